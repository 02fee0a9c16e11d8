"""Messages that leave their queue in a change, and are dead-lettered in the same change.

Not here: when messages must leave (``overflow.py``, ``expiry.py``, ``settlement.py``), and how the copies are
enqueued (``messages.py``).
Invariant: messages settled here are added to a :class:`Removals` before, if their queue dead-letters; a
:class:`Removals` is empty when its change ends. A change has a bounded room for dead letters: who can leave
some for a later change asks :meth:`Removals.add` how many fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from broker_core.broker.message.dead_letter import DeadLetters, Reason
from broker_core.broker.queue import Queue
from broker_core.broker.transaction.publish import Publish
from broker_core.core.block import NotLoaded, together
from broker_core.core.change import REASONS, Effects, InboxRow
from broker_core.routing.search import STEPS

# Dead letters of one commit; the rest waits for the next. A copy takes as long as some twenty entries.
ROWS = 4096
ENTRIES = 10_000
SIZE_BYTES = 4 * 1024 * 1024
_READ = 8  # messages that are read at a time, where some may find no room


class Removed(NamedTuple):
    """Copies of messages that left ``queue`` in this change, in order, and where they must go in it."""

    queue: Queue
    publishes: list[Publish]


class Removals(deque[Removed]):
    """Messages that left queues in a change and are not dead-lettered yet.

    ``letters`` makes the copies of one queue and reason; None: nothing gets them. ``entries``: how many more
    there is room for.
    """

    def __init__(self, effects: Effects, letters: Callable[[Queue, Reason], DeadLetters | None]) -> None:
        super().__init__()
        self.effects = effects
        self._letters = letters
        self._rows, self.entries, self._bytes = ROWS, ENTRIES, SIZE_BYTES

    @property
    def full(self) -> bool:
        """Returns whether there is no room left."""
        return self._rows <= 0 or self.entries <= 0 or self._bytes <= 0

    def add(self, queue: Queue, rows: Iterable[InboxRow], reason: Reason, *, whole: bool = False) -> int:
        """Adds the dead letters of the first of ``rows``, for which there is room, and returns how many may
        leave. ``whole``: of all, whatever they reach.
        """
        letters = self._letters(queue, reason) if queue.arguments.dead_letters else None
        if letters is None:
            return sum(1 for _ in rows)
        publishes: list[Publish] = []
        left = 0
        for row in rows:
            if self.full and not whole:
                break
            left += 1
            before = letters.search.steps
            publish = letters.publish(row)
            if publish is not None:
                publishes.append(publish)
            looked = (letters.search.steps - before) // STEPS
            self.entries -= max(looked, 0 if publish is None else len(publish.queues))
            self._rows -= 1
            self._bytes -= len(row.body) + letters.cost_bytes(row)
        if publishes:
            self.append(Removed(queue, publishes))
        return left


def discard(queue: Queue, offsets: Sequence[int], reason: Reason, removals: Removals) -> None:
    """Settles entries of ``queue``, to be dead-lettered in the same change if it dead-letters, whatever they
    reach. Entries that are already settled only stop being held.

    Raises StoreError, with nothing changed.
    """
    if queue.arguments.dead_letters:
        removals.add(queue, messages_of(queue, offsets), reason, whole=True)
    leave(queue, offsets, reason, removals.effects)


def leave(queue: Queue, offsets: Sequence[int], reason: Reason, effects: Effects) -> None:
    """Settles entries whose dead letters were added."""
    for start, end in ranges(offsets):
        queue.settle_range(start, end)
        effects.note(REASONS[reason], queue, start, end)


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
                except NotLoaded as error:
                    missing.append(error)
                    start = queue.log.locate(start)[0].end
                    continue
                rows += found
                start += len(found)
    if missing:
        raise together(missing)
    return rows


def rows_of(queue: Queue, offsets: Sequence[int]) -> Iterator[InboxRow]:
    """Yields the messages of entries that are not settled, which are read a few at a time."""
    for start in range(0, len(offsets), _READ):
        yield from messages_of(queue, offsets[start : start + _READ])


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
