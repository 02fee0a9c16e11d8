"""The consumers of one queue: who is next.

Not here: what a consumer is (``broker/consumer.py``), taking entries and sending them
(``broker/dispatch.py``). Source: RabbitMQ's consumer priorities and single active consumer. Invariant: each
consumer of a queue stands in exactly one ring of its priority; a ring turns by one consumer for each message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from broker_core.broker.undo import Undo
from broker_core.errors import AccessRefused


class Member(Protocol):
    """What its queue needs to know of a consumer (``broker/consumer.py``)."""

    priority: int
    exclusive: bool
    no_local: bool
    active: bool
    parked: bool

    @property
    def credit(self) -> int: ...

    def end(self, undo: Undo) -> None: ...


C = TypeVar("C", bound=Member)


class Consumers(Generic[C]):
    """Those of one queue. ``single``: only one of them is given messages (x-single-active-consumer)."""

    __slots__ = ("_queue", "_rings", "_single", "_undo", "publishers", "single")

    def __init__(self, queue: str, undo: Undo, *, single: bool = False) -> None:
        self._queue = queue  # its name
        self._undo = undo
        self.single = single
        # connections of unsettled entries, since a no-local consumer came
        self.publishers: dict[int, object] | None = None
        self._single: C | None = None  # the active one
        self._rings: list[tuple[int, deque[C]]] = []  # by priority, highest first

    def __len__(self) -> int:
        return sum(len(ring) for _, ring in self._rings)

    def __bool__(self) -> bool:
        return bool(self._rings)

    def __iter__(self) -> Iterator[C]:
        for _, ring in self._rings:
            yield from ring

    def check_access(self, exclusive: bool) -> None:
        """Whether one more may come. Raises AccessRefused: an exclusive consumer stands alone."""
        if (self and (exclusive or any(consumer.exclusive for consumer in self))) or (
            exclusive and self.single
        ):
            raise AccessRefused(f"queue '{self._queue}' in vhost '/' in exclusive use")

    def add(self, consumer: C) -> None:
        """Raises AccessRefused."""
        self.check_access(consumer.exclusive)
        for priority, ring in self._rings:
            if priority == consumer.priority:
                ring.append(consumer)
                break
        else:
            self._rings.append((consumer.priority, deque([consumer])))
            self._rings.sort(key=_descending)
        if self.single and self._single is None:
            self._single = consumer
        if consumer.no_local and self.publishers is None:
            self.publishers = {}

    def remove(self, consumer: C, undo: Undo) -> None:
        """What it holds stays with its channel."""
        undo.attribute(consumer, "active")
        undo.attribute(self, "_rings")
        undo.attribute(self, "_single")
        consumer.active = False
        left = [
            (priority, deque(other for other in ring if other is not consumer))
            for priority, ring in self._rings
        ]
        self._rings = [(priority, ring) for priority, ring in left if ring]
        if self._single is consumer:
            self._single = next(iter(self), None)

    def forget(self, start: int, end: int) -> None:
        """These entries are settled: who published them is of no interest any more."""
        publishers = self.publishers
        if publishers:
            for offset in range(start, end):
                if offset in publishers:
                    self._undo.item(publishers, offset)
                    del publishers[offset]

    def clear(self, undo: Undo | None = None) -> list[C]:
        """The queue is gone, and all consumers with it; those whom the shell has to tell."""
        undo = Undo() if undo is None else undo
        gone = list(self)
        undo.attribute(self, "_rings")
        undo.attribute(self, "_single")
        self._rings = []
        self._single = None
        for consumer in gone:
            consumer.end(undo)
        return gone

    @property
    def credit(self) -> int:
        """How many messages they take now, together."""
        if self.single:
            return self._single.credit if self._single is not None else 0
        return sum(consumer.credit for consumer in self)

    def ready(self) -> list[C]:
        """Those of the highest priority that has one with credit, the next one first; the others are
        parked.
        """
        if self.single:
            rings = [deque([self._single])] if self._single is not None else []
        else:
            rings = [ring for _, ring in self._rings]
        for ring in rings:
            found = []
            for consumer in ring:
                if consumer.credit:
                    found.append(consumer)
                else:
                    consumer.parked = True
            if found:
                return found
        return []

    def next(self) -> C | None:
        """The one that gets the next message, and its ring turns past it; None where nobody has credit."""
        found = self.ready()
        if not found:
            return None
        self.turn(found[0])
        return found[0]

    def turn(self, consumer: C) -> None:
        """It was served: it comes last in its ring."""
        for priority, ring in self._rings:
            if priority == consumer.priority:
                if len(ring) > 1:
                    while ring[-1] is not consumer:
                        ring.rotate(-1)
                return


def _descending(ring: tuple[int, object]) -> int:
    return -ring[0]
