"""Which micro-batch a task works for, from the local properties of its job.

Spark's own properties name it in jobs of the thread of a stream. A job of Spark Connect has none of them, but
the tags of its operation; so a transactional function marks what it runs, in the same words there and in a
classic session.

Not here: what a batch reads (``batch/batch_reads.py``).
Invariant: a batch whose transactions are those of one app reads no range of another app. It would consume it.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator

from pyspark import TaskContext
from pyspark.sql import SparkSession

from broker_core.core.errors import OptionError
from connector.tables.table import is_connect

MARK = "txmq-batch-"
_QUERY = "sql.streaming.queryId"
_TAGS = "spark.job.tags"  # of Spark Connect: separated by commas, each behind the names of user and session


def task_identity() -> tuple[str, int]:
    """(query_id, batch_id) of this task, or ("", -1): of a plain thread, or a batch read or write."""
    query_id, batch_id = _property(_QUERY), _property("streaming.sql.batchId")
    if query_id and batch_id:
        return query_id, int(batch_id)
    _, query_id, number = _marked(_TAGS)
    return query_id, number


def require_app_of_batch(app_id: str) -> None:
    """Raises OptionError if the transactional function that runs this task is one of another app."""
    query_id = _property(_QUERY)
    own, of_query, _ = _marked(MARK if query_id else _TAGS)
    # a query that is started in a batch inherits the mark, and is another one
    if own and own != app_id and query_id in ("", of_query):
        raise other_app(own, app_id)


def other_app(own: str, app_id: str) -> OptionError:
    return OptionError(
        f"a batch of app {own!r} reads rows of app {app_id!r}, and would consume its rows too",
        "give both the same, in transactional and in its source; of the batch of another query, collect or "
        "write the rows, and use that",
    )


@contextlib.contextmanager
def marked(spark: SparkSession, app_id: str, query_id: str, batch_id: int) -> Iterator[None]:
    """The jobs of this thread tell their tasks which micro-batch they are of."""
    word = MARK + base64.urlsafe_b64encode(json.dumps([app_id, query_id, batch_id]).encode()).decode()
    if not is_connect(spark):
        spark.sparkContext.setLocalProperty(MARK, word)  # one call; the next batch of the thread replaces it
        yield
        return
    outer = word in spark.getTags()
    spark.addTag(word)
    try:
        yield
    finally:
        if not outer and word in spark.getTags():  # the function may have cleared them
            spark.removeTag(word)


def _property(name: str) -> str:
    context = TaskContext.get()
    return (context.getLocalProperty(name) if context else None) or ""


def _marked(name: str) -> tuple[str, str, int]:
    """(app_id, query_id, batch_id) of the mark in a property; "", "" and -1 without one."""
    for word in _property(name).split(","):
        _, found, text = word.partition(MARK)
        if found:
            app_id, query_id, batch_id = json.loads(base64.urlsafe_b64decode(text))
            return app_id, query_id, batch_id
    return "", "", -1
