"""A rehearsal of an append on a temporary table, to test whether Delta accepts the schema and the options.

Not here: the values (fit.py). Not on Spark Connect, where a client cannot write the log of a table.

Invariant: the real table is not changed, and the temporary table is deleted. What was accepted once in this
process is not tried again for a table that differs in nothing but its place, its name and its id.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.errors import OptionError
from connector.delta import jvm
from connector.delta.log import checksum
from connector.delta.resolve import snapshot_at
from connector.errors import message
from connector.stream.staging import no_rows
from connector.tables.table import Table, without_high_water_marks
from connector.tables.table_format import Writing

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

# Tables whose commits go through a catalog: a copy of their log is not a table.
_COORDINATED = ("catalogManaged", "catalogOwned", "coordinatedCommits")
_OF_ONE_TABLE = ("id", "name", "description", "createdTime")
# What a session notes about its commits.
_NOTES = (".lastCommitVersionInSession", ".commitInfo.userMetadata")
_accepted: set[str] = set()


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
    log: list[str] = []
    if table.exists:
        snapshot = snapshot_at(spark, table.location)
        actions: list[JavaObject] = [snapshot.protocol(), snapshot.metadata()]
        found = checksum(snapshot)
        if found is not None and found.domainMetadata().isDefined():
            domains = found.domainMetadata().get().iterator()
        else:
            domains = snapshot.domainMetadata().iterator()
        while domains.hasNext():
            actions.append(domains.next())
        log = [str(action.json()) for action in actions]
        if any(word in log[0] for word in _COORDINATED):
            return
    names = [spark.catalog.currentCatalog(), spark.catalog.currentDatabase()] if where else []
    asked = _key(spark, log, schema, writing, [where, *names])
    if asked in _accepted:
        return
    place = Path(tempfile.mkdtemp(prefix="txmq-rehearsal-"))
    try:
        if log:
            about = {
                "timestamp": 0,
                "inCommitTimestamp": 0,
                "operation": "REHEARSAL",
                "operationParameters": {},
            }
            text = json.dumps({"commitInfo": about})
            (place / "_delta_log").mkdir()
            (place / "_delta_log" / f"{0:020d}.json").write_text("\n".join([text, *log]) + "\n")
        mode, chosen = ("overwrite", {"replaceWhere": where}) if where else ("append", {})
        options = {**writing.options, **chosen}
        writer = no_rows(spark, schema).write.format("delta").mode(mode).options(**options)
        if writing.partition_by:
            writer = writer.partitionBy(*writing.partition_by)
        writer.save(f"file:{place}")
    except Exception as error:
        raise refused(table.name, error, str(place)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    _accepted.add(asked)


def _key(
    spark: SparkSession, log: Sequence[str], schema: StructType, writing: Writing, more: list[str]
) -> str:
    """All that the outcome depends on."""
    actions = [json.loads(without_high_water_marks(action)) for action in log]
    for action in actions:
        for name in _OF_ONE_TABLE:
            action.get("metaData", {}).pop(name, None)
    settings = {
        name: value
        for name, value in spark.conf.getAll.items()
        if name.startswith(("spark.sql.", "spark.databricks."))
        and ".streaming." not in name
        and not name.endswith(_NOTES)
    }
    text = [actions, settings, schema.json(), dict(writing.options), [*writing.partition_by, *more]]
    return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()
