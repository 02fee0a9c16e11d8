"""When entries of a queue are due, in the order of time.

Not here: what an entry is due for (``broker/message/delays.py``), and reading it.
An index is made of the messages themselves, from the oldest on, and again after a restart: nothing of it is
durable. It has 16 bytes for each entry, in sorted arrays.
Invariant: every visible and unsettled entry that is due at some time is in it, unless it is ``unread``; so
may be some settled ones, and some twice, which its user leaves out.
"""

from __future__ import annotations

from typing import Generic

import numpy as np
import numpy.typing as npt

from broker_core.core.undo import Undo
from broker_core.routing.exchange import Q
from broker_core.routing.exchange_types import WaitingExchange

_FRESH = 1_024  # entries before they become an array
_LARGEST = 65_536  # entries of an array that is merged: more would hold others for too long
_NEVER = 1 << 62

Times = npt.NDArray[np.int64]  # 2 rows: microseconds since the epoch, offsets; sorted by both


class DueIndex(Generic[Q]):
    """``exchange``: which routes the messages that are due. ``unread``: first and end of the entries since
    the first look, then of those before it.
    """

    __slots__ = ("_arrays", "_fresh", "_next_fresh", "_undo", "exchange", "unread")

    def __init__(self, undo: Undo, exchange: WaitingExchange[Q]) -> None:
        self._undo = undo
        self.exchange = exchange
        self.unread = [0, 0], [0, 0]
        self._fresh: list[tuple[int, int]] = []
        self._next_fresh = _NEVER
        self._arrays: list[Times] = []

    def add(self, at_us: int, offset: int) -> None:
        self._fresh.append((at_us, offset))
        self._next_fresh = min(self._next_fresh, at_us)
        if len(self._fresh) >= _FRESH:
            self._sort_fresh()

    def _sort_fresh(self) -> None:
        # first: an exception leaves some twice, and loses none
        self.add_all(np.array(self._fresh, np.int64).T)
        self._fresh, self._next_fresh = [], _NEVER

    def add_all(self, times: Times) -> None:
        """Adds entries in any order."""
        arrays = self._arrays
        for start in range(0, times.shape[1], _LARGEST):
            arrays.append(_sorted(times[:, start : start + _LARGEST]))
            while len(arrays) > 1 and arrays[-2].shape[1] <= 2 * arrays[-1].shape[1] < _LARGEST:
                arrays[-2:] = [_sorted(np.concatenate(arrays[-2:], axis=1))]

    def next_us(self) -> int | None:
        """Returns when the first entry is due."""
        times = [int(array[0, 0]) for array in self._arrays]
        if self._fresh:
            times.append(self._next_fresh)
        return min(times, default=None)

    def due(self, now_us: int, most: int) -> Times:
        """Returns the first entries that are due, at most so many."""
        if self._next_fresh <= now_us:
            self._sort_fresh()
        found = [array[:, : min(most, _count_due(array, now_us))] for array in self._arrays]
        return _sorted(np.concatenate(found, axis=1))[:, :most] if found else np.empty((2, 0), np.int64)

    def drop(self, due: Times) -> None:
        """Removes the first ones of what ``due`` has returned."""
        if not due.shape[1]:
            return
        at_us, offset = due[:, -1].tolist()
        self._undo.append((self.add_all, due))
        rest = [array[:, _count_to(array, at_us, offset) :] for array in self._arrays]
        self._arrays = [array for array in rest if array.shape[1]]


def _sorted(times: Times) -> Times:
    return times[:, np.lexsort((times[1], times[0]))]


def _count_due(array: Times, now_us: int) -> int:
    return int(np.searchsorted(array[0], now_us, "right"))


def _count_to(array: Times, at_us: int, offset: int) -> int:
    """Returns how many entries are not after this one."""
    low, high = int(np.searchsorted(array[0], at_us, "left")), _count_due(array, at_us)
    return low + int(np.searchsorted(array[1, low:high], offset, "right"))
