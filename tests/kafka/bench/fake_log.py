"""One partition of FakeKafka: batches, producers' sequences, open and aborted transactions.

Not here: leaders and coordinators.
Invariant: a batch is appended whole or refused; the last stable offset never falls.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from broker_core.core import errors
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import (
    EARLIEST,
    LATEST,
    Fetch,
    Fetched,
    Isolation,
    OffsetAnswer,
    Produced,
    Producer,
    TopicPartition,
)
from broker_core.kafka.record.compression import inflate
from broker_core.kafka.record.decode import header_pairs, plain_records
from broker_core.kafka.record.record_batch import TRANSACTIONAL, Head, read_head
from tests.kafka.bench.batches import Batch, Row, marker


@dataclass
class FakeLog:
    log: TopicPartition
    leader: int
    epoch: int = 0
    start: int = 0
    end: int = 0
    ends_unknown: int = 0  # so many questions are answered OFFSET_NOT_AVAILABLE, as after an election
    hidden: bool = False  # a fetch shows nothing behind the begin, as of a leader that has not caught up
    max_message_bytes: int = 1_048_588
    batches: list[tuple[Head, bytes]] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)  # first offset of the transaction of a producer id
    aborted: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # producer id, first offset, offset of the marker
    written: dict[int, tuple[int, list[tuple[int, int, int]]]] = field(
        default_factory=dict
    )  # epoch, (first, last sequence, offset)

    def last_stable(self) -> int:
        return min(self.open.values(), default=self.end)

    def produce(self, data: bytes, producer: Producer | None) -> Produced:
        """``producer``: of the transaction that the batch must belong to."""
        if len(data) > self.max_message_bytes:
            return Produced(Code.MESSAGE_TOO_LARGE, -1)
        try:
            head = read_head(memoryview(data), 0, str(self.log))
            if head is None or head.stop != len(data) or not head.records:
                return Produced(Code.INVALID_RECORD, -1)
            inflate(head.codec, memoryview(data)[head.body], 64 << 20)
        except (errors.CorruptRecordBatch, ValueError):
            return Produced(Code.CORRUPT_MESSAGE, -1)
        if bool(head.attributes & TRANSACTIONAL) != (producer is not None):
            return Produced(Code.INVALID_RECORD, -1)
        if producer is not None:
            refused, offset = self._sequenced(data, head, producer)
            if refused or offset >= 0:
                return Produced(refused, offset)
            self.open.setdefault(producer.id, self.end)
        return Produced(Code.NONE, self._append(data))

    def _sequenced(self, data: bytes, head: Head, producer: Producer) -> tuple[Code, int]:
        """A refusal; or the offset at which the same batch stands already, else -1."""
        epoch, sequence = struct.unpack_from(">hi", data, 51)
        last = sequence + head.records - 1
        if (head.producer_id, epoch) != producer:
            return Code.INVALID_PRODUCER_EPOCH, -1
        known, runs = self.written.get(producer.id, (-1, []))
        if epoch < known:
            return Code.INVALID_PRODUCER_EPOCH, -1
        runs = runs if epoch == known else []
        for first, end, offset in runs[-5:]:
            if (first, end) == (sequence, last):
                return Code.NONE, offset
        if sequence != (runs[-1][1] + 1 if runs else 0):
            return Code.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
        self.written[producer.id] = epoch, [*runs, (sequence, last, self.end)]
        return Code.NONE, -1

    def _append(self, data: bytes) -> int:
        base = self.end
        placed = struct.pack(">q", base) + data[8:12] + struct.pack(">i", self.epoch) + data[16:]
        head = read_head(memoryview(placed), 0, str(self.log))
        assert head is not None
        self.batches.append((head, placed))
        self.end = head.last_offset + 1
        return base

    def end_transaction(self, producer: Producer, *, commit: bool) -> None:
        """Writes the marker."""
        first = self.open.pop(producer.id, None)
        if first is not None and not commit:
            self.aborted.append((producer.id, first, self.end))
        self.written[producer.id] = max(producer.epoch, self.written.get(producer.id, (-1, []))[0]), []
        self._append(marker(self.end, producer.id, commit=commit).encoded())

    # -- reading ---------------------------------------------------------------------------------------------

    def visible_end(self, isolation: Isolation) -> int:
        return self.last_stable() if isolation is Isolation.READ_COMMITTED else self.end

    def fetch(self, offset: int, request: Fetch, room: int, *, first: bool) -> Fetched:
        """``first``: the first log of the answer with a batch gets one, whatever its size (KIP-74)."""
        if not self.start <= offset <= self.end:
            return Fetched(Code.OFFSET_OUT_OF_RANGE, -1, -1, -1)
        until = self.start if self.hidden else self.visible_end(request.isolation)
        found, size, upto = [], 0, offset
        for head, data in self.batches:
            if head.last_offset < offset or head.base_offset >= until:
                continue
            if (found or not first) and size + len(data) > min(request.max_bytes, room):
                break
            found.append(data)
            size += len(data)
            upto = head.last_offset + 1
        aborted = [each for each in self.aborted if each[2] >= offset and each[1] < upto]
        listed = (
            tuple((producer, first) for producer, first, _ in aborted)
            if request.isolation is Isolation.READ_COMMITTED
            else ()
        )
        return Fetched(
            Code.NONE, self.end, self.last_stable(), self.start, listed, memoryview(b"".join(found))
        )

    def offset_of(self, timestamp: int, isolation: Isolation) -> OffsetAnswer:
        if self.ends_unknown:
            self.ends_unknown -= 1
            return OffsetAnswer(Code.OFFSET_NOT_AVAILABLE, -1)
        if timestamp == EARLIEST:
            return OffsetAnswer(Code.NONE, self.start)
        until = self.visible_end(isolation)
        if timestamp == LATEST:
            return OffsetAnswer(Code.NONE, until)
        for head, data in self.batches:
            for record in plain_records(head, _content(head, data), str(self.log)):
                if self.start <= record.offset < until and record.timestamp >= timestamp:
                    return OffsetAnswer(Code.NONE, record.offset)
        return OffsetAnswer(Code.NONE, -1)

    # -- cleaning --------------------------------------------------------------------------------------------

    def compact(self, upto: int | None) -> int:
        """Removes records of which a later one has the key. Tombstones stay, as long as a reader may need
        them; batches keep their offsets.
        """
        active = self.batches[-1][0].base_offset if upto is None else upto
        cleaned = [(head, data) for head, data in self.batches if head.last_offset < active]
        found = {head: [*plain_records(head, _content(head, data), str(self.log))] for head, data in cleaned}
        last = {record.key: record.offset for each in found.values() for record in each}
        gone = 0
        kept: list[tuple[Head, bytes]] = []
        for head, data in cleaned:
            rest = [record for record in found[head] if record.offset == last[record.key]]
            gone += head.records - len(rest)
            if len(rest) == head.records:
                kept.append((head, data))
            elif rest:
                rows = [
                    Row(each.offset, each.timestamp, each.key, each.value, tuple(header_pairs(each.headers)))
                    for each in rest
                ]
                made = Batch(
                    rows, head.base_offset, head.last_offset, base_timestamp=head.base_timestamp
                ).encoded()
                again = read_head(memoryview(made), 0, str(self.log))
                assert again is not None
                kept.append((again, made))
        self.batches = [*kept, *(each for each in self.batches if each[0].last_offset >= active)]
        return gone

    def delete_before(self, offset: int) -> OffsetAnswer:
        if not 0 <= offset <= self.end:
            return OffsetAnswer(Code.OFFSET_OUT_OF_RANGE, -1)
        self.start = max(self.start, offset)
        self.batches = [each for each in self.batches if each[0].last_offset >= self.start]
        return OffsetAnswer(Code.NONE, self.start)


def _content(head: Head, data: bytes) -> bytes | memoryview:
    return inflate(head.codec, memoryview(data)[head.body], 64 << 20)
