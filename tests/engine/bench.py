"""A broker in memory, and the words of a driver and of its tasks, for example tests of the micro-batch
protocol.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from broker_core.engine import START, BranchHeader, Limit, Origin, Ranges, ReadTicket, StagedBranch, Vector
from broker_core.message import READ_SCHEMA
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore

APP = "alerts"
NO_LIMIT = Limit()
EARLIEST = Origin()


class Bench:
    """A broker with the queues ``in``, ``in2`` and ``out``, and the words of a driver and its tasks."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._open()
        with self.local.channel() as channel:
            for queue in ("in", "in2", "out"):
                channel.queue_declare(queue)

    @classmethod
    def over(cls, local: LocalBroker, engine: EmbeddedEngine) -> Bench:
        """The same words over a broker that somebody else has opened."""
        made = cls.__new__(cls)
        made.local, made.engine = local, engine
        with local.channel() as channel:
            for queue in ("in", "in2", "out"):
                channel.queue_declare(queue)
        return made

    def _open(self) -> None:
        self.now = getattr(self, "now", 1_000_000)
        self.local = LocalBroker(self.store, clock=self._clock, upkeep=False)
        self.engine = EmbeddedEngine(self.local)

    def _clock(self) -> int:
        self.now += 1_000
        return self.now

    def crash(self) -> None:
        self.store = self.store.reopened()
        self._open()

    def produce(self, *bodies: bytes, queue: str = "in") -> None:
        """One transaction."""
        with self.local.channel() as channel:
            channel.tx_select()
            for body in bodies:
                channel.publish(body, routing_key=queue)
            channel.tx_commit()

    def claim(
        self,
        start: Vector | None = None,
        *,
        app: str = APP,
        limit: Limit = NO_LIMIT,
        origin: Origin = EARLIEST,
        on_new: Any = "fail",
    ) -> Vector:
        start = start or {"in": START}
        return self.engine.claim(app, list(start), start, limit, origin, on_new)

    def ranges(self, start: Vector, end: Vector, app: str = APP) -> Ranges:
        return self.engine.resolve(app, start, end)

    def read(
        self, query: str, batch: int, ranges: Ranges, *, app: str = APP, strict: bool = True
    ) -> list[bytes]:
        slices = tuple((log, start, end) for log, (start, end) in ranges.items())
        batches = list(self.engine.read(ReadTicket(app, query, batch, ranges, slices, strict)))
        assert all(found.schema.equals(READ_SCHEMA) for found in batches)
        return [body for found in batches for body in found.column("body").to_pylist()]

    def stage(
        self,
        token: str,
        *bodies: bytes,
        query: str = "",
        batch: int = -1,
        app: str = "",
        kind: Any = "publish",
        target: Any = None,
        branch: str = "",
    ) -> StagedBranch:
        header = BranchHeader(
            token,
            branch or uuid.uuid4().hex,
            kind,
            target or {"routing_key": "out"},
            app_id=app,
            query_id=query,
            batch_id=batch,
        )
        return self.engine.stage(header, [rows(bodies)])

    def run(
        self, query: str, batch: int, start: Vector, end: Vector, *publish: bytes, on_new: Any = "fail"
    ) -> Any:
        """A whole batch: open, read, stage, commit."""
        opened = self.engine.open_batch(APP, query, batch, on_new)
        assert opened.entry is None
        self.read(query, batch, self.ranges(start, end))
        branches = [self.stage(opened.token, *publish)] if publish else []
        return self.engine.commit_batch(APP, query, batch, opened.token, branches).entry

    def visible(self, queue: str = "out") -> list[bytes]:
        found = self.engine.available([queue])[queue]
        return [
            body
            for batch in self.engine.browse([(queue, found.start, found.end)])
            for body in batch.column("body").to_pylist()
        ]

    def deleted(self, offset: int, queue: str = "in") -> bool:
        return not self.local.state.topology.queue(queue).log.runs_between(offset, offset + 1)


def rows(bodies: Sequence[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})
