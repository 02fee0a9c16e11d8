"""Appends to Delta tables that happen once, whoever repeats them.

Not here: what is appended and when (foreach_batch.py, ledger.py).

Invariant: a commit carries (txnAppId, txnVersion); Delta skips a write whose version is not above the one stored for that
app, so a repeated append changes nothing. The same rule drops rows silently when a version starts again from 1:
``refuse_a_restarted_sequence`` is the guard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, IntegralType, MapType, NullType, StructField, StructType

from broker_core.errors import LineageConflict, OptionError

T = TypeVar("T")

# A transaction that loses a race against the same (txnAppId, txnVersion) is repeated and then finds itself done.
CONFLICT_ATTEMPTS = 5
_CONFLICT = re.compile(
    r"DELTA_CONCURRENT|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED|Concurrent\w*Exception|(Metadata|Protocol)ChangedException"
)
_REFUSED_OPTIONS = {
    "txnappid": "txmq sets it, it is what makes the append happen once",
    "txnversion": "txmq sets it, it is what makes the append happen once",
    "usermetadata": "txmq writes the offsets of the micro-batch there",
    "mode": "a micro-batch only appends",
    "path": "the table is the second argument of append",
    "overwriteschema": "a micro-batch only appends",
    "replacewhere": "a micro-batch only appends",
    "partitionoverwritemode": "a micro-batch only appends",
}


def is_connect(session_or_frame: object) -> bool:
    """Whether this session or DataFrame belongs to Spark Connect."""
    return type(session_or_frame).__module__.startswith("pyspark.sql.connect")


def is_path(table: str) -> bool:
    """``lake/flights``, ``/lake/flights`` and ``s3://...`` are paths; ``flights``, ``db.flights`` and ``delta.`/x``` are names."""
    return "/" in table and "`" not in table


def qualified(spark: SparkSession, table: str) -> str:
    """One spelling per table, as far as it can be told: two appends under one txnVersion lose the second, silently."""
    if not is_path(table):
        if re.fullmatch(r"delta\.`[^`]+`", table):
            return qualified(spark, table[len("delta.`") : -1])
        parts = table.split(".")
        if len(parts) == 1:
            parts.insert(0, spark.catalog.currentDatabase())
        if len(parts) == 2:
            parts.insert(0, spark.catalog.currentCatalog())
        return ".".join(parts).lower()
    if is_connect(spark):
        return table.rstrip("/")
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(table)
    file_system = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
    return str(file_system.makeQualified(path).toString())


def writer_options(table: str, options: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The options of ``tx.append`` as (Delta's writer options, partition columns). Raises OptionError."""
    chosen: dict[str, str] = {}
    columns: list[str] = []
    for name, value in options.items():
        if name.lower() in _REFUSED_OPTIONS:
            raise OptionError(f"option {name!r} of the append to {table!r} cannot be set: {_REFUSED_OPTIONS[name.lower()]}; leave it out")
        if name.lower() == "partitionby":
            columns = [value] if isinstance(value, str) else list(value)
        else:
            chosen[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return chosen, columns


def retried(write: Callable[[], T]) -> T:
    """``write``, repeated when another writer's commit came between."""
    for attempt in range(1, CONFLICT_ATTEMPTS + 1):
        try:
            return write()
        except Exception as error:
            if attempt == CONFLICT_ATTEMPTS or not _CONFLICT.search(f"{type(error).__name__} {error}"):
                raise
    raise AssertionError("unreachable")


def append(
    rows: DataFrame,
    table: str,
    *,
    txn_app_id: str,
    txn_version: int,
    metadata: Mapping[str, Any],
    options: Mapping[str, str] | None = None,
    partition_by: Sequence[str] = (),
) -> None:
    """One Delta commit of ``rows``, or none where ``txn_version`` is there already. Creates the table."""

    def write() -> None:
        writer = rows.write.format("delta").mode("append").options(**dict(options or {}))
        writer = writer.option("txnAppId", txn_app_id).option("txnVersion", str(txn_version))
        writer = writer.option("userMetadata", json.dumps(metadata, sort_keys=True))
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        if is_path(table):
            writer.save(table)
        else:
            writer.saveAsTable(table)

    retried(write)


def table_schema(spark: SparkSession, table: str) -> StructType | None:
    """The table's columns; None where there is no Delta table yet."""
    if not is_path(table):
        return spark.table(table).schema if spark.catalog.tableExists(table) else None
    try:
        return spark.read.format("delta").load(table).schema
    except AnalysisException:  # Spark has an error class of its own for each way in which nothing is there
        return None


def stored_version(spark: SparkSession, table: str, txn_app_id: str) -> int:
    """The last txnVersion that the table holds for this app, 0 for none; on Connect as far as its last 100 commits tell."""
    if table_schema(spark, table) is None:
        return 0
    if is_connect(spark):
        name = f"delta.`{table}`" if is_path(table) else table
        found = [0]
        for row in spark.sql(f"DESCRIBE HISTORY {name} LIMIT 100").select("userMetadata").collect():
            metadata = _json_object(row["userMetadata"])
            if metadata.get("app_id") == txn_app_id:
                found.append(int(metadata.get("sequence", 0)))
        return max(found)
    jvm: Any = spark._jvm
    at = table if is_path(table) else str(spark.sql(f"DESCRIBE DETAIL {table}").collect()[0]["location"])
    delta_log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, at)
    versions = delta_log.unsafeVolatileSnapshot().transactions()
    found_version = versions.get(txn_app_id)
    return int(found_version.get()) if found_version.isDefined() else 0


def refuse_a_restarted_sequence(spark: SparkSession, table: str, app_id: str, sequence: int) -> None:
    """Raises LineageConflict where the table already holds later batches of ``app_id`` than the broker knows (``sequence``)."""
    stored = stored_version(spark, table, app_id)
    if stored > sequence:
        raise LineageConflict(
            f"Delta table {table!r} holds batch {stored} of app {app_id!r}, and the broker has decided only {sequence}: "
            "the broker's data directory is another or an older one, and Delta would skip these rows silently; "
            "restore the data directory, or use a new app_id"
        )


def check_append(spark: SparkSession, table: str, schema: StructType, options: Mapping[str, str], partition_by: Sequence[str]) -> None:
    """What can be known before the decision about an append that would fail after it. Raises OptionError.

    After the decision a failing append stops the pipeline until somebody changes the table, so the check is worth its time.
    """
    names = [name.lower() for name in schema.names]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise OptionError(f"append to {table!r}: column {doubled[0]!r} stands twice in the DataFrame; name each column once")
    for name in partition_by:
        if name.lower() not in names:
            raise OptionError(f"append to {table!r}: partitionBy names column {name!r}, and the DataFrame has {', '.join(schema.names)}")
    for column in schema:
        if _has_void(column.dataType):
            raise OptionError(f"append to {table!r}: column {column.name!r} has type void, which Delta cannot write; cast it")
    existing = table_schema(spark, table)
    if existing is None:
        bad = [name for name in schema.names if re.search(r"[ ,;{}()\n\t=]", name)]
        if bad:
            raise OptionError(
                f"append to {table!r}: column name {bad[0]!r} has a character that Delta refuses (one of ' ,;{{}}()=', tab, newline)"
            )
        return
    merges = options.get("mergeSchema", "false").lower() == "true"
    known = {column.name.lower(): column for column in existing}
    for column in schema:
        held = known.get(column.name.lower())
        if held is None and not merges:
            raise OptionError(f"append to {table!r}: the table has no column {column.name!r}; drop it, or set mergeSchema=True")
        if held is not None and not _fits(column.dataType, held.dataType):
            raise OptionError(
                f"append to {table!r}: column {column.name!r} is {column.dataType.simpleString()} and the table has "
                f"{held.dataType.simpleString()}; cast it"
            )


def nullable(schema: StructType) -> StructType:
    """The schema without its NOT NULLs: rows that were staged do not carry them."""
    return StructType([StructField(column.name, _nullable(column.dataType), True, column.metadata) for column in schema])


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return nullable(kind)
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType), True)
    return kind


def _has_void(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_void(column.dataType) for column in kind)
    if isinstance(kind, ArrayType):
        return _has_void(kind.elementType)
    if isinstance(kind, MapType):
        return _has_void(kind.keyType) or _has_void(kind.valueType)
    return isinstance(kind, NullType)


def _fits(given: DataType, held: DataType) -> bool:
    """Delta widens among integers; nested types it merges by itself, so only their outer kind is compared."""
    if isinstance(given, IntegralType) and isinstance(held, IntegralType):
        return True
    if isinstance(given, (StructType, ArrayType, MapType)):
        return type(given) is type(held)
    return given == held


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
