"""The log of a queue: offsets, the runs that hold them, and the rows that the runs name.

Not here: which entries are settled (``progress.py``) or delivered (``ready.py``); they decide when a run is
dropped. Offsets are dense, in commit order. Readers look only below ``visible_end``.
Invariant: runs are in the order of their offsets and do not overlap. A run pins its block, and unpins it when
it leaves the log. Rows of a run rise with its offsets, and its bitmap selects exactly ``count`` of them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker_core.broker.queue.message_ids import MessageIds
from broker_core.core.block import Block, Blocks, RowNumbers
from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import CorruptCatalog, DataLoss
from broker_core.core.ids import NO_SEQUENCE, BlockId, CommitSequence, QueueId
from broker_core.core.records import RunRecord
from broker_core.core.undo import Tally, Undo

_BLOCK_ROWS = 256
_BLOCK_BYTES = 1024 * 1024
_FIRST_RUNS_KEPT = 1024  # dropped runs at the front of the list before they are removed from it


@dataclass(slots=True, eq=False)
class Run:
    """``count`` offsets from ``first`` on, naming rows of one block in the same order (see RunRecord). An
    operation that would break this raises, because a wrong row is another message, perhaps of another queue.

    A clipped run (``Log.runs_between``) skips the first ``skip`` set bits of its bitmap. A run that grows
    keeps its rows as numbers beside the bitmap.
    """

    first: int
    count: int
    block: Block
    row: int
    bitmap: bytes | bytearray
    sequence: CommitSequence  # NO_SEQUENCE: each row of the block has its own
    committed_at: int
    skip: int = 0
    numbers: list[int] | None = None  # the rows of the bitmap, for a run that grows
    saved: int = 0  # ``Undo.work`` when its rows were last saved
    recorded: bool = False  # a RunRecord of it is in the catalog

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
                f"{self._text()}: its bitmap selects {len(found)} rows, not {self.count}; `txmq broker "
                "verify` names all such runs"
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
        rows = self.block_id, self.row, bytes(self.bitmap)
        times = self.sequence, self.committed_at, self.block.expires_us
        return RunRecord(queue_id, self.first, self.count, *rows, *times)

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


class DecodedBlocks:
    """What a log has read of its blocks: decoded rows, and the row numbers of one run, which are those of
    ``selected[0]`` at its length ``selected[1]``. All of it may be dropped at any moment; nothing is undone.
    """

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


class RecordedRuns:
    """Which runs of a log the catalog has, and which of them it is to drop."""

    __slots__ = ("_queue_id", "_undo", "dropped")

    def __init__(self, queue_id: QueueId, undo: Undo) -> None:
        self._queue_id, self._undo = queue_id, undo
        self.dropped: list[int] = []

    def put(self, run: Run) -> RunRecord:
        self._undo.attribute(run, "recorded")
        run.recorded = True
        return run.record(self._queue_id)

    def drop(self, run: Run) -> None:
        self._undo.growth(self.dropped)
        self.dropped.append(run.first)

    def record(self, change: Change) -> None:
        for first in self.dropped:
            change.drop(RunRecord, (self._queue_id, first))
        self._undo.attribute(self, "dropped")
        self.dropped = []


class Log:
    __slots__ = (
        "_blocks", "_decoded", "_firsts", "_front", "_name", "_recorded", "_runs", "_saved", "_undo",
        "ids", "next_offset", "tally", "visible_end",
    )  # fmt: skip

    def __init__(self, queue_id: QueueId, name: str, blocks: Blocks, tally: Tally) -> None:
        self._undo = blocks.undo
        self._saved = 0  # ``Undo.work`` when the numbers were last saved
        self._name, self._blocks = name, blocks
        self._recorded = RecordedRuns(queue_id, blocks.undo)
        self._decoded = DecodedBlocks(blocks)
        self.tally = tally
        self.ids: MessageIds | None = None  # None: the queue takes duplicates
        self.next_offset = self.visible_end = 0
        self._runs: list[Run] = []
        self._firsts: list[int] = []
        self._front = 0  # runs before this index are dropped

    def _save(self) -> None:
        self._saved = self._undo.work
        self._undo.append((self._put_back, self.next_offset, self._front))

    def _put_back(self, next_offset: int, front: int) -> None:
        self.next_offset, self._front = next_offset, front
        self._decoded.clear()

    # -- growing ---------------------------------------------------------------------------------------------
    def append(
        self,
        count: int,
        block_id: BlockId,
        row: int,
        bitmap: bytes,
        sequence: CommitSequence,
        committed_at: int,
    ) -> int:
        """Appends ``count`` entries, visible after the commit, and returns their first offset. Adjacent rows
        of an open block extend the last run.
        """
        block = self._blocks.by_id[block_id]
        if count == 1 and not bitmap and sequence == 0:
            return self.append_row(block, row)
        first = self.next_offset
        self._blocks.pin(block_id)
        self._add_run(Run(first, count, block, row, bitmap, sequence, committed_at))
        self.next_offset = first + count
        self.tally.add(count)
        return first

    def append_row(self, block: Block, row: int) -> int:
        """Appends one entry of an open or memory-only block and returns its offset. A row that is not above
        the last run's rows starts a new run.
        """
        offset = self.next_offset
        self.tally.add(1)
        if self._front < len(self._runs):
            run = self._runs[-1]
            if run.block is block and run.sequence == 0 and run.first + run.count == offset:
                undo = self._undo
                if run.saved != undo.work:
                    run.saved = undo.work
                    undo.append((self._shorten, run, run.count))
                if run.row + run.count == row and not run.bitmap:
                    run.count += 1
                    self.next_offset = offset + 1
                    return offset
                if row > run.last_row:
                    run.extend(row)
                    self.next_offset = offset + 1
                    return offset
        self._blocks.pin(block.block_id)
        self._add_run(Run(offset, 1, block, row, b"", NO_SEQUENCE, 0))
        self.next_offset = offset + 1
        return offset

    def append_rows(self, block: Block, row: int, count: int) -> int:
        """Like ``append_row`` for ``count`` rows that follow each other. Returns the offset of the first."""
        offset = self.append_row(block, row)
        self._runs[-1].extend_by(count - 1)
        self.tally.add(count - 1)
        self.next_offset = offset + count
        return offset

    def _add_run(self, run: Run) -> None:
        self._save()
        self._undo.append((self._put_runs, len(self._runs), sys.maxsize, [], []))
        run.saved = self._undo.work
        self._runs.append(run)
        self._firsts.append(run.first)

    def _shorten(self, run: Run, count: int) -> None:
        """Undoes the growth of the last run."""
        run.shorten(count)
        self.next_offset = run.first + count
        self._decoded.selected = None

    def show(self) -> None:
        """Makes the entries of the commits in progress visible; they are durable."""
        self.visible_end = self.next_offset

    def replace_run(self, run: Run, pieces: list[Run]) -> None:
        """Replaces a run by ``pieces``: the same entries in other blocks, already pinned."""
        at = self._runs.index(run)
        self._undo.append((self._put_runs, at, at + len(pieces), [run], [run.first]))
        self._drop(run)
        self._runs[at : at + 1] = pieces
        self._firsts[at : at + 1] = [piece.first for piece in pieces]

    # -- loading ---------------------------------------------------------------------------------------------
    def restore_entries(self, entries: Sequence[tuple[int, InboxRow | RunRecord]], blocks: Blocks) -> None:
        """Restores runs that the catalog names, and rows of open blocks at their offsets, in offset order."""
        next_offset = self.next_offset
        for offset, entry in entries:
            if isinstance(entry, RunRecord):
                rows = entry.count, self._blocks.pin(entry.block_id), entry.row, entry.bitmap
                run = Run(entry.first, *rows, entry.sequence, entry.committed_at, recorded=True)
                self._add_run(run)
                self.next_offset = run.end
            else:
                self.next_offset = offset
                self.append_row(blocks.by_id[entry.block_id], entry.row)
        self.next_offset = max(next_offset, self.next_offset)

    # -- looking ---------------------------------------------------------------------------------------------
    @property
    def runs(self) -> Sequence[Run]:
        """Returns the runs that have a needed entry."""
        return self._runs[self._front :]

    def runs_between(self, start: int, end: int) -> list[Run]:
        """Returns the runs that hold entries of [start, end), clipped to it, including settled entries.
        Deleted entries have no run.
        """
        found: list[Run] = []
        at = max(self._front, bisect_right(self._firsts, start) - 1)
        for run in self._runs[at:]:
            if run.first >= end or start >= end:  # an empty range inside a run matches nothing
                break
            if run.end > start:
                found.append(run.clip(start, end))
        return found

    def runs_in(self, block_ids: Container[BlockId]) -> list[Run]:
        return [run for run in self.runs if run.block.block_id in block_ids]

    def locate(self, offset: int) -> tuple[Run, int]:
        """Returns the run and the row of an entry. Raises DataLoss for a deleted entry, CorruptCatalog."""
        at = bisect_right(self._firsts, offset) - 1
        run = self._runs[at] if at >= self._front else None
        if run is None or offset >= run.first + run.count:
            raise DataLoss(f"the message at offset {offset} of queue '{self._name}' is gone")
        if not run.bitmap:
            return run, run.row + offset - run.first
        if run.numbers is not None:
            return run, run.numbers[offset - run.first]
        return run, self._decoded.row_of(run, offset)

    def rows(self, start: int, end: int) -> list[InboxRow]:
        """Returns messages from ``start`` on, up to ``end`` at most. It returns at least one, and fewer than
        requested if they are large or stored in several blocks.

        Raises CorruptSegment, DataLoss.
        """
        run, row = self.locate(start)
        end = min(end, run.first + run.count)
        inbox = run.block.inbox
        if inbox is None:
            return self._decoded.rows(run, row, start, end)
        if not run.bitmap:
            return inbox[row : row + end - start]
        if run.numbers is not None:
            return [inbox[number] for number in run.numbers[start - run.first : end - run.first]]
        return [inbox[self.locate(offset)[1]] for offset in range(start, end)]

    # -- forgetting ------------------------------------------------------------------------------------------
    def forget_below(self, limit: int) -> None:
        """Drops the runs at the front that end at or below ``limit``; none of their entries is needed."""
        runs, front = self._runs, self._front
        if front < len(runs) and runs[front].first + runs[front].count <= limit:
            if self._saved != self._undo.work:
                self._save()
            while front < len(runs) and runs[front].end <= limit:
                self._drop(runs[front])
                front = self._front = front + 1
        if front > _FIRST_RUNS_KEPT and front * 2 > len(runs):
            self._undo.append((self._put_runs, 0, 0, runs[:front], self._firsts[:front]))
            del runs[:front], self._firsts[:front]
            self._front = 0

    def forget_within(self, start: int, end: int, is_needed: Callable[[int, int], bool]) -> None:
        """Drops the runs that overlap [start, end) and have no entry that ``is_needed``."""
        at = max(self._front, bisect_right(self._firsts, start) - 1)
        while at < len(self._runs) and self._runs[at].first < end:
            run = self._runs[at]
            if is_needed(run.first, run.first + run.count):
                at += 1
                continue
            self._drop(run)
            self._undo.append((self._put_runs, at, at, [run], [run.first]))
            del self._runs[at], self._firsts[at]

    def forget_all(self) -> None:
        """Drops all runs of a deleted queue."""
        for name in ("_runs", "_firsts", "_front"):
            self._undo.attribute(self, name)
        for run in self.runs:
            self._drop(run)
        self._runs, self._firsts, self._front = [], [], 0

    def _put_runs(self, at: int, end: int, runs: list[Run], firsts: list[int]) -> None:
        self._runs[at:end] = runs
        self._firsts[at:end] = firsts

    def _drop(self, run: Run) -> None:
        self._blocks.unpin(run.block.block_id)
        if run.recorded:
            self._recorded.drop(run)
        self._decoded.forget(run)

    # -- durable ---------------------------------------------------------------------------------------------
    def record(self, change: Change) -> None:
        """Records which runs of the catalog are dropped, and which blocks nothing pins."""
        if self._recorded.dropped:
            self._recorded.record(change)
        self._blocks.record(change)

    def record_last_run(self) -> RunRecord:
        """Returns the record of the last appended run, for the catalog."""
        return self._recorded.put(self._runs[-1])

    def record_between(self, start: int, end: int) -> list[RunRecord]:
        """Returns records of the runs of stored blocks that overlap [start, end) and are not in the catalog
        yet.
        """
        found = [run for run in self.runs if run.first < end and run.end > start]
        return [self._recorded.put(run) for run in found if run.block.inbox is None and not run.recorded]

    def record_runs(self, block_id: BlockId) -> list[RunRecord]:
        """Returns the records of the runs of an open block that is sealed. Their time is the latest of the
        block; each row has its own.
        """
        found = self.runs_in((block_id,))
        for run in found:
            self._undo.attribute(run, "committed_at")
            if run.block.inbox:
                run.committed_at = run.block.inbox[-1].committed_at
        return [self._recorded.put(run) for run in found]


def committed_at(log: Log, offset: int) -> tuple[int, bool]:
    """Returns when an entry was committed, in microseconds since the epoch, and True; False if only its
    stored block has the time: then it is that of the last commit in the block. Raises DataLoss.
    """
    run = next(iter(log.runs_between(offset, offset + 1)), None)
    if run is not None and (run.sequence or run.block.inbox is None):
        return run.committed_at, bool(run.sequence)
    return log.rows(offset, offset + 1)[0].committed_at, True  # in memory
