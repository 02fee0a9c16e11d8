"""Caches of what a log has read of its blocks: decoded rows, and the row numbers of one run.

Nothing here is undone, and all of it may be dropped at any moment.
Invariant: the row numbers are those of ``selected[0]`` at its length ``selected[1]``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from broker_core.broker.queue.run import Run
from broker_core.broker.state.block import Blocks, RowNumbers
from broker_core.broker.state.change import InboxRow

_BLOCK_ROWS = 256
_BLOCK_BYTES = 1024 * 1024


class DecodedBlocks:
    __slots__ = ("_blocks", "_first", "_rows", "selected")

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.selected: tuple[Run, int, npt.NDArray[np.int64]] | None = None
        self._first = 0
        self._rows: list[InboxRow] = []  # consecutive stored entries, from ``_first`` on

    def row_of(self, run: Run, offset: int) -> int:
        """Returns the row of an entry of a run with a bitmap. Raises CorruptCatalog."""
        selected = self.selected
        if selected is None or selected[0] is not run or selected[1] != run.count:
            rows = run.rows()
            assert not isinstance(rows, range)
            selected = self.selected = (run, run.count, rows)
        return int(selected[2][offset - run.first])

    def rows(self, run: Run, row: int, start: int, end: int) -> list[InboxRow]:
        """Returns entries in a segment; the first is in row ``row``. They are decoded in groups, and a group
        is kept until its last entry is requested.
        """
        first, rows = self._first, self._rows
        if not first <= start < first + len(rows):
            average = max(1, run.block.size_bytes // max(1, run.block.rows))
            first, count = start, min(run.end - start, _BLOCK_ROWS, max(1, _BLOCK_BYTES // average))
            numbers: RowNumbers = range(row, row + count)
            if run.numbers is not None:
                numbers = np.array(run.numbers[start - run.first : start - run.first + count], np.int64)
            elif run.bitmap:
                assert self.selected is not None  # by ``row_of``
                numbers = self.selected[2][start - run.first : start - run.first + count]
            rows = self._blocks.decode(run.block_id, numbers, run.sequence, run.committed_at)
            self._first, self._rows = first, rows
        found = rows[start - first : end - first]
        if start + len(found) == first + len(rows):
            self._rows = []
        return found

    def clear(self) -> None:
        """Drops everything: other entries may get the same offsets."""
        self.selected = None
        self._rows = []

    def forget(self, run: Run) -> None:
        """Drops the row numbers of a run that leaves the log."""
        if self.selected is not None and self.selected[0] is run:
            self.selected = None
