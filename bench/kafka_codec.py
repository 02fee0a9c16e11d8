"""Record batches: rows that one core decodes and encodes in a second. No Kafka is needed.

Bodies of 100 bytes (``_uneven``: of 90 to 109); decoded in batches of 150 rows, as a Java producer fills its
16 KiB, eight MiB at once as a fetch brings them; encoded 8,000 rows at once. CPU time, and the best of many
runs: what else the machine does only makes a run slower.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pyarrow as pa

from bench.report import Figure, note
from broker_core.kafka.record.decode import decode
from broker_core.kafka.record.encode import encode
from broker_core.kafka.record.record_batch import Codec

ROWS = 70_000
JAVA_BATCH, OUR_BATCH = 150, 8_000
RUNS = 60
EVERYTHING = 1 << 62


def rows(count: int, first: int = 0) -> pa.BinaryArray:
    return pa.array([b"%0100d" % number for number in range(first, first + count)], pa.binary())


def fetched(codec: Codec, *, keyed: bool = False) -> bytes:
    """ROWS rows in batches as they lie in a partition, with rising offsets."""
    batches = []
    for first in range(0, ROWS, JAVA_BATCH):
        count = min(JAVA_BATCH, ROWS - first)
        keys = (
            pa.array([b"key-%06d" % (number % 9973) for number in range(first, first + count)], pa.binary())
            if keyed
            else None
        )
        data = encode(rows(count, first), timestamp=1_700_000_000_000, keys=keys, codec=codec)
        batches.append(struct.pack(">q", first) + data[8:])
    return b"".join(batches)


def measured(name: str, count: int, work: Callable[[], object]) -> Figure:
    work()  # warm
    best_ns = min(_cpu_ns(work) for _ in range(RUNS))
    note(f"{name}: {best_ns / count:,.0f} ns a row")
    return Figure(name, round(count / best_ns * 1e9), "rows/s")


def _cpu_ns(work: Callable[[], object]) -> int:
    began = time.process_time_ns()
    work()
    return time.process_time_ns() - began


def codec_figures() -> list[Figure]:
    found = []
    for name, data in (
        ("kafka_decode", fetched(Codec.NONE)),
        ("kafka_decode_keyed", fetched(Codec.NONE, keyed=True)),
        ("kafka_decode_lz4", fetched(Codec.LZ4)),
    ):
        found.append(measured(name, ROWS, lambda data=data: decode(data, 0, EVERYTHING, log="orders/0")))  # type: ignore[misc]
    uneven = pa.array([b"%0*d" % (90 + number % 20, number) for number in range(OUR_BATCH)], pa.binary())
    for name, values in (("kafka_encode", rows(OUR_BATCH)), ("kafka_encode_uneven", uneven)):
        found.append(
            measured(
                name,
                OUR_BATCH,
                lambda values=values: encode(values, timestamp=1_700_000_000_000, transactional=True),  # type: ignore[misc]
            )
        )
    return found
