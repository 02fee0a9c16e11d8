"""The engine as the connector's processes see it: every call may be lost, answered into the void, repeated,
or meet a crash.

Not here: rules. It does what ``BrokerClient`` does over Flight (parts one by one, reads planned anew after a
restart), in process, with a stop before every call.

Modes of a step: ``go``; ``refused`` (the request is lost for good); ``unanswered`` (done, the answer is lost
for good); ``repeated`` (done, the answer is lost, the client sends it again); ``restarted`` (the engine was
killed before it); ``torn`` (killed within the commit, nothing is durable) and ``durable`` (killed behind the
commit), each with the client sending it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from broker_core.arrow import parts
from broker_core.core import failpoint
from broker_core.core.errors import ConnectionFailed, StoreFailed
from broker_core.engine import BranchHeader, ReadTicket, StagedBranch
from tests.model.actors import current

T = TypeVar("T")
MODES = ("go", "refused", "unanswered", "repeated", "restarted", "torn", "durable")


class Wire:
    def __init__(self, world: Any) -> None:
        self.world = world

    def call(self, method: str, perform: Callable[[Any], T]) -> T:
        actor = current()
        mode = "go" if actor is None else actor.point(method)
        if mode == "refused":
            raise ConnectionFailed("the model lost a request")
        if mode == "restarted":
            self.world.crash_engine()
        if mode in ("torn", "durable"):
            failpoint.arm("store.commit.begin" if mode == "torn" else "store.commit.committed", "raise")
            try:
                return perform(self.world.engine)  # a call without a commit meets no crash
            except StoreFailed:
                failpoint.disarm()
                self.world.crash_engine()
                return perform(self.world.engine)
            finally:
                failpoint.disarm()
        answer = perform(self.world.engine)
        if mode == "unanswered":
            raise ConnectionFailed("the model lost an answer")
        if mode == "repeated":
            return perform(self.world.engine)
        return answer

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return self.call(method, lambda engine: getattr(engine, method)(*arguments, **named))

        return call

    def wait(self, queues: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        found: bool = self.call("wait", lambda engine: engine.wait(queues, ends, 0.0))
        return found

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        checksums: list[int] = []
        count = 0
        for number, batch in enumerate(parts.parts(rows, header)):
            staged, checksum = self.call(
                "stage_part",
                lambda engine, number=number, batch=batch: engine.stage_part(header, number, batch),
            )
            checksums.append(checksum)
            count += staged
        return StagedBranch(
            header.branch, header.partition, header.attempt, count, parts.branch_checksum(checksums)
        )

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        planned: list[Any] = []

        def open_read(engine: Any) -> None:
            planned[:] = [self.world.restarts, engine.open_read(ticket)]

        def read_plan(engine: Any) -> list[pa.RecordBatch]:
            if planned[0] != self.world.restarts:
                open_read(engine)
            return list(engine.read_plan(planned[1]))

        self.call("open_read", open_read)
        yield from self.call("read_plan", read_plan)

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        wanted = list(branches)
        yield from self.call("read_branches", lambda engine: list(engine.read_branches(wanted)))
