"""A queue: a log of runs, a floor with holes above it, and a cursor for its channels.

Not here: routing, reading of bodies, and who may do what (``topology.py``, ``broker.py``).

Words: *settled* is acked, dead-lettered, expired or purged. *held* is in the hands of a channel or of a prepared transaction.
Offsets are dense, in commit order, end-exclusive in pairs. Readers look only below ``visible_end``.
Invariant: ``floor`` is the first offset that is not settled; every hole lies above it, none touches it. A run leaves memory and
catalog when all its entries are deletable: settled in an unowned queue, below ``acked`` in an owned one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from broker_core.broker.batch import Batch, Batches
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.interval import IntervalSet
from broker_core.broker.records import HoleRecord, ProgressRecord, RunRecord

_FIRST_RUNS_KEPT = 1024  # so many dead slots at the front of the run list before it is cut


class Run:
    """``count`` offsets from ``first`` on, naming rows of one batch in the same order (see RunRecord).

    A clipped run (``Queue.runs_between``) skips the first ``skip`` set bits of its bitmap.
    """

    __slots__ = ("batch", "bitmap", "committed_at", "count", "first", "recorded", "row", "sequence", "skip")

    def __init__(self, first: int, count: int, batch: Batch, row: int, bitmap: bytes | bytearray, sequence: int, committed_at: int) -> None:
        self.first = first
        self.count = count
        self.batch = batch
        self.row = row
        self.bitmap = bitmap
        self.sequence = sequence  # 0: stands in the batch, row by row
        self.committed_at = committed_at
        self.skip = 0
        self.recorded = False  # a RunRecord of it is in the catalog

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def batch_id(self) -> int:
        return self.batch.batch_id

    @property
    def size_bytes(self) -> int:
        """Bodies of the run, about: its share of the batch."""
        return self.batch.size_bytes * self.count // max(1, self.batch.rows)

    def rows(self) -> range | npt.NDArray[np.int64]:
        """Row numbers in offset order: a range where they are contiguous, otherwise an array."""
        if not self.bitmap:
            return range(self.row, self.row + self.count)
        bits = np.unpackbits(np.frombuffer(bytes(self.bitmap), dtype=np.uint8), bitorder="little")
        return np.flatnonzero(bits)[self.skip : self.skip + self.count].astype(np.int64) + self.row

    def clip(self, start: int, end: int) -> Run:
        """A copy of the part within [start, end)."""
        start, end = max(start, self.first), min(end, self.end)
        ahead = start - self.first
        clipped = Run(start, end - start, self.batch, self.row, bytes(self.bitmap), self.sequence, self.committed_at)
        if self.bitmap:
            clipped.skip = self.skip + ahead
        else:
            clipped.row += ahead
        return clipped

    def record(self, queue_id: int) -> RunRecord:
        return RunRecord(queue_id, self.first, self.count, self.batch_id, self.row, bytes(self.bitmap), self.sequence, self.committed_at)

    def extend(self, row: int) -> None:
        """One more row, above all rows so far. A gap turns the run into a bitmap."""
        if not self.bitmap:
            if row == self.row + self.count:
                self.count += 1
                return
            whole, rest = divmod(self.count, 8)
            self.bitmap = bytearray(b"\xff" * whole + bytes([(1 << rest) - 1] if rest else []))
        bit = row - self.row
        bitmap = self.bitmap
        assert isinstance(bitmap, bytearray)
        if bit >> 3 >= len(bitmap):
            bitmap.extend(bytes((bit >> 3) + 1 - len(bitmap)))
        bitmap[bit >> 3] |= 1 << (bit & 7)
        self.count += 1


class Queue:
    def __init__(
        self,
        queue_id: int,
        name: str,
        batches: Batches,
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.queue_id = queue_id
        self.name = name
        self.durable = durable
        self.durable = durable
        self.exclusive = exclusive
        self.auto_delete = auto_delete
        self.arguments = arguments or {}
        self.connection: object = None  # of an exclusive queue
        self.written = durable and not exclusive  # an exclusive queue ends with its connection: nothing of it is worth a record
        self.deleted = False
        self.limited = not self.arguments.keys().isdisjoint(("x-max-length", "x-max-length-bytes"))
        self.dead_letters = "x-dead-letter-exchange" in self.arguments
        self.owner = ""  # app_id that holds the claim (protocol S6)
        self.acked = 0
        self.floor = 0
        self.next_offset = 0
        self.visible_end = 0
        self.claimed_end = 0  # of an owned queue: entries below are frozen by claims
        self.dispatched_below = 0  # nothing at or above was ever handed out
        self.held: set[int] = set()
        self.sizes: dict[int, int] | None = None  # body sizes of unsettled entries, only under x-max-length-bytes
        self.sizes_sum = 0
        self._batches = batches
        self._holes = IntervalSet()
        self._sent = IntervalSet()  # may have been handed out before
        self._runs: list[Run] = []
        self._firsts: list[int] = []
        self._front = 0  # runs before it are gone
        self._cursor = 0
        self._requeued: list[int] = []  # heap
        self._selected: tuple[Run, int, npt.NDArray[np.int64]] | None = None
        self._progress_dirty = False
        self._hole_changes: dict[int, int | None] = {}
        self._dropped: list[int] = []

    # -- the log --------------------------------------------------------------------------------------------------------
    def append(self, count: int, batch_id: int, row: int, bitmap: bytes, sequence: int, committed_at: int) -> int:
        """``count`` more entries, visible after the commit; their first offset. Adjacent rows of an open batch join the last run."""
        batch = self._batches.by_id[batch_id]
        if count == 1 and not bitmap and sequence == 0:
            return self.append_row(batch, row)
        first = self.next_offset
        self._batches.pin(batch_id)
        self._add_run(Run(first, count, batch, row, bitmap, sequence, committed_at))
        self.next_offset = first + count
        return first

    def append_row(self, batch: Batch, row: int) -> int:
        """One more entry, of an open or memory-only batch; its offset."""
        offset = self.next_offset
        if self._front < len(self._runs):
            run = self._runs[-1]
            if run.batch is batch and run.sequence == 0 and run.first + run.count == offset:
                if run.row + run.count == row and not run.bitmap:
                    run.count += 1
                else:
                    run.extend(row)
                self.next_offset = offset + 1
                return offset
        self._batches.pin(batch.batch_id)
        self._add_run(Run(offset, 1, batch, row, b"", 0, 0))
        self.next_offset = offset + 1
        return offset

    def _add_run(self, run: Run) -> None:
        self._runs.append(run)
        self._firsts.append(run.first)

    def restore_entries(self, entries: Sequence[tuple[int, InboxRow | RunRecord]], batches: Batches) -> None:
        """While loading: runs that the catalog names, and rows of open batches at their offsets, in offset order."""
        next_offset = self.next_offset
        for offset, entry in entries:
            if isinstance(entry, RunRecord):
                self._restore(entry)
            else:
                self.next_offset = offset
                self.append_row(batches.by_id[entry.batch_id], entry.row)
        self.next_offset = max(next_offset, self.next_offset)

    def _restore(self, run: RunRecord) -> None:
        restored = Run(run.first, run.count, self._batches.pin(run.batch_id), run.row, run.bitmap, run.sequence, run.committed_at)
        restored.recorded = True
        self._add_run(restored)
        self.next_offset = restored.end

    def runs_between(self, start: int, end: int) -> list[Run]:
        """The runs that hold entries of [start, end), clipped to it, settled entries included; none where they are deleted."""
        found: list[Run] = []
        at = max(self._front, bisect_right(self._firsts, start) - 1)
        for run in self._runs[at:]:
            if run.first >= end:
                break
            if run.end > start:
                found.append(run.clip(start, end))
        return found

    def add_size(self, offset: int, size_bytes: int) -> None:
        assert self.sizes is not None
        self.sizes[offset] = size_bytes
        self.sizes_sum += size_bytes

    def transient_runs(self, start: int, end: int) -> list[Run]:
        """Memory-only runs that touch [start, end)."""
        return [run for run in self._runs[self._front :] if run.batch.batch_id < 0 and run.first < end and run.end > start]

    def replace_run(self, run: Run, pieces: list[Run]) -> None:
        """The same entries in other batches; ``pieces`` are pinned already."""
        at = self._runs.index(run)
        self._drop(run)
        self._runs[at : at + 1] = pieces
        self._firsts[at : at + 1] = [piece.first for piece in pieces]

    def runs_in(self, batch_ids: Container[int]) -> list[Run]:
        return [run for run in self._runs[self._front :] if run.batch.batch_id in batch_ids]

    def needed_within(self, start: int, end: int) -> list[list[int]]:
        """Offsets of [start, end) that are not deletable, as [start, end] pairs."""
        return (
            [[max(start, self.acked), end]] if self.owner and end > self.acked else [] if self.owner else self.unsettled_within(start, end)
        )

    def record_last_run(self) -> RunRecord:
        """The run that was appended last, for the catalog."""
        run = self._runs[-1]
        run.recorded = True
        return run.record(self.queue_id)

    def record_runs(self, batch_id: int) -> list[RunRecord]:
        """The runs of an open batch that is sealed, for the catalog."""
        found = [run for run in self._runs[self._front :] if run.batch.batch_id == batch_id]
        for run in found:
            run.recorded = True
        return [run.record(self.queue_id) for run in found]

    def locate(self, offset: int) -> tuple[Run, int]:
        """The run and the row of an entry that is not deleted."""
        run = self._runs[bisect_right(self._firsts, offset) - 1]
        if not run.bitmap:
            return run, run.row + offset - run.first
        if self._selected is None or self._selected[0] is not run or self._selected[1] != run.count:
            rows = run.rows()
            assert not isinstance(rows, range)
            self._selected = (run, run.count, rows)
        return run, int(self._selected[2][offset - run.first])

    # -- settled --------------------------------------------------------------------------------------------------------
    def first_unsettled(self) -> int:
        """The first offset that is not settled; ``next_offset`` where all are."""
        return self.floor

    def is_settled(self, offset: int) -> bool:
        return offset < self.floor or self._holes.contains(offset)

    def settled_within(self, start: int, end: int) -> list[list[int]]:
        """Settled offsets of [start, end), as [start, end] pairs."""
        below = [[start, min(end, self.floor)]] if start < min(end, self.floor) else []
        return below + self._holes.within(max(start, self.floor), end)

    def unsettled_within(self, start: int, end: int) -> list[list[int]]:
        """Offsets of [start, end) that are not settled, as [start, end] pairs."""
        return self._holes.outside(max(start, self.floor), end)

    def redelivered_within(self, start: int, end: int) -> list[list[int]]:
        """Offsets of [start, end) that may have been handed out before, as [start, end] pairs."""
        return self._sent.within(start, end)

    def settle(self, start: int, end: int) -> None:
        """Acked, dead-lettered, expired or purged. Settling twice is fine."""
        start = max(start, self.floor)
        if start >= end:
            return
        if self.sizes is not None:
            self.sizes_sum -= sum(self.sizes.pop(offset, 0) for offset in range(start, end))
        self._progress_dirty = True
        if start == self.floor and not len(self._holes):
            self.floor = end
        else:
            low, high, absorbed = self._holes.add(start, end)
            for absorbed_start in absorbed:
                self._hole_changes[absorbed_start] = None
            if low <= self.floor:
                self._holes.subtract(low, high)
                self.floor = high
            else:
                self._hole_changes[low] = high
        if not self.owner:
            self._free(start, end)

    def ack_to(self, offset: int) -> None:
        """Everything below ``offset`` is settled and may be deleted: the source has acked it and the range after it (S5)."""
        if offset <= self.acked:
            return
        self.settle(self.floor, offset)
        self.acked = offset
        self._progress_dirty = True
        self._free(0, offset)

    def _free(self, start: int, end: int) -> None:
        """Drop the runs, of those that touch [start, end), whose entries are all deletable."""
        limit = self.acked if self.owner else self.floor
        while self._front < len(self._runs) and self._runs[self._front].end <= limit:
            self._drop(self._runs[self._front])
            self._front += 1
        if self._front > _FIRST_RUNS_KEPT and self._front * 2 > len(self._runs):
            del self._runs[: self._front], self._firsts[: self._front]
            self._front = 0
        if self.owner or not len(self._holes):
            return
        at = max(self._front, bisect_right(self._firsts, start) - 1)
        while at < len(self._runs) and self._runs[at].first < end:
            run = self._runs[at]
            if run.end > self.floor and self._holes.covers(max(run.first, self.floor), run.end):
                self._drop(run)
                del self._runs[at], self._firsts[at]
            else:
                at += 1

    def _drop(self, run: Run) -> None:
        self._batches.unpin(run.batch.batch_id)
        if run.recorded:
            self._dropped.append(run.first)
        if self._selected is not None and self._selected[0] is run:
            self._selected = None

    # -- ownership (protocol S6) ----------------------------------------------------------------------------------------
    def own(self, app_id: str) -> None:
        """From now on entries are deletable when acked, no more when settled. Who may own is the broker's rule."""
        if self.owner != app_id:
            self.owner = app_id
            self.acked = self.claimed_end = self.floor
            self._progress_dirty = True

    def claim(self, end: int) -> None:
        """Entries below ``end`` are claimed by the owner: frozen, and as good as handed out."""
        self.claimed_end = max(self.claimed_end, end)
        self.dispatched_below = max(self.dispatched_below, end)
        self._progress_dirty = True

    def release(self) -> None:
        """Nobody owns the queue: claimed and unsettled entries are ready again, as redelivered."""
        self._sent.add(self.floor, max(self.floor, self.claimed_end))
        self.owner = ""
        self.acked = self.claimed_end = self.floor
        self._cursor, self._requeued = self.floor, []
        self._progress_dirty = True
        self._free(0, self.next_offset)

    def reserve(self, offset: int) -> None:
        """Offsets below ``offset`` are taken, though their entries may be gone (transient messages that a claim names)."""
        if offset > self.next_offset:
            self.next_offset, gap = offset, self.next_offset
            self.visible_end = max(self.visible_end, offset)
            self.settle(gap, offset)

    # -- counts ---------------------------------------------------------------------------------------------------------
    @property
    def messages(self) -> int:
        """Committed and not settled."""
        return max(0, self.visible_end - self.floor - self._holes.measure(self.floor, self.visible_end))

    @property
    def unacknowledged(self) -> int:
        """Of these, held by channels or prepared transactions."""
        return len(self.held)

    @property
    def ready(self) -> int:
        """Entries that overflow may drop: neither settled, held nor claimed; those of the commit in hand count."""
        start = max(self.floor, self.claimed_end) if self.owner else self.floor
        return self.next_offset - start - self._holes.measure(start, self.next_offset) - len(self.held)

    # -- dispatch -------------------------------------------------------------------------------------------------------
    def head(self, end: int) -> int | None:
        """The next ready offset below ``end``, requeued ones first; it stays where it is."""
        while self._requeued:
            offset = self._requeued[0]
            if offset not in self.held and not self.is_settled(offset):
                if self.owner and offset < self.claimed_end:
                    break
                return offset if offset < end else None
            heappop(self._requeued)
        cursor = max(self._cursor, self.floor, self.claimed_end if self.owner else 0)
        while cursor < end:
            if cursor in self.held:
                cursor += 1
                continue
            after = self._holes.first_outside(cursor)
            if after == cursor:
                return cursor
            cursor = after
        return None

    def take(self) -> int | None:
        """Hand out the next ready, visible entry; the caller holds it until it settles or requeues it."""
        offset = self.head(self.visible_end)
        if offset is None:
            return None
        if self._requeued and self._requeued[0] == offset:
            heappop(self._requeued)
        else:
            self._cursor = offset + 1
        self.hold(offset)
        return offset

    def hold(self, offset: int) -> None:
        self.held.add(offset)
        if offset >= self.dispatched_below:
            self.dispatched_below = offset + 1

    def was_sent(self, offset: int) -> bool:
        """Whether a delivery of it has to say redelivered."""
        return self._sent.contains(offset)

    def requeue(self, offset: int) -> None:
        """A held entry is ready again, at its old place, and any later delivery of it says redelivered."""
        self.held.discard(offset)
        if not self.is_settled(offset):
            self._sent.add(offset, offset + 1)
            heappush(self._requeued, offset)

    def settle_held(self, offset: int) -> None:
        self.held.discard(offset)
        self.settle(offset, offset + 1)

    def ready_offsets(self) -> list[list[int]]:
        """Visible entries that a purge takes: neither settled nor held."""
        if not self.held:
            return self.unsettled_within(self.floor, self.visible_end)
        taken = IntervalSet((offset, offset + 1) for offset in self.held)
        return [part for start, end in self.unsettled_within(self.floor, self.visible_end) for part in taken.outside(start, end)]

    # -- durable --------------------------------------------------------------------------------------------------------
    def restore_progress(self, progress: ProgressRecord, holes: list[HoleRecord]) -> None:
        self.owner = progress.owner
        self.floor = progress.floor
        self.acked = progress.acked
        self.next_offset = max(progress.next_offset, progress.floor)
        self.dispatched_below = progress.dispatched_below
        for hole in holes:
            self._holes.add(hole.start, hole.end)
            self.next_offset = max(self.next_offset, hole.end)

    def loaded(self, *, clean: bool) -> None:
        """All runs are restored: settle what has no run (transient messages), and say what may have been sent before."""
        kept = IntervalSet((run.first, run.end) for run in self._runs)
        for start, end in kept.outside(self.floor, self.next_offset):
            self.settle(start, end)
        self._cursor = self.floor
        self.claimed_end = max(self.claimed_end, self.acked) if self.owner else 0
        self.visible_end = self.next_offset
        self.dispatched_below = min(self.dispatched_below, self.next_offset) if clean else self.next_offset
        self._sent.add(min(self.floor, self.acked), self.dispatched_below)
        self._free(0, self.next_offset)

    def record(self, change: Change) -> None:
        """Write what became dirty: progress, holes, and the drops of runs that became deletable."""
        if self._progress_dirty:
            self._progress_dirty = False
            if not self.owner:
                self.acked = self.floor
            self._sent.drop_below(min(self.floor, self.acked))
            if self.written:
                change.puts.append(self.progress())
        if self._hole_changes:
            if self.written:
                for start, end in self._hole_changes.items():
                    if end is None:
                        change.drops.append((HoleRecord, (self.queue_id, start)))
                    else:
                        change.puts.append(HoleRecord(self.queue_id, start, end))
            self._hole_changes.clear()
        if self._dropped:
            change.drops.extend((RunRecord, (self.queue_id, first)) for first in self._dropped)
            self._dropped.clear()
        self._batches.record(change)

    def progress(self) -> ProgressRecord:
        return ProgressRecord(self.queue_id, self.owner, self.floor, self.acked, self.next_offset, self.dispatched_below)

    def forget_runs(self) -> None:
        """The queue is deleted: nothing of it is needed."""
        for run in self._runs[self._front :]:
            self._drop(run)
        self._runs, self._firsts, self._front = [], [], 0
