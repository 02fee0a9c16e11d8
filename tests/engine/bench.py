"""The embedded engine over a broker in memory, with the words of a driver and of its tasks."""

from __future__ import annotations

from broker_core.core.records import PartRecord
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.contract.engine.bench import APP, QUEUES, EngineBench, rows

__all__ = ["APP", "Bench", "rows"]


class Bench(EngineBench):
    engine: EmbeddedEngine

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._open()
        self.declare()

    @classmethod
    def over(cls, local: LocalBroker, engine: EmbeddedEngine) -> Bench:
        """The same words over a broker that somebody else has opened."""
        made = cls.__new__(cls)
        made.local, made.engine = local, engine
        made.declare()
        return made

    def declare(self) -> None:
        with self.local.channel() as channel:
            for queue in QUEUES:
                channel.queue_declare(queue)

    def _open(self) -> None:
        self.now = getattr(self, "now", 1_000_000)
        self.local = LocalBroker(self.store, clock=self._clock, upkeep=False)
        self.engine = EmbeddedEngine(self.local)

    def _clock(self) -> int:
        self.now += 1_000
        return self.now

    def log(self, queue: str) -> str:
        return queue

    def produce(self, *bodies: bytes, queue: str = "in") -> None:
        """One transaction."""
        with self.local.channel() as channel:
            channel.tx_select()
            for body in bodies:
                channel.publish(body, routing_key=queue)
            channel.tx_commit()

    def crash(self) -> None:
        self.store = self.store.reopened()
        self._open()

    def remake(self, queue: str) -> None:
        with self.local.channel() as channel:
            channel.queue_delete(queue)
            channel.queue_declare(queue)
        self.crash()

    def staged(self) -> int:
        return sum(isinstance(record, PartRecord) for record in self.store.reopened().load().records)

    def deleted(self, offset: int, queue: str = "in") -> bool:
        return not self.local.state.topology.queue(queue).log.runs_between(offset, offset + 1)

    def later(self) -> int:
        self.now += 1_000_000
        return self.now

    def close(self) -> None:
        self.local.close()
