"""A queue: its log, what is settled of it, which entry is next, and its consumers.

Here is what concerns several of these parts. Callers ask a part directly for what is its own. Not here:
routing, reading of bodies, and who may do what (``topology.py``, ``broker.py``). Words: see ``progress.py``
(settled, claimed, needed) and ``ready.py`` (held, ready). Offsets are end-exclusive in pairs. Invariant: a
run leaves memory and catalog when none of its entries is needed. Every mutator tells ``undo`` first what it
is about to write (``undo.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from broker_core.broker.arguments import QueueArguments
from broker_core.broker.block import Blocks
from broker_core.broker.change import Change
from broker_core.broker.queue.deliveries import Deliveries
from broker_core.broker.queue.interval import IntervalSet
from broker_core.broker.queue.log import Log
from broker_core.broker.queue.progress import Progress
from broker_core.broker.queue.ready import Ready
from broker_core.broker.queue.ring import Consumers
from broker_core.broker.queue.room import Room
from broker_core.broker.records import DeliveryRecord, HoleRecord, ProgressRecord

REPLIES = "amq.rabbitmq.reply-to."  # before the token of a requester


class Marks:
    """What only causes one more look, and is not undone."""

    __slots__ = ("hasty", "offered", "timed", "used_at_us")

    def __init__(self, ttl_ms: int | None) -> None:
        self.timed = ttl_ms is not None  # some message that came since the start may expire
        self.hasty = ttl_ms == 0  # what no consumer takes at once has expired
        self.offered = 0  # entries below were visible when consumers were looked at, for the same reason
        self.used_at_us = 0  # last declared, consumed or got from (x-expires)


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
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        undo = blocks.undo
        self.queue_id = queue_id
        self.name = name
        self.durable = durable
        self.exclusive = exclusive
        self.auto_delete = auto_delete
        parsed = self.arguments = QueueArguments.parse(arguments or {})
        self.connection: object = None  # of an exclusive queue
        # an exclusive queue ends with its connection: nothing of it is worth a record
        self.written = durable and not exclusive
        self.deleted = False
        self.consumers: Consumers[Any] = Consumers(name, undo, single=parsed.single_active_consumer)
        self.marks = Marks(parsed.ttl_ms)
        self.log = Log(queue_id, name, blocks)
        self.progress = Progress(undo)
        self.room = Room(undo)
        deliveries = Deliveries(parsed.delivery_limit, undo) if parsed.counts_deliveries else None
        self.ready = Ready(
            self.log, self.progress, self.room, undo, max_priority=parsed.max_priority, deliveries=deliveries
        )

    @property
    def replies(self) -> bool:
        """Direct reply-to: publishing is all that one can do with it."""
        return self.name.startswith(REPLIES)

    @property
    def owner(self) -> str:
        """The app that owns it, or ""."""
        return self.progress.owner

    # -- counts ----------------------------------------------------------------------------------------------
    @property
    def messages(self) -> int:
        """Committed and not settled."""
        log, progress = self.log, self.progress
        if log.visible_end == log.next_offset:  # every hole is below
            return log.visible_end - progress.floor - progress.holes.total
        return progress.unsettled_below(log.visible_end)

    @property
    def to_read(self) -> int:
        """Of these, what the owner does not skip."""
        return self.messages - sum(end - start for start, end in self.progress.skipped())

    @property
    def unacknowledged(self) -> int:
        """Of these, held by channels or prepared transactions."""
        return len(self.ready.held)

    @property
    def droppable(self) -> int:
        """Entries that overflow may drop: neither settled, held nor claimed; those of the commit in hand
        count.
        """
        end, progress = self.log.next_offset, self.progress
        frozen = progress.frozen_below(end) if progress.owner else 0
        return end - progress.floor - progress.holes.total - len(self.ready.held) - frozen

    @property
    def has_news(self) -> bool:
        """Whether it counted deliveries that are not in the catalog yet."""
        return self.ready.deliveries is not None and bool(self.ready.deliveries.changes)

    # -- settling --------------------------------------------------------------------------------------------
    def settle(self, start: int, end: int) -> None:
        """Acked, dead-lettered, expired or purged. Settling twice is fine."""
        progress, ready, publishers = self.progress, self.ready, self.consumers.publishers
        if start < progress.floor:
            start = progress.floor
        if start >= end:
            return
        if self.room.sizes is not None:
            self.room.settle(start, end, progress.claimed.within(start, end) if progress.owner else ())
        if ready.deliveries is not None or ready.ranks is not None:
            ready.forget(start, end)
        if publishers:
            self.consumers.forget(start, end)
        progress.settle(start, end)
        self._free(start, end)

    def settle_range(self, start: int, end: int) -> None:
        """The same, of what may be held."""
        if self.ready.held:
            self.ready.let_go(start, end)
        self.settle(start, end)

    def requeue_range(self, start: int, end: int) -> None:
        """Held entries are ready again, at their old place, and any later delivery of them says
        redelivered.
        """
        self.ready.let_go(start, end)
        for low, high in self.progress.unsettled_within(start, end):
            self.ready.put_back(low, high)

    def _free(self, start: int, end: int) -> None:
        """Forget the runs, of those that touch [start, end), of which no entry is needed."""
        progress = self.progress
        self.log.forget_below(progress.needed_from() if progress.owner else progress.floor)
        if progress.owner or progress.holes.total:
            self.log.forget_within(start, end, progress.is_needed)

    def forget_runs(self) -> None:
        """The queue is deleted: nothing of it is needed."""
        if self.ready.deliveries is not None:
            self.ready.deliveries.forget_all()
        self.log.forget_all()

    # -- ownership (protocol S6) -----------------------------------------------------------------------------
    def own(self, app_id: str, start: int = 0) -> None:
        """From now on claimed entries are needed until they are acked. The app skips what lies below
        ``start``: it stays as it is.

        Who may own is the broker's rule.
        """
        if self.progress.owner != app_id:
            self.progress.own(app_id, start)

    def claim(self, start: int, end: int) -> None:
        """[start, end) is claimed by the owner: frozen, and as good as handed out."""
        if self.room.sizes is not None:
            self.room.claim(self.progress.claimed.outside(start, end))
        self.progress.claim(start, end)
        self.ready.sent_below(end)

    def settle_claimed(self, end: int) -> None:
        """Claimed entries below ``end`` are consumed. What the owner skipped stays."""
        for start, stop in self.progress.claimed_below(end):
            self.settle(start, stop)

    def ack_to(self, offset: int) -> None:
        """Claimed entries below ``offset`` are settled and not needed: the source has acked them and the
        range after them (S5).
        """
        before = self.progress.acked
        if offset <= before:
            return
        self.settle_claimed(offset)
        self.progress.ack_to(offset)
        self._free(before, offset)

    def _unclaim(self) -> None:
        """Claimed and unsettled entries are ready again, as redelivered."""
        self.ready.put_back_all(self.progress.unclaim())
        self.room.unclaim()

    def release(self) -> None:
        """Nobody owns the queue."""
        self._unclaim()
        self.progress.release()
        self._free(0, self.log.next_offset)

    def reclaim(self, ranges: Iterable[Sequence[int]]) -> None:
        """Only these ranges are claimed still."""
        self._unclaim()
        self.progress.reclaim(ranges)
        if self.room.sizes is not None:
            self.room.claim(self.progress.claimed)
        self._free(0, self.log.next_offset)

    # -- loading ---------------------------------------------------------------------------------------------
    def restore_progress(self, progress: ProgressRecord, holes: list[HoleRecord]) -> None:
        self.progress.restore(progress, holes)
        self.ready.dispatched_below = progress.dispatched_below
        self.log.next_offset = max([progress.next_offset, progress.floor, *(hole.end for hole in holes)])

    def restore_counts(self, records: Iterable[DeliveryRecord]) -> None:
        """After the progress. The offset of a transient message that is gone is not used again for
        another.
        """
        records = list(records)
        self.log.next_offset = max([self.log.next_offset, *(record.offset + 1 for record in records)])
        if self.ready.deliveries is not None:
            self.ready.deliveries.restore(
                record for record in records if not self.progress.is_settled(record.offset)
            )

    def restore_claim(self, start: int, end: int) -> None:
        """After the progress and before any ``reserve``: a claim that the catalog names."""
        self.progress.restore_claim(start, end)

    def reserve(self, offset: int) -> None:
        """Offsets below ``offset`` are taken, though their entries may be gone (transient messages that a
        claim names).
        """
        log = self.log
        if offset > log.next_offset:
            gap, log.next_offset = log.next_offset, offset
            log.visible_end = max(log.visible_end, offset)
            self.settle(gap, offset)

    def loaded(self, *, clean: bool) -> None:
        """All runs are restored: settle what has no run (transient messages), and say what may have been sent
        before.
        """
        there = IntervalSet((run.first, run.end) for run in self.log.runs)
        for start, end in there.outside(self.progress.floor, self.log.next_offset):
            self.settle(start, end)
        self.log.show()
        self.ready.loaded(clean=clean)
        self._free(0, self.log.next_offset)

    # -- durable ---------------------------------------------------------------------------------------------
    def record(self, change: Change) -> None:
        """Write what became dirty: progress, holes, and the drops of runs that became deletable. Of a deleted
        queue nothing is put.
        """
        progress, ready = self.progress, self.ready
        kept = self.written and not self.deleted
        if progress.dirty:
            progress.recorded()
            if ready.sent.total:
                ready.sent.drop_below(min(progress.floor, progress.acked))
            if kept:
                change.put(self.progress_record())
        if progress.hole_changes:
            progress.record_holes(change, self.queue_id, written=self.written, kept=kept)
        self.log.record(change)
        if ready.deliveries is not None and ready.deliveries.changes:
            ready.deliveries.record(change, self.queue_id, written=self.written, kept=kept)

    def progress_record(self) -> ProgressRecord:
        progress = self.progress
        return ProgressRecord(
            self.queue_id,
            progress.owner,
            progress.floor,
            progress.acked,
            self.log.next_offset,
            self.ready.dispatched_below,
        )
