"""Record batches written byte by byte, as any client may write them, and read by kafka-python.

Not here: the product's own encoder; nothing of ``broker_core.kafka`` but compression, which kafka-python has
no libraries for.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import crc32c
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import encode_varint

from broker_core.kafka.record.compression import deflate
from broker_core.kafka.record.decode import Records, VisibleRecords, header_pairs
from broker_core.kafka.record.record_batch import Codec

LOG = "orders/0"
LOG_APPEND_TIME, TRANSACTIONAL, CONTROL = 0x08, 0x10, 0x20
EVERYTHING = 1 << 62


class Row(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass(frozen=True)
class Batch:
    """A batch as a writer means it; ``rows`` carry absolute offsets and timestamps."""

    rows: Sequence[Row]
    base: int = 0
    last: int | None = None
    codec: Codec = Codec.NONE
    attributes: int = 0
    base_timestamp: int = 1_700_000_000_000
    max_timestamp: int = 1_700_000_000_000
    producer: int = -1
    count: int | None = None
    magic: int = 2
    content: bytes | None = field(default=None, repr=False)

    def plain(self) -> bytes:
        """The records, not compressed."""
        if self.content is not None:
            return self.content
        return b"".join(
            record(row, row.offset - self.base, row.timestamp - self.base_timestamp) for row in self.rows
        )

    @property
    def last_offset(self) -> int:
        return self.last if self.last is not None else self.rows[-1].offset

    def encoded(self) -> bytes:
        return self.around(bytes(deflate(self.codec, memoryview(self.plain()))))

    def around(self, body: bytes) -> bytes:
        """The head before a body that is compressed already."""
        count = len(self.rows) if self.count is None else self.count
        tail = struct.pack(
            ">hiqqqhii", self.attributes | self.codec, self.last_offset - self.base, self.base_timestamp, self.max_timestamp, self.producer,
            0 if self.producer >= 0 else -1, -1, count,
        )  # fmt: skip
        return (
            struct.pack(
                ">qiibI", self.base, 9 + len(tail) + len(body), 0, self.magic, crc32c.crc32c(tail + body)
            )
            + tail
            + body
        )

    def uncompressed(self) -> Batch:
        return replace(self, codec=Codec.NONE)


def signed(value: int) -> bytes:
    out = bytearray()
    encode_varint(value, out.append)
    return bytes(out)


def nullable(value: bytes | None) -> bytes:
    return signed(-1) if value is None else signed(len(value)) + value


def record(row: Row, offset_delta: int, timestamp_delta: int) -> bytes:
    names = [name.encode() for name, _ in row.headers]
    headers = b"".join(
        signed(len(name)) + name + nullable(value) for name, (_, value) in zip(names, row.headers)
    )
    body = (
        b"\0"
        + signed(timestamp_delta)
        + signed(offset_delta)
        + nullable(row.key)
        + nullable(row.value)
        + signed(len(names))
        + headers
    )
    return signed(len(body)) + body


def marker(base: int, producer: int, *, commit: bool) -> Batch:
    """The control batch that ends a transaction."""
    row = Row(base, 1_700_000_000_000, struct.pack(">hh", 0, commit), struct.pack(">hi", 0, 1))
    return Batch([row], base, attributes=TRANSACTIONAL | CONTROL, producer=producer)


def checked_again(data: bytes) -> bytes:
    """A damaged batch with the checksum of its damaged bytes."""
    return data[:17] + struct.pack(">I", crc32c.crc32c(data[21:])) + data[21:]


def rows(result: VisibleRecords | Records) -> list[Row]:
    records = result.records if isinstance(result, VisibleRecords) else result
    count = len(records)
    assert len(records.timestamps) == len(records.values) == count
    keys = [None] * count if records.keys is None else records.keys.to_pylist()
    headers = [b"\0"] * count if records.headers is None else records.headers.to_pylist()
    values = records.values.to_pylist()
    columns = zip(records.offsets.tolist(), records.timestamps.tolist(), keys, values, headers)
    return [Row(*each[:-1], tuple(header_pairs(each[-1]))) for each in columns]


def rows_of_kafka_python(data: bytes, start: int = 0, end: int = EVERYTHING) -> list[Row]:
    """What kafka-python's decoder reads; it knows no transactions, and here no lz4 and snappy. Raises its
    errors.
    """
    found = []
    batches = MemoryRecords(data)
    while batches.has_next():
        batch = batches.next_batch()
        if not batch.is_control_batch:
            found += [
                Row(each.offset, each.timestamp, each.key, each.value, tuple(each.headers)) for each in batch
            ]
    return [row for row in found if start <= row.offset < end]


# -- random ones ---------------------------------------------------------------------------------------------

VALUES = {
    "text": lambda rng, size: b"x" * size,
    "zeros": lambda rng, size: bytes(size),
    "random": lambda rng, size: rng.randbytes(size),
    "records": lambda rng, size: b"".join(
        record(Row(0, 0, None, b"fake"), number, 0) for number in range(40)
    )[:size],
}


@dataclass(frozen=True)
class Shape:
    """What a random batch is like."""

    rows: int
    value: str = "text"
    sizes: tuple[int, ...] = (100,)
    nulls: float = 0.0
    keys: float = 0.0
    headers: float = 0.0
    spread_ms: int = 0
    gaps: bool = False
    append_time: bool = False
    codec: Codec = Codec.NONE
    seed: int = 0

    def batch(self, base: int) -> Batch:
        rng = random.Random(self.seed)
        made, offset, time = [], base, 1_700_000_000_000
        for _ in range(self.rows):
            offset += rng.choice((0, 0, 1, 300)) if self.gaps else 0
            value = None if rng.random() < self.nulls else VALUES[self.value](rng, rng.choice(self.sizes))
            key = rng.randbytes(rng.choice((0, 1, 8, 70))) if rng.random() < self.keys else None
            headers = ()
            if rng.random() < self.headers:
                headers = tuple(
                    (f"h{number}é", rng.choice((None, b"", rng.randbytes(70))))
                    for number in range(rng.randint(1, 3))
                )
            made.append(Row(offset, time + rng.randint(-self.spread_ms, self.spread_ms), key, value, headers))
            offset += 1
        top = max(row.timestamp for row in made)
        if self.append_time:
            made = [row._replace(timestamp=top) for row in made]
        last = offset - 1 + (5 if self.gaps else 0)
        return Batch(made, base, last, self.codec, LOG_APPEND_TIME if self.append_time else 0, time, top)


def log_of(shapes: Sequence[Shape], base: int = 0) -> list[Batch]:
    made: list[Batch] = []
    for shape in shapes:
        made.append(shape.batch(base))
        base = made[-1].last_offset + 1
    return made
