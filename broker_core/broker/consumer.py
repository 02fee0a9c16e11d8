"""A consumer, and the consumers of one queue: who is next.

Not here: taking entries and sending them (``dispatch.py``), tags and credit coming back (``channel.py``).
Source: AMQP 0-9-1, 1.8.3.3 (basic.consume) and RabbitMQ's consumer priorities and single active consumer.
Invariant: each consumer of a queue stands in exactly one ring of its priority; a ring turns by one consumer for each message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from broker_core.broker.arguments import type_name
from broker_core.broker.change import InboxRow
from broker_core.broker.undo import Undo
from broker_core.errors import AccessRefused, PreconditionFailed
from broker_core.field_table import Timestamp

if TYPE_CHECKING:
    from broker_core.broker.channel import Channel
    from broker_core.broker.queue import Queue


class Consumer:
    """``prefetch`` 0: no limit of its own. ``writable``: the shell makes it False while its connection takes no more, then wakes the queue.

    ``send`` gets the consumer, the delivery tag, whether it says redelivered, and the message. ``cancelled`` is what the shell calls
    when the queue is gone (``Consumers.clear``); a consumer that was cancelled is ``active`` no more.
    """

    __slots__ = (
        "active",
        "arguments",
        "cancelled",
        "channel",
        "exclusive",
        "limited",
        "no_ack",
        "no_local",
        "parked",
        "prefetch",
        "priority",
        "queue",
        "send",
        "tag",
        "unacked",
        "writable",
    )

    def __init__(
        self,
        channel: Channel,
        queue: Queue,
        tag: str,
        send: Send,
        cancelled: Cancelled,
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        no_local: bool = False,
        priority: int = 0,
        prefetch: int = 0,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.channel = channel
        self.queue = queue
        self.tag = tag
        self.send = send
        self.cancelled = cancelled
        self.no_ack = no_ack
        self.exclusive = exclusive
        self.no_local = no_local
        self.priority = priority
        self.prefetch = prefetch
        self.arguments = arguments or {}
        self.unacked = 0
        self.limited = True  # by the channel's prefetch
        self.writable = True
        self.active = True
        self.parked = False  # dispatch left it without credit: the queue is woken when some comes back

    @property
    def credit(self) -> int:
        """How many messages it takes now; below 0 never, and a great number where nothing limits it."""
        if not self.writable:
            return 0
        if self.no_ack:  # it uses up nothing of the channel's limit, but waits with the others where that is reached
            channel = self.channel
            return 0 if channel.prefetch and self.limited and channel.consuming >= channel.prefetch else UNLIMITED
        credit = self.prefetch - self.unacked if self.prefetch else UNLIMITED
        channel = self.channel
        if channel.prefetch:
            credit = min(credit, channel.prefetch - channel.consuming)
        return max(0, credit)


class Unacked(NamedTuple):
    """A delivery that a channel holds. ``consumer`` None: of basic.get, which costs no credit."""

    queue: Queue
    offset: int
    consumer: Consumer | None


Send = Callable[[Consumer, int, bool, InboxRow], None]  # must not raise
Cancelled = Callable[[Consumer], None]
UNLIMITED = 1 << 62


def consumer_priority(queue: str, arguments: Mapping[str, Any]) -> int:
    """``x-priority`` of basic.consume. Raises PreconditionFailed."""
    priority = arguments.get("x-priority", 0)
    if isinstance(priority, (bool, Timestamp)) or not isinstance(priority, int):
        what = f'"expected integer, got {type_name(priority)}"'
        raise PreconditionFailed(f"invalid arg 'x-priority' for queue '{queue}' in vhost '/': {what}", "give a whole number")
    return priority


class Consumers:
    """Those of one queue. ``single``: only one of them is given messages (x-single-active-consumer)."""

    __slots__ = ("_queue", "_rings", "_single", "_undo", "publishers", "single")

    def __init__(self, queue: str, undo: Undo, *, single: bool = False) -> None:
        self._queue = queue  # its name
        self._undo = undo
        self.single = single
        self.publishers: dict[int, object] | None = None  # connections of unsettled entries, since a no-local consumer came
        self._single: Consumer | None = None  # the active one
        self._rings: list[tuple[int, deque[Consumer]]] = []  # by priority, highest first

    def __len__(self) -> int:
        return sum(len(ring) for _, ring in self._rings)

    def __bool__(self) -> bool:
        return bool(self._rings)

    def __iter__(self) -> Iterator[Consumer]:
        for _, ring in self._rings:
            yield from ring

    def check_access(self, exclusive: bool) -> None:
        """Whether one more may come. Raises AccessRefused: an exclusive consumer stands alone."""
        if (self and (exclusive or any(consumer.exclusive for consumer in self))) or (exclusive and self.single):
            raise AccessRefused(f"queue '{self._queue}' in vhost '/' in exclusive use")

    def add(self, consumer: Consumer) -> None:
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

    def remove(self, consumer: Consumer, undo: Undo) -> None:
        """What it holds stays with its channel."""
        undo.attribute(consumer, "active")
        undo.attribute(self, "_rings")
        undo.attribute(self, "_single")
        consumer.active = False
        left = [(priority, deque(other for other in ring if other is not consumer)) for priority, ring in self._rings]
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

    def clear(self, undo: Undo | None = None) -> list[Consumer]:
        """The queue is gone, and all consumers with it; those whom the shell has to tell."""
        undo = Undo() if undo is None else undo
        gone = list(self)
        undo.attribute(self, "_rings")
        undo.attribute(self, "_single")
        self._rings = []
        self._single = None
        for consumer in gone:
            undo.attribute(consumer, "active")
            undo.item(consumer.channel.consumers, consumer.tag)
            consumer.active = False
            consumer.channel.consumers.pop(consumer.tag, None)
        return gone

    @property
    def credit(self) -> int:
        """How many messages they take now, together."""
        if self.single:
            return self._single.credit if self._single is not None else 0
        return sum(consumer.credit for consumer in self)

    def ready(self) -> list[Consumer]:
        """Those of the highest priority that has one with credit, the next one first; the others are parked."""
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

    def next(self) -> Consumer | None:
        """The one that gets the next message, and its ring turns past it; None where nobody has credit."""
        found = self.ready()
        if not found:
            return None
        self.turn(found[0])
        return found[0]

    def turn(self, consumer: Consumer) -> None:
        """It was served: it comes last in its ring."""
        for priority, ring in self._rings:
            if priority == consumer.priority:
                if len(ring) > 1:
                    while ring[-1] is not consumer:
                        ring.rotate(-1)
                return


def _descending(ring: tuple[int, deque[Consumer]]) -> int:
    return -ring[0]
