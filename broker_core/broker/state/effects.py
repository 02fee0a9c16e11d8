"""What a commit did to the entries of queues, by offsets: published, acknowledged, expired, ...

Not here: how it is kept (``history/``).
Invariant: its size is bounded, whatever the commit does: ranges of one kind and queue up to ``RANGES``, then
their number, the first and the last; queues up to ``QUEUES``, then none.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from broker_core.ids import QueueId

RANGES = 32  # of one kind and queue
QUEUES = 128  # of one commit, counted once for each kind

PUBLISHED, DEAD_LETTERED, ACKNOWLEDGED, REJECTED, RETURNED, EXPIRED = 0, 1, 2, 3, 4, 5
OVERFLOWED, DELIVERY_LIMIT, PURGED, CONSUMED, DELETED = 6, 7, 8, 9, 10
KINDS = (
    "published", "dead_lettered", "acknowledged", "rejected", "returned", "expired",
    "overflowed", "delivery_limit", "purged", "consumed", "deleted",
)  # fmt: skip
REASONS = {"rejected": REJECTED, "expired": EXPIRED, "maxlen": OVERFLOWED, "delivery_limit": DELIVERY_LIMIT}


class Named(Protocol):
    """A queue, as far as the history shows it."""

    @property
    def queue_id(self) -> QueueId: ...

    @property
    def name(self) -> str: ...

    @property
    def vhost(self) -> str: ...

    @property
    def replies(self) -> bool:
        """Whether it is of direct replies, and not shown."""


class Who(NamedTuple):
    """Who commits. ``door``: amqp, flight, process, spark, or "" for the broker itself. ``client``: what the
    client calls itself. ``address``: of its connection.
    """

    door: str = ""
    vhost: str = ""
    user: str = ""
    client: str = ""
    address: str = ""


BROKER = Who()
Key = tuple[int, Named, Named | None]  # kind, queue, and the queue where a dead letter comes from


class Effects(dict[Key, list[int]]):
    """Per kind and queue: how many entries, then the starts and ends of their ranges in the order of the
    commit. If the ranges hold more entries than that number, they are only the first and the last.

    ``source``: dead letters of this queue are being published. ``xid``: the name of a named transaction.
    ``batch``: app, query, batch and number in the ledger of a micro-batch. ``left_out``: entries of more
    queues than are kept.
    """

    # of the class, because each work makes one of these and few set more than ``who``
    who = BROKER
    source: Named | None = None
    xid = ""
    batch: tuple[str, str, int, int] | None = None
    left_out = 0
    is_plain = True  # without ``xid``, ``batch`` and ``left_out``

    def __bool__(self) -> bool:
        """Returns whether the history has anything to keep."""
        return len(self) > 0 or not self.is_plain

    def note(self, kind: int, queue: Named, start: int, end: int, count: int = -1) -> None:
        """Adds [start, end) of a queue; ``count`` of its entries, if not all."""
        if count < 0:
            count = end - start
        source = self.source if kind == PUBLISHED else None
        key = (kind if source is None else DEAD_LETTERED, queue, source)
        found = self.get(key)
        if found is None:
            if len(self) < QUEUES:
                self[key] = [count, start, end]
            else:
                self.left_out += count
                self.is_plain = False
            return
        found[0] += count
        if found[-1] == start:
            found[-1] = end
        elif len(found) <= 2 * RANGES:
            found += (start, end)
        else:
            found[1:] = [min(start, *found[1::2]), max(end, *found[2::2])]
