"""Which micro-batch a task works for, from the local properties of its job.

Not here: what a batch reads (``batch/batch_reads.py``).
Invariant: a batch whose transactions are those of one app reads no range of another app. It would consume it.
"""

from __future__ import annotations

from pyspark import TaskContext
from pyspark.sql import SparkSession

from broker_core.errors import OptionError
from connector.tables.table import is_connect

APP_OF_QUERY = "txmq.appOfQuery"  # a local property


def task_identity() -> tuple[str, int]:
    """(query_id, batch_id) of this task, or ("", -1) if not known (foreachBatch on Connect, batch writes)."""
    context = TaskContext.get()
    query_id = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch_id = context.getLocalProperty("streaming.sql.batchId") if context else None
    if not query_id or not batch_id:
        return "", -1
    return query_id, int(batch_id)


def note_app_of_query(spark: SparkSession, app_id: str, query_id: str) -> None:
    """Tells the tasks of a query whose its transactions are. Called in its thread; not on Spark Connect."""
    if not is_connect(spark):  # a query that is started in a batch inherits the property, so it names its own
        spark.sparkContext.setLocalProperty(APP_OF_QUERY, f"{query_id} {app_id}")


def require_app_of_query(app_id: str, query_id: str) -> None:
    """Raises OptionError if the transactions of the query of this task are those of another app."""
    context = TaskContext.get()
    told = context.getLocalProperty(APP_OF_QUERY) if context else None
    query, _, other = (told or "").partition(" ")
    if query and query == query_id and other != app_id:
        raise OptionError(
            f"a batch of app {other!r} reads the frame of a batch of app {app_id!r}, "
            "and would consume its rows too",
            "collect or write these rows, and use that",
        )
