"""The order of a queue with priorities: highest first, then by offset.

Not here: which entries are settled (``progress.py``) or held (``ready.py``). Such entries may be in the heap
and are ignored.
Invariant: every ready entry below ``below`` is in the heap, and none is there twice. What was known before a
work is known after its undo: otherwise a work that needs the orders of two queues, neither of which is in
memory, would forget the one when it waits for the other, for ever.
"""

from __future__ import annotations

from collections.abc import Set
from heapq import heappop, heappush

from broker_core.broker.queue.log import Log
from broker_core.broker.queue.progress import Progress
from broker_core.core.block import NotLoaded
from broker_core.core.errors import RemoteProtocolError
from broker_core.core.undo import Undo
from broker_core.message.properties import priority


class Ranks:
    """``highest`` is x-max-priority, to which higher priorities are reduced. The default priority is 0."""

    __slots__ = (
        "_forgotten", "_heap", "_log", "_of", "_offsets", "_popped", "_progress", "_saved", "_unacked",
        "_undo", "below", "highest",
    )  # fmt: skip

    def __init__(self, highest: int, log: Log, progress: Progress, unacked: Set[int], undo: Undo) -> None:
        self._log = log
        self._progress = progress
        self._unacked = unacked
        self._undo = undo
        self._saved = 0  # ``Undo.work`` of the last change
        self.highest = highest
        self.below = 0
        self._heap: list[tuple[int, int]] = []  # (-priority, offset)
        self._offsets: set[int] = set()  # of the heap
        self._of: dict[int, int] = {}  # priorities above 0 of entries that are not settled
        # in this work: entries that left the heap, and priorities that left ``_of``
        self._popped: list[int] = []
        self._forgotten: dict[int, int] = {}

    def add(self, start: int, properties: list[bytes]) -> None:
        """Adds consecutive entries that became visible."""
        for offset, encoded in enumerate(properties, start):
            rank = min(_priority(encoded), self.highest)
            if rank:
                self._of[offset] = rank
            self.push(offset)

    def push(self, offset: int) -> None:
        """Adds an entry that is ready again."""
        if offset not in self._offsets:
            self._offsets.add(offset)
            heappush(self._heap, (-self._of.get(offset, 0), offset))

    def best(self) -> int | None:
        """Returns the next visible entry without taking it. Raises CorruptSegment, DataLoss."""
        progress, visible_end = self._progress, self._log.visible_end
        if self.below < visible_end:
            self._save()
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
        if self._heap and progress.floor >= visible_end:  # all were purged: not one by one
            self._undo.attribute(self, "_heap")
            self._undo.attribute(self, "_offsets")
            self._heap, self._offsets = [], set()
        heap = self._heap
        while heap and (heap[0][1] in self._unacked or progress.is_settled(heap[0][1])):
            self._pop()
        return heap[0][1] if heap else None

    def take(self, limit: int) -> list[int]:
        """Takes and returns at most ``limit`` of the next visible entries."""
        taken: list[int] = []
        while len(taken) < limit and (offset := self.best()) is not None:
            self._pop()
            taken.append(offset)
        return taken

    def forget(self, start: int, end: int) -> None:
        """Drops the priorities of settled entries."""
        for offset in range(start, end):
            if offset in self._of:
                self._save()
                self._forgotten[offset] = self._of.pop(offset)

    def _pop(self) -> None:
        self._save()
        offset = self._heap[0][1]
        self._popped.append(offset)
        heappop(self._heap)
        self._offsets.discard(offset)

    def _save(self) -> None:
        if self._saved != self._undo.work:
            self._saved = self._undo.work
            self._popped, self._forgotten = [], {}
            self._undo.append((self._put_back, self.below, self._popped, self._forgotten))

    def _put_back(self, below: int, popped: list[int], forgotten: dict[int, int]) -> None:
        """What was learnt meanwhile stays, and is learnt again: it lacks what the work had settled."""
        self._of.update(forgotten)
        self.below = min(below, self.below)
        if len(self._offsets) != len(self._heap):  # memory ran out between the two
            self._offsets = {offset for _, offset in self._heap}
        for offset in popped:
            self.push(offset)


def _priority(encoded: bytes) -> int:
    if not encoded:
        return 0
    try:
        return priority(encoded) or 0
    except RemoteProtocolError:
        return 0  # invalid properties are accepted as they are
