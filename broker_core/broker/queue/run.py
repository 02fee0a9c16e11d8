"""A run: consecutive offsets of a queue that name rows of one block.

Not here: the log that consists of runs, and which of their entries are settled (``log.py``, ``progress.py``).
Invariant: rows of a run rise with its offsets, and its bitmap selects exactly ``count`` of them. A run that
grows keeps its rows as numbers beside the bitmap. An operation that would break the invariant raises, because
a wrong row is another message, perhaps of another queue.
"""

from __future__ import annotations

import numpy as np

from broker_core.broker.state.block import Block, RowNumbers
from broker_core.broker.state.records import RunRecord
from broker_core.errors import CorruptCatalog
from broker_core.ids import BlockId, CommitSequence, QueueId


class Run:
    """``count`` offsets from ``first`` on, naming rows of one block in the same order (see RunRecord).

    A clipped run (``Log.runs_between``) skips the first ``skip`` set bits of its bitmap.
    """

    __slots__ = (
        "bitmap",
        "block",
        "committed_at",
        "count",
        "first",
        "numbers",
        "recorded",
        "row",
        "saved",
        "sequence",
        "skip",
    )

    def __init__(
        self,
        first: int,
        count: int,
        block: Block,
        row: int,
        bitmap: bytes | bytearray,
        sequence: CommitSequence,
        committed_at: int,
    ) -> None:
        self.first = first
        self.count = count
        self.block = block
        self.row = row
        self.bitmap = bitmap
        self.sequence = sequence  # NO_SEQUENCE: each row of the block has its own
        self.committed_at = committed_at
        self.skip = 0
        self.numbers: list[int] | None = None  # the rows of the bitmap, for a run that grows
        self.saved = 0  # ``Undo.work`` when its rows were last saved
        self.recorded = False  # a RunRecord of it is in the catalog

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def block_id(self) -> BlockId:
        return self.block.block_id

    @property
    def size_bytes(self) -> int:
        """Returns the approximate size of the bodies: the run's share of the block."""
        return self.block.size_bytes * self.count // max(1, self.block.rows)

    def rows(self) -> RowNumbers:
        """Returns the row numbers in offset order: a range if they are contiguous, otherwise an array. Raises
        CorruptCatalog.
        """
        if not self.bitmap:
            return range(self.row, self.row + self.count)
        bits = np.unpackbits(np.frombuffer(bytes(self.bitmap), dtype=np.uint8), bitorder="little")
        found = np.flatnonzero(bits)[self.skip : self.skip + self.count]
        if len(found) != self.count:
            raise CorruptCatalog(
                f"{self._text()}: its bitmap selects {len(found)} rows, not {self.count}; `txmq verify` "
                "names all such runs"
            )
        return found.astype(np.int64) + self.row

    @property
    def last_row(self) -> int:
        """Returns the highest row of a run that may grow."""
        return self.row + self.count - 1 if self.numbers is None else self.numbers[-1]

    def _text(self) -> str:
        return f"the run at offset {self.first} over block {self.block_id}"

    def clip(self, start: int, end: int) -> Run:
        """Returns a copy of the part within [start, end)."""
        start, end = max(start, self.first), min(end, self.end)
        ahead = start - self.first
        clipped = Run(
            start, end - start, self.block, self.row, bytes(self.bitmap), self.sequence, self.committed_at
        )
        if self.bitmap:
            clipped.skip = self.skip + ahead
        else:
            clipped.row += ahead
        return clipped

    def record(self, queue_id: QueueId) -> RunRecord:
        """Returns the record for the catalog. Raises ValueError if the bitmap contradicts ``count``."""
        if self.bitmap and int.from_bytes(self.bitmap, "little").bit_count() != self.count:
            raise ValueError(
                f"{self._text()} of queue {queue_id} has {self.count} entries, and its bitmap selects others"
            )
        return RunRecord(
            queue_id,
            self.first,
            self.count,
            self.block_id,
            self.row,
            bytes(self.bitmap),
            self.sequence,
            self.committed_at,
        )

    def extend(self, row: int) -> None:
        """Adds one row above all rows so far (else ValueError). A gap turns the run into a bitmap."""
        if row <= self.last_row:
            raise ValueError(f"{self._text()} ends with row {self.last_row}: row {row} does not follow it")
        if not self.bitmap:
            if row == self.row + self.count:
                self.count += 1
                return
            self.numbers = list(range(self.row, self.row + self.count))
            whole, rest = divmod(self.count, 8)
            self.bitmap = bytearray(b"\xff" * whole + bytes([(1 << rest) - 1] if rest else []))
        bit = row - self.row
        bitmap = self.bitmap
        assert isinstance(bitmap, bytearray)
        if bit >> 3 >= len(bitmap):
            bitmap.extend(bytes((bit >> 3) + 1 - len(bitmap)))
        bitmap[bit >> 3] |= 1 << (bit & 7)
        assert self.numbers is not None
        self.numbers.append(row)
        self.count += 1

    def extend_by(self, count: int) -> None:
        """Adds the ``count`` rows that follow its last one."""
        if self.numbers is not None and count:
            first = self.numbers[-1] + 1
            bit = first - self.row
            bitmap = self.bitmap
            assert isinstance(bitmap, bytearray)
            at, shift = bit >> 3, bit & 7
            bits = int.from_bytes(bitmap[at:], "little") | ((1 << count) - 1) << shift
            bitmap[at:] = bits.to_bytes((shift + count + 7) >> 3, "little")
            self.numbers.extend(range(first, first + count))
        self.count += count

    def shorten(self, count: int) -> None:
        """Undoes ``extend``: keeps only the first ``count`` rows."""
        if self.numbers is not None and isinstance(self.bitmap, bytearray):
            for number in self.numbers[count:]:
                bit = number - self.row
                if bit >> 3 < len(self.bitmap):
                    self.bitmap[bit >> 3] &= ~(1 << (bit & 7)) & 0xFF
            del self.numbers[count:]
        self.count = count
