"""What Spark keeps for the thread of a stream: its local properties and its active session.

The jobs of another thread of the function run with them too: they are attributed to the batch, ended with the
query, and use its settings. Nothing follows from them for what the batch consumes (``batch_reads.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from broker_core.core.errors import OptionError
from connector.stream.task_identity import marked
from connector.tables.table import is_connect

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject


class ThreadContext:
    """Of the thread that makes it. On Spark Connect, where jobs run on the server, that is the mark of the
    batch alone (``identity``: its app, query and number).
    """

    def __init__(self, spark: SparkSession, identity: tuple[str, str, int] | None = None) -> None:
        self._spark = spark
        self._identity = identity
        self._context: JavaObject = None if is_connect(spark) else spark.sparkContext._jsc.sc()
        self._properties: JavaObject = None if self._context is None else self._context.getLocalProperties()

    def require_query(self, query_id: str, operation: str) -> None:
        """Raises OptionError if the calling thread is that of another query, with a batch of its own."""
        other = None if self._context is None else self._context.getLocalProperty("sql.streaming.queryId")
        if other and other != query_id:
            raise OptionError(
                f"tx.{operation} was called in a batch of another query: both would consume its rows",
                "give the stream within the function a transactional function of its own",
            )

    def of_batch(self, *, elsewhere: bool) -> contextlib.AbstractContextManager[None]:
        """What a job of the batch needs in the calling thread, whatever the function has cleared there;
        ``elsewhere``: it is another one than that of the stream.
        """
        if self._context is None and self._identity is not None:
            return marked(self._spark, *self._identity)
        return self.entered() if elsewhere else contextlib.nullcontext()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Gives them to the calling thread, within the block."""
        if self._context is None:
            yield
            return
        context, sessions = self._context, SparkSession._get_j_spark_session_class(self._spark._jvm)
        properties, session = context.getLocalProperties(), sessions.getActiveSession()
        context.setLocalProperties(self._properties.clone())
        sessions.setActiveSession(self._spark._jsparkSession)
        try:
            yield
        finally:
            context.setLocalProperties(properties)
            if session.isDefined():
                sessions.setActiveSession(session.get())
            else:
                sessions.clearActiveSession()
