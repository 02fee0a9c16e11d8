"""The log of a queue: offsets, the runs that hold them, and the rows that the runs name.

Not here: which entries are settled (``progress.py``) or handed out (``ready.py``). They say when a run may
go. Offsets are dense, in commit order. Readers look only below ``visible_end``. Invariant: runs lie in the
order of their offsets and do not overlap. A run pins its block, and unpins it when it leaves the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Sequence

from broker_core.broker.block import Block, Blocks
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.queue.decoded import Decoded
from broker_core.broker.queue.run import Run
from broker_core.broker.records import RunRecord
from broker_core.errors import DataLoss

_FIRST_RUNS_KEPT = 1024  # so many dead slots at the front of the run list before it is cut


class Log:
    __slots__ = (
        "_blocks", "_decoded", "_dropped", "_firsts", "_front",
        "_name", "_queue_id", "_runs", "_saved", "_undo",
        "next_offset", "visible_end",
    )  # fmt: skip

    def __init__(self, queue_id: int, name: str, blocks: Blocks) -> None:
        self._undo = blocks.undo
        self._saved = 0  # the last work (``Undo.work``) in which the numbers were noted
        self._queue_id = queue_id
        self._name = name
        self._blocks = blocks
        self._decoded = Decoded(blocks)
        self.next_offset = 0
        self.visible_end = 0
        self._runs: list[Run] = []
        self._firsts: list[int] = []
        self._front = 0  # runs before it are gone
        self._dropped: list[int] = []  # runs of the catalog that are gone

    def _save(self) -> None:
        self._saved = self._undo.work
        self._undo.append((self._put_back, self.next_offset, self._front))

    def _put_back(self, next_offset: int, front: int) -> None:
        self.next_offset, self._front = next_offset, front
        self._decoded.selected = None

    # -- growing ---------------------------------------------------------------------------------------------
    def append(
        self, count: int, block_id: int, row: int, bitmap: bytes, sequence: int, committed_at: int
    ) -> int:
        """``count`` more entries, visible after the commit; their first offset. Adjacent rows of an open
        block join the last run.
        """
        block = self._blocks.by_id[block_id]
        if count == 1 and not bitmap and sequence == 0:
            return self.append_row(block, row)
        first = self.next_offset
        self._blocks.pin(block_id)
        self._add_run(Run(first, count, block, row, bitmap, sequence, committed_at))
        self.next_offset = first + count
        return first

    def append_row(self, block: Block, row: int) -> int:
        """One more entry, of an open or memory-only block; its offset. A row that is not above the last run's
        begins a run.
        """
        offset = self.next_offset
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
        self._add_run(Run(offset, 1, block, row, b"", 0, 0))
        self.next_offset = offset + 1
        return offset

    def _add_run(self, run: Run) -> None:
        self._save()
        self._undo.append((self._remove_runs, len(self._runs)))
        run.saved = self._undo.work
        self._runs.append(run)
        self._firsts.append(run.first)

    def _shorten(self, run: Run, count: int) -> None:
        """Take back the growth of the last run."""
        run.shorten(count)
        self.next_offset = run.first + count
        self._decoded.selected = None

    def _remove_runs(self, length: int) -> None:
        del self._runs[length:], self._firsts[length:]

    def show(self) -> None:
        """The commits in hand are durable."""
        self.visible_end = self.next_offset

    def replace_run(self, run: Run, pieces: list[Run]) -> None:
        """The same entries in other blocks; ``pieces`` are pinned already."""
        at = self._runs.index(run)
        self._undo.append((self._put_runs, at, at + len(pieces), [run], [run.first]))
        self._drop(run)
        self._runs[at : at + 1] = pieces
        self._firsts[at : at + 1] = [piece.first for piece in pieces]

    # -- loading ---------------------------------------------------------------------------------------------
    def restore_entries(self, entries: Sequence[tuple[int, InboxRow | RunRecord]], blocks: Blocks) -> None:
        """Runs that the catalog names, and rows of open blocks at their offsets, in offset order."""
        next_offset = self.next_offset
        for offset, entry in entries:
            if isinstance(entry, RunRecord):
                self._restore(entry)
            else:
                self.next_offset = offset
                self.append_row(blocks.by_id[entry.block_id], entry.row)
        self.next_offset = max(next_offset, self.next_offset)

    def _restore(self, run: RunRecord) -> None:
        restored = Run(
            run.first,
            run.count,
            self._blocks.pin(run.block_id),
            run.row,
            run.bitmap,
            run.sequence,
            run.committed_at,
        )
        restored.recorded = True
        self._add_run(restored)
        self.next_offset = restored.end

    # -- looking ---------------------------------------------------------------------------------------------
    @property
    def runs(self) -> Sequence[Run]:
        """Those that some entry still needs."""
        return self._runs[self._front :]

    def runs_between(self, start: int, end: int) -> list[Run]:
        """The runs that hold entries of [start, end), clipped to it, settled entries included; none where
        they are deleted.
        """
        found: list[Run] = []
        at = max(self._front, bisect_right(self._firsts, start) - 1)
        for run in self._runs[at:]:
            if run.first >= end or start >= end:  # an empty range inside a run holds nothing of it
                break
            if run.end > start:
                found.append(run.clip(start, end))
        return found

    def transient_runs(self, start: int, end: int) -> list[Run]:
        """Memory-only runs that touch [start, end)."""
        return [
            run
            for run in self._runs[self._front :]
            if run.block.block_id < 0 and run.first < end and run.end > start
        ]

    def runs_in(self, block_ids: Container[int]) -> list[Run]:
        return [run for run in self._runs[self._front :] if run.block.block_id in block_ids]

    def locate(self, offset: int) -> tuple[Run, int]:
        """The run and the row of an entry that is not deleted. Raises DataLoss where it is,
        CorruptCatalog.
        """
        at = bisect_right(self._firsts, offset) - 1
        run = self._runs[at] if at >= self._front else None
        if run is None or offset >= run.first + run.count:
            raise DataLoss(f"the message at offset {offset} of queue '{self._name}' is not there any more")
        if not run.bitmap:
            return run, run.row + offset - run.first
        if run.numbers is not None:
            return run, run.numbers[offset - run.first]
        return run, self._decoded.row_of(run, offset)

    def rows(self, start: int, end: int) -> list[InboxRow]:
        """Messages from ``start`` on, at most up to ``end``: at least one, fewer than asked where they are
        stored elsewhere or large.

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
        """Drop the runs at the front that end at or below ``limit``: no entry of them is needed."""
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
        """Drop the runs that touch [start, end) and of which no entry ``is_needed``."""
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
        """The queue is deleted."""
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
        """The runs of the catalog that are gone, and the blocks that nothing pins any more."""
        if self._dropped:
            for first in self._dropped:
                change.drop(RunRecord, (self._queue_id, first))
            self._undo.attribute(self, "_dropped")
            self._dropped = []
        self._blocks.record(change)

    def record_last_run(self) -> RunRecord:
        """The run that was appended last, for the catalog."""
        return self._recorded(self._runs[-1])

    def record_between(self, start: int, end: int) -> list[RunRecord]:
        """Runs that touch [start, end) of stored blocks, and that a restart would not find: from now on it
        does.
        """
        found = [run for run in self._runs[self._front :] if run.first < end and run.end > start]
        return [self._recorded(run) for run in found if run.block.inbox is None and not run.recorded]

    def record_runs(self, block_id: int) -> list[RunRecord]:
        """The runs of an open block that is sealed, for the catalog. Their time is the block's latest: each
        row has its own.
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
