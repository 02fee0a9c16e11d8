"""A set of integers stored as sorted, disjoint, non-touching intervals [start, end).

Not a tree: the sets of a queue are short (holes above a floor), so two flat lists and bisection are fastest.
Invariant: ``starts[i] < ends[i] < starts[i + 1]``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from broker_core.broker.state.undo import Undo


class IntervalSet:
    """Each change appends to ``undo`` how to restore the previous state."""

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
        """Returns how many integers of [start, end) are in the set."""
        return sum(inside_end - inside_start for inside_start, inside_end in self.within(start, end))

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
