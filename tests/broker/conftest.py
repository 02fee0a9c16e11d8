"""A broker over a memory store with a clock that only a test moves; ``restart`` opens what was committed, as
after a crash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.admin import QueueInfo
from broker_core.core.records import Record
from broker_core.node.channel import LocalChannel
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore
from broker_core.store.port import Store
from broker_core.store.salvage.verify import verify
from tests.reading import bodies


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
            found = []
            while (delivery := channel.get(name)) is not None:
                found.append(delivery.body)
                channel.ack(delivery.tag)
            return found

    def browse(self, name: str) -> list[bytes]:
        """All unsettled bodies, in order; nothing changes."""
        return bodies(self.broker, name)


def declared(node: Node, *queues: str, **arguments: Any) -> None:
    with node.channel() as channel:
        for queue in queues:
            channel.queue_declare(queue, arguments=arguments or None)


def publish(node: Node, queue: str, *bodies: bytes, properties: bytes = b"") -> None:
    with node.channel() as channel:
        for body in bodies:
            channel.publish(body, routing_key=queue, properties=properties)


class Place:
    """A broker over one of the two stores, and its successors after a clean end or a kill."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.store: Store = MemoryStore() if directory is None else DurableStore(directory)
        self.broker = LocalBroker(self.store, upkeep=False)

    def _reopened(self) -> Store:
        if isinstance(self.store, MemoryStore):
            return self.store.reopened()
        assert self.directory is not None
        return DurableStore(self.directory)

    def restart(self, *, clean: bool = True) -> LocalBroker:
        if clean:
            self.broker.close()
            assert self.directory is None or verify(self.directory).problems == []
        elif self.directory is not None:
            self.store.close(clean=False)
        self.store = self._reopened()
        self.broker = LocalBroker(self.store, upkeep=False)
        return self.broker

    def kept(self, kind: type[Record]) -> list[Record]:
        """The records of this class that a restart would find."""
        self.broker.close()
        with contextlib.closing(self._reopened()) as other:
            return [record for record in other.load().records if isinstance(record, kind)]

    def bodies(self, name: str) -> list[bytes]:
        return bodies(self.broker, name)


@pytest.fixture(params=["memory", "durable"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path / "data" if request.param == "durable" else None)
    yield found
    found.broker.close()


@pytest.fixture
def node() -> Iterator[Node]:
    found = Node()
    yield found
    found.broker.close()
