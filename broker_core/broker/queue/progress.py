"""Which entries of a queue are settled, and which its owner has claimed.

Not here: what is dropped because of that (``log.py``, ``room.py``, ``ready.py``; ``queue.py`` calls them) and
who may own a queue (the broker's rule). Words: *settled* is acked, dead-lettered, expired or purged.
*claimed* is in a range that the owning app was given and has not acked. An entry is *needed* while it is
claimed or not settled. An entry that is not needed may lose its bytes at any moment, and is never needed
again.
Invariant: ``floor`` is the first offset that is not settled; every hole is above it and does not touch it.
Nothing below ``acked`` is claimed; the owner skips the unsettled entries there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from broker_core.core.change import Change
from broker_core.core.ids import QueueId
from broker_core.core.records import HoleRecord, ProgressRecord
from broker_core.core.undo import Tally, Undo

_MERGED = 16  # intervals for each part that is added: more are not looked at


class IntervalSet:
    """A set of integers as sorted, disjoint intervals [start, end) that do not touch. Each change appends to
    ``undo`` how to restore the previous state.

    The sets of a queue are short (holes above a floor), so two flat lists and bisection are fastest.
    Invariant: ``starts[i] < ends[i] < starts[i + 1]``.
    """

    __slots__ = ("_ends", "_starts", "_undo", "total")

    def __init__(
        self, intervals: Iterable[tuple[int, int] | list[int]] = (), undo: Undo | None = None
    ) -> None:
        self._undo = undo
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0  # how many integers
        for start, end in intervals:
            self.add(start, end)

    def __len__(self) -> int:
        """Returns the number of intervals, not of integers (see ``total`` and :meth:`measure`)."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)!r})"

    def add(self, start: int, end: int) -> tuple[int, int, list[int]]:
        """Adds [start, end). Returns the interval that holds it now, and the starts of the intervals merged
        into it.
        """
        if start >= end:
            return start, end, []
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        absorbed = self._starts[low:high]
        if self._undo is not None:
            self._undo.append((self._restore, low, low + 1, absorbed, self._ends[low:high], self.total))
        if absorbed:
            self.total -= sum(self._ends[low:high]) - sum(absorbed)
            start = min(start, absorbed[0])
            end = max(end, self._ends[high - 1])
        self.total += end - start
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        return start, end, absorbed

    def add_all(self, parts: Sequence[Sequence[int]]) -> None:
        """Adds [start, end) of each part; they are sorted and do not overlap."""
        if self.few_of(parts):
            for start, end in parts:
                self.add(start, end)
        else:
            self.merge(parts)

    def few_of(self, parts: Sequence[Sequence[int]]) -> bool:
        """Returns whether to add them one by one looks at fewer intervals than ``merge``."""
        between = bisect_left(self._starts, parts[-1][1]) - bisect_right(self._ends, parts[0][0])
        return len(parts) == 1 or between > _MERGED * len(parts)

    def merge(self, parts: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """Like ``add_all``, in one step. Returns the starts of intervals that are gone, and those that are
        new, both sorted.
        """
        low = bisect_left(self._ends, parts[0][0])
        high = bisect_right(self._starts, parts[-1][1])
        before = self._starts[low:high], self._ends[low:high], self.total
        runs = dict(zip(*before[:2]))
        starts: list[int] = []
        ends: list[int] = []
        for start, end in sorted([*runs.items(), *map(tuple, parts)]):  # two sorted runs, which it merges
            if not ends or start > ends[-1]:
                starts.append(start)
                ends.append(end)
            elif end > ends[-1]:
                ends[-1] = end
        if self._undo is not None:
            self._undo.append((self._restore, low, low + len(starts), *before))
        self.total += sum(ends) - sum(starts) - sum(runs.values()) + sum(runs)
        self._starts[low:high] = starts
        self._ends[low:high] = ends
        new = [(start, end) for start, end in zip(starts, ends) if runs.pop(start, None) != end]
        return list(runs), new

    def subtract(self, start: int, end: int) -> None:
        if start >= end:
            return
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end)
        if low >= high:
            return
        before = (self._starts[low:high], self._ends[low:high], self.total)
        starts: list[int] = []
        ends: list[int] = []
        if self._starts[low] < start:
            starts.append(self._starts[low])
            ends.append(start)
        if self._ends[high - 1] > end:
            starts.append(end)
            ends.append(self._ends[high - 1])
        if self._undo is not None:
            self._undo.append((self._restore, low, low + len(starts), *before))
        self.total += sum(ends) - sum(starts) - sum(self._ends[low:high]) + sum(self._starts[low:high])
        self._starts[low:high] = starts
        self._ends[low:high] = ends

    def _restore(self, low: int, high: int, starts: list[int], ends: list[int], total: int) -> None:
        self._starts[low:high] = starts
        self._ends[low:high] = ends
        self.total = total

    def drop_below(self, floor: int) -> None:
        """Removes all integers below ``floor``."""
        if self._starts and self._starts[0] < floor:
            self.subtract(self._starts[0], floor)

    def contains(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def covers(self, start: int, end: int) -> bool:
        """Returns whether every integer of [start, end) is in the set."""
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and end <= self._ends[at])

    def within(self, start: int, end: int) -> list[list[int]]:
        """Returns the set clipped to [start, end), as [start, end] pairs."""
        found: list[list[int]] = []
        for at in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[at] >= end:
                break
            found.append([max(start, self._starts[at]), min(end, self._ends[at])])
        return found

    def outside(self, start: int, end: int) -> list[list[int]]:
        """Returns the part of [start, end) that is not in the set, as [start, end] pairs."""
        found: list[list[int]] = []
        for inside_start, inside_end in self.within(start, end):
            if start < inside_start:
                found.append([start, inside_start])
            start = inside_end
        if start < end:
            found.append([start, end])
        return found

    def measure(self, start: int, end: int) -> int:
        """Returns how many integers of [start, end) are in the set. It looks at the intervals within, or at
        the others, whichever are fewer.
        """
        starts, ends = self._starts, self._ends
        low, high = bisect_right(ends, start), bisect_left(starts, end)
        if start >= end or low >= high:
            return 0
        if 2 * (high - low) <= len(starts):
            whole = sum(ends[low:high]) - sum(starts[low:high])
        else:
            whole = self.total - sum(ends[:low]) + sum(starts[:low]) - sum(ends[high:]) + sum(starts[high:])
        return whole - max(0, start - starts[low]) - max(0, ends[high - 1] - end)

    def outside_some(self, start: int, end: int, most: int) -> tuple[list[list[int]], int]:
        """Returns ``outside`` up to where some ``most`` intervals begin, and that place, at most ``end``."""
        at = bisect_right(self._ends, start) + most
        if at < len(self._starts):
            end = min(end, self._starts[at])
        return self.outside(start, end), end

    def first_outside(self, offset: int) -> int:
        """Returns the first integer at or above ``offset`` that is not in the set."""
        at = bisect_right(self._starts, offset) - 1
        return self._ends[at] if at >= 0 and offset < self._ends[at] else offset

    def first(self) -> tuple[int, int]:
        """Returns the lowest interval of a set that is not empty."""
        return self._starts[0], self._ends[0]

    def next_start(self, start: int, end: int) -> int:
        """Returns the start of the first interval above ``start``, or ``end`` if none starts before it."""
        at = bisect_right(self._starts, start)
        return self._starts[at] if at < len(self._starts) and self._starts[at] < end else end

    def end(self) -> int:
        """Returns one more than the greatest member; 0 for the empty set."""
        return self._ends[-1] if self._ends else 0


class Progress:
    """``owner`` is the app_id that holds the claim (protocol S6), or ""."""

    __slots__ = (
        "_saved", "_undo",
        "acked", "claimed", "dirty", "floor", "hole_changes", "holes", "owner", "tally",
    )  # fmt: skip

    def __init__(self, undo: Undo, tally: Tally) -> None:
        self._undo = undo
        self.tally = tally
        self._saved = 0  # ``Undo.work`` when the numbers were last saved
        self.owner = ""
        self.acked = 0
        self.floor = 0
        self.holes = IntervalSet(undo=undo)
        self.claimed = IntervalSet(undo=undo)  # of an owned queue: kept until the owner has acked them
        self.dirty = False  # the record in the catalog differs
        # starts of holes that differ from the catalog; None: removed
        self.hole_changes: dict[int, int | None] = {}

    def _save(self) -> None:
        self._saved = self._undo.work
        self._undo.append((self._put_back, self.owner, self.dirty, self.floor, self.acked))

    def _put_back(self, owner: str, dirty: bool, floor: int, acked: int) -> None:
        self.owner, self.dirty, self.floor, self.acked = owner, dirty, floor, acked

    # -- looking ---------------------------------------------------------------------------------------------
    def is_settled(self, offset: int) -> bool:
        return offset < self.floor or self.holes.contains(offset)

    def settled_within(self, start: int, end: int) -> list[list[int]]:
        """Returns the settled offsets of [start, end), as [start, end] pairs."""
        below = [[start, min(end, self.floor)]] if start < min(end, self.floor) else []
        return below + self.holes.within(max(start, self.floor), end)

    def unsettled_within(self, start: int, end: int) -> list[list[int]]:
        """Returns the unsettled offsets of [start, end), as [start, end] pairs."""
        if start < self.floor:
            start = self.floor
        if not self.holes.total:  # the usual case
            return [[start, end]] if start < end else []
        return self.holes.outside(start, end)

    def unsettled_count(self, start: int, end: int) -> int:
        """Returns how many offsets of [start, end) are not settled."""
        start = max(start, self.floor)
        return max(0, end - start - self.holes.measure(start, end))

    def unsettled_below(self, end: int) -> int:
        """Returns how many offsets below ``end`` are not settled."""
        return self.unsettled_count(self.floor, end)

    def frozen_below(self, end: int) -> int:
        """Returns how many of these are claimed."""
        return sum(
            stop - start - self.holes.measure(start, stop)
            for start, stop in self.claimed.within(self.floor, end)
        )

    def is_needed(self, start: int, end: int) -> bool:
        """Returns whether any entry of [start, end) is needed (claimed or not settled)."""
        if end > self.floor and not (self.holes.total and self.holes.covers(max(start, self.floor), end)):
            return True
        return bool(self.owner and self.claimed.within(max(start, self.acked), end))

    def needed_within(self, start: int, end: int) -> list[list[int]]:
        """Returns the needed offsets of [start, end), as [start, end] pairs. Their bytes are kept."""
        unsettled = self.unsettled_within(start, end)
        claimed = self.claimed.within(max(start, self.acked), end) if self.owner else []
        return [list(part) for part in IntervalSet([*unsettled, *claimed])] if claimed else unsettled

    def needed_from(self) -> int:
        """Returns an offset below which no entry is needed."""
        claimed = self.claimed.within(self.acked, self.floor) if self.owner else ()
        return claimed[0][0] if claimed else self.floor

    def skipped(self) -> list[list[int]]:
        """Returns unsettled entries that the owner skips, as [start, end] pairs."""
        return self.unsettled_within(self.floor, self.acked) if self.owner else []

    def first_unsettled(self, start: int) -> int:
        """Returns the first one at or above ``start``."""
        return self.holes.first_outside(max(self.floor, start))

    def first_to_read(self) -> int:
        """Returns the first unsettled offset that the owner does not skip."""
        return self.first_unsettled(self.acked)

    # -- settling --------------------------------------------------------------------------------------------
    def settle(self, start: int, end: int) -> None:
        """Settles [start, end), which is not empty and is at or above the floor. It may be repeated."""
        undo = self._undo
        if self._saved != undo.work:
            self._save()
        self.dirty = True
        if start == self.floor and not self.holes.total:
            self.floor = end
            self.tally.add(start - end)
            return
        settled = self.floor + self.holes.total
        low, high, absorbed = self.holes.add(start, end)
        for absorbed_start in absorbed:
            undo.item(self.hole_changes, absorbed_start)
            self.hole_changes[absorbed_start] = None
        if low <= self.floor:
            self.holes.subtract(low, high)
            self.floor = high
        else:
            undo.item(self.hole_changes, low)
            self.hole_changes[low] = high
        self.tally.add(settled - self.floor - self.holes.total)

    def settle_all(self, parts: Sequence[Sequence[int]]) -> None:
        """Like ``settle``, for parts that are sorted and do not overlap: the time does not grow with their
        square.
        """
        if self.holes.few_of(parts):
            for start, end in parts:
                if end > self.floor:
                    self.settle(max(start, self.floor), end)
            return
        undo = self._undo
        if self._saved != undo.work:
            self._save()
        self.dirty = True
        settled = self.floor + self.holes.total
        gone, new = self.holes.merge(parts)
        undo.attribute(self, "hole_changes")
        self.hole_changes = {**self.hole_changes, **dict.fromkeys(gone), **dict(new)}
        if new and new[0][0] == self.floor:
            low, self.floor = new[0]
            self.holes.subtract(low, self.floor)
            del self.hole_changes[low]
        self.tally.add(settled - self.floor - self.holes.total)

    # -- ownership (protocol S6) -----------------------------------------------------------------------------
    def own(self, app_id: str, start: int) -> None:
        """Makes the app the owner. From now on claimed entries are needed until they are acked. The app skips
        entries below ``start``; they do not change. Not checked here: who may own a queue.
        """
        if self._saved != self._undo.work:
            self._save()
        self.dirty = True
        self.owner = app_id
        self.acked = max(self.floor, start)

    def claim(self, start: int, end: int) -> None:
        """Marks [start, end) as claimed by the owner."""
        if self._saved != self._undo.work:
            self._save()
        self.dirty = True
        self.acked = min(self.acked, max(start, self.floor))
        self.claimed.add(max(start, self.acked), end)

    def claimed_below(self, end: int) -> list[list[int]]:
        """Returns unsettled claimed entries below ``end``, as [start, end] pairs."""
        return [
            part
            for first, last in self.claimed.within(self.floor, end)
            for part in self.unsettled_within(first, last)
        ]

    def ack_to(self, offset: int) -> None:
        """Marks claimed entries below ``offset`` as not needed."""
        if self._saved != self._undo.work:
            self._save()
        self.dirty = True
        self.acked = offset
        self.claimed.drop_below(offset)

    def unclaim(self) -> IntervalSet:
        """Removes and returns all claims."""
        self._undo.attribute(self, "claimed")
        claimed, self.claimed = self.claimed, IntervalSet(undo=self._undo)
        return claimed

    def reclaim(self, ranges: Iterable[Sequence[int]]) -> None:
        """After ``unclaim``: claims only these ranges again."""
        if self._saved != self._undo.work:
            self._save()
        self.dirty = True
        for start, end in ranges:
            self.restore_claim(start, end)

    def restore_claim(self, start: int, end: int) -> None:
        """While loading, after the progress and before any ``reserve``: a claim that the catalog names."""
        self.claimed.add(max(start, self.acked), end)

    def release(self) -> None:
        """Removes the owner."""
        if self._saved != self._undo.work:
            self._save()
        self.dirty = True
        self.owner = ""
        self.acked = self.floor

    # -- durable ---------------------------------------------------------------------------------------------
    def restore(self, progress: ProgressRecord, holes: list[HoleRecord]) -> None:
        self.owner, self.floor, self.acked = progress.owner, progress.floor, progress.acked
        for hole in holes:
            self.holes.add(hole.start, hole.end)

    def recorded(self) -> None:
        """Prepares the state for the record that is written next."""
        if self._saved != self._undo.work:
            self._save()
        self.dirty = False
        if not self.owner:
            self.acked = self.floor

    def record_holes(self, change: Change, queue_id: QueueId, *, written: bool, deleted: bool) -> None:
        """Records the changed holes. For a queue that is not ``written`` it records nothing, for a deleted
        one only drops.
        """
        if written:
            for start, end in self.hole_changes.items():
                if end is None:
                    change.drop(HoleRecord, (queue_id, start))
                elif not deleted:
                    change.put(HoleRecord(queue_id, start, end))
        self._undo.attribute(self, "hole_changes")
        self.hole_changes = {}
