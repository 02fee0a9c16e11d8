"""A broker over a memory store with a clock that only a test moves; ``restart`` opens what was committed, as
after a crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from broker_core.admin import QueueInfo
from broker_core.node.channel import LocalChannel
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.reading import fetched


class Clock:
    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000
        self._passed_us = 0

    def monotonic(self) -> int:
        """Nanoseconds that passed; setting the clock back is not time that passes."""
        return self._passed_us * 1000

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        self.now_us += int(seconds * 1_000_000)
        self._passed_us += max(0, int(seconds * 1_000_000))


class Node:
    """One broker, and its successors after restarts."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.broker = LocalBroker(self.store, self.clock, upkeep=False)

    def restart(self, *, clean: bool = False) -> LocalBroker:
        if clean:
            self.broker.close()
        store = self.store.reopened()
        if not clean:
            self.broker.close()
        self.store = store
        self.broker = LocalBroker(store, self.clock, upkeep=False)
        return self.broker

    def channel(self) -> LocalChannel:
        return self.broker.channel()

    def queue(self, name: str) -> QueueInfo:
        return {info.name: info for info in self.broker.queues()}[name]

    def drain(self, name: str) -> list[bytes]:
        """The bodies that are ready, in order; they are acked."""
        with self.channel() as channel:
            bodies = []
            while (delivery := channel.get(name)) is not None:
                bodies.append(delivery.body)
                channel.ack(delivery.tag)
            return bodies

    def browse(self, name: str) -> list[bytes]:
        """All unsettled bodies, in order; nothing changes."""
        queue = self.broker.state.topology.queue(name)
        return [
            fetched(self.broker, queue, offset).body
            for start, end in queue.progress.unsettled_within(0, queue.log.visible_end)
            for offset in range(start, end)
        ]


def declared(node: Node, *queues: str, **arguments: Any) -> None:
    with node.channel() as channel:
        for queue in queues:
            channel.queue_declare(queue, arguments=arguments or None)


def publish(node: Node, queue: str, *bodies: bytes, properties: bytes = b"") -> None:
    with node.channel() as channel:
        for body in bodies:
            channel.publish(body, routing_key=queue, properties=properties)


@pytest.fixture
def node() -> Iterator[Node]:
    found = Node()
    yield found
    found.broker.close()
