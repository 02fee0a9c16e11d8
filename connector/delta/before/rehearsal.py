"""A rehearsal of a write on a temporary table, to test whether Delta accepts the schema and the options.

Not here: the values (fit.py), and plain appends as files, which Delta writes before the decision itself. Not
on Spark Connect, where a client cannot write the log of a table.

Invariant: the real table is not changed, and the temporary table is deleted. What was accepted once is not
tried again for the same shape of rows and table: ``tables/checks.py`` keeps the answer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from connector.delta import jvm, transient
from connector.delta.log import parts
from connector.delta.resolve import managed, snapshot_at
from connector.errors import message
from connector.sql import nullable
from connector.stream.staging import no_rows
from connector.tables.table import Table
from connector.tables.table_format import Writing

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

_COORDINATED = ("catalogOwned", "coordinatedCommits")  # of a Delta that opens such a table by its path
_COMMIT_INFO = (
    '{"commitInfo":{"timestamp":0,"inCommitTimestamp":0,"operation":"REHEARSAL","operationParameters":{}}}'
)


def refused(table: str, error: Exception, place: str = "") -> OptionError:
    """The error of what Delta does not take, with Delta's text. ``place``: where it was tried."""
    lines = [line.strip() for line in message(error).splitlines() if line.strip()]
    text = next(
        (line for line in lines if "[" in line and "]" in line), lines[0] if lines else type(error).__name__
    )
    if place:
        text = text.replace(f"file:{place}", table).replace(place, table)
    return OptionError(f"table {table!r}: Delta would refuse it: {text[:500]}")


def rehearse(
    spark: SparkSession, table: Table, schema: StructType, writing: Writing, where: str = ""
) -> None:
    """Append no rows to a new table with the protocol and metadata of ``table``, or overwrite it ``where``.
    Raises OptionError with Delta's error.
    """
    if jvm.only_sql(spark):
        return
    log = _log_of(snapshot_at(spark, table.location)) if table.exists else []
    if log and any(word in log[0] for word in _COORDINATED):
        raise managed(table.name)
    _write(spark, table.name, log, schema, writing, where)


def evolved(spark: SparkSession, table: Table, schema: StructType, writing: Writing) -> StructType | None:
    """The schema that an append of such rows, which may change it, gives to an existing table; None where
    Delta does not take it, or is not asked.
    """
    if jvm.only_sql(spark):
        return None
    log = _log_of(snapshot_at(spark, table.location))
    try:
        return StructType.fromJson(json.loads(_write(spark, table.name, log, nullable(schema), writing, "")))
    except OptionError:  # told where the rows are fitted to the table as it is
        return None


def _log_of(snapshot: JavaObject) -> list[str]:
    """The actions that a table without rows would have, as JSON: the first is the protocol."""
    actions = [snapshot.protocol(), snapshot.metadata(), *parts(snapshot, "domainMetadata")]
    return [str(action.json()) for action in actions]


def _write(
    spark: SparkSession, table: str, log: Sequence[str], schema: StructType, writing: Writing, where: str
) -> str:
    """No rows to a temporary table with this log. Returns its schema then. Raises OptionError."""
    place = Path(tempfile.mkdtemp(prefix="txmq-rehearsal-"))
    try:
        if log:
            (place / "_delta_log").mkdir()
            (place / "_delta_log" / f"{0:020d}.json").write_text("\n".join([_COMMIT_INFO, *log]) + "\n")
        mode, chosen = ("overwrite", {"replaceWhere": where}) if where else ("append", {})
        options = {**writing.options, **chosen}
        writer = no_rows(spark, schema).write.format("delta").mode(mode).options(**options)
        if writing.partition_by:
            writer = writer.partitionBy(*writing.partition_by)
        writer.save(f"file:{place}")
        return str(snapshot_at(spark, f"file:{place}").metadata().schemaString())
    except Exception as error:
        if transient.why(error):  # it says nothing about the table
            raise
        raise refused(table, error, str(place)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
