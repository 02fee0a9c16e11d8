"""Messages that leave their queue in a change, and are dead-lettered in the same change.

Not here: when messages must leave (``overflow.py``, ``expiry.py``, ``settlement.py``), and where the copies
go (``messages.py``).
Invariant: messages settled here are added to a :class:`Removals` if their queue dead-letters; a
:class:`Removals` is empty when its change ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from broker_core.broker.message.dead_letter import Reason
from broker_core.broker.queue import Queue
from broker_core.broker.state.block import NotLoaded, together
from broker_core.broker.state.change import REASONS, Effects, InboxRow

_DRIVEN_OUT = 4096  # messages that overflow dead-letters in one commit; the rest waits for the next
_DRIVEN_OUT_BYTES = 16 * 1024 * 1024


class Removed(NamedTuple):
    """Messages that left ``queue`` in this change, in order, and must be dead-lettered in it."""

    queue: Queue
    rows: Sequence[InboxRow]
    reason: Reason


class Removals(deque[Removed]):
    """Messages that left queues in a change and are not dead-lettered yet. ``room`` and ``room_bytes`` are
    what overflow may still add.
    """

    room = _DRIVEN_OUT
    room_bytes = _DRIVEN_OUT_BYTES

    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self.effects = effects


def discard(queue: Queue, offsets: Sequence[int], reason: Reason, removals: Removals) -> None:
    """Settles entries of ``queue``, to be dead-lettered in the same change if it dead-letters. Entries that
    are already settled only stop being held.

    Raises StoreError, with nothing changed.
    """
    leave(
        queue, offsets, messages_of(queue, offsets) if queue.arguments.dead_letters else [], reason, removals
    )


def leave(
    queue: Queue, offsets: Sequence[int], rows: Sequence[InboxRow], reason: Reason, removals: Removals
) -> None:
    """Like ``discard``, for entries that were read already."""
    for start, end in ranges(offsets):
        queue.settle_range(start, end)
        removals.effects.note(REASONS[reason], queue, start, end)
    if rows and queue.arguments.dead_letters:
        removals.append(Removed(queue, rows, reason))
        if reason == "maxlen":
            removals.room -= len(rows)
            removals.room_bytes -= sum(len(row.body) for row in rows)


def messages_of(queue: Queue, offsets: Sequence[int]) -> list[InboxRow]:
    """Returns the messages of those entries that are not settled, with their commit sequence and time. Raises
    CorruptSegment, DataLoss, and NotLoaded for all of their blocks together.
    """
    rows: list[InboxRow] = []
    missing: list[NotLoaded] = []
    for first, last in ranges(offsets):
        for start, end in queue.progress.unsettled_within(first, last):
            while start < end:
                try:
                    found = queue.log.rows(start, end)
                except NotLoaded as wanted:
                    missing.append(wanted)
                    start = queue.log.locate(start)[0].end
                    continue
                rows += found
                start += len(found)
    if missing:
        raise together(missing)
    return rows


def ranges(offsets: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Returns the consecutive offsets of a list as [start, end), in its order."""
    if not offsets:
        return ()
    if isinstance(offsets, range) or len(offsets) == 1:
        return ((offsets[0], offsets[-1] + 1),)
    found: list[tuple[int, int]] = []
    start = end = offsets[0]
    for offset in offsets:
        if offset != end:
            found.append((start, end))
            start = offset
        end = offset + 1
    found.append((start, end))
    return found
