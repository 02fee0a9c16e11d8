"""Which entry of a queue is next (first in, first out, or by priority), and which entries are held.

Not here: which consumer gets an entry (``ring.py``, ``broker/message/dispatch.py``), what is settled
(``progress.py``). Words: *held* is held by a channel or a prepared transaction. *ready* is not settled, held
or claimed.
Invariant: a ready entry is at or above the cursor, or in ``_requeued``, or (in a queue with priorities) in
``ranks``. Entries there that were settled in the meantime are ignored.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from broker_core.broker.queue.deliveries import Deliveries
from broker_core.broker.queue.log import Log
from broker_core.broker.queue.progress import IntervalSet, Progress
from broker_core.broker.queue.rank import Ranks
from broker_core.broker.queue.room import Room
from broker_core.core.undo import Undo

LOOKED_AT = 16_384  # entries at a time, in a queue that holds more


class Ready:
    """``deliveries`` and ``ranks`` are None for a queue without delivery counts or without priorities."""

    __slots__ = (
        "_cursor", "_held_ahead", "_log", "_progress", "_requeued", "_room", "_saved", "_undo",
        "deliveries", "dispatched_below", "ranks", "sent", "unacked",
    )  # fmt: skip

    def __init__(
        self,
        log: Log,
        progress: Progress,
        room: Room,
        undo: Undo,
        *,
        max_priority: int | None,
        deliveries: Deliveries | None,
    ) -> None:
        self._undo = undo
        self._saved = 0  # ``Undo.work`` when the numbers were last saved
        self._log = log
        self._progress = progress
        self._room = room
        self.unacked: set[int] = set()
        self.dispatched_below = 0  # no entry at or above was ever delivered
        self.deliveries = deliveries
        self.ranks = Ranks(max_priority, log, progress, self.unacked, undo) if max_priority else None
        self._cursor = 0
        self._requeued = IntervalSet(undo=undo)  # all below the cursor
        self._held_ahead = 0  # nothing at or above both this and the cursor is held
        self.sent = IntervalSet(undo=undo)  # may have been delivered before

    def _save(self) -> None:
        self._saved = self._undo.work
        self._undo.append((self._put_back, self._cursor, self.dispatched_below))

    def _put_back(self, cursor: int, dispatched_below: int) -> None:
        self._cursor, self.dispatched_below = cursor, dispatched_below

    # -- next ------------------------------------------------------------------------------------------------
    def head(self, end: int) -> int | None:
        """Returns the next ready offset below ``end`` without taking it: requeued entries first, or by
        priority. Raises CorruptSegment.
        """
        progress = self._progress
        start = progress.floor
        if self.ranks is not None and not progress.owner:
            offset = self.ranks.best()
            return offset if offset is not None else self.first_ready(max(self._log.visible_end, start), end)
        requeued = self._requeued
        if requeued.total:
            below = 0
            for low, high in requeued:
                offset = self.first_ready(max(low, start), min(high, end))
                if offset is not None or high > end:
                    requeued.drop_below(below)
                    return offset
                below = high
            requeued.drop_below(below)
        return self.first_ready(max(self._cursor, start), end)

    def first_ready(self, start: int, end: int) -> int | None:
        """Returns the first offset of [start, end) that is not settled, held or claimed."""
        progress = self._progress
        if start < progress.floor:
            start = progress.floor
        holes = progress.holes
        while start < end:
            after = holes.first_outside(start) if holes.total else start
            if after == start and progress.owner:
                after = progress.claimed.first_outside(start)
            if after == start:
                if start not in self.unacked:
                    return start
                after = start + 1
            start = after
        return None

    def take_next(self, limit: int, end: int | None = None) -> Sequence[int]:
        """Takes at most ``limit`` of the next ready entries below ``end`` (default: the visible ones). The
        caller holds them or returns them with ``untake``.

        Returns a range of consecutive offsets, or a list in order of priority; empty if no entry is ready.
        """
        progress = self._progress
        end = self._log.visible_end if end is None else end
        if self.ranks is not None and not progress.owner:
            return self._take_ranked(self.ranks, limit, end)
        first = self.head(end)
        if first is None:
            return ()
        stop = min(end, first + limit)
        if self._requeued.total and self._requeued.contains(first):
            stop = min(stop, self._requeued.first()[1])
        if progress.holes.total:
            stop = min(stop, progress.holes.next_start(first, stop))
        if progress.owner:
            stop = min(stop, progress.claimed.next_start(first, stop))
        if first < self._held_ahead:
            stop = next((offset for offset in range(first, stop) if offset in self.unacked), stop)
        self._pass(first, stop)
        return range(first, stop)

    def _take_ranked(self, ranks: Ranks, limit: int, end: int) -> Sequence[int]:
        """Takes entries by priority; if none is visible, the oldest one of the commit in progress."""
        taken = ranks.take(limit)
        visible_end = self._log.visible_end
        if not taken and end > visible_end:
            first = self.first_ready(max(visible_end, self._progress.floor), end)
            return () if first is None else [first]
        return taken

    def _pass(self, first: int, stop: int) -> None:
        """Moves past [first, stop), which is taken; ``head`` returned ``first``."""
        if first < self._cursor:
            self._requeued.drop_below(stop)
        else:
            if self._saved != self._undo.work:
                self._save()
            self._cursor = stop

    def untake(self, offsets: Sequence[int]) -> None:
        """Returns the last of the taken entries to the queue; they are next again."""
        if not offsets:
            return
        if self.ranks is not None:
            for offset in offsets:
                if offset < self.ranks.below:
                    self.ranks.push(offset)
        elif offsets[-1] + 1 == self._cursor and offsets[-1] - offsets[0] + 1 == len(offsets):
            if self._saved != self._undo.work:
                self._save()
            self._cursor = offsets[0]
        else:
            for offset in offsets:
                self._requeued.add(offset, offset + 1)

    def take_head(self, offset: int) -> None:
        """Takes and holds the entry that ``head`` has just returned."""
        if self.ranks is not None and not self._progress.owner:
            self._take_ranked(self.ranks, 1, self._log.visible_end)
        else:
            self._pass(offset, offset + 1)
        self.hold_all((offset,))

    # -- held ------------------------------------------------------------------------------------------------
    def hold(self, offset: int) -> None:
        """Holds an entry at any place (of a prepared transaction, while loading)."""
        self.hold_all((offset,))
        self._held_ahead = max(self._held_ahead, offset + 1)

    def hold_all(self, offsets: Sequence[int]) -> None:
        """Holds entries that were taken: they are delivered."""
        undo = self._undo
        if self._saved != undo.work:
            self._save()
        undo.append((self.unacked.difference_update, offsets))
        self.unacked.update(offsets)
        if self._room.sizes is not None:
            self._room.hold(offsets)
        end = (offsets[-1] if self.ranks is None else max(offsets)) + 1
        if end > self.dispatched_below:
            self.dispatched_below = end

    def let_go(self, start: int, end: int) -> None:
        """Stops holding the held entries of [start, end)."""
        if end > start + 1:
            self.let_go_all(((start, end),))
        elif start in self.unacked:
            self._let_go((start,))

    def let_go_all(self, parts: Sequence[Sequence[int]]) -> None:
        """Stops holding the held entries of the parts, which are sorted and do not overlap."""
        unacked = self.unacked
        if sum(end - start for start, end in parts) <= len(unacked):
            gone = [offset for start, end in parts for offset in range(start, end) if offset in unacked]
        else:
            starts = [start for start, _ in parts]
            gone = [at for at in unacked if starts[0] <= at < parts[bisect_right(starts, at) - 1][1]]
        if gone:
            self._let_go(gone)

    def _let_go(self, gone: Sequence[int]) -> None:
        self._undo.append((self.unacked.update, gone))
        self.unacked.difference_update(gone)
        if self._room.sizes is not None:
            self._room.let_go(gone)

    def put_back(self, parts: Sequence[Sequence[int]]) -> None:
        """Makes sorted parts, not settled or held, ready again at their old places, as redelivered."""
        self.sent.add_all(parts)
        if self.deliveries is not None:
            self.deliveries.came_back([offset for start, end in parts for offset in range(start, end)])
        end = self._cursor if self.ranks is None else self.ranks.below  # it reaches those above by itself
        below = [(start, min(stop, end)) for start, stop in parts if start < end]
        if self.ranks is not None:
            for start, stop in below:
                for offset in range(start, stop):
                    self.ranks.push(offset)
        elif below:
            self._requeued.add_all(below)

    def put_back_all(self, claimed: IntervalSet) -> None:
        """Makes all entries that were ``claimed`` ready again: the cursor moves back to the floor."""
        if self._saved != self._undo.work:
            self._save()
        self._undo.attribute(self, "_requeued")
        for start, end in claimed:
            self.sent.add(max(start, self._progress.floor), end)
        self._cursor, self._requeued = self._progress.floor, IntervalSet(undo=self._undo)

    def forget(self, start: int, end: int) -> None:
        """Drops counts and priorities of settled entries."""
        if self.deliveries is not None and self.deliveries.counts:
            self.deliveries.forget(start, end)
        if self.ranks is not None:
            self.ranks.forget(start, end)

    # -- sent ------------------------------------------------------------------------------------------------
    def was_sent(self, offset: int) -> bool:
        """Returns whether a delivery of the entry must be marked redelivered."""
        return self.sent.total > 0 and self.sent.contains(offset)

    def none_sent(self, start: int, end: int) -> bool:
        """Returns whether no entry of [start, end) was ever delivered."""
        return not self.sent.total or (
            self.sent.next_start(start, end) == end and not self.sent.contains(start)
        )

    def redelivered_within(self, start: int, end: int) -> list[list[int]]:
        """Returns the offsets of [start, end) that may have been delivered before, as [start, end] pairs."""
        return self.sent.within(start, end)

    def over_limit(self, offset: int) -> bool:
        """Returns whether the entry was returned more often than x-delivery-limit allows."""
        return self.deliveries is not None and self.deliveries.over_limit(offset)

    def sent_below(self, end: int) -> None:
        """Marks entries below ``end`` as delivered."""
        if self._saved != self._undo.work:
            self._save()
        self.dispatched_below = max(self.dispatched_below, end)

    def loaded(self, *, clean: bool) -> None:
        """Finishes loading, after all entries are restored: marks what may have been delivered before."""
        end = self._log.next_offset
        self._cursor = self._progress.floor
        self.dispatched_below = min(self.dispatched_below, end) if clean else end
        self.sent.add(min(self._progress.floor, self._progress.acked), self.dispatched_below)


def _in_order(ready: Ready) -> bool:
    """Whether only ``_requeued`` is ready below the cursor."""
    return ready.ranks is None and not ready._progress.owner


def without(parts: Sequence[Sequence[int]], offsets: Sequence[int]) -> list[list[int]]:
    """Returns [start, end) of ``parts`` without ``offsets``; both are sorted."""
    found: list[list[int]] = []
    place = 0
    for start, end in parts:
        place = bisect_left(offsets, start, place)
        while place < len(offsets) and offsets[place] < end:
            if start < offsets[place]:
                found.append([start, offsets[place]])
            start = offsets[place] + 1
            place += 1
        if start < end:
            found.append([start, end])
    return found


def purged(ready: Ready, start: int, end: int) -> None:
    """[start, end) was purged: nothing there is ready."""
    ready._requeued.subtract(start, end)


def purgeable(ready: Ready, start: int, end: int, most: int) -> tuple[list[list[int]], int]:
    """Returns at most ``most`` parts from ``start`` on that a purge settles, neither settled nor held, and
    where to go on: at ``end``, which is not above the visible end, there are no more.
    """
    progress, unacked, requeued = ready._progress, ready.unacked, ready._requeued
    start = max(start, progress.floor)
    if _in_order(ready):
        start = max(start, requeued.first()[0] if requeued.total else ready._cursor)
    if start >= end:
        return [], end
    if len(unacked) > LOOKED_AT and start <= max(unacked):
        end = min(end, start + LOOKED_AT)
        unacked = unacked.intersection(range(start, end))
    parts, end = progress.holes.outside_some(start, end, most)
    parts = without(parts, sorted([at for at in unacked if at >= start]))
    return (parts[:most], parts[most - 1][1]) if len(parts) > most else (parts, end)


def oldest(ready: Ready, start: int, most: int, steps: int) -> tuple[list[list[int]], int | None]:
    """Returns the first entries that a purge settles from ``start`` on, at most ``most``, and where to go on
    after so many ``steps``; None: there are no more. A gap of what is held or settled is one step in a
    queue without priorities.
    """
    progress, end = ready._progress, ready._log.visible_end
    in_order = _in_order(ready)
    found: list[list[int]] = []
    start = max(start, progress.floor)
    for _ in range(steps):
        if start >= end or not most:
            return found, None
        after = progress.holes.first_outside(start) if progress.holes.total else start
        if after == start and in_order and start < ready._cursor and not ready._requeued.contains(start):
            after = ready._requeued.next_start(start, ready._cursor)
        if after == start and start not in ready.unacked:
            if found and found[-1][1] == start:
                found[-1][1] += 1
            else:
                found.append([start, start + 1])
            most -= 1
        start = start + 1 if after == start else after
    return found, start
