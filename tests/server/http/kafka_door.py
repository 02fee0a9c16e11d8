"""The door of a cluster of Kafka, and a cluster that has something to show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from broker_core.engine import START, BranchHeader, BranchKind, Limit, Origin, ReadTicket, Vector
from broker_core.kafka.admin import KafkaAdmin
from broker_core.kafka.engine import KafkaEngine
from broker_core.server.http.elsewhere.serve import EngineDoor, opened
from broker_core.server.http.server import HttpServer

APP, FROM, TO, TABLE = "confirm", "orders", "done", "sales.orders"


@contextmanager
def kafka_door(
    engine: KafkaEngine, users: Mapping[str, str] | None = None, **more: Any
) -> Iterator[HttpServer]:
    door = EngineDoor(["127.0.0.1:0"], users or {}, **{"cluster": "kafka://fake:1", **more})
    with opened(engine, KafkaAdmin(engine), door) as server:
        yield server


def play(engine: KafkaEngine, *, rows: int = 4) -> Vector:
    """A batch that publishes and appends, whose rows are not applied; another one that is staged; and as many
    rows that nobody has consumed. Returns the end of the first.
    """
    admin = KafkaAdmin(engine)
    for name in (FROM, TO):
        admin.declare_queue(name, arguments={"x-partitions": 2})
    admin.declare_exchange("events", "topic")
    admin.bind(FROM, "events", "order.#")
    admin.publish([b"row %d" % each for each in range(rows)], "", FROM)
    end = engine.claim(APP, [FROM], {FROM: START}, Limit(), Origin(), "fail")
    opened_ = engine.open_batch(APP, "query", 0, "fail")
    ranges = engine.resolve(APP, {FROM: START}, end)
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    read = list(engine.read(ReadTicket(APP, "query", 0, ranges, slices)))
    staged = [
        engine.stage(
            _header(opened_.token, 0, kind, target),
            [pa.record_batch({"body": each.column("body")}) for each in read],
        )
        for kind, target in _TARGETS
    ]
    engine.commit_batch(APP, "query", 0, opened_.token, staged)
    admin.publish([b"late %d" % each for each in range(rows)], "", FROM)
    waiting = engine.open_batch(APP, "query", 1, "fail")
    engine.stage(_header(waiting.token, 1, *_TARGETS[0]), [pa.record_batch({"body": pa.array([b"x"])})])
    return end


_TARGETS: tuple[tuple[BranchKind, dict[str, str]], ...] = (
    ("publish", {"exchange": "", "routing_key": TO}),
    ("append", {"table": TABLE}),
)


def _header(token: str, batch: int, kind: BranchKind, target: Mapping[str, str]) -> BranchHeader:
    return BranchHeader(token, os.urandom(16).hex(), kind, target, APP, "query", batch)
