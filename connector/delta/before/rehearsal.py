"""A rehearsal of a write on a temporary table, to test whether Delta accepts the schema and the options.

The table is a copy without rows: its log in a directory; or, where a client cannot write one (Spark Connect),
``CREATE TABLE .. LIKE`` or a clone in the current database. There, only a change of the schema is rehearsed.

Not here: the values (fit.py), and plain appends as files, which Delta writes before the decision itself.

Invariant: the real table is not changed, and the temporary table is deleted. What was accepted once is not
tried again for the same shape of rows and table: ``tables/checks.py`` keeps the answer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from connector.delta import jvm, transient
from connector.delta.log import parts
from connector.delta.resolve import managed, snapshot_at
from connector.errors import error_summary, message
from connector.sql import nullable
from connector.stream.staging import no_rows
from connector.tables.change import Merge
from connector.tables.table import Table, in_sql, is_path
from connector.tables.table_format import Writing

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

log = logging.getLogger("txmq")

AUTO_MERGE = "spark.databricks.delta.schema.autoMerge.enabled"
_PLAN = ("at ", "'", "+-", ":", "==")  # lines behind the text: of a stack trace, or of a plan
_COORDINATED = ("catalogOwned", "coordinatedCommits")  # of a Delta that opens such a table by its path
_COMMIT_INFO = (
    '{"commitInfo":{"timestamp":0,"inCommitTimestamp":0,"operation":"REHEARSAL","operationParameters":{}}}'
)


def refused(table: str, error: Exception, place: str = "") -> OptionError:
    """The error of what Delta does not take, with Delta's text. ``place``: where it was tried."""
    lines = [line.strip() for line in message(error).splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if "[" in line and "]" in line), 0)
    advice = itertools.takewhile(lambda line: not line.startswith(_PLAN), lines[first + 1 :])
    text = " ".join([*lines[first : first + 1], *advice]) or type(error).__name__
    text = text.replace(f"file:{place}", table).replace(place, table) if place else text
    return OptionError(f"table {table!r}: Delta would refuse it: {text[:500]}")


def merges_schema(spark: SparkSession, options: Mapping[str, str]) -> bool:
    """Whether a write with these options may change the schema of the table."""
    chosen = next((value for name, value in options.items() if name.lower() == "mergeschema"), None)
    return (chosen if chosen is not None else str(spark.conf.get(AUTO_MERGE, "false"))).lower() == "true"


def rehearse(
    spark: SparkSession, table: Table, schema: StructType, writing: Writing, where: str = ""
) -> StructType | None:
    """Append no rows to a new table with the protocol and metadata of ``table``, or overwrite it ``where``.
    Returns its schema then; None if it was not tried. Raises OptionError with Delta's error.
    """
    if jvm.only_sql(spark) and not (table.exists and merges_schema(spark, writing.options)):
        return None

    def write(copy: str) -> None:
        mode, chosen = ("overwrite", {"replaceWhere": where}) if where else ("append", {})
        options = {**writing.options, **chosen}
        writer = no_rows(spark, schema).write.format("delta").mode(mode).options(**options)
        if writing.partition_by:
            writer = writer.partitionBy(*writing.partition_by)
        (writer.save if is_path(copy) else writer.saveAsTable)(copy)

    return _rehearsed(spark, table, write)


def rehearse_merge(spark: SparkSession, table: Table, merge: Merge, view: str) -> StructType | None:
    """As ``rehearse``, of a merge of a view without rows that may change the schema."""
    return _rehearsed(spark, table, lambda copy: spark.sql(merge.sql(in_sql(copy), view)).collect())


def evolved(spark: SparkSession, table: Table, schema: StructType, writing: Writing) -> StructType | None:
    """The schema that such an append gives to an existing table; None where Delta does not take it."""
    try:
        return rehearse(spark, table, nullable(schema), writing)
    except OptionError:  # told where the rows are fitted to the table as it is
        return None


def _rehearsed(spark: SparkSession, table: Table, write: Callable[[str], object]) -> StructType | None:
    with _copy(spark, table) as copy:
        if not copy:
            return None
        try:
            write(copy)
            return (spark.read.format("delta").load(copy) if is_path(copy) else spark.table(copy)).schema
        except Exception as error:
            if transient.why(error):  # it says nothing about the table
                raise
            raise refused(table.name, error, copy.removeprefix("file:")) from error


@contextlib.contextmanager
def _copy(spark: SparkSession, table: Table) -> Iterator[str]:
    """A new table without rows, with the protocol and metadata of ``table`` if that exists: a path, or a name
    where Delta is reached by SQL alone; "" if there can be none.
    """
    if jvm.only_sql(spark):
        name, source = f"txmq_rehearsal_{uuid.uuid4().hex}", in_sql(table.name)
        with contextlib.ExitStack() as stack:
            try:
                try:
                    spark.sql(f"CREATE TABLE {name} LIKE {source} USING delta")
                except Exception:  # Spark 4.1 makes none LIKE a path; a clone has an entry for each file
                    spark.sql(f"CREATE TABLE {name} SHALLOW CLONE {source}")
                stack.callback(spark.sql, f"DROP TABLE {name}")
            except Exception as error:
                log.warning("%r: no change of its schema is rehearsed: %s", table.name, error_summary(error))
                name = ""
            yield name
        return
    actions = _log_of(snapshot_at(spark, table.location)) if table.exists else []
    if actions and any(word in actions[0] for word in _COORDINATED):
        raise managed(table.name)
    place = Path(tempfile.mkdtemp(prefix="txmq-rehearsal-"))
    try:
        if actions:
            (place / "_delta_log").mkdir()
            (place / "_delta_log" / f"{0:020d}.json").write_text("\n".join([_COMMIT_INFO, *actions]) + "\n")
        yield f"file:{place}"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _log_of(snapshot: JavaObject) -> list[str]:
    """The actions that a table without rows would have, as JSON: the first is the protocol."""
    actions = [snapshot.protocol(), snapshot.metadata(), *parts(snapshot, "domainMetadata")]
    return [str(action.json()) for action in actions]
