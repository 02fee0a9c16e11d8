"""When entries of a queue are due, in the order of time.

Not here: what an entry is due for (``broker/message/delays.py``, ``expiry.py``), and reading it.
An index is made of the messages themselves, and again after a restart: nothing of it is durable. Spans of
entries that nobody has read yet have a time before which none of them is due. The entries of a span that is
due are read, and then have 16 bytes each in sorted arrays.
Invariant: every visible and unsettled entry that is due at some time is in a span, in an array or aside. So
may be some settled ones, and some twice, which its user leaves out. What is due and not ready is aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic

import numpy as np
import numpy.typing as npt

from broker_core.broker.queue.progress import IntervalSet
from broker_core.core.records import NEVER
from broker_core.core.undo import Undo
from broker_core.routing.exchange import Q
from broker_core.routing.exchange_types import WaitingExchange

SPAN = 4_096  # offsets of a span to which new entries are added
FRESH = 1_024  # entries before they become an array
LARGEST = 65_536  # entries of an array that is merged: more would hold others for too long

Times = npt.NDArray[np.int64]  # 2 rows: microseconds since the epoch, offsets; sorted by both


class DueIndex(Generic[Q]):
    """``exchange``: routes the messages that are due; None: they expire. ``spans``: first, end and time, in
    the order of offsets. ``next_us``: nothing is due before; it may be too early until the next ``tidy``.
    """

    __slots__ = (
        "_arrays", "_aside", "_fresh", "_fresh_us", "_undo", "end", "exchange", "next_us", "spans",
        "unread_us",
    )  # fmt: skip

    def __init__(self, undo: Undo, exchange: WaitingExchange[Q] | None = None) -> None:
        self._undo, self.exchange = undo, exchange
        self.spans: list[list[int]] = []
        self.end = 0  # of the spans so far
        self.next_us = self.unread_us = self._fresh_us = NEVER  # of all, of spans, of ``_fresh``
        self._fresh: list[tuple[int, int]] = []
        self._arrays: list[Times] = []
        self._aside = IntervalSet(undo=undo)

    def expect(self, first: int, end: int, due_us: int) -> None:
        """Some of these newest entries are due then or later; 0: nobody can say when."""
        spans = self.spans
        while spans and spans[-1][0] >= first:  # of a commit that was undone
            spans.pop()
        if spans and due_us and first < spans[-1][0] + SPAN:
            last = spans[-1]
            last[1] = end
            if due_us < last[2]:
                last[2] = due_us
        else:
            spans.append([first, end, due_us])
        self.end = end
        if due_us < self.unread_us:
            self.unread_us = due_us
            self.next_us = min(self.next_us, due_us)

    def expect_again(self, first: int, end: int, due_us: int = 0) -> None:
        """Undoes that they were forgotten because they were settled."""
        self.spans = sorted([*self.spans, [first, end, due_us]])
        self.unread_us = min(self.unread_us, due_us)
        self.next_us = min(self.next_us, due_us)

    def tidy(self, floor: int, end: int, most: int) -> None:
        """Forgets what is read or settled, and what was undone. ``most``: so many entries are not settled."""
        live: list[list[int]] = []
        for span in self.spans:
            if max(span[0], floor) < min(span[1], end):
                live.append(span)
            elif span[0] < span[1]:
                self._undo.append((self.expect_again, *span))
        self.spans, self.unread_us = live, min((due_us for _, _, due_us in live), default=NEVER)
        self._aside.drop_below(floor)
        if sum(array.shape[1] for array in self._arrays) > 2 * most + LARGEST:
            self._undo.extend((self.add_all, array[:, array[1] < floor]) for array in self._arrays)
            self._put([array[:, array[1] >= floor] for array in self._arrays])
        self._put(self._arrays)

    def add(self, at_us: int, offset: int) -> None:
        self._fresh.append((at_us, offset))
        self._fresh_us = min(self._fresh_us, at_us)
        self.next_us = min(self.next_us, at_us)
        if len(self._fresh) >= FRESH:
            self._sort_fresh()

    def _sort_fresh(self) -> None:
        # first: an exception leaves some twice, and loses none
        self.add_all(np.array(self._fresh, np.int64).T)
        self._fresh, self._fresh_us = [], NEVER

    def set_aside(self, offset: int) -> None:
        """It is due and not ready: nobody looks at it until it is."""
        self._aside.add(offset, offset + 1)

    def look_again(self, parts: Iterable[Sequence[int]]) -> None:
        """These are ready again."""
        for low, high in parts:
            for start, end in self._aside.within(low, high):
                self.add_all(np.stack([np.zeros(end - start, np.int64), np.arange(start, end)]))
                self._aside.subtract(start, end)

    def add_all(self, times: Times) -> None:
        """Adds entries in any order."""
        arrays = self._arrays
        for start in range(0, times.shape[1], LARGEST):
            arrays.append(_sorted(times[:, start : start + LARGEST]))
            self.next_us = min(self.next_us, int(arrays[-1][0, 0]))
            while len(arrays) > 1 and arrays[-2].shape[1] <= 2 * arrays[-1].shape[1] < LARGEST:
                arrays[-2:] = [_sorted(np.concatenate(arrays[-2:], axis=1))]

    def due(self, now_us: int, most: int) -> Times:
        """Returns the first entries that are due, at most so many."""
        if self._fresh_us <= now_us:
            self._sort_fresh()
        found = [array[:, : min(most, _count_due(array, now_us))] for array in self._arrays]
        return _sorted(np.concatenate(found, axis=1))[:, :most] if found else np.empty((2, 0), np.int64)

    def drop(self, due: Times) -> None:
        """Removes the first ones of what ``due`` has returned."""
        if due.shape[1]:
            at_us, offset = due[:, -1].tolist()
            self._undo.append((self.add_all, due))
            self._arrays = [array[:, _count_to(array, at_us, offset) :] for array in self._arrays]
        self._put(self._arrays)

    def _put(self, arrays: list[Times]) -> None:
        self._arrays = [array for array in arrays if array.shape[1]]
        times = [int(array[0, 0]) for array in self._arrays]
        self.next_us = min([self.unread_us, self._fresh_us, *times])


def _sorted(times: Times) -> Times:
    return times[:, np.lexsort((times[1], times[0]))]


def _count_due(array: Times, now_us: int) -> int:
    return int(np.searchsorted(array[0], now_us, "right"))


def _count_to(array: Times, at_us: int, offset: int) -> int:
    """Returns how many entries are not after this one."""
    low, high = int(np.searchsorted(array[0], at_us, "left")), _count_due(array, at_us)
    return low + int(np.searchsorted(array[1, low:high], offset, "right"))
