"""Merges, deletes and overwrites of decided batches, each once (C5).

Each is one Delta commit with (txnAppId, txnVersion). Delta skips a change that the table has, and lets only
one of two drivers commit it. A merge that changes nothing is a commit too, so it is known as done.

Not here: their order (``apply.py``), and the checks before the decision (``changes.py``).
Invariant: the transaction is in settings of a session that nobody else has, or in options of the write.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core import failpoint
from broker_core.engine import ToApply
from broker_core.errors import OptionError
from connector import delta
from connector.isolated import isolated
from connector.merge import Merge
from connector.overwrite import Overwrite
from connector.table import Table, in_sql, is_path

KEY = "change"  # in the target of a branch
_WRITE = "spark.databricks.delta.write"


def target(table: Table, wanted: Merge | Overwrite, schema: StructType) -> dict[str, Any]:
    """What the target of a branch says about a change. ``schema``: of its rows."""
    about = {"table": table.name, "table_id": table.table_id, "schema": schema.json()}
    return {**about, KEY: wanted.told()}


def nothing() -> pa.RecordBatch:
    """What is staged for a change without rows: a branch without rows is none."""
    return pa.RecordBatch.from_pydict({"nothing": pa.nulls(1, pa.int32())})


def is_change(part: ToApply) -> bool:
    """Whether a part is a merge, a delete or an overwrite."""
    return KEY in part.target


def require_same_table(table: Table, part: ToApply, batch: str) -> None:
    """Raises OptionError if the table is not the one that the change was decided for."""
    decided = part.target["table_id"]
    if table.table_id == decided:
        return
    what = "was replaced by another one" if table.exists else "was dropped"
    raise OptionError(
        f"table {table.name!r} {what} before the {part.kind} of {batch} (Delta's id was {decided})",
        f"it is not done on another table; {delta.UNAPPLIED}",
    )


def change(
    spark: SparkSession,
    table: Table,
    part: ToApply,
    rows: Callable[[SparkSession], DataFrame],
    *,
    txn_app_id: str,
    txn_version: int,
    batch: Mapping[str, Any],
    decided_at_us: int,
) -> None:
    """One Delta commit of the change, or none if the table has that of ``batch``.

    ``rows`` makes the given rows in a session. Raises LineageConflict as ``delta.append`` does.
    """
    batch = {**batch, "txn_app_id": txn_app_id}
    told = delta.user_metadata(batch, txn_app_id)
    transaction = {"txnAppId": txn_app_id, "txnVersion": str(txn_version)}

    def merge() -> None:
        settings = {f"{_WRITE}.{name}": value for name, value in transaction.items()}
        settings |= {f"{_WRITE}.txnVersion.autoReset.enabled": "false", delta.USER_METADATA: told}
        view = f"txmq_{uuid.uuid4().hex}"
        with isolated(spark, settings) as session:
            rows(session).createOrReplaceTempView(view)
            session.sql(Merge.of(part.target[KEY]).sql(in_sql(table.name), view)).collect()

    def overwrite() -> None:
        wanted = Overwrite.of(part.target[KEY])
        writer = rows(spark).write.format("delta").mode("overwrite").options(**wanted.options)
        writer = writer.options(**transaction, userMetadata=told, replaceWhere=wanted.where)
        if is_path(table.name):
            writer.save(table.name)
        else:
            writer.saveAsTable(table.name)

    if delta.remembered(spark, table, batch, txn_version, decided_at_us):
        return
    failpoint.here("changing.started")
    delta.retried(overwrite if part.kind == "overwrite" else merge)
    failpoint.here("changing.committed")
    delta.require_held(spark, table, txn_app_id, batch, decided_at_us)
