"""Staging: the rows of a task as records of the stage topic: durable, invisible, ready to be published (C2).

The value of a staged record is a whole record batch for one log, or an Arrow stream of rows that are applied
later. So the driver publishes without reading a row.
Not here: which branches count (``decide.py``), and reading them (``staged_branches.py``).
Invariant: nothing that is staged is read by a consumer of a queue, and a record that no receipt names has no
effect. A batch is stamped with the time of now: time retention would delete one of 1970 within minutes.
"""

from __future__ import annotations

import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

import pyarrow as pa
import xxhash

from broker_core.arrow.parts import branch_checksum, parts, signed, stream_of
from broker_core.core.endpoint import client_name
from broker_core.core.errors import MissingBranch, QueueNotFound, TransactionTooLarge
from broker_core.core.failpoint import here
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.record.encode import encode_headers, encode_large
from broker_core.kafka.record.record_batch import Codec
from broker_core.kafka.sink.encoded_batches import BATCH_BYTES, Publisher
from broker_core.kafka.sink.staged_branches import (
    APP,
    BATCH,
    CLIENT,
    KIND,
    NUMBER,
    PARTITION,
    QUERY,
    ROWS,
    TOKEN,
    TOPIC,
    BranchPlace,
    Receipt,
    Span,
    joined,
    of,
)
from broker_core.kafka.topics import topics
from broker_core.kafka.topics.entry import now_ms
from broker_core.kafka.topics.routing import ClusterTopology
from broker_core.routing.carbon_copy import copies_of_rows
from broker_core.routing.content import check_rows

ROOM = 8 << 10  # of a staged record batch, beside its values: heads, keys and headers
SENT = topics.STAGED_BYTES - ROOM  # values wait until they are so large together
_HEADERS = 2 << 10  # of one staged record, with its key, at most


class _Value(NamedTuple):
    """The value of a staged record. ``log`` None: rows that are applied later."""

    log: TopicPartition | None
    rows: int
    data: bytes


def stage_app(header: BranchHeader) -> str:
    """Returns the app whose stage topic holds the branch; "" for a batch write."""
    return header.app_id if header.batch_id >= 0 else ""


class _Stage(NamedTuple):
    """A stage topic. ``largest``: bytes of a value that it takes; ``fetched_at``: seconds."""

    name: str
    id: uuid.UUID
    partitions: int
    largest: int
    fetched_at: float


class KafkaStaging:
    """``codec`` compresses what is published."""

    def __init__(self, client: Client, topology: ClusterTopology, codec: Codec = Codec.NONE) -> None:
        self._client = client
        self._topology = topology
        self._codec = codec
        self._lock = threading.Lock()
        self._stages: dict[str, _Stage] = {}  # stage topics that exist with their settings
        self._last = BranchHeader("", "", "publish", {})  # the newest branch

    def ensure(self, app_id: str) -> str:
        """Returns the name of the stage topic, which is created if it is missing."""
        return self._stage(app_id).name

    def _stage(self, app_id: str) -> _Stage:
        topic = topics.stage(app_id)
        stage = self._stages.get(topic.name)
        if stage is None or time.monotonic() - stage.fetched_at > topics.ASKED_S:
            found = topics.ensure(self._client, topic)
            largest = self._client.configs(topic.name, topics.LARGEST).get(topics.LARGEST)
            room = int(largest or topics.STAGED_BYTES) - ROOM
            stage = _Stage(topic.name, found.id, len(found.partitions), room, time.monotonic())
            self._stages[topic.name] = stage
        return stage

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        """Stages a branch. Raises OptionError for rows that Kafka cannot carry, TransactionTooLarge,
        ExchangeNotFound, AccessRefused.
        """
        stage = self._stage(stage_app(header))
        log = TopicPartition(stage.name, header.partition % stage.partitions)
        branch = _Branch(self._client, header, log, stage.id, lambda: self._made_again(stage_app(header)))
        publishes = header.kind == "publish"
        values = self._published(branch, rows, stage) if publishes else _rows_to_apply(header, rows, stage)
        for value in values:
            branch.add(value)
        branch.flush()
        if not publishes:  # a decision reads what is published, and does not read what is applied later
            branch.require_same_topic()
        return branch.staged()

    def _made_again(self, app_id: str) -> uuid.UUID:
        """Makes a stage topic that somebody has deleted, unless somebody has made it. Returns its id."""
        self._stages.pop(topics.stage(app_id).name, None)
        return self._stage(app_id).id

    def _published(self, branch: _Branch, rows: Iterable[pa.RecordBatch], stage: _Stage) -> Iterator[_Value]:
        header = branch.header
        # tasks of one batch begin with different partitions, and those of another batch with others
        turn = zlib.crc32(header.token.encode()) + header.partition
        publisher = Publisher(turn, staged_bytes=stage.largest, codec=self._codec)
        target = self._topology.target
        if self._begins_again(header):
            target = cache(partial(target, fresh=True))
        for part in parts(rows, header, null_bodies=True):
            check_rows(part, on_kafka=True)
            copies, part = copies_of_rows(part)
            with self._lock:  # one topology for all threads
                routed = self._topology.route(part, copies)
                batches = list(publisher.batches(part, routed, target, now_ms()))
            branch.rows += part.num_rows
            branch.unroutable += routed.unroutable
            branch.examples += routed.examples
            for log, count, data in batches:
                yield _Value(log, count, data)

    def _begins_again(self, header: BranchHeader) -> bool:
        """Whether an attempt of the same batch was staged here before: it may have failed because a topic has
        fewer partitions now.
        """
        last, self._last = self._last, header
        batch = (last.app_id, last.query_id, last.batch_id)
        return batch == (header.app_id, header.query_id, header.batch_id) and last.token != header.token


class _Branch:
    """What is staged of one branch."""

    def __init__(
        self,
        client: Client,
        header: BranchHeader,
        log: TopicPartition,
        topic_id: uuid.UUID,
        made_again: Callable[[], uuid.UUID],
    ) -> None:
        """``topic_id``: of the topic of ``log``. ``made_again`` makes it where it is gone, and returns its
        id.
        """
        self.header = header
        self.rows = 0
        self.unroutable = 0
        self.examples: list[tuple[str, str]] = []
        self._client = client
        self._log = log
        self._topic_id = topic_id
        self._made_again = made_again
        self._waiting: list[_Value] = []
        self._waiting_bytes = 0
        self._checksums: list[int] = []
        self._spans: list[Span] = []
        self._logs: set[TopicPartition] = set()
        self._size_bytes = 0
        self._sent: tuple[int, Callable[[], Mapping[TopicPartition, int]]] | None = (
            None  # records, and their offset
        )

    def add(self, value: _Value) -> None:
        size = len(value.data) + _HEADERS
        if self._waiting and self._waiting_bytes + size > SENT:
            self._send()
        self._waiting.append(value)
        self._waiting_bytes += size
        if value.log is not None:
            self._logs.add(value.log)
        else:
            self.rows += value.rows

    def flush(self) -> None:
        """Returns when everything is appended."""
        if self._waiting:
            self._send()
        self._settle()

    def _send(self) -> None:
        """Sends what waits as one record batch. While it is appended, the next rows are encoded."""
        here("kafka.stage.append")
        header, first = self.header, len(self._checksums)
        key, count = header.branch.encode(), len(self._waiting)
        records = [
            (key, value.data, _headers(header, value, first + number))
            for number, value in enumerate(self._waiting)
        ]
        batch = encode_large(records, timestamp=now_ms())
        self._checksums += [signed(xxhash.xxh3_64_intdigest(value.data)) for value in self._waiting]
        self._size_bytes += sum(len(value.data) for value in self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self._settle()  # in their order: the records of a branch have numbers
        self._sent = count, self._appending(batch)

    def _appending(self, batch: bytes) -> Callable[[], Mapping[TopicPartition, int]]:
        """Sends a batch. Returns the call that waits until it is appended.

        It is sent again where the answer is lost: the copy that is not acknowledged is named by nothing. And
        where the topic is gone, but only the first of a branch: the others would follow in another topic.
        """

        def send() -> Callable[[], Mapping[TopicPartition, int]]:
            return self._client.producing({self._log: batch}, repeat=True)

        def again() -> Callable[[], Mapping[TopicPartition, int]]:
            self._topic_id = self._made_again()
            if self._spans:
                raise self._deleted()
            return send()

        def wait() -> Mapping[TopicPartition, int]:
            try:
                return answer()
            except QueueNotFound:
                return again()()

        try:
            answer = send()
        except QueueNotFound:
            answer = again()
        return wait

    def _deleted(self) -> MissingBranch:
        return MissingBranch(
            f"the stage topic {self._log.topic} was deleted while rows were staged; nothing was "
            "published. Let Spark run the batch again"
        )

    def require_same_topic(self) -> None:
        """Raises MissingBranch where what was appended may stand in another topic than the one that was there
        before: one that was deleted and made again answers as the same.
        """
        try:
            same = self._client.topic(self._log.topic, fresh=True).id == self._topic_id
        except QueueNotFound:
            same = False
        if not same:
            self._made_again()
            raise self._deleted()

    def _settle(self) -> None:
        """Waits until what was sent is appended."""
        if self._sent is None:
            return
        (count, appended), self._sent = self._sent, None
        offset = appended()[self._log]
        self._spans.append(Span(offset, offset + count - 1))
        here("kafka.stage.appended")

    def staged(self) -> StagedBranch:
        header = self.header
        receipt = Receipt(
            token=header.token,
            identity=of(header),
            kind=header.kind,
            target={} if header.kind == "publish" else header.target,
            place=BranchPlace(header.branch, self._log, joined(self._spans)),
            records=len(self._checksums),
            size_bytes=self._size_bytes,
            reached=self.rows - self.unroutable if header.kind == "publish" else 0,
            unroutable=self.unroutable,
            examples=tuple(self.examples[:3]),
            logs=tuple(sorted(self._logs)),
            topic_id=None if header.kind == "publish" else self._topic_id,
        )
        return StagedBranch(
            header.branch,
            header.partition,
            header.attempt,
            self.rows,
            branch_checksum(self._checksums) if self._checksums else 0,
            receipt=receipt.text() if self.rows else "",
        )


def _headers(header: BranchHeader, value: _Value, number: int) -> bytes:
    pairs = {
        TOKEN: header.token,
        APP: header.app_id,
        QUERY: header.query_id,
        BATCH: str(header.batch_id),
        KIND: header.kind,
        ROWS: str(value.rows),
        NUMBER: str(number),
        CLIENT: client_name(),
    }
    if value.log is not None:
        pairs |= {TOPIC: value.log.topic, PARTITION: str(value.log.partition)}
    return encode_headers((name, text.encode()) for name, text in pairs.items())


def _rows_to_apply(header: BranchHeader, rows: Iterable[pa.RecordBatch], stage: _Stage) -> Iterator[_Value]:
    """Yields rows that are applied later, as Arrow streams that fit into a staged record."""
    waiting: list[pa.RecordBatch] = []
    for part in parts(rows, header):
        waiting.append(part)
        while waiting:
            piece = waiting.pop()
            if piece.num_rows > 1 and piece.nbytes > 2 * BATCH_BYTES:
                waiting += _halves(piece)
                continue
            data = bytes(stream_of([piece], piece.schema, "lz4"))
            if len(data) <= (SENT if piece.num_rows > 1 else stage.largest):
                yield _Value(None, piece.num_rows, data)
            elif piece.num_rows > 1:
                waiting += _halves(piece)
            else:
                raise TransactionTooLarge(
                    f"a row of {len(data)} bytes for the stage topic of app {header.app_id!r}, which takes "
                    f"at most {stage.largest} bytes in a row",
                    f"raise max.message.bytes of {stage.name}, or store it elsewhere and append a reference",
                )


def _halves(piece: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Returns both halves, the first one last."""
    middle = piece.num_rows // 2
    return [piece.slice(middle), piece.slice(0, middle)]
