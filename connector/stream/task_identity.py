"""Which micro-batch a task works for, from the local properties of its job.

Not here: what a batch reads (``batch/batch_reads.py``).
Invariant: a batch whose transactions are those of one app reads no range of another app. It would consume it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pyspark import TaskContext
from pyspark.sql import SparkSession

from broker_core.errors import OptionError
from connector.tables.table import is_connect

if TYPE_CHECKING:  # a client of Spark Connect has none
    from pyspark import SparkContext

APPS_OF_OTHERS = "txmq.appsOfOthers"  # a local property: the query, its app, and the apps of other queries
_query_of_app: WeakKeyDictionary[SparkContext, dict[str, str]] = WeakKeyDictionary()


def task_identity() -> tuple[str, int]:
    """(query_id, batch_id) of this task, or ("", -1) if not known (foreachBatch on Connect, batch writes)."""
    context = TaskContext.get()
    query_id = context.getLocalProperty("sql.streaming.queryId") if context else None
    batch_id = context.getLocalProperty("streaming.sql.batchId") if context else None
    if not query_id or not batch_id:
        return "", -1
    return query_id, int(batch_id)


def note_app_of_query(spark: SparkSession, app_id: str, query_id: str) -> None:
    """Tells the tasks of a query which apps belong to other queries of this driver. Called in the thread of
    the query; does nothing on Spark Connect.
    """
    if is_connect(spark):
        return
    queries = _query_of_app.setdefault(spark.sparkContext, {})
    queries[app_id] = query_id
    others = [app for app, query in list(queries.items()) if query != query_id]
    # a query that is started in a batch inherits the property, so it names its own
    spark.sparkContext.setLocalProperty(APPS_OF_OTHERS, json.dumps([query_id, app_id, *others]))


def require_app_of_query(app_id: str, query_id: str) -> None:
    """Raises OptionError if the batches of the app are those of another query than this task's. An app
    that only names a source decides no batches, and belongs to none.
    """
    context = TaskContext.get()
    told = context.getLocalProperty(APPS_OF_OTHERS) if context else None
    query, own, *others = json.loads(told) if told else ("", "")
    if query == query_id and app_id in others:
        raise OptionError(
            f"a batch of app {own!r} reads the frame of a batch of app {app_id!r}, "
            "and would consume its rows too",
            "collect or write these rows, and use that",
        )
