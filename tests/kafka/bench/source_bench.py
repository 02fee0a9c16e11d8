"""A FakeKafka with several processes that read from it: each has a client and a source of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from broker_core.core.backoff import Time
from broker_core.engine import START, Limit, OnNewCheckpoint, Origin, Ranges, ReadTicket, Vector
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import Request, TopicPartition
from broker_core.kafka.record.encode import encode, encode_headers, stamp
from broker_core.kafka.source.source import KafkaSource
from broker_core.micro_batch.ledger import Ledger
from tests.kafka.bench.fake_kafka import FakeKafka

APP, QUEUE = "app", "orders"
Fault = str | Code | Callable[[], None] | None


class SourceBench:
    def __init__(self, partitions: int = 2) -> None:
        self.kafka = FakeKafka()
        self.now = 1000.0
        self.decided = Ledger()
        self.client = self.connect()
        self.client.create_topic(QUEUE, partitions)

    def connect(self, reconnect_s: float = 30.0) -> Client:
        def sleep(seconds: float) -> None:
            self.now += seconds

        clock = Time(lambda: self.now, sleep)
        return Client(self.kafka.wire(), list(self.kafka.nodes.values()), reconnect_s=reconnect_s, time=clock)

    def source(self, reconnect_s: float = 30.0) -> KafkaSource:
        """Of another process."""
        return KafkaSource(self.connect(reconnect_s), lambda app_id: self.decided)

    # -- what others write -----------------------------------------------------------------------------------

    def send(self, partition: int, *bodies: bytes | None, queue: str = QUEUE, timestamp: int = 1) -> int:
        batch = encode(pa.array(bodies, pa.binary()), timestamp=timestamp)
        return self.client.produce({TopicPartition(queue, partition): batch}, repeat=True)[
            TopicPartition(queue, partition)
        ]

    def send_with(
        self, partition: int, body: bytes | None, key: bytes | None, *headers: tuple[str, bytes | None]
    ) -> None:
        batch = encode(
            pa.array([body], pa.binary()),
            timestamp=1,
            keys=pa.array([key], pa.binary()),
            headers=pa.array([encode_headers(headers)], pa.binary()),
        )
        self.client.produce({TopicPartition(QUEUE, partition): batch})

    def send_in_transaction(self, partition: int, *bodies: bytes, commit: bool | None) -> None:
        """``commit`` None: it stays open."""
        txid = f"other-{time.monotonic_ns()}"
        producer = self.client.fence(txid)
        data = bytearray(encode(pa.array(bodies, pa.binary()), timestamp=1, transactional=True))
        stamp(data, producer_id=producer.id, epoch=producer.epoch, sequence=0, timestamp=1)
        self.client.produce(
            {TopicPartition(QUEUE, partition): bytes(data)}, transactional_id=txid, implicit=True
        )
        if commit is not None:
            self.client.end_transaction(txid, producer, commit=commit, bump=True)

    def failing(self, faults: Sequence[Fault], *kinds: type[Request[Any]], topic: str = "") -> None:
        """The next requests of these kinds fail so, one by one; a function is called before its request."""
        left = list(faults)

        def fault(node: int, request: Request[Any]) -> str | Code | None:
            if not left or not isinstance(request, kinds) or not _is_about(request, topic):
                return None
            each = left.pop(0)
            if callable(each):
                each()
                return None
            return each

        self.kafka.fault = fault


def _is_about(request: Request[Any], topic: str) -> bool:
    logs = (
        getattr(request, "offsets", None)
        or getattr(request, "batches", None)
        or getattr(request, "timestamps", {})
    )
    return not topic or any(log.topic == topic for log in logs)


# -- short forms of what the connector calls
# ---------------------------------------------------------------------


def claim(
    source: KafkaSource,
    start: Vector | None = None,
    limit: Limit | None = None,
    origin: Origin | None = None,
    *,
    queues: Sequence[str] = (QUEUE,),
    app_id: str = APP,
    new: OnNewCheckpoint = "fail",
    ran: bool = True,
) -> Vector:
    first: Vector = dict.fromkeys(queues, START)
    return source.claim(app_id, queues, start or first, limit or Limit(), origin or Origin(), new, ran=ran)


def read(
    source: KafkaSource, ranges: Ranges, *, query: str = "q", batch: int = 0, fail: bool = True
) -> list[Any]:
    """Bodies of the ranges, in order."""
    return [row["body"] for row in read_rows(source, ranges, query=query, batch=batch, fail=fail)]


def read_rows(
    source: KafkaSource,
    ranges: Ranges,
    *,
    query: str = "q",
    batch: int = 0,
    fail: bool = True,
    app_id: str = APP,
) -> list[Mapping[str, Any]]:
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    ticket = ReadTicket(app_id, query, batch, ranges, slices, fail)
    return [row for rows in source.read(ticket) for row in rows.to_pylist()]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


__all__ = ["APP", "QUEUE", "SourceBench", "claim", "now_ms", "port", "read", "read_rows"]
