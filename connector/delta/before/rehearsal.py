"""A rehearsal of an append on a temporary table, to test whether Delta accepts the schema and the options.

Not here: the values (fit.py). Not on Spark Connect, where a client cannot write the log of a table.

Invariant: the real table is not changed, and the temporary table is deleted. What was accepted once is not
tried again for a table that differs in nothing but its place, its name and its id: a process knows it, and a
file in the hidden directory of a table on a disk tells the next one. A cold rehearsal is a tenth of the CPU
that a driver takes until its first batch is committed.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from connector.delta.table_files import DISK, HIDDEN, TableFiles
from connector.errors import message
from connector.sql import nullable
from connector.stream.staging import no_rows
from connector.tables.table import Table, without_high_water_marks
from connector.tables.table_format import Writing

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

_COORDINATED = ("catalogOwned", "coordinatedCommits")  # of a Delta that opens such a table by its path
_OF_ONE_TABLE = ("id", "name", "description", "createdTime")
# What a session notes about its commits.
_NOTES = (".lastCommitVersionInSession", ".commitInfo.userMetadata")
_accepted: set[str] = set()
_evolved: dict[str, str] = {}
_FILE = f"{HIDDEN}/accepted"
_MOST = 32
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
    log: list[str] = []
    versions = [spark.version]
    if table.exists:
        snapshot = snapshot_at(spark, table.location)
        log, source = _log_of(snapshot), snapshot.getClass().getProtectionDomain().getCodeSource()
        # the name of Delta's jar has its version; None where the JVM does not say it
        versions.append("" if source is None else str(source.getLocation()).rpartition("/")[2])
        if any(word in log[0] for word in _COORDINATED):
            raise managed(table.name)
    names = [spark.catalog.currentCatalog(), spark.catalog.currentDatabase()] if where else []
    asked = _key(spark, log, schema, writing, [where, *names, *versions])
    if asked in _accepted:
        return
    # not of a new table, and not of a condition: it may name what only this session has
    on_disk = bool(log) and not where and table.location.startswith(DISK)
    files = TableFiles.at(table.location) if on_disk else None
    if files is None or asked not in _accepted_in(files):
        _write(spark, table.name, log, schema, writing, where)
        if files is not None:
            with contextlib.suppress(OSError):  # the table is gone, or not ours: it is tried again
                files.make(HIDDEN)
                files.write(_FILE, "\n".join([*_accepted_in(files)[1 - _MOST :], asked]))
    _accepted.add(asked)


def evolved(spark: SparkSession, table: Table, schema: StructType, writing: Writing) -> StructType | None:
    """The schema that an append of such rows, which may change it, gives to an existing table; None where
    Delta does not take it, or is not asked.
    """
    if jvm.only_sql(spark):
        return None
    log = _log_of(snapshot_at(spark, table.location))
    asked = _key(spark, log, schema, writing, [spark.version])
    if asked not in _evolved:
        with contextlib.suppress(OptionError):  # told where the rows are fitted to the table as it is
            _evolved[asked] = _write(spark, table.name, log, nullable(schema), writing, "")
        if len(_evolved) > _MOST:
            del _evolved[next(iter(_evolved))]
    return StructType.fromJson(json.loads(_evolved[asked])) if asked in _evolved else None


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


def _accepted_in(files: TableFiles) -> list[str]:
    """What Delta has accepted for a table, in a file of its hidden directory. It may be deleted at any time;
    whoever can write it can write the table.
    """
    try:
        return files.read(_FILE)[0].split()
    except (OSError, UnicodeError):
        return []


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
