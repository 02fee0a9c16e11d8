"""A consumer, and the deliveries that it is sent.

Not here: which of a queue's consumers is next (``queue/ring.py``), taking entries and sending them
(``message/dispatch.py``), tags and returned credit (``channel.py``). Source: AMQP 0-9-1, 1.8.3.3
(basic.consume).
Invariant: a consumer has credit only within the limits of its channel and of its own prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from broker_core.broker.queue import Queue
from broker_core.core.change import Author, InboxRow
from broker_core.core.undo import Undo
from broker_core.routing.exchange import canonical


class ConsumerChannel(Protocol):
    """The attributes of a channel that a consumer uses (``channel.py``)."""

    connection: object
    who: Author
    state: Any
    prefetch: int  # of all its consumers together; 0: no limit
    consuming: int  # deliveries that count against it
    last_tag: int
    unacked: dict[int, Unacked]
    consumers: dict[str, Consumer]

    def served(self, consumer: Consumer) -> None: ...


class Consumer:
    """``prefetch`` 0: no limit of its own. ``writable``: the shell sets it to False while the connection
    accepts no more data, and wakes the queue afterwards.

    ``send`` gets the consumer, the first delivery tag, and the redelivered flags and the messages of
    deliveries with consecutive tags. It sends the first, and more while the consumer is ``writable``, and
    returns how many it has sent; 0 if it cannot, after it has made the consumer not ``writable``. The shell
    calls ``cancelled`` when the queue is deleted (``Consumers.clear``).
    """

    __slots__ = (
        "arguments", "cancelled", "channel", "exclusive", "limited", "no_ack", "no_local", "parked",
        "prefetch", "priority", "queue", "send", "tag", "unacked", "writable",
    )  # fmt: skip

    def __init__(
        self,
        channel: ConsumerChannel,
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
        arguments: Mapping[str, object] | None = None,
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
        self.parked = False  # dispatch found it without credit: the queue is woken when credit returns

    @property
    def active(self) -> bool:
        """Returns whether it gets messages: no other one is its queue's single active consumer."""
        return self.queue.consumers.single_active in (None, self)

    @property
    def credit(self) -> int:
        """Returns how many messages it takes now: 0 or more, ``UNLIMITED`` without a limit."""
        if not self.writable:
            return 0
        # it uses nothing of the channel's limit, but waits like the others when that is reached
        if self.no_ack:
            channel = self.channel
            return (
                0
                if channel.prefetch and self.limited and channel.consuming >= channel.prefetch
                else UNLIMITED
            )
        credit = self.prefetch - self.unacked if self.prefetch else UNLIMITED
        channel = self.channel
        if channel.prefetch:
            credit = min(credit, channel.prefetch - channel.consuming)
        return max(0, credit)

    def end(self, undo: Undo) -> None:
        """Ends the consumer of a deleted queue."""
        undo.item(self.channel.consumers, self.tag)
        self.channel.consumers.pop(self.tag, None)
        self.count(undo, -1)

    def count(self, undo: Undo, sign: int) -> None:
        """It begins (1) or ends (-1) to take its user's share."""
        size_bytes, channel = memory_bytes(self.tag, self.arguments), self.channel
        channel.state.names.shares.count(undo, channel.who.user, sign * size_bytes)


def memory_bytes(tag: str, arguments: Mapping[str, object]) -> int:
    """Returns how much memory a consumer takes, about."""
    return 2_000 + len(tag) + 8 * len(canonical(arguments))


class Unacked(NamedTuple):
    """A delivery that a channel holds. ``consumer`` None: from basic.get, which uses no credit."""

    queue: Queue
    offset: int
    consumer: Consumer | None


Send = Callable[[Consumer, int, Sequence[bool], Sequence[InboxRow]], int]  # must not raise
Cancelled = Callable[[Consumer], None]
UNLIMITED = 1 << 62
