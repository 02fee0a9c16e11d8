"""The streaming reader and the batch reader: Spark's calls on the engine port, by the rules S1 to S5.

Not here: claims and their owners (the engine); how each Spark asks for the end of a batch
(``with_admission_control.py``, ``without_admission_control.py``). Invariants: ``__init__`` never connects; a
reader has no state that is needed after a restart; a symbolic start or a recorded end is never replaced by a
computed number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from broker_core.core.errors import CheckpointMismatch
from broker_core.core.failpoint import here
from broker_core.engine import LATEST, Available, Engine, Limit, Ranges, ReadTicket, Slice, Vector
from connector.options import ReadOptions
from connector.stream import offset
from connector.stream.reader_lock import ReaderLock
from connector.stream.schema import to_spark
from connector.stream.task_identity import require_app_of_batch, task_identity

# How long latestOffset may wait for new messages. Spark calls an idle source every 10 ms, but query.stop()
# and the other sources of a query wait for the answer.
POLL_S = 0.1
# With fewer rows, another task costs more than it saves. minPartitions and maxRecordsPerPartition override
# this number.
MIN_ROWS_PER_TASK = 1_000
# The ends of the logs are for the progress of a query, and a look at them is a call in each trigger.
ENDS_S = 1.0


@dataclass(frozen=True)
class ClaimedSlice(InputPartition):
    """A task's slice of a micro-batch, and its whole range, as an app has claimed it (S3)."""

    ranges: Ranges
    slices: tuple[Slice, ...]
    app_id: str


@dataclass(frozen=True)
class BrowsedSlice(InputPartition):
    slices: tuple[Slice, ...]


# -- splitting -----------------------------------------------------------------------------------------------


def parallelism() -> int:
    """The default for the maximum number of tasks: the cores of the driver's machine.

    A Python data source runs without a session, so the size of the cluster is not known here.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def task_count(found: Mapping[str, Available], options: ReadOptions) -> int:
    """At least 1, at most one per row. Does not depend on the number of queues.

    A queue of several logs is spread over a cluster, so its logs with rows count as cores.
    """
    rows = sum(one.rows for one in found.values())
    logs = sum(one.rows > 0 for log, one in found.items() if log not in options.queues)
    count = options.min_partitions or min(max(parallelism(), logs), -(-rows // MIN_ROWS_PER_TASK))
    if options.max_rows_per_partition is not None:
        count = max(count, -(-rows // options.max_rows_per_partition))
    return max(1, min(count, rows))


def split(found: Mapping[str, Available], tasks: int) -> list[tuple[Slice, ...]]:
    """Splits the ranges into ``tasks`` parts of about the same number of rows, each of one or more slices.

    Ranges without readable rows are added to a neighbour, so that missing rows are detected.
    """
    total = sum(one.rows for one in found.values())
    parts: list[list[Slice]] = [[] for _ in range(tasks)]
    before = 0  # rows of the logs before this one
    for log, one in found.items():
        if one.end <= one.start:
            continue
        position = one.start
        first = min(before * tasks // total, tasks - 1) if total else 0
        last = min((before + one.rows - 1) * tasks // total, tasks - 1) if one.rows else first
        for part in range(first, last + 1):
            # rows of this log in the parts up to this one, as a share of its offsets
            share = -(-total * (part + 1) // tasks) - before
            end = (
                one.end
                if part == last
                else max(position, one.start + (one.end - one.start) * share // one.rows)
            )
            if end > position:
                parts[part].append((log, position, end))
                position = end
        before += one.rows
    return [tuple(slices) for slices in parts if slices]


# -- streams -------------------------------------------------------------------------------------------------


class StreamReader(DataSourceStreamReader):
    """What every version of Spark calls on a stream; ``spark_version.py`` adds how it asks for the next end.

    Built in two processes of the driver and unpickled in every task; connects at the first use.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._logs: dict[str, list[str]] = {}  # of every queue, as last seen
        self._lock = ReaderLock()
        self._final: dict[str, int] | None = None  # Trigger.AvailableNow: the end of all reads
        # a start without new messages, and the ends of the logs at that time
        self._idle: tuple[Vector, dict[str, int]] | None = None
        self._acked: Vector | None = None  # everything below it, by the last claim
        self._claimed: tuple[Vector, Vector] | None = None  # start and end of the last claim
        self._ran: Vector | None = None  # the end of the batch that this reader planned last
        # when the ends of the logs were asked, and they
        self._latest: tuple[float, dict[str, int]] = (-ENDS_S, {})

    @property
    def _engine(self) -> Engine:
        return self._options.address.engine()

    def _vector(self, logged: object) -> Vector:
        """The offset that Spark passes back. A log that is not known may have been added meanwhile."""
        try:
            if self._logs:
                return offset.vector(logged, self._logs)
        except CheckpointMismatch:
            pass
        self._logs = logs_of(self._engine, self._options.queues)
        return offset.vector(logged, self._logs)

    def _require_only(self) -> None:
        """Raises ResourceLocked if another source reads a queue of this one.

        Only within a trigger: if ``prepareForTriggerAvailableNow`` raises, Spark leaves sources running.
        """
        if not self._lock.is_held:
            self._lock.take(self._engine.identity(), self._options.app_id, self._options.queues)

    def initialOffset(self) -> Vector:
        self._require_only()
        # S1: symbolic. Spark logs no start for batch 0 and asks again; a new number would skip messages.
        self._logs = logs_of(self._engine, self._options.queues)
        return offset.symbolic(self._options.queues)

    def _end(self, start: Vector, *, limited: bool, acks: bool = True) -> Vector:
        """S2: acknowledge all below ``start``, if Spark has committed it (``acks``); the end of its claim, or
        ``start`` if nothing is new.
        """
        idles = (
            self._idle is not None
            and self._idle[0] == start
            and not self._engine.wait(self._options.queues, self._idle[1], POLL_S)
        )
        # with min_rows, waiting messages may become due without new ones
        if idles and self._options.min_rows is None:
            return start
        end = self._claim(start, limited=limited, acks=acks)
        if end == start and self._final is None:
            # Messages may have arrived between the claim and ``_ends``: claim once more before waiting.
            ends = self._ends()
            end = self._claim(start, limited=limited, acks=acks)
            self._idle = (start, ends) if end == start else None
        else:
            self._idle = None
        here("connector.latest_offset.claimed")
        return end

    def _claim(self, start: Vector, *, limited: bool, acks: bool) -> Vector:
        options = self._options
        waits = limited and self._final is None and options.min_rows is not None
        limit = Limit(
            max_rows=options.max_rows if limited else None,
            max_bytes=options.max_bytes if limited else None,
            end=self._final,
            min_rows=options.min_rows if waits else None,
            max_delay_s=options.max_delay_s if waits else None,
        )
        origin = options.origin
        if options.ledger_start is not None and offset.is_symbolic(start):
            origin = options.ledger_start.origin(self._engine, logs_of(self._engine, options.queues))
        end = self._engine.claim(
            options.app_id,
            options.queues,
            start,
            limit,
            origin,
            options.on_new_checkpoint,
            acks=acks,
            ran=start == self._ran,
        )
        if acks:
            self._acked = start
        self._claimed = start, end
        return end

    def _ends(self, logs: Sequence[str] = ()) -> dict[str, int]:
        """The ends of ``logs``, or of all that the queues have now."""
        found = self._engine.available(logs or self._engine.logs(self._options.queues))
        return {log: one.end for log, one in found.items()}

    def _latest_ends(self) -> dict[str, int]:
        """The ends of the logs that it knows, asked at most every ``ENDS_S``; never below the last claim."""
        logs = [log for logs in self._logs.values() for log in logs]
        at, ends = self._latest
        if time.monotonic() - at >= ENDS_S or ends.keys() != set(logs):
            ends = self._ends(logs)
            self._latest = time.monotonic(), ends
        claimed = self._claimed[1] if self._claimed is not None else {}
        reached = {log: offset for log, offset in claimed.items() if isinstance(offset, int)}
        return {log: max(end, reached.get(log, 0)) for log, end in ends.items()}

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[InputPartition]:
        """S3: the recorded range of a claim, also on replay, split evenly over all logs."""
        first, last = self._vector(start), self._vector(end)
        if first == last:
            # An empty batch 0 has one task without rows: only tasks tell a sink its query.
            return [ClaimedSlice({}, (), self._options.app_id)]
        # the engine is not asked about a claim that this reader just made
        if (first, last) == self._claimed and first.keys() == last.keys() and not offset.is_symbolic(first):
            ranges: Ranges = {log: (int(first[log]), int(last[log])) for log in sorted(first)}
        else:
            ranges = self._engine.resolve(self._options.app_id, first, last)
        self._ran = last
        found = {log: Available(first, last, last - first, 0) for log, (first, last) in ranges.items()}
        if task_count(found, self._options) > 1:  # of fewer rows, which are one task too
            found = self._engine.count(self._options.app_id, ranges)
        tasks = task_count(found, self._options)
        # At least one task: rows that no task reads are not consumed (S4).
        app_id = self._options.app_id
        return [ClaimedSlice(ranges, slices, app_id) for slices in split(found, tasks) or [()]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """S4: runs in a task, on another instance."""
        assert isinstance(partition, ClaimedSlice)
        if not partition.ranges:
            return iter(())
        options = self._options
        query_id, batch_id = task_identity()
        require_app_of_batch(options.app_id)
        ticket = ReadTicket(
            options.app_id,
            query_id,
            batch_id,
            partition.ranges,
            partition.slices,
            options.fail_on_data_loss,
            options.included.transaction,
            options.included.key or options.included.headers,
        )
        return _marked(to_spark(self._engine.read(ticket), options.included))

    def commit(self, end: dict[str, object]) -> None:
        """S5: Spark has ``end`` in its commit log. Nothing is left to do if the next claim was first (S2)."""
        vector = self._vector(end)
        if vector != self._acked and not offset.is_symbolic(vector):
            self._engine.ack(self._options.app_id, vector, vector == self._ran)


def _marked(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        yield batch
        here("connector.read.rows")


# -- batches -------------------------------------------------------------------------------------------------


class TxmqBatchReader(DataSourceReader):
    """Reads the messages that are not settled when the read is planned; changes nothing."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        engine = self._options.address.engine()
        starts = engine.offsets(self._options.queues, self._options.origin)
        found = engine.available(list(starts), starts)
        ending, logs = self._options.ending, logs_of(engine, self._options.queues)
        ending.check(logs, "endingOffsets")
        ends = {log: ending.offset(queue, log) for queue, of_queue in logs.items() for log in of_queue}
        found = {log: _cut(one, ends.get(log, LATEST)) for log, one in found.items()}
        tasks = task_count(found, self._options)
        return [BrowsedSlice(slices) for slices in split(found, tasks)] or [BrowsedSlice(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, BrowsedSlice)
        if not partition.slices:
            return iter(())
        included = self._options.included
        more = {"transaction": included.transaction, "record": included.key or included.headers}
        rows = self._options.address.engine().browse(partition.slices, **more)
        return to_spark(rows, included)


def logs_of(engine: Engine, queues: Sequence[str]) -> dict[str, list[str]]:
    """The logs of each queue, as of now. Raises QueueNotFound."""
    return {queue: engine.logs([queue]) for queue in queues}


def _cut(found: Available, end: int) -> Available:
    """``found`` up to ``end``, with rows and bytes in proportion."""
    if end == LATEST or end >= found.end:
        return found
    end = max(end, found.start)
    whole = found.end - found.start
    rows, size_bytes = (-(-part * (end - found.start) // whole) for part in (found.rows, found.size_bytes))
    return replace(found, end=end, rows=rows, size_bytes=size_bytes)
