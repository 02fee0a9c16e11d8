"""A consumer, and the deliveries that it is sent.

Not here: which of a queue's consumers is next (``queue/ring.py``), taking entries and sending them
(``dispatch.py``), tags and credit coming back (``channel.py``). Source: AMQP 0-9-1, 1.8.3.3 (basic.consume).
Invariant: a consumer has credit only while its channel and its own prefetch let it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from broker_core.broker.arguments import type_name
from broker_core.broker.change import InboxRow
from broker_core.broker.queue import Queue
from broker_core.broker.undo import Undo
from broker_core.errors import PreconditionFailed
from broker_core.field_table import Timestamp


class Holder(Protocol):
    """What a consumer needs of its channel (``channel.py``)."""

    connection: object
    prefetch: int  # of all its consumers together; 0: no limit
    consuming: int  # how many deliveries count against it
    last_tag: int
    unacked: dict[int, Unacked]
    consumers: dict[str, Consumer]

    def served(self, consumer: Consumer) -> None: ...


class Consumer:
    """``prefetch`` 0: no limit of its own. ``writable``: the shell makes it False while its connection takes
    no more, then wakes the queue.

    ``send`` gets the consumer, the delivery tag, whether it says redelivered, and the message. ``cancelled``
    is what the shell calls when the queue is gone (``Consumers.clear``); a consumer that was cancelled is
    ``active`` no more.
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
        channel: Holder,
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
        # it uses up nothing of the channel's limit, but waits with the others where that is reached
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
        """Its queue is gone."""
        undo.attribute(self, "active")
        undo.item(self.channel.consumers, self.tag)
        self.active = False
        self.channel.consumers.pop(self.tag, None)


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
        raise PreconditionFailed(
            f"invalid arg 'x-priority' for queue '{queue}' in vhost '/': {what}", "give a whole number"
        )
    return priority
