"""Appends to Delta tables: checked before the decision, those of rows done once after it by Spark's writer.

An append takes one of two forms. As files: Delta writes its data files before the decision, invisible. As
rows: they are staged in the engine, and written after the decision. Any table takes rows.

Not here: the files (``staged_files.py``), adding them (``after/add_files.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from connector.delta import jvm
from connector.delta.before.fit import Fit, Shape, asserting, check_columns, check_void, fit, fit_new
from connector.delta.before.rehearsal import evolved, merges_schema, rehearse
from connector.delta.commits import creation, require_commit, retry, save, was_committed
from connector.delta.isolated_session import isolated_session
from connector.delta.table_files import DISK
from connector.sql import nullable, quoted
from connector.stream.staging import no_rows
from connector.tables.commit_id import CommitId
from connector.tables.table import Table
from connector.tables.table_format import CONFLICT_TIMEOUT_S, PLAIN, Rows, Writing

# Options and table features that mean the same to a commit of files.
_OPTIONS = {"mergeschema", "maxrecordsperfile", "compression", "optimizewrite"}
_FEATURES = {
    "allowColumnDefaults", "appendOnly", "changeDataFeed", "checkConstraints", "checkpointProtection",
    "clustering", "columnMapping", "deletionVectors", "domainMetadata", "generatedColumns",
    "identityColumns", "inCommitTimestamp", "invariants", "rowTracking", "timestampNtz", "typeWidening",
    "v2Checkpoint", "vacuumProtocolCheck",
}  # fmt: skip
# Columns whose values the commit, or Spark's analysis of a write by name, completes.
_IDENTITY = "delta.identity.start"
_DEFAULT = "CURRENT_DEFAULT"
_CHAR = "__CHAR_VARCHAR_TYPE_STRING"
_EVALUATED = ("delta.generationExpression", "delta.constraints.", "delta.invariants")
_STATISTICS = "spark.databricks.delta.stats.collect"
_REFUSED_OPTIONS = {
    "txnappid": "txmq sets it to make the append take effect once",
    "txnversion": "txmq sets it to make the append take effect once",
    "usermetadata": "txmq writes the offsets of the micro-batch there",
    "mode": "it follows from the operation",
    "path": "the table is the second argument",
    "overwriteschema": "a micro-batch keeps the schema, or adds columns to it",
    "replacewhere": "it is an argument of tx.overwrite",
    "partitionoverwritemode": "tx.overwrite says what is replaced",
}


def writing(table: str, options: Mapping[str, Any]) -> Writing:
    """What the options of a write to a table say to Delta's writer. Raises OptionError."""
    chosen: dict[str, str] = {}
    columns: list[str] = []
    for name, value in options.items():
        if name.lower() in _REFUSED_OPTIONS:
            raise OptionError(
                f"table {table!r}: option {name!r} cannot be set: {_REFUSED_OPTIONS[name.lower()]}",
                "leave it out",
            )
        if name.lower() == "partitionby":
            columns = [value] if isinstance(value, str) else list(value)
        else:
            chosen[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return Writing(chosen, columns)


def append(
    spark: SparkSession,
    table: Table,
    rows: Rows,
    once: CommitId,
    writing: Writing = PLAIN,
    limit_s: float = CONFLICT_TIMEOUT_S,
) -> int | None:
    """One Delta commit of ``rows``, or none if the table has that of ``once``. Creates the table. Returns its
    version, if that is known.

    Raises CheckpointMismatch if the table holds another batch with this number, or if too much of its log was
    cleaned to know.
    """

    def write() -> None:
        # nobody else has the session of a commit that makes a table: its settings say whose it is
        settings = creation(table, once)
        with isolated_session(spark, settings) if settings else nullcontext(spark) as session:
            frame = widened(rows(session), table) if table.metadata else rows(session)
            writer = frame.write.format("delta").mode("append").options(**writing.options)
            by = writing.partition_by
            save(writer.partitionBy(*by) if by else writer, table, once)

    if table.exists and (version := was_committed(spark, table, once)) is not None:
        return version
    retry(write, limit_s)
    return require_commit(spark, table, once)


def check_append(
    spark: SparkSession, table: Table, schema: StructType, writing: Writing, *, rehearses: bool = True
) -> Fit | None:
    """How to convert rows of ``schema`` so that the append cannot fail after the decision; None: not at all.
    ``rehearses``: not where Delta's writer judges the rows themselves before it, or another rehearsal does.

    After the decision, a failing append stops the query until the table is changed. Raises OptionError.
    """
    options, partition_by = writing
    check_columns(table.name, schema, partition_by)
    target = Shape.of(table.metadata, table.location) if table.metadata else None
    check_void(table.name, schema, target.schema if target else StructType())
    found = fit_new(table.name, schema, table.location, partition_by)
    if target:
        merges = merges_schema(spark, options)
        target = target.widened(evolved(spark, table, schema, writing) if merges and target.widens else None)
        found = fit(table.name, schema, target, partition_by, merges=merges)
    if rehearses:
        rehearse(spark, table, nullable(fit_rows(no_rows(spark, schema), found).schema), writing)
    return found


def fit_rows(rows: DataFrame, found: Fit | None) -> DataFrame:
    """The rows in the types of the table. Their execution fails if the table does not accept a value."""
    if found is None or found.plain:
        return rows
    columns = [expr(expression).alias(name) for name, expression in found.columns.items()]
    if not found.conditions:
        return rows.select(*columns)
    beside = [expr(expression).alias(name) for name, expression in found.beside.items()]
    names = [quoted(name) for name in found.columns]
    first = next(iter(found.columns))
    asserted = expr(asserting(first, found.conditions)).alias(first)
    return rows.select(*columns).select("*", *beside).select(asserted, *names[1:])


def widened(rows: DataFrame, table: Table) -> DataFrame:
    """The rows with the integers of a table that was widened since: Delta casts them neither in an overwrite
    nor in an append to a path. Those that widen the table stay as they are.
    """
    try:
        found = fit(table.name, rows.schema, Shape.of(table.metadata), (), merges=True)
    except OptionError:
        return rows  # Delta's own error says more
    columns = {name: quoted(name) if "raise_error" in sql else sql for name, sql in found.columns.items()}
    return fit_rows(rows, Fit(columns))


# -- the form ------------------------------------------------------------------------------------------------


def evaluates(table: Table) -> bool:
    """Whether a write to an existing table evaluates SQL of that."""
    return any(name in table.metadata for name in _EVALUATED)


def why_rows(spark: SparkSession, table: Table, schema: StructType, options: Mapping[str, str]) -> str:
    """Why the data files of an append cannot be written before the decision; "" if they can."""
    if jvm.only_sql(spark):
        return "this session has no access to Delta's writer"
    if not table.exists:
        return "the table does not exist yet"
    if not table.location.startswith(DISK):
        return "the table is not on a disk that this process sees"
    if not table.protocol:
        return "the table belongs to a catalog that is not Spark's own"
    protocol = json.loads(table.protocol)["protocol"]
    unknown = sorted({*protocol.get("writerFeatures", ()), *protocol.get("readerFeatures", ())} - _FEATURES)
    if unknown:
        return f"the table has the feature {', '.join(unknown)}"
    others = sorted(name for name in options if name.lower() not in _OPTIONS)
    if others:
        return f"the option {', '.join(others)}"
    if str(spark.conf.get(_STATISTICS, "true")).lower() != "true":
        return f"{_STATISTICS} is off"
    target = Shape.of(table.metadata)
    for column in target.schema:
        completed = _IDENTITY in column.metadata or _DEFAULT in column.metadata
        if completed or re.search(r"(?i)(?<!var)char\(", str(column.metadata.get(_CHAR, ""))):
            return f"column {column.name!r} is an identity, has a default or is of type CHAR"
    if merges_schema(spark, options):
        try:
            fit(table.name, schema, target, (), merges=False)
        except OptionError:
            return "the append adds columns to the table"
        wide = evolved(spark, table, schema, Writing(options)) if target.widens else None
        if target.widened(wide) != target:
            return "the append widens columns of the table"
    return ""
