"""The consumers of one queue, and which of them is next.

Not here: what a consumer is (``broker/queue/consumer.py``), taking entries and sending them
(``broker/message/dispatch.py``). Source: RabbitMQ's consumer priorities and single active consumer.
Invariant: each consumer is in exactly one ring, that of its priority; a ring turns by one consumer for each
message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from broker_core.core.errors import AccessRefused
from broker_core.core.undo import Undo


class Member(Protocol):
    """The attributes of a consumer that its queue uses (``broker/queue/consumer.py``)."""

    priority: int
    exclusive: bool
    no_local: bool
    parked: bool

    @property
    def credit(self) -> int: ...

    def end(self, undo: Undo) -> None: ...


C = TypeVar("C", bound=Member)


class Consumers(Generic[C]):
    """The consumers of one queue. ``single``: only one of them gets messages (x-single-active-consumer)."""

    __slots__ = ("_queue", "_single", "_undo", "publishers", "rings", "single")

    def __init__(self, queue: str, undo: Undo, *, single: bool = False) -> None:
        self._queue = queue  # its name
        self._undo = undo
        self.single = single
        # connections of unsettled entries, since the first no-local consumer
        self.publishers: dict[int, object] | None = None
        self._single: C | None = None  # the active one
        self.rings: list[tuple[int, deque[C]]] = []  # by priority, highest first; empty without consumers

    def __len__(self) -> int:
        return sum(len(ring) for _, ring in self.rings)

    def __bool__(self) -> bool:
        return bool(self.rings)

    def __iter__(self) -> Iterator[C]:
        for _, ring in self.rings:
            yield from ring

    def check_access(self, exclusive: bool) -> None:
        """Raises AccessRefused if a consumer may not be added: an exclusive one must be the only one."""
        first = next(iter(self), None)
        if (first and (exclusive or first.exclusive)) or (exclusive and self.single):
            raise AccessRefused(f"{self._queue} in exclusive use")

    def add(self, consumer: C) -> None:
        """Adds a consumer. Raises AccessRefused."""
        self.check_access(consumer.exclusive)
        for priority, ring in self.rings:
            if priority == consumer.priority:
                ring.append(consumer)
                break
        else:
            self.rings.append((consumer.priority, deque([consumer])))
            self.rings.sort(key=itemgetter(0), reverse=True)
        if self.single and self._single is None:
            self._single = consumer
        if consumer.no_local and self.publishers is None:
            self.publishers = {}

    def remove(self, consumers: Collection[C], undo: Undo) -> None:
        """Removes them in one pass. Their channels keep the deliveries that they hold."""
        undo.attribute(self, "rings")
        undo.attribute(self, "_single")
        rings, gone = dict(self.rings), set(consumers)
        for priority in {each.priority for each in gone}:  # alone: an undo holds each copy
            rings[priority] = deque(each for each in rings.get(priority, ()) if each not in gone)
        self.rings = [(priority, ring) for priority, ring in rings.items() if ring]
        if self._single in gone:
            self._single = next(iter(self), None)

    def forget(self, start: int, end: int) -> None:
        """Forgets which connections published these settled entries."""
        publishers = self.publishers
        if publishers:
            for offset in range(start, end):
                if offset in publishers:
                    self._undo.item(publishers, offset)
                    del publishers[offset]

    def clear(self, undo: Undo | None = None) -> list[C]:
        """Removes all consumers of a deleted queue and returns them; the shell notifies them."""
        undo = Undo() if undo is None else undo
        gone = list(self)
        undo.attribute(self, "rings")
        undo.attribute(self, "_single")
        self.rings, self._single = [], None
        for consumer in gone:
            consumer.end(undo)
        return gone

    @property
    def single_active(self) -> C | None:
        """Returns the only consumer that gets messages, if the queue has such a one."""
        return self._single

    @property
    def credit(self) -> int:
        """Returns how many messages the consumers can take now in total."""
        if self.single:
            return self._single.credit if self._single is not None else 0
        return sum(consumer.credit for consumer in self)

    def ready(self) -> list[C]:
        """Returns the consumers with credit of the highest priority that has any, the next one first.
        Consumers without credit are marked parked.
        """
        rings = [ring for _, ring in self.rings]
        if self.single:
            rings = [deque([self._single])] if self._single is not None else []
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
        """Returns the consumer that gets the next message, now last in its ring; None without credit."""
        found = self.ready()
        if not found:
            return None
        self.turn(found[0])
        return found[0]

    def turn(self, consumer: C) -> None:
        """Moves a consumer that was served to the end of its ring."""
        for priority, ring in self.rings:
            if priority == consumer.priority:
                if len(ring) > 1:
                    while ring[-1] is not consumer:
                        ring.rotate(-1)
                return
