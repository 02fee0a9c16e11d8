"""A queue: a log of runs, a floor with holes above it, and a cursor for its channels.

Not here: routing, reading of bodies, and who may do what (``topology.py``, ``broker.py``).

Words: *settled* is acked, dead-lettered, expired or purged. *held* is in the hands of a channel or of a prepared transaction.
*claimed* is in a range that the owning app was given and has not acked. *ready* is none of these. An entry is *needed* while it is
not settled, or claimed: what is not needed any more may lose its bytes at any moment, and is never needed again.
Offsets are dense, in commit order, end-exclusive in pairs. Readers look only below ``visible_end``.
Invariant: ``floor`` is the first offset that is not settled; every hole lies above it, none touches it. A run leaves memory and
catalog when none of its entries is needed. Below ``acked`` nothing is claimed: what is not settled there is skipped by the owner.
Every mutator tells ``undo`` first what it is about to write (``undo.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from broker_core.broker.block import Block, Blocks
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.consumer import Consumers
from broker_core.broker.queue.interval import IntervalSet
from broker_core.broker.queue.rank import Ranks
from broker_core.broker.queue.run import Run
from broker_core.broker.records import DeliveryRecord, HoleRecord, ProgressRecord, RunRecord
from broker_core.errors import DataLoss

_BLOCK_ROWS = 256
_BLOCK_BYTES = 1024 * 1024
_FIRST_RUNS_KEPT = 1024  # so many dead slots at the front of the run list before it is cut
REPLIES = "amq.rabbitmq.reply-to."  # before the token of a requester


class Queue:
    def __init__(
        self,
        queue_id: int,
        name: str,
        blocks: Blocks,
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self._undo = blocks.undo
        self._saved = 0  # the last work (``Undo.work``) in which the scalars were noted
        self.queue_id = queue_id
        self.name = name
        self.durable = durable
        self.exclusive = exclusive
        self.auto_delete = auto_delete
        self.arguments = arguments or {}
        self.connection: object = None  # of an exclusive queue
        self.written = durable and not exclusive  # an exclusive queue ends with its connection: nothing of it is worth a record
        self.deleted = False
        self.consumers = Consumers(self, single=bool(self.arguments.get("x-single-active-consumer")))
        self.used_at_us = 0  # last declared, consumed or got from (x-expires)
        self.limited = not self.arguments.keys().isdisjoint(("x-max-length", "x-max-length-bytes"))
        self.refuses = self.limited and str(self.arguments.get("x-overflow")).startswith("reject-publish")
        self.ttl_ms: int | None = self.arguments.get("x-message-ttl")
        self.timed = self.ttl_ms is not None  # some message that came since the start may expire
        self.hasty = self.ttl_ms == 0  # what no consumer takes at once has expired
        self.offered = 0  # entries below were visible when consumers were looked at, for the same reason
        self.dead_letters = "x-dead-letter-exchange" in self.arguments
        self.replies = name.startswith(REPLIES)  # direct reply-to: publishing is all that one can do with it
        self.owner = ""  # app_id that holds the claim (protocol S6)
        self.acked = 0
        self.floor = 0
        self.next_offset = 0
        self.visible_end = 0
        self.claimed = IntervalSet(undo=self._undo)  # of an owned queue: frozen until the owner has acked them
        self.dispatched_below = 0  # nothing at or above was ever handed out
        self.held: set[int] = set()
        self.sizes: dict[int, int] | None = None  # body sizes of unsettled entries, only under x-max-length-bytes
        self.sizes_sum = self.held_bytes = self.claimed_bytes = 0  # of all of these, of the held and of the claimed ones
        self.kept = self.kept_bytes = 0  # what prepared transactions will bring
        self._blocks = blocks
        self.delivery_limit: int | None = self.arguments.get("x-delivery-limit")
        counted = self.delivery_limit is not None or self.arguments.get("x-queue-type") == "quorum"
        self.counts: dict[int, int] | None = {} if counted else None  # how often an entry was given back
        self.publishers: dict[int, object] | None = None  # connections of unsettled entries, since a no-local consumer came
        self.ranks = Ranks(self.arguments["x-max-priority"], self._undo) if self.arguments.get("x-max-priority") else None
        self._holes = IntervalSet(undo=self._undo)
        self._sent = IntervalSet(undo=self._undo)  # may have been handed out before
        self._runs: list[Run] = []
        self._firsts: list[int] = []
        self._front = 0  # runs before it are gone
        self._cursor = 0
        self._requeued = IntervalSet(undo=self._undo)  # all below the cursor; what was settled meanwhile is skipped
        self._held_ahead = 0  # nothing at or above both this and the cursor is held
        self._selected: tuple[Run, int, npt.NDArray[np.int64]] | None = None
        self._decoded: tuple[int, list[InboxRow]] = (0, [])  # consecutive stored entries, from an offset on
        self._progress_dirty = False
        self._hole_changes: dict[int, int | None] = {}
        self._count_changes: set[int] = set()
        self._dropped: list[int] = []

    # -- undo -----------------------------------------------------------------------------------------------------------
    def _save(self) -> None:
        """Before the first change of a work: what the numbers are. Lists and sets note each of their changes."""
        self._saved = self._undo.work
        numbers = (
            self.floor, self.acked, self.next_offset, self.claimed_bytes, self.dispatched_below,
            self.sizes_sum, self.held_bytes, self._cursor, self._front,
        )  # fmt: skip
        self._undo.append((self._put_back, self.owner, self._progress_dirty, numbers))

    def _put_back(self, owner: str, progress_dirty: bool, numbers: tuple[int, ...]) -> None:
        self.owner, self._progress_dirty = owner, progress_dirty
        (
            self.floor, self.acked, self.next_offset, self.claimed_bytes, self.dispatched_below,
            self.sizes_sum, self.held_bytes, self._cursor, self._front,
        ) = numbers  # fmt: skip
        self._selected = None

    # -- the log --------------------------------------------------------------------------------------------------------
    def append(self, count: int, block_id: int, row: int, bitmap: bytes, sequence: int, committed_at: int) -> int:
        """``count`` more entries, visible after the commit; their first offset. Adjacent rows of an open block join the last run."""
        block = self._blocks.by_id[block_id]
        if count == 1 and not bitmap and sequence == 0:
            return self.append_row(block, row)
        first = self.next_offset
        self._blocks.pin(block_id)
        self._add_run(Run(first, count, block, row, bitmap, sequence, committed_at))
        self.next_offset = first + count
        return first

    def append_row(self, block: Block, row: int) -> int:
        """One more entry, of an open or memory-only block; its offset. A row that is not above the last run's begins a run."""
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
        self._selected = None

    def _remove_runs(self, length: int) -> None:
        del self._runs[length:], self._firsts[length:]

    def restore_entries(self, entries: Sequence[tuple[int, InboxRow | RunRecord]], blocks: Blocks) -> None:
        """While loading: runs that the catalog names, and rows of open blocks at their offsets, in offset order."""
        next_offset = self.next_offset
        for offset, entry in entries:
            if isinstance(entry, RunRecord):
                self._restore(entry)
            else:
                self.next_offset = offset
                self.append_row(blocks.by_id[entry.block_id], entry.row)
        self.next_offset = max(next_offset, self.next_offset)

    def _restore(self, run: RunRecord) -> None:
        restored = Run(run.first, run.count, self._blocks.pin(run.block_id), run.row, run.bitmap, run.sequence, run.committed_at)
        restored.recorded = True
        self._add_run(restored)
        self.next_offset = restored.end

    def runs_between(self, start: int, end: int) -> list[Run]:
        """The runs that hold entries of [start, end), clipped to it, settled entries included; none where they are deleted."""
        found: list[Run] = []
        at = max(self._front, bisect_right(self._firsts, start) - 1)
        for run in self._runs[at:]:
            if run.first >= end or start >= end:  # an empty range inside a run holds nothing of it
                break
            if run.end > start:
                found.append(run.clip(start, end))
        return found

    def add_size(self, offset: int, size_bytes: int) -> None:
        assert self.sizes is not None
        if self._saved != self._undo.work:
            self._save()
        self._undo.append((self.sizes.pop, offset, None))
        self.sizes[offset] = size_bytes
        self.sizes_sum += size_bytes

    def transient_runs(self, start: int, end: int) -> list[Run]:
        """Memory-only runs that touch [start, end)."""
        return [run for run in self._runs[self._front :] if run.block.block_id < 0 and run.first < end and run.end > start]

    def record_between(self, start: int, end: int) -> list[RunRecord]:
        """Runs that touch [start, end) of stored blocks, and that a restart would not find: from now on it does."""
        found = [run for run in self._runs[self._front :] if run.first < end and run.end > start]
        found = [run for run in found if run.block.inbox is None and not run.recorded]
        for run in found:
            self._undo.attribute(run, "recorded")
            run.recorded = True
        return [run.record(self.queue_id) for run in found]

    def replace_run(self, run: Run, pieces: list[Run]) -> None:
        """The same entries in other blocks; ``pieces`` are pinned already."""
        at = self._runs.index(run)
        self._undo.append((self._put_runs, at, at + len(pieces), [run], [run.first]))
        self._drop(run)
        self._runs[at : at + 1] = pieces
        self._firsts[at : at + 1] = [piece.first for piece in pieces]

    def runs_in(self, block_ids: Container[int]) -> list[Run]:
        return [run for run in self._runs[self._front :] if run.block.block_id in block_ids]

    def needed_within(self, start: int, end: int) -> list[list[int]]:
        """Offsets of [start, end) that are not settled, or claimed, as [start, end] pairs: those whose bytes are kept."""
        unsettled = self.unsettled_within(start, end)
        claimed = self.claimed.within(max(start, self.acked), end) if self.owner else []
        return [list(part) for part in IntervalSet([*unsettled, *claimed])] if claimed else unsettled

    def record_last_run(self) -> RunRecord:
        """The run that was appended last, for the catalog."""
        run = self._runs[-1]
        self._undo.attribute(run, "recorded")
        run.recorded = True
        return run.record(self.queue_id)

    def record_runs(self, block_id: int) -> list[RunRecord]:
        """The runs of an open block that is sealed, for the catalog. Their time is the block's latest: each row has its own."""
        found = [run for run in self._runs[self._front :] if run.block.block_id == block_id]
        for run in found:
            self._undo.attribute(run, "recorded")
            self._undo.attribute(run, "committed_at")
            run.recorded = True
            if run.block.inbox:
                run.committed_at = run.block.inbox[-1].committed_at
        return [run.record(self.queue_id) for run in found]

    def locate(self, offset: int) -> tuple[Run, int]:
        """The run and the row of an entry that is not deleted. Raises DataLoss where it is, CorruptCatalog."""
        at = bisect_right(self._firsts, offset) - 1
        run = self._runs[at] if at >= self._front else None
        if run is None or offset >= run.first + run.count:
            raise DataLoss(f"the message at offset {offset} of queue '{self.name}' is not there any more")
        if not run.bitmap:
            return run, run.row + offset - run.first
        if run.numbers is not None:
            return run, run.numbers[offset - run.first]
        if self._selected is None or self._selected[0] is not run or self._selected[1] != run.count:
            rows = run.rows()
            assert not isinstance(rows, range)
            self._selected = (run, run.count, rows)
        return run, int(self._selected[2][offset - run.first])

    def rows(self, start: int, end: int) -> list[InboxRow]:
        """Messages from ``start`` on, at most up to ``end``: at least one, fewer than asked where they are stored elsewhere or large.

        Raises CorruptSegment, DataLoss.
        """
        run, row = self.locate(start)
        end = min(end, run.first + run.count)
        inbox = run.block.inbox
        if inbox is None:
            return self._stored(run, row, start, end)
        if not run.bitmap:
            return inbox[row : row + end - start]
        if run.numbers is not None:
            return [inbox[number] for number in run.numbers[start - run.first : end - run.first]]
        return [inbox[self.locate(offset)[1]] for offset in range(start, end)]

    def _stored(self, run: Run, row: int, start: int, end: int) -> list[InboxRow]:
        """Entries in a segment are decoded in blocks; a block is kept until its last row is asked for."""
        first, rows = self._decoded
        if not first <= start < first + len(rows):
            average = max(1, run.block.size_bytes // max(1, run.block.rows))
            first, count = start, min(run.end - start, _BLOCK_ROWS, max(1, _BLOCK_BYTES // average))
            numbers: range | npt.NDArray[np.int64] = range(row, row + count)
            if run.numbers is not None:
                numbers = np.array(run.numbers[start - run.first : start - run.first + count], np.int64)
            elif run.bitmap:
                assert self._selected is not None  # by ``locate``
                numbers = self._selected[2][start - run.first : start - run.first + count]
            rows = self._blocks.decode(run.block_id, numbers, run.sequence, run.committed_at)
            self._decoded = (first, rows)
        found = rows[start - first : end - first]
        if start + len(found) == first + len(rows):
            self._decoded = (0, [])
        return found

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
        undo = self._undo
        if self._saved != undo.work:
            self._save()
        if self.sizes is not None:
            settled = {offset: self.sizes[offset] for offset in range(start, end) if offset in self.sizes}
            undo.append((self.sizes.update, settled))
            if self.owner:
                self.claimed_bytes -= self._claimed_size(start, end)
            for offset in settled:
                del self.sizes[offset]
            self.sizes_sum -= sum(settled.values())
        if self.counts or self.publishers or self.ranks is not None:
            self._forget_entries(start, end)
        self._progress_dirty = True
        if start == self.floor and not self._holes.total:
            self.floor = end
        else:
            low, high, absorbed = self._holes.add(start, end)
            for absorbed_start in absorbed:
                undo.item(self._hole_changes, absorbed_start)
                self._hole_changes[absorbed_start] = None
            if low <= self.floor:
                self._holes.subtract(low, high)
                self.floor = high
            else:
                undo.item(self._hole_changes, low)
                self._hole_changes[low] = high
        self._free(start, end)

    def _forget_entries(self, start: int, end: int) -> None:
        """What was remembered of entries that are settled now."""
        for offset in range(start, end):
            if self.counts and offset in self.counts:
                self._undo.item(self.counts, offset)
                del self.counts[offset]
                self._count_changed(offset)
            if self.publishers and offset in self.publishers:
                self._undo.item(self.publishers, offset)
                del self.publishers[offset]
            if self.ranks is not None:
                self.ranks.forget(offset)

    def _count_changed(self, offset: int) -> None:
        if offset not in self._count_changes:
            self._undo.append((self._count_changes.discard, offset))
            self._count_changes.add(offset)

    def ack_to(self, offset: int) -> None:
        """Claimed entries below ``offset`` are settled and not needed: the source has acked them and the range after them (S5)."""
        if offset <= self.acked:
            return
        self.settle_claimed(offset)
        if self._saved != self._undo.work:
            self._save()
        before, self.acked = self.acked, offset
        self.claimed.drop_below(offset)
        self._progress_dirty = True
        self._free(before, offset)

    def settle_claimed(self, end: int) -> None:
        """Claimed entries below ``end`` are consumed. What the owner skipped stays."""
        for first, last in self.claimed.within(self.floor, end):
            for start, stop in self.unsettled_within(first, last):
                self.settle(start, stop)

    def _free(self, start: int, end: int) -> None:
        """Drop the runs, of those that touch [start, end), of which no entry is needed."""
        limit = min(self.floor, self._first_claimed()) if self.owner else self.floor
        runs = self._runs
        if self._front < len(runs) and runs[self._front].end <= limit:
            if self._saved != self._undo.work:
                self._save()
            while self._front < len(runs) and runs[self._front].end <= limit:
                self._drop(runs[self._front])
                self._front += 1
        if self._front > _FIRST_RUNS_KEPT and self._front * 2 > len(self._runs):
            self._undo.append((self._put_runs, 0, 0, self._runs[: self._front], self._firsts[: self._front]))
            del self._runs[: self._front], self._firsts[: self._front]
            self._front = 0
        if not self.owner and not self._holes.total:
            return
        at = max(self._front, bisect_right(self._firsts, start) - 1)
        while at < len(self._runs) and self._runs[at].first < end:
            run = self._runs[at]
            if (run.end <= self.floor or self._holes.covers(max(run.first, self.floor), run.end)) and not (
                self.owner and self.claimed.within(max(run.first, self.acked), run.end)
            ):
                self._drop(run)
                self._undo.append((self._put_runs, at, at, [run], [run.first]))
                del self._runs[at], self._firsts[at]
            else:
                at += 1

    def _put_runs(self, at: int, end: int, runs: list[Run], firsts: list[int]) -> None:
        self._runs[at:end] = runs
        self._firsts[at:end] = firsts

    def _drop(self, run: Run) -> None:
        self._blocks.unpin(run.block.block_id)
        if run.recorded:
            self._undo.growth(self._dropped)
            self._dropped.append(run.first)
        if self._selected is not None and self._selected[0] is run:
            self._selected = None

    # -- ownership (protocol S6) ----------------------------------------------------------------------------------------
    def own(self, app_id: str, start: int = 0) -> None:
        """From now on claimed entries are needed until they are acked. The app skips what lies below ``start``: it stays as it is.

        Who may own is the broker's rule.
        """
        if self.owner != app_id:
            if self._saved != self._undo.work:
                self._save()
            self.owner = app_id
            self.acked = max(self.floor, start)
            self._progress_dirty = True

    def claim(self, start: int, end: int) -> None:
        """[start, end) is claimed by the owner: frozen, and as good as handed out."""
        if self._saved != self._undo.work:
            self._save()
        self.acked = min(self.acked, max(start, self.floor))
        if self.sizes is not None:
            self.claimed_bytes += sum(self._size(first, last) for first, last in self.claimed.outside(start, end))
        self.claimed.add(max(start, self.acked), end)
        self.dispatched_below = max(self.dispatched_below, end)
        self._progress_dirty = True

    def unclaim(self) -> None:
        """Claimed and unsettled entries are ready again, as redelivered."""
        if self._saved != self._undo.work:
            self._save()
        self._undo.attribute(self, "claimed")
        self._undo.attribute(self, "_requeued")
        for start, end in self.claimed:
            self._sent.add(max(start, self.floor), end)
        self.claimed = IntervalSet(undo=self._undo)
        self.claimed_bytes = 0
        self._cursor, self._requeued = self.floor, IntervalSet(undo=self._undo)

    def release(self) -> None:
        """Nobody owns the queue."""
        self.unclaim()
        self.owner = ""
        self.acked = self.floor
        self._progress_dirty = True
        self._free(0, self.next_offset)

    def skipped(self) -> list[list[int]]:
        """Entries that the owner skipped and nobody settled, as [start, end] pairs."""
        return self.unsettled_within(self.floor, self.acked) if self.owner else []

    def first_to_read(self) -> int:
        """The first offset that is not settled, of those that the owner does not skip."""
        return self._holes.first_outside(max(self.floor, self.acked))

    def reclaim(self, ranges: Iterable[Sequence[int]]) -> None:
        """Only these ranges are claimed still."""
        self.unclaim()
        for start, end in ranges:
            self.restore_claim(start, end)
        self.measure_claimed()
        self._progress_dirty = True
        self._free(0, self.next_offset)

    def measure_claimed(self) -> None:
        """Sizes are known now."""
        if self._saved != self._undo.work:
            self._save()
        self.claimed_bytes = sum(self._size(start, end) for start, end in self.claimed)

    def _size(self, start: int, end: int) -> int:
        return sum(self.sizes.get(offset, 0) for offset in range(start, end)) if self.sizes else 0

    def _claimed_size(self, start: int, end: int) -> int:
        return sum(self._size(first, last) for first, last in self.claimed.within(start, end))

    def _first_claimed(self) -> int:
        """The first claimed entry that is not acked; ``next_offset`` where there is none."""
        found = self.claimed.within(self.acked, self.next_offset)
        return found[0][0] if found else self.next_offset

    def restore_claim(self, start: int, end: int) -> None:
        """While loading, after the progress and before any ``reserve``: a claim that the catalog names."""
        self.claimed.add(max(start, self.acked), end)

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
        if self.visible_end == self.next_offset:  # every hole is below
            return self.visible_end - self.floor - self._holes.total
        return max(0, self.visible_end - self.floor - self._holes.measure(self.floor, self.visible_end))

    @property
    def to_read(self) -> int:
        """Of these, what the owner does not skip."""
        return self.messages - sum(end - start for start, end in self.skipped())

    @property
    def unacknowledged(self) -> int:
        """Of these, held by channels or prepared transactions."""
        return len(self.held)

    @property
    def ready(self) -> int:
        """Entries that overflow may drop: neither settled, held nor claimed; those of the commit in hand count."""
        if not self.owner:
            return self.next_offset - self.floor - self._holes.total - len(self.held)
        frozen = sum(end - start - self._holes.measure(start, end) for start, end in self.claimed.within(self.floor, self.next_offset))
        return self.next_offset - self.floor - self._holes.total - len(self.held) - frozen

    # -- dispatch -------------------------------------------------------------------------------------------------------
    def head(self, end: int) -> int | None:
        """The next ready offset below ``end``, requeued ones first, or by priority; it stays where it is. Raises CorruptSegment."""
        start = self.floor
        if self.ranks is not None and not self.owner:
            offset = self.ranks.best(self)
            return offset if offset is not None else self.first_ready(max(self.visible_end, start), end)
        requeued = self._requeued
        while requeued.total:
            low, high = requeued.first()
            offset = self.first_ready(max(low, start), min(high, end))
            if offset is not None:
                return offset
            if high > end:
                return None
            requeued.drop_below(high)
        return self.first_ready(max(self._cursor, start), end)

    def first_ready(self, start: int, end: int) -> int | None:
        """The first offset of [start, end) that is neither settled, held nor claimed."""
        if start < self.floor:
            start = self.floor
        holes = self._holes
        while start < end:
            after = holes.first_outside(start) if holes.total else start
            if after == start and self.owner:
                after = self.claimed.first_outside(start)
            if after == start:
                if start not in self.held:
                    return start
                after = start + 1
            start = after
        return None

    def take_next(self, limit: int, end: int | None = None) -> Sequence[int]:
        """At most ``limit`` of the next ready entries (below ``end``, or visible), taken out: hold them, or give them back (``untake``).

        A range of consecutive offsets, or a list in order of priority; empty where nothing is ready.
        """
        end = self.visible_end if end is None else end
        if self.ranks is not None and not self.owner:
            return self.ranks.take(self, limit, end)
        first = self.head(end)
        if first is None:
            return ()
        stop = min(end, first + limit)
        if self._requeued.total and self._requeued.contains(first):
            stop = min(stop, self._requeued.first()[1])
        if self._holes.total:
            stop = min(stop, self._holes.next_start(first, stop))
        if self.owner:
            stop = min(stop, self.claimed.next_start(first, stop))
        if first < self._held_ahead:
            stop = next((offset for offset in range(first, stop) if offset in self.held), stop)
        if first < self._cursor:
            self._requeued.drop_below(stop)
        else:
            if self._saved != self._undo.work:
                self._save()
            self._cursor = stop
        return range(first, stop)

    def untake(self, offsets: Sequence[int]) -> None:
        """Puts back the end of a taken block: these entries are next again."""
        if not offsets:
            return
        if self.ranks is not None:
            for offset in offsets:
                if offset < self.ranks.below:
                    self.ranks.push(offset)
        elif offsets[-1] + 1 == self._cursor and offsets[-1] - offsets[0] + 1 == len(offsets):
            if self._saved != self._undo.work:
                self._save()
            self._cursor = offsets[0]
        else:
            for offset in offsets:
                self._requeued.add(offset, offset + 1)

    def take(self) -> int | None:
        """Hand out the next ready, visible entry; the caller holds it until it settles or requeues it."""
        offset = self.head(self.visible_end)
        if offset is not None:
            self.take_head(offset)
        return offset

    def take_head(self, offset: int) -> None:
        """The same for the one that ``head`` has just named."""
        if self.ranks is not None and not self.owner:
            self.ranks.take(self, 1, self.visible_end)
        elif offset < self._cursor:
            self._requeued.drop_below(offset + 1)
        else:
            if self._saved != self._undo.work:
                self._save()
            self._cursor = offset + 1
        self.hold_all((offset,))

    def hold(self, offset: int) -> None:
        """An entry that may be anywhere (of a prepared transaction, while loading)."""
        self.hold_all((offset,))
        self._held_ahead = max(self._held_ahead, offset + 1)

    def hold_all(self, offsets: Sequence[int]) -> None:
        """A block that was taken is handed out."""
        undo = self._undo
        if self._saved != undo.work:
            self._save()
        undo.append((self.held.difference_update, offsets))
        self.held.update(offsets)
        if self.sizes is not None:
            self.held_bytes += sum(self.sizes.get(offset, 0) for offset in offsets)
        end = (offsets[-1] if self.ranks is None else max(offsets)) + 1
        if end > self.dispatched_below:
            self.dispatched_below = end

    def was_sent(self, offset: int) -> bool:
        """Whether a delivery of it has to say redelivered."""
        return self._sent.total > 0 and self._sent.contains(offset)

    def none_sent(self, start: int, end: int) -> bool:
        """Whether no entry of [start, end) was ever handed out."""
        return not self._sent.total or (self._sent.next_start(start, end) == end and not self._sent.contains(start))

    def requeue(self, offset: int) -> None:
        """A held entry is ready again, at its old place, and any later delivery of it says redelivered."""
        self.requeue_range(offset, offset + 1)

    def requeue_range(self, start: int, end: int) -> None:
        """The same for consecutive entries."""
        self._let_go_range(start, end)
        for low, high in self.unsettled_within(start, end):
            self._sent.add(low, high)
            if self.counts is not None:
                self._count(self.counts, range(low, high))
            if self.ranks is not None:
                for offset in range(low, min(high, self.ranks.below)):
                    self.ranks.push(offset)
            elif low < self._cursor:  # otherwise the cursor comes to it
                self._requeued.add(low, min(high, self._cursor))

    def _count(self, counts: dict[int, int], offsets: range) -> None:
        before = {offset: counts[offset] for offset in offsets if offset in counts}
        fresh = set(offsets) - self._count_changes
        self._undo.append((self._uncount, offsets, before, fresh))
        counts.update((offset, before.get(offset, 0) + 1) for offset in offsets)
        self._count_changes |= fresh

    def _uncount(self, offsets: range, before: dict[int, int], fresh: set[int]) -> None:
        assert self.counts is not None
        for offset in offsets:
            self.counts.pop(offset, None)
        self.counts.update(before)
        self._count_changes -= fresh

    def over_limit(self, offset: int) -> bool:
        """Whether it was given back more often than x-delivery-limit allows."""
        return self.delivery_limit is not None and self.counts is not None and self.counts.get(offset, 0) > self.delivery_limit

    def _let_go(self, offset: int) -> None:
        held = self.held
        if offset in held:
            undo = self._undo
            if self._saved != undo.work:
                self._save()
            undo.append((held.add, offset))
            held.discard(offset)
            if self.sizes is not None:
                self.held_bytes -= self.sizes.get(offset, 0)

    def settle_held(self, offset: int) -> None:
        self._let_go(offset)
        self.settle(offset, offset + 1)

    def settle_range(self, start: int, end: int) -> None:
        """The same for consecutive entries."""
        self._let_go_range(start, end)
        self.settle(start, end)

    def _let_go_range(self, start: int, end: int) -> None:
        if end == start + 1:
            self._let_go(start)
        elif self.held:
            held = self.held.intersection(range(start, end))
            if self._saved != self._undo.work:
                self._save()
            self._undo.append((self.held.update, held))
            self.held -= held
            if self.sizes is not None:
                self.held_bytes -= sum(self.sizes.get(offset, 0) for offset in held)

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
        self.visible_end = self.next_offset
        self.dispatched_below = min(self.dispatched_below, self.next_offset) if clean else self.next_offset
        self._sent.add(min(self.floor, self.acked), self.dispatched_below)
        self._free(0, self.next_offset)

    def record(self, change: Change) -> None:
        """Write what became dirty: progress, holes, and the drops of runs that became deletable. Of a deleted queue nothing is put."""
        kept = self.written and not self.deleted
        undo = self._undo
        if self._progress_dirty:
            if self._saved != undo.work:
                self._save()
            self._progress_dirty = False
            if not self.owner:
                self.acked = self.floor
            if self._sent.total:
                self._sent.drop_below(min(self.floor, self.acked))
            if kept:
                change.put(self.progress())
        if self._hole_changes:
            if self.written:
                for start, end in self._hole_changes.items():
                    if end is None:
                        change.drop(HoleRecord, (self.queue_id, start))
                    elif kept:
                        change.put(HoleRecord(self.queue_id, start, end))
            undo.attribute(self, "_hole_changes")
            self._hole_changes = {}
        if self._dropped:
            for first in self._dropped:
                change.drop(RunRecord, (self.queue_id, first))
            undo.attribute(self, "_dropped")
            self._dropped = []
        if self._count_changes:
            if self.written:
                for offset in self._count_changes:
                    count = self.counts.get(offset, 0) if self.counts else 0
                    if count and kept:
                        change.put(DeliveryRecord(self.queue_id, offset, count))
                    else:
                        change.drop(DeliveryRecord, (self.queue_id, offset))
            undo.attribute(self, "_count_changes")
            self._count_changes = set()
        self._blocks.record(change)

    def restore_counts(self, deliveries: Iterable[DeliveryRecord]) -> None:
        """While loading, after the progress. The offset of a transient message that is gone is not used again for another."""
        deliveries = list(deliveries)
        self.next_offset = max([self.next_offset, *(delivery.offset + 1 for delivery in deliveries)])
        if self.counts is not None:
            self.counts.update((delivery.offset, delivery.count) for delivery in deliveries if not self.is_settled(delivery.offset))

    @property
    def has_news(self) -> bool:
        """Whether it counted deliveries that are not in the catalog yet."""
        return bool(self._count_changes)

    def progress(self) -> ProgressRecord:
        return ProgressRecord(self.queue_id, self.owner, self.floor, self.acked, self.next_offset, self.dispatched_below)

    def forget_runs(self) -> None:
        """The queue is deleted: nothing of it is needed."""
        if self.counts:
            for offset in self.counts:
                self._count_changed(offset)
            self._undo.attribute(self, "counts")
            self.counts = {}
        for name in ("_runs", "_firsts", "_front"):
            self._undo.attribute(self, name)
        for run in self._runs[self._front :]:
            self._drop(run)
        self._runs, self._firsts, self._front = [], [], 0
