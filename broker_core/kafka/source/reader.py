"""Reading ranges of offsets: what is committed there, in order, exactly once.

The next fetch is under way while rows are decoded and used.
Not here: which range a batch reads (``source.py``), what a record means (``rows.py``).
Invariant: the position moves by whole batches, also over aborted data and markers, and gaps prove nothing.
Rows that retention deleted, and a topic that was made again, are DataLoss, never fewer or other rows.
Memory: two fetches of FETCH_BYTES and the rows of one.
"""

from __future__ import annotations

import struct
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
        self._ahead: tuple[TopicPartition, int, Future[_Answer]] | None = None
        if self._slices:
            self._send(self._slices[0].log, self._slices[0].start)

    def __enter__(self) -> PartitionReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def rows(self, *, record: bool = False) -> Iterator[pa.RecordBatch]:
        """Yields them as READ_SCHEMA; ``record``: as READ_WITH_RECORD. Raises DataLoss, ConnectionFailed."""
        for number, each in enumerate(self._slices):
            following = self._slices[number + 1] if number + 1 < len(self._slices) else None
            yield from self._rows(each, following, record)

    def _rows(self, part: LogSlice, following: LogSlice | None, record: bool) -> Iterator[pa.RecordBatch]:
        log, position, end = part
        patience = self._client.patience()
        while position < end:
            at = position
            position, fetched = self._answer(log, position)
            if fetched is None:
                return
            behind = _behind(fetched.records, position)
            if position < behind < end:
                self._send(log, behind)
            elif behind >= end and following is not None:
                self._send(following.log, following.start)
            decoded = decode(fetched.records, position, end, fetched.aborted, log=str(log))
            if len(decoded.records):
                yield rows_of(decoded.records, log, record=record)
            position = decoded.position
            if position > at:
                patience.renew()
            else:  # a leader that is new has not caught up yet
                patience.wait(
                    errors.ConnectionFailed(
                        f"the leader of {log} does not show offset {position} yet, of {end}"
                    )
                )

    # -- fetching --------------------------------------------------------------------------------------------

    def _send(self, log: TopicPartition, position: int) -> None:
        self._ahead = log, position, self._pool.submit(self._fetch, log, position)

    def _answer(self, log: TopicPartition, position: int) -> _Answer:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (log, position):
            return ahead[2].result()
        return self._fetch(log, position)

    def _fetch(self, log: TopicPartition, position: int) -> _Answer:
        patience = self._client.patience()
        while True:
            try:
                found = self._client.fetch({log: position}, ids=self._ids, max_bytes=FETCH_BYTES, lane=LANE)
                return _Answer(position, found[log])
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
