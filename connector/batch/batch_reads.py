"""What a micro-batch reads, and whether the engine has a note of it (S4).

A task notes what it reads, under the query and the batch that Spark's local properties name. That is not
enough: a thread of the function has no such properties, and what it has put into a cache or a shuffle is not
read again. So the ranges are taken from the input partitions of the batch, which Spark has fixed, and noted
from the driver, unless an execution has surely run every reading task in the thread of the stream. A client
of Spark Connect does not see the partitions: there every operation is marked, in whatever thread, and a batch
that may not have been read by one is read once more.

Not here: what the source reads (``stream/source.py``), the plan of a frame (``reject/plan.py``).
Invariant: a batch that is decided is noted with all its ranges, whoever has executed it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from pyspark.serializers import CPickleSerializer
from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from broker_core.engine import Engine, ReadTicket
from broker_core.message import spans
from connector.errors import error_summary
from connector.stream import staging
from connector.stream.source import ClaimedSlice
from connector.stream.spark_version import input_partition
from connector.stream.task_identity import other_app
from connector.tables.table import is_connect

log = logging.getLogger("txmq")

_MARK = b"ClaimedSlice"
LINKED = 32


class BatchReads:
    """Of one micro-batch; made in the thread of the stream."""

    def __init__(self, batch: DataFrame) -> None:
        self._batch = batch
        self._thread = threading.get_ident()
        self._narrow: bool | None = None
        self._cache: Any = None  # what Spark has persisted
        self.rdd_id: int | None = None  # of the rows of the batch, once it is known
        self.by_tasks = False  # an execution of the whole batch has noted what it reads
        self._connect = is_connect(batch)

    def direct(self) -> bool:
        """Whether an execution of the whole batch in this thread would now run the tasks that read."""
        if self.by_tasks or (threading.get_ident() != self._thread and not self._connect):
            return False
        try:
            if self._connect:
                return _is_rows(self._batch) and not _is_cached(self._batch)
            if self._narrow is None:
                rdd = _rdd(self._batch)
                self.rdd_id = None if rdd is None else int(rdd.id())
                session: Any = self._batch.sparkSession
                self._cache = session._jsparkSession.sharedState().cacheManager()
                self._narrow = _pinned(self._batch) and (rdd is None or "+-" not in str(rdd.toDebugString()))
            return self._narrow and bool(self._cache.isEmpty())
        except Exception:  # Spark's internals: then the ranges are noted from here
            return False

    def persist(self) -> None:
        """Caches the batch. On Spark Connect it is executed at once: by tasks that note what they read."""
        direct = self.direct()
        self._batch.persist()
        if self._connect and direct:
            staging.execute(self._batch)
            self.by_tasks = True

    def note(self, engine: Engine, app_id: str, query_id: str, batch_id: int) -> None:
        """Notes every range that the batch reads, if its tasks have not. Raises CheckpointMismatch,
        OptionError.
        """
        if self.by_tasks:
            return
        if self._connect:
            rows = rows_of(self._batch)
            if _is_cached(rows):
                rows.unpersist()
            staging.execute(rows)
            return
        for other, ranges in ranges_of(self._batch):
            if other != app_id:
                raise other_app(app_id, other)
            for _ in engine.read(ReadTicket(app_id, query_id, batch_id, ranges, ())):
                raise AssertionError("a read of no slices has rows")


def ranges_of(batch: DataFrame) -> list[tuple[str, Any]]:
    """(app_id, ranges) of each source of txmq below the batch. Raises OptionError if Spark does not report
    it.
    """
    try:
        found = list(input_partitions(batch))
    except Exception as error:
        raise OptionError(
            f"txmq cannot find out what the batch reads ({error_summary(error)})",
            "use tx in the thread of the function, without persist, or report the version of Spark",
        ) from error
    return list({repr((each.app_id, sorted(each.ranges.items()))): (each.app_id, each.ranges)
                 for each in found if each.ranges}.values())  # fmt: skip


def link_messages(batch: DataFrame, engine: Engine) -> None:
    """Links the span around to the traces of the first messages that the batch reads, at most LINKED."""
    if not spans.current():
        return
    try:
        found = [
            (log, *ends)
            for _, ranges in ranges_of(batch)
            for log, ends in ranges.items()
            if ends[0] < ends[1]
        ][:LINKED]
        rows = LINKED // max(len(found), 1)
        slices = [(log, start, min(end, start + rows)) for log, start, end in found]
        spans.link(spans.contexts(engine.browse(slices), LINKED))
    except Exception as error:  # Spark's internals, or a tracer: a batch does not fail for a span
        log.debug("the span of the batch has no links: %s", error_summary(error))


def input_partitions(batch: DataFrame) -> Iterator[ClaimedSlice]:
    """One input partition of each source of txmq; each carries the whole range."""
    seen, rdd = set[int](), _rdd(batch)
    pending = [] if rdd is None else [rdd]
    while pending:
        rdd = pending.pop()
        if (number := rdd.id()) in seen:
            continue
        seen.add(number)
        if rdd.getClass().getSimpleName() == "DataSourceRDD":
            yield from _claimed(rdd)
        dependencies = rdd.dependencies()
        pending += [dependencies.apply(at).rdd() for at in range(dependencies.length())]


def _claimed(rdd: Any) -> Iterator[ClaimedSlice]:
    partitions = rdd.partitions()
    if not len(partitions):
        return
    first = input_partition(partitions[0])
    if first.isEmpty() or not first.get().getClass().getSimpleName().startswith("Python"):
        return
    pickled = bytes(first.get().pickedPartition())
    if _MARK in pickled:  # otherwise it is of another Python source
        serializer: Any = CPickleSerializer()
        found = serializer.loads(pickled)
        if isinstance(found, ClaimedSlice):
            yield found


def _rdd(batch: DataFrame) -> Any:
    """The rows of a micro-batch, as Spark gives it to foreachBatch; None if the frame is not one."""
    node = batch._jdf.queryExecution().analyzed()
    return node.rdd() if node.nodeName() == "LogicalRDD" else None


def _is_rows(frame: DataFrame) -> bool:
    """On Spark Connect: whether it is a micro-batch as Spark gives it to foreachBatch."""
    return type(vars(frame)["_plan"]).__name__ == "CachedRemoteRelation"


def rows_of(batch: DataFrame) -> DataFrame:
    """On Spark Connect: the micro-batch that a frame was made of; itself where that is not certain."""
    found = batch
    while (child := getattr(vars(found)["_plan"], "_child", None)) is not None:
        found = type(batch)(child, batch.sparkSession)
    return found if _is_rows(found) else batch


def _is_cached(frame: DataFrame) -> bool:
    level = frame.storageLevel
    return level.useMemory or level.useDisk or level.useOffHeap


def _pinned(batch: DataFrame) -> bool:
    """Whether each thread here has a thread of its own in the JVM, and so its own local properties."""
    from py4j.clientserver import ClientServer

    return isinstance(batch.sparkSession.sparkContext._gateway, ClientServer)
