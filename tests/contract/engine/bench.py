"""The words of a driver and its tasks over one engine, for the contract of all engines.

A bench has the queues ``in``, ``in2`` and ``out``, of one log each, and tests use the name of a queue for its
log. How messages come in, how a process dies and what is left behind, the bench of each engine knows.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from broker_core.engine import (
    START,
    Available,
    BranchHeader,
    Engine,
    LedgerEntry,
    Limit,
    Origin,
    Ranges,
    ReadTicket,
    StagedBranch,
    Vector,
)
from broker_core.message.message import READ_SCHEMA

APP = "alerts"
QUEUES = ("in", "in2", "out")
NO_LIMIT = Limit()
EARLIEST = Origin()

T = TypeVar("T")


class EngineBench(ABC):
    """``lacks``: what this engine does in another way than the embedded one."""

    engine: Engine
    lacks: frozenset[str] = frozenset()

    # -- of each engine --------------------------------------------------------------------------------------
    @abstractmethod
    def produce(self, *bodies: bytes, queue: str = "in") -> None:
        """Messages of another program, all or none, at offsets that follow each other."""

    @abstractmethod
    def crash(self) -> None:
        """Every process of the app is killed; ``engine`` is one of a new process."""

    @abstractmethod
    def remake(self, queue: str) -> None:
        """An operator deletes the queue and declares it again; the processes of the app are new."""

    @abstractmethod
    def staged(self) -> int:
        """How many staged parts are still stored."""

    @abstractmethod
    def deleted(self, offset: int, queue: str = "in") -> bool:
        """Whether the bytes of a message are gone."""

    @abstractmethod
    def later(self) -> int:
        """A time in microseconds: messages of before were committed earlier, those that follow are not."""

    @abstractmethod
    def close(self) -> None: ...

    # -- the source ------------------------------------------------------------------------------------------
    def log(self, queue: str) -> str:
        (log,) = self.engine.logs([queue])
        return log

    def _by_log(self, named: Mapping[str, T]) -> dict[str, T]:
        return {
            self.log(name) if value != START and name in QUEUES else name: value
            for name, value in named.items()
        }

    def _by_queue(self, named: Mapping[str, T]) -> dict[str, T]:
        queue_of = {self.log(queue): queue for queue in QUEUES}
        return {queue_of.get(name, name): value for name, value in named.items()}

    def claim(
        self,
        start: Vector | None = None,
        *,
        app: str = APP,
        limit: Limit = NO_LIMIT,
        origin: Origin = EARLIEST,
        on_new: Any = "fail",
        ran: bool = True,
    ) -> Vector:
        """``ran``: as of ``ack``."""
        asked = self._by_log(start or {"in": START})
        if origin.offsets is not None:
            origin = replace(origin, offsets=self._by_log(origin.offsets))
        if limit.end is not None:
            limit = replace(limit, end=self._by_log(limit.end))
        return self._by_queue(
            self.engine.claim(app, list(start or {"in": START}), asked, limit, origin, on_new, ran=ran)
        )

    def wait(self, queues: Sequence[str], ends: Mapping[str, int]) -> bool:
        return self.engine.wait(queues, self._by_log(ends), 0.0)

    def ranges(self, start: Vector, end: Vector, app: str = APP) -> Ranges:
        return self._by_queue(self.engine.resolve(app, self._by_log(start), self._by_log(end)))

    def ranges_of(self, entry: LedgerEntry) -> Ranges:
        return self._by_queue(entry.ranges)

    def count(self, ranges: Ranges) -> dict[str, Available]:
        return self._by_queue(self.engine.count(APP, self._by_log(ranges)))

    def read(
        self,
        query: str,
        batch: int,
        ranges: Ranges,
        *,
        app: str = APP,
        strict: bool = True,
        slices: Ranges | None = None,
    ) -> list[bytes]:
        parts = tuple(
            (self.log(name), start, end)
            for name, (start, end) in (ranges if slices is None else slices).items()
        )
        batches = list(self.engine.read(ReadTicket(app, query, batch, self._by_log(ranges), parts, strict)))
        assert all(found.schema.equals(READ_SCHEMA) for found in batches)
        return [body for found in batches for body in found.column("body").to_pylist()]

    def ack(self, end: Vector, *, ran: bool = True) -> None:
        """``ran``: by the reader that has planned the batch, whose sink may be another system."""
        self.engine.ack(APP, self._by_log(end), ran)

    # -- the sink --------------------------------------------------------------------------------------------
    def stage(
        self,
        token: str,
        *bodies: bytes,
        query: str = "q",
        batch: int = 0,
        app: str = APP,
        kind: Any = "publish",
        target: Any = None,
        branch: str = "",
    ) -> StagedBranch:
        """A task of a micro-batch."""
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

    def write(self, token: str, *bodies: bytes) -> StagedBranch:
        """A task of a batch write, which has a token and no other identity."""
        return self.stage(token, *bodies, query="", batch=-1, app="")

    def run(
        self, query: str, batch: int, start: Vector, end: Vector, *publish: bytes, on_new: Any = "fail"
    ) -> Any:
        """A whole batch: open, read, stage, commit."""
        opened = self.engine.open_batch(APP, query, batch, on_new)
        assert opened.entry is None
        self.read(query, batch, self.ranges(start, end))
        branches = [self.stage(opened.token, *publish, query=query, batch=batch)] if publish else []
        return self.engine.commit_batch(APP, query, batch, opened.token, branches).entry

    def visible(self, queue: str = "out") -> list[bytes]:
        """The bodies that are published to the queue, and not consumed by the app."""
        log = self.log(queue)
        found = self.engine.available([log])[log]
        return [
            body
            for batch in self.engine.browse([(log, found.start, found.end)])
            for body in batch.column("body").to_pylist()
        ]


def rows(bodies: Sequence[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})
