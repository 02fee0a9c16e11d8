"""The log of a queue: offsets, the runs that hold them, and the rows that the runs name.

Not here: which entries are settled (``progress.py``) or delivered (``ready.py``); they decide when a run is
dropped. Offsets are dense, in commit order. Readers look only below ``visible_end``.
Invariant: runs are in the order of their offsets and do not overlap. A run pins its block, and unpins it when
it leaves the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Sequence

from broker_core.broker.queue.decoded import DecodedBlocks
from broker_core.broker.queue.run import Run
from broker_core.broker.state.block import Block, Blocks
from broker_core.broker.state.change import Change, InboxRow
from broker_core.broker.state.records import RunRecord
from broker_core.broker.state.undo import Tally
from broker_core.errors import DataLoss
from broker_core.ids import NO_SEQUENCE, BlockId, CommitSequence, QueueId

_FIRST_RUNS_KEPT = 1024  # dropped runs at the front of the list before they are removed from it


class Log:
    __slots__ = (
        "_blocks", "_decoded", "_dropped", "_firsts", "_front",
        "_name", "_queue_id", "_runs", "_saved", "_undo",
        "next_offset", "tally", "visible_end",
    )  # fmt: skip

    def __init__(self, queue_id: QueueId, name: str, blocks: Blocks, tally: Tally) -> None:
        self._undo = blocks.undo
        self._saved = 0  # ``Undo.work`` when the numbers were last saved
        self._queue_id = queue_id
        self._name = name
        self._blocks = blocks
        self._decoded = DecodedBlocks(blocks)
        self.tally = tally
        self.next_offset = 0
        self.visible_end = 0
        self._runs: list[Run] = []
        self._firsts: list[int] = []
        self._front = 0  # runs before this index are dropped
        self._dropped: list[int] = []  # dropped runs that the catalog has

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
        self._undo.append((self._remove_runs, len(self._runs)))
        run.saved = self._undo.work
        self._runs.append(run)
        self._firsts.append(run.first)

    def _shorten(self, run: Run, count: int) -> None:
        """Undoes the growth of the last run."""
        run.shorten(count)
        self.next_offset = run.first + count
        self._decoded.selected = None

    def _remove_runs(self, length: int) -> None:
        del self._runs[length:], self._firsts[length:]

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
                self._restore(entry)
            else:
                self.next_offset = offset
                self.append_row(blocks.by_id[entry.block_id], entry.row)
        self.next_offset = max(next_offset, self.next_offset)

    def _restore(self, run: RunRecord) -> None:
        block = self._blocks.pin(run.block_id)
        restored = Run(run.first, run.count, block, run.row, run.bitmap, run.sequence, run.committed_at)
        restored.recorded = True
        self._add_run(restored)
        self.next_offset = restored.end

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

    def transient_runs(self, start: int, end: int) -> list[Run]:
        """Returns memory-only runs that overlap [start, end)."""
        return [
            run
            for run in self._runs[self._front :]
            if run.block.block_id < 0 and run.first < end and run.end > start
        ]

    def runs_in(self, block_ids: Container[BlockId]) -> list[Run]:
        return [run for run in self._runs[self._front :] if run.block.block_id in block_ids]

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
        for run in self._runs[self._front :]:
            self._drop(run)
        self._runs, self._firsts, self._front = [], [], 0

    def _put_runs(self, at: int, end: int, runs: list[Run], firsts: list[int]) -> None:
        self._runs[at:end] = runs
        self._firsts[at:end] = firsts

    def _drop(self, run: Run) -> None:
        self._blocks.unpin(run.block.block_id)
        if run.recorded:
            self._undo.growth(self._dropped)
            self._dropped.append(run.first)
        self._decoded.forget(run)

    # -- durable ---------------------------------------------------------------------------------------------
    def record(self, change: Change) -> None:
        """Records which runs of the catalog are dropped, and which blocks nothing pins."""
        if self._dropped:
            for first in self._dropped:
                change.drop(RunRecord, (self._queue_id, first))
            self._undo.attribute(self, "_dropped")
            self._dropped = []
        self._blocks.record(change)

    def record_last_run(self) -> RunRecord:
        """Returns the record of the last appended run, for the catalog."""
        return self._recorded(self._runs[-1])

    def record_between(self, start: int, end: int) -> list[RunRecord]:
        """Returns records of the runs of stored blocks that overlap [start, end) and are not in the catalog
        yet.
        """
        found = [run for run in self._runs[self._front :] if run.first < end and run.end > start]
        return [self._recorded(run) for run in found if run.block.inbox is None and not run.recorded]

    def record_runs(self, block_id: BlockId) -> list[RunRecord]:
        """Returns the records of the runs of an open block that is sealed. Their time is the latest of the
        block; each row has its own.
        """
        found = [run for run in self._runs[self._front :] if run.block.block_id == block_id]
        for run in found:
            self._undo.attribute(run, "committed_at")
            if run.block.inbox:
                run.committed_at = run.block.inbox[-1].committed_at
        return [self._recorded(run) for run in found]

    def _recorded(self, run: Run) -> RunRecord:
        self._undo.attribute(run, "recorded")
        run.recorded = True
        return run.record(self._queue_id)


def committed_at(log: Log, offset: int) -> tuple[int, bool]:
    """Returns when an entry was committed, in microseconds since the epoch, and True; False if only its
    stored block has the time: then it is that of the last commit in the block. Raises DataLoss.
    """
    run = next(iter(log.runs_between(offset, offset + 1)), None)
    if run is not None and (run.sequence or run.block.inbox is None):
        return run.committed_at, bool(run.sequence)
    return log.rows(offset, offset + 1)[0].committed_at, True  # in memory
