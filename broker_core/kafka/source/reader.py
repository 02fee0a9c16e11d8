"""Reading ranges of offsets: what is committed there, in order, exactly once.

A fetch asks for several logs where a batch has few rows of each: its round trip is paid once, not for each
partition. The next one is under way while rows are decoded and used.
Not here: which range a batch reads (``source.py``), what a record means (``rows.py``).
Invariant: the position moves by whole batches, also over aborted data and markers, and gaps prove nothing.
Rows that retention deleted, and a topic that was made again, are DataLoss, never fewer or other rows.
Memory: two fetches of FETCH_BYTES and the rows of one.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple
from uuid import UUID

import pyarrow as pa

from broker_core.core import errors
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import EARLIEST, LATEST, Fetched, TopicPartition
from broker_core.kafka.record.decode import decode
from broker_core.kafka.record.record_batch import HEAD
from broker_core.kafka.source.partitions import topic_lost
from broker_core.kafka.source.rows import rows_of

FETCH_BYTES = 8 << 20
FETCH_LOGS, FETCH_ROWS = 64, 10_000  # of one fetch; a slice with more rows than that is its last
LANE = "read"  # large answers do not hold up the questions of others

_BASE_AND_LENGTH = struct.Struct(">qi")
_LAST_DELTA = struct.Struct(">i")
_LAST_DELTA_AT = 23


class LogSlice(NamedTuple):
    log: TopicPartition
    start: int
    end: int


class _Answer(NamedTuple):
    position: int  # behind the one that was asked for where rows are lost
    fetched: Fetched | None  # None: nothing is there any more


class PartitionReader:
    """Of some slices, in their order. ``ids``: those that the topics had when the slices were claimed.

    The first fetch is sent by the constructor. Use it with ``with``: it has a thread.
    """

    def __init__(
        self, client: Client, slices: Sequence[LogSlice], ids: Mapping[str, UUID], *, fail_on_data_loss: bool
    ) -> None:
        self._client = client
        self._slices = [each for each in slices if each.start < each.end]
        self._ids = ids
        self._fails = fail_on_data_loss
        self._pool = ThreadPoolExecutor(1, "txmq-read")
        self._todo = deque(self._slices)  # not asked for yet, in the order of reading
        self._ahead: tuple[list[LogSlice], Future[Mapping[TopicPartition, Fetched]]] | None = None
        self._arrived: dict[tuple[TopicPartition, int], Fetched] = {}
        self._send()

    def __enter__(self) -> PartitionReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def rows(self, *, record: bool = False) -> Iterator[pa.RecordBatch]:
        """Yields them as READ_SCHEMA; ``record``: as READ_WITH_RECORD. Raises DataLoss, ConnectionFailed."""
        for number, (log, position, end) in enumerate(self._slices):
            patience = self._client.patience()
            while position < end:
                at = position
                position, fetched = self._answer(number, position)
                if fetched is None:
                    break
                decoded = decode(fetched.records, position, end, fetched.aborted, log=str(log))
                if len(decoded.records):
                    yield rows_of(decoded.records, log, record=record)
                position = decoded.position
                if position > at:
                    patience.renew()
                else:  # a leader that is new has not caught up yet
                    text = f"the leader of {log} does not show offset {position} yet, of {end}"
                    patience.wait(errors.ConnectionFailed(text))

    # -- fetching --------------------------------------------------------------------------------------------

    def _send(self, *, alone: bool = False) -> None:
        """Asks for what is read next, of each log once. ``alone``: of one log."""
        group: dict[TopicPartition, LogSlice] = {}
        most, rows = 1 if alone else FETCH_LOGS, 0
        while self._todo and self._todo[0].log not in group and len(group) < most and rows < FETCH_ROWS:
            each = self._todo.popleft()
            group[each.log] = each
            rows += each.end - each.start
        if group:
            offsets = {log: each.start for log, each in group.items()}
            self._ahead = [*group.values()], self._pool.submit(self._ask, offsets)

    def _ask(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Fetched]:
        return self._client.fetch(offsets, ids=self._ids, max_bytes=FETCH_BYTES, lane=LANE)

    def _answer(self, number: int, position: int) -> _Answer:
        log, _, end = self._slices[number]
        if (log, position) not in self._arrived and self._ahead is not None:
            self._receive(*self._ahead)
        if (fetched := self._arrived.pop((log, position), None)) is not None:
            return _Answer(position, fetched)
        # lost, not there yet, or left over by the decoder: this log alone, and what follows is asked for anew
        answer = self._fetch(log, position)
        behind = end if answer.fetched is None else _behind(answer.fetched.records, answer.position)
        self._ahead, self._arrived = None, {}
        rest = [LogSlice(log, behind, end)] if behind < end else []
        self._todo = deque([*rest, *self._slices[number + 1 :]])
        if behind > position:
            self._send()
        return answer

    def _receive(self, group: Sequence[LogSlice], pending: Future[Mapping[TopicPartition, Fetched]]) -> None:
        """Takes the answers up to the first log that lacks rows. Kafka fills an answer in the order of the
        question: what had no room is asked for alone, so that no later log arrives again and again.
        """
        self._ahead = None
        try:
            answers = pending.result()
        except (errors.DataLoss, errors.QueueNotFound):
            return  # of one log, but there is no answer for any
        for number, (log, start, end) in enumerate(group):
            behind = _behind(answers[log].records, start)
            if behind > start:
                self._arrived[log, start] = answers[log]
            elif number == 0:
                return  # it is not there yet
            if behind < end:
                self._todo.extendleft(reversed([LogSlice(log, behind, end), *group[number + 1 :]]))
                break
        self._send(alone=behind < end)

    def _fetch(self, log: TopicPartition, position: int) -> _Answer:
        patience = self._client.patience()
        while True:
            try:
                return _Answer(position, self._ask({log: position})[log])
            except errors.DataLoss as lost:
                moved = self._behind_the_loss(log, position, lost)
                if moved is None:
                    return _Answer(position, None)
                if moved == position:
                    patience.wait(lost)
                position = moved
            except errors.QueueNotFound as gone:
                self._require_same(log.topic)
                patience.wait(gone)  # a node that does not know the topic yet

    def _behind_the_loss(self, log: TopicPartition, position: int, lost: errors.DataLoss) -> int | None:
        """Returns where to go on; None: nowhere. Raises DataLoss where that must not be skipped."""
        begin = self._client.offsets({log: EARLIEST})[log]
        end = self._client.offsets({log: LATEST})[log]
        if begin <= position <= end:
            return position  # it is there: the node that answered was not up to date
        if self._fails:
            raise errors.DataLoss(
                f"offset {position} of {log} is lost: Kafka has {begin} to {end}",
                "raise retention.ms and retention.bytes of the topic; set failOnDataLoss=false to continue "
                "with the rows that are left",
            ) from lost
        return begin if position < begin else None

    def _require_same(self, topic: str) -> None:
        """Raises DataLoss unless the topic is the one whose rows were claimed."""
        try:
            found = self._client.topic(topic, fresh=True).id
        except errors.QueueNotFound:
            found = None
        if found != self._ids.get(topic, found):
            raise topic_lost(topic)


def _behind(data: memoryview, position: int) -> int:
    """Returns the offset behind the batches that lie whole in ``data``. The decoder checks them."""
    at = 0
    while at + HEAD.size <= len(data):
        base, length = _BASE_AND_LENGTH.unpack_from(data, at)
        stop = at + _BASE_AND_LENGTH.size + length
        if length <= 0 or stop > len(data):
            break
        position = max(position, base + _LAST_DELTA.unpack_from(data, at + _LAST_DELTA_AT)[0] + 1)
        at = stop
    return position
