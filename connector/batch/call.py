"""Calls: one of a function of the user has ended when it returns; a transactional function has one a batch.

Not here: what the function does (``batch_transaction.py``), replays of a batch (``foreach_batch.py``).
Invariant: what a function has left to do later is never taken for done, and no call waits for itself.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from connector.batch.batch_reads import rows_of
from connector.errors import error_summary
from connector.stream.query_plan import explained, running
from connector.tables.table import is_connect

log = logging.getLogger("txmq")


def require_ended(returned: object, function: str) -> None:
    """Raises OptionError if ``function`` has returned something that would do its work later, or never."""
    if not (
        inspect.isawaitable(returned)
        or inspect.isgenerator(returned)
        or inspect.isasyncgen(returned)
        or isinstance(returned, Future)
    ):
        return
    if inspect.iscoroutine(returned):
        returned.close()  # otherwise Python warns that it was never awaited
    raise OptionError(
        f"{function} returned a {type(returned).__name__}, so its work is not done",
        "give a function that ends when its work is done: use asyncio.run or .result() in it, and no yield",
    )


def running_query(batch: DataFrame) -> tuple[str, str]:
    """(query, run) of the thread; over Connect, of the process, which is one of a run. Raises OptionError."""
    spark = batch.sparkSession
    if is_connect(spark):
        process = os.getpid(), spark.session_id  # type: ignore[attr-defined]
        return _queries.get(process) or _queries.setdefault(process, _query_of(batch))
    context = spark.sparkContext
    query_id = context.getLocalProperty("sql.streaming.queryId")
    if not query_id:
        raise OptionError("transactional was called outside a query", "use it in foreachBatch")
    run = context.getLocalProperty("spark.jobGroup.id")
    # of a new run; or the function has a job group of its own, or none
    if not run or _runs.get(query_id) != run:
        query = execution(spark, query_id)
        run = run if query is None else str(query.runId())
        if not run:
            raise OptionError(
                f"the run of query {query_id} is not known",
                "call transactional before you clear the job group",
            )
        _runs[query_id] = run
    return query_id, run


_runs: dict[str, str] = {}  # by query


def execution(spark: Any, query_id: str) -> Any:
    """A running query in the JVM; None if Spark does not report it."""
    try:
        queries = spark._jsparkSession.sharedState().activeStreamingQueries()
        return queries.get(spark._jvm.java.util.UUID.fromString(query_id))
    except Exception as error:  # Spark's internals
        log.debug("query %s is not known: %s", query_id, error_summary(error))
        return None


_queries: dict[tuple[int, str], tuple[str, str]] = {}


def _query_of(batch: DataFrame) -> tuple[str, str]:
    """On Spark Connect: the query of the session in whose plan are the most columns of ``batch``."""
    columns = _columns(rows_of(batch)._explain_string(extended=False))  # type: ignore[operator]
    shared = [(query, len(columns & _columns(explained(query)))) for query in running(batch.sparkSession)]
    most = max((count for _, count in shared), default=0)
    found = [query for query, count in shared if count == most > 0]
    if len(found) > 1:
        raise OptionError(
            f"{len(found)} queries of this session read one frame, so the query of this batch is unknown",
            "give each query a readStream of its own",
        )
    if not found:
        raise OptionError(
            "transactional was called outside a query, or with no rows of its batch",
            "use it in foreachBatch, and give it the batch or a frame made of it without localCheckpoint",
        )
    return found[0].id, found[0].runId


def _columns(plan: str) -> set[str]:
    """The names of Spark in a plan: a column has a number that no other one of the server has."""
    return set(re.findall(r"#\d+", plan))


_calls = threading.Lock()
_under_way: set[tuple[str, str | int]] = set()  # broker, and the run or the thread of a call


@contextlib.contextmanager
def not_within_itself(broker: str, app_id: str, run: str) -> Iterator[None]:
    """A call of a transactional function. Raises OptionError within the function of another call, which would
    wait for this one, or lose its batch: any app of the owner consumes what the outer function has read.
    """
    callers = {(broker, caller) for caller in (run, threading.get_ident())}
    with _calls:
        if callers & _under_way:
            raise OptionError(
                f"transactional of app {app_id!r} was called by its own function, or by that of another app",
                "do everything with the tx that the function has",
            )
        _under_way.update(callers)
    try:
        yield
    finally:
        with _calls:
            _under_way.difference_update(callers)


@dataclass(frozen=True)
class Call:
    """The call of a transactional function for a batch, in one run of a query."""

    broker: str
    app_id: str
    batch: tuple[str, str, int]  # the run, the query and the number

    _done: ClassVar[dict[tuple[str, str], tuple[str, str, int]]] = {}

    def require_first(self) -> None:
        """Raises OptionError if this batch has had its call, and is decided."""
        if self._done.get((self.broker, self.app_id)) == self.batch:
            raise OptionError(
                f"transactional of app {self.app_id!r} was called twice for batch {self.batch[2]}, "
                "and the first call has decided it, with all of its rows: those of the second are left out",
                "do everything in one function, or filter the batch within it",
            )

    def done(self) -> None:
        self._done[(self.broker, self.app_id)] = self.batch
