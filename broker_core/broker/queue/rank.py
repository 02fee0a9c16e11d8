"""The order of a queue with priorities: highest first, then by offset.

Not here: which entries are settled (``progress.py``) or held (``ready.py``). Such entries may be in the heap
and are ignored.
Invariant: every ready entry below ``below`` is in the heap, perhaps more than once.
"""

from __future__ import annotations

from collections.abc import Set
from heapq import heappop, heappush

from broker_core.broker.queue.log import Log
from broker_core.broker.queue.progress import Progress
from broker_core.broker.state.block import NotLoaded
from broker_core.broker.state.undo import Undo
from broker_core.errors import RemoteProtocolError
from broker_core.message.properties import priority


class Ranks:
    """``highest`` is x-max-priority, to which higher priorities are reduced. The default priority is 0."""

    __slots__ = ("_heap", "_held", "_log", "_of", "_progress", "_saved", "_undo", "below", "highest")

    def __init__(self, highest: int, log: Log, progress: Progress, held: Set[int], undo: Undo) -> None:
        self._log = log
        self._progress = progress
        self._held = held
        self._undo = undo
        self._saved = 0  # ``Undo.work`` of the last change
        self.highest = highest
        self.below = 0
        self._heap: list[tuple[int, int]] = []  # (-priority, offset)
        self._of: dict[int, int] = {}  # priorities above 0 of entries that are not settled

    def add(self, start: int, properties: list[bytes]) -> None:
        """Adds consecutive entries that became visible."""
        self._save()
        for offset, encoded in enumerate(properties, start):
            rank = min(_priority(encoded), self.highest)
            if rank:
                self._of[offset] = rank
            heappush(self._heap, (-rank, offset))

    def push(self, offset: int) -> None:
        """Adds an entry that is ready again."""
        self._save()
        heappush(self._heap, (-self._of.get(offset, 0), offset))

    def best(self) -> int | None:
        """Returns the next visible entry without taking it. Raises CorruptSegment, DataLoss."""
        progress, visible_end = self._progress, self._log.visible_end
        if self.below < visible_end:
            for start, end in progress.unsettled_within(max(self.below, progress.floor), visible_end):
                while start < end:
                    try:
                        rows = self._log.rows(start, end)
                    except NotLoaded as missing:  # the order of all visible entries is kept, not their blocks
                        raise NotLoaded(missing.block_ids, prepare=self.best) from None
                    self.add(start, [row.properties for row in rows])
                    start += len(rows)
                    self.below = start  # if the next rows are damaged, these are not added twice
            self.below = visible_end
        heap = self._heap
        while heap and (heap[0][1] in self._held or progress.is_settled(heap[0][1])):
            self._save()
            heappop(heap)
        return heap[0][1] if heap else None

    def take(self, limit: int) -> list[int]:
        """Takes and returns at most ``limit`` of the next visible entries."""
        taken: list[int] = []
        while len(taken) < limit and (offset := self.best()) is not None:
            self._save()
            while self._heap and self._heap[0][1] == offset:  # read again while it was held, and given back
                heappop(self._heap)
            taken.append(offset)
        return taken

    def forget(self, start: int, end: int) -> None:
        """Drops the priorities of settled entries."""
        for offset in range(start, end):
            if offset in self._of:
                self._save()
                del self._of[offset]

    def _save(self) -> None:
        if self._saved != self._undo.work:
            self._saved = self._undo.work
            self._undo.append((self._reset,))

    def _reset(self) -> None:
        """Clears everything after an undo, so that all entries are read again."""
        self.below = 0
        self._heap.clear()
        self._of.clear()


def _priority(encoded: bytes) -> int:
    if not encoded:
        return 0
    try:
        return priority(encoded) or 0
    except RemoteProtocolError:
        return 0  # invalid properties are accepted as they are
