"""Appends to Delta tables that take effect once, also if they are repeated.

Not here: what is appended and when (foreach_batch.py, ledger.py).

Invariant: a commit carries (txnAppId, txnVersion). Delta skips a write whose version is not above the stored
one of that app, so a repeated append changes nothing. The same rule could silently drop the rows of another
batch. Therefore the txnAppId contains the id of the data directory, the commit carries the token of the
batch, and after each append the log must contain the commit of this batch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import StructType

from broker_core.errors import LineageConflict, OptionError
from connector import delta_log
from connector.fit import Fit, Known, asserting, check_columns, fit, nullable, quoted
from connector.rehearsal import no_rows, rehearse
from connector.table import Table, is_path

T = TypeVar("T")

UNAPPLIED = (
    "stop the query, list the waiting rows with `txmq unapplied APP`, "
    "and write the rows to Parquet files with `txmq skip APP SEQUENCE --to DIR`"
)

# After a conflict with a transaction of the same (txnAppId, txnVersion), the repeated write is skipped.
CONFLICT_ATTEMPTS = 5
_CONFLICT = re.compile(
    r"DELTA_CONCURRENT|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED|DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS"
    r"|Concurrent\w*Exception|(Metadata|Protocol)ChangedException"
)
USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_RETENTION = "delta.setTransactionRetentionDuration"
_AUTO_MERGE = "spark.databricks.delta.schema.autoMerge.enabled"
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


def writer_options(table: str, options: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The options of a write as (Delta's writer options, partition columns). Raises OptionError."""
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
    return chosen, columns


def retried(write: Callable[[], T]) -> T:
    """Call ``write``, and repeat it after a conflict with the commit of another writer."""
    for attempt in range(1, CONFLICT_ATTEMPTS + 1):
        try:
            return write()
        except Exception as error:
            if attempt == CONFLICT_ATTEMPTS or not _CONFLICT.search(f"{type(error).__name__} {error}"):
                raise
    raise AssertionError("unreachable")


def append(
    rows: DataFrame,
    table: Table,
    *,
    txn_app_id: str,
    txn_version: int,
    batch: Mapping[str, Any],
    decided_at_us: int,
    options: Mapping[str, str] | None = None,
    partition_by: Sequence[str] = (),
) -> None:
    """One Delta commit of ``rows``, or none if the table has that of ``batch``. Creates the table.

    ``batch`` is written to the commit's userMetadata; its ``token`` identifies the batch. Raises
    LineageConflict if the table holds ``txn_version`` from another batch, or if too much of its log was
    cleaned to know.
    """
    spark = rows.sparkSession
    batch = {**batch, "txn_app_id": txn_app_id}
    metadata = user_metadata(batch, txn_app_id)

    def write() -> None:
        writer = rows.write.format("delta").mode("append").options(**dict(options or {}))
        writer = (
            writer.option("txnAppId", txn_app_id)
            .option("txnVersion", str(txn_version))
            .option("userMetadata", metadata)
        )
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        if is_path(table.name):
            writer.save(table.name)
            return
        spark.conf.set(USER_METADATA, metadata)  # Delta ignores the option if saveAsTable creates the table
        try:
            writer.saveAsTable(table.name)
        finally:
            spark.conf.unset(USER_METADATA)

    if table.exists and remembered(spark, table, batch, txn_version, decided_at_us):
        return
    retried(write)
    require_held(spark, table, txn_app_id, batch, decided_at_us)


def user_metadata(batch: Mapping[str, Any], txn_app_id: str) -> str:
    """What a commit says about its batch."""
    return json.dumps({**batch, "txn_app_id": txn_app_id}, sort_keys=True)


def remembered(
    spark: SparkSession, table: Table, batch: Mapping[str, Any], txn_version: int, decided_at_us: int
) -> bool:
    """Whether an existing table that forgets txnVersions has the commit of this batch; False for others.
    Raises LineageConflict if that is unknown.
    """
    if _RETENTION not in table.properties:
        return False
    known = delta_log.held(delta_log.commits(spark, table), batch, decided_at_us)
    if known is None:
        raise LineageConflict(
            f"table {table.name!r} forgets which batches it has (delta.setTransactionRetentionDuration), "
            f"and its log was cleaned after batch {txn_version} of app {batch['app_id']!r} was decided, "
            "so it is unknown whether the table has the rows of this batch",
            UNAPPLIED,
        )
    return known


def require_held(
    spark: SparkSession, table: Table, txn_app_id: str, batch: Mapping[str, Any], decided_at_us: int
) -> None:
    """Raises LineageConflict unless the table has the commit of this batch."""
    batch = {**batch, "txn_app_id": txn_app_id}
    known = delta_log.held(delta_log.commits(spark, table, fresh=False), batch, decided_at_us)
    if known or (known is None and delta_log.stored_at_ms(spark, table, txn_app_id) >= decided_at_us // 1000):
        return
    raise LineageConflict(
        f"Delta has skipped batch {batch['sequence']} of app {batch['app_id']!r}, "
        f"because table {table.name!r} holds another batch with this number: "
        "an older copy of the broker's data was restored, "
        "or two copies are in use (the broker keeps the rows)",
        UNAPPLIED,
    )


def refuse_a_restarted_sequence(
    spark: SparkSession, table: Table, txn_app_id: str, app_id: str, decided: Callable[[], int]
) -> None:
    """Raises LineageConflict if the table holds later batches of this broker than ``decided()``, in any of
    the steps of ``txn_app_id``.
    """
    stored = delta_log.stored_version(spark, table, txn_app_id) if table.exists else 0
    # ``decided`` is called after the table was read: another driver may decide meanwhile
    if stored and stored > (known := decided()):
        raise LineageConflict(
            f"Delta table {table.name!r} holds batch {stored} of app {app_id!r}, "
            f"and the broker has decided only {known}: "
            "an older copy of the broker's data was restored (nothing was consumed)",
            "restore the newest data, or use a new app_id, which appends later batches again",
        )


def merges_schema(spark: SparkSession, options: Mapping[str, str]) -> bool:
    """Whether an append with these options may add columns to the table."""
    asked = next((value for name, value in options.items() if name.lower() == "mergeschema"), None)
    return (asked if asked is not None else str(spark.conf.get(_AUTO_MERGE, "false"))).lower() == "true"


def txn_app_id(app_id: str, identity: str, location: str, step: int = 0) -> str:
    """The txnAppId of a step of an app on a table: batch numbers count within one data directory.

    It contains the location: spellings that txmq cannot compare (``s3://t``, ``s3a://t``) make two commits.
    Each step of a batch has its own one: Delta skips a second commit with the same id and version.
    """
    table = f"{app_id}@{identity}/{hashlib.sha256(location.encode()).hexdigest()[:8]}"
    return f"{table}{delta_log.STEP}{step}" if step else table


def check_append(
    spark: SparkSession,
    table: Table,
    schema: StructType,
    options: Mapping[str, str],
    partition_by: Sequence[str],
) -> Fit | None:
    """How to convert rows of ``schema`` so that the append cannot fail after the decision; None: not at all.


    After the decision, a failing append stops the pipeline until the table is changed. Raises OptionError.
    """
    check_columns(table.name, schema, partition_by)
    found = None
    if table.metadata:
        merges = merges_schema(spark, options)
        found = fit(table.name, schema, Known.of(table.metadata), partition_by, merges=merges)
    rehearse(spark, table, nullable(fitted(no_rows(spark, schema), found).schema), options, partition_by)
    return found


def fitted(rows: DataFrame, found: Fit | None) -> DataFrame:
    """The rows in the types of the table. Their execution fails if the table does not accept a value."""
    if found is None:
        return rows
    columns = [expr(expression).alias(name) for name, expression in found.columns.items()]
    if not found.conditions:
        return rows.select(*columns)
    beside = [expr(expression).alias(name) for name, expression in found.beside.items()]
    names = [quoted(name) for name in found.columns]
    first = next(iter(found.columns))
    asserted = expr(asserting(first, found.conditions)).alias(first)
    return rows.select(*columns).select("*", *beside).select(asserted, *names[1:])
