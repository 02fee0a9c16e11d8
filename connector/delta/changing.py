"""Merges, deletes and overwrites of decided batches, each once (C5).

Each is one Delta commit with (txnAppId, txnVersion). Delta skips a change that the table has, and lets only
one of two drivers commit it. A merge that changes nothing is a commit too, so it is known as done.

Not here: their order (``apply.py``), and the checks before the decision (``changes.py``).
Invariant: the transaction is in settings of a session that nobody else has, or in options of the write.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession

from broker_core import failpoint
from connector.delta.commits import remembered, require_held, retried, save, settings
from connector.delta.isolated import isolated
from connector.merge import Merge
from connector.once import Once
from connector.overwrite import Overwrite
from connector.table import Table, in_sql


def change(
    spark: SparkSession,
    table: Table,
    wanted: Merge | Overwrite,
    rows: Callable[[SparkSession], DataFrame],
    once: Once,
) -> None:
    """One Delta commit of the change, or none if the table has that of ``once``.

    ``rows`` makes the given rows in a session. Raises LineageConflict as ``append`` does.
    """

    def write() -> None:
        if isinstance(wanted, Overwrite):
            writer = rows(spark).write.format("delta").mode("overwrite").options(**wanted.options)
            save(spark, writer.option("replaceWhere", wanted.where), table, once)
            return
        view = f"txmq_{uuid.uuid4().hex}"
        with isolated(spark, settings(once)) as session:
            rows(session).createOrReplaceTempView(view)
            session.sql(wanted.sql(in_sql(table.name), view)).collect()

    if remembered(spark, table, once):
        return
    failpoint.here("changing.started")
    retried(write)
    failpoint.here("changing.committed")
    require_held(spark, table, once)
