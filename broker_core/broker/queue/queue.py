"""A queue: its log, which entries are settled, which entry is next, and its consumers.

This class has only what concerns several of these parts; for the rest, callers use the part itself. Not here:
routing, reading of bodies, and access checks (``topology/topology.py``, ``broker.py``). Words: see
``progress.py`` (settled, claimed, needed) and ``ready.py`` (held, ready). Offsets are end-exclusive in pairs.
Invariant: a run leaves memory and catalog when none of its entries is needed. Every mutator first records in
``undo`` what it is about to write (``state/undo.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from broker_core.broker.queue.deliveries import Deliveries
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.log import Log, Run
from broker_core.broker.queue.message_ids import MessageIds
from broker_core.broker.queue.progress import IntervalSet, Progress
from broker_core.broker.queue.ready import Ready
from broker_core.broker.queue.ring import Consumers
from broker_core.broker.queue.room import Room
from broker_core.core.address import VHOST
from broker_core.core.block import Blocks
from broker_core.core.change import Change
from broker_core.core.ids import QueueId
from broker_core.core.records import NEVER, DeliveryRecord, HoleRecord, ProgressRecord
from broker_core.core.undo import Tally, Undo
from broker_core.message.arguments import QueueArguments
from broker_core.message.arguments.policy import NO_POLICY, Policy
from broker_core.routing.exchange import Exchange

REPLIES = "amq.rabbitmq.reply-to."  # before the token of a requester


class Marks:
    """Flags that only cause an additional check, counts that are only shown, and ``waits``, which undoes what
    it must itself. They are not undone.
    """

    __slots__ = (
        "_undo", "deadline", "delivered", "delivered_no_ack", "expirations", "got", "got_no_ack", "hasty",
        "offered", "redelivered", "timed", "used_at_us", "waits",
    )  # fmt: skip

    def __init__(self, ttl_ms: int | None, undo: Undo) -> None:
        self._undo = undo
        self.timed = ttl_ms is not None  # some message received since the start may expire
        self.hasty = ttl_ms == 0  # a message that no consumer takes at once has expired
        self.offered = 0  # entries below were visible when dispatch last looked at the consumers
        # of the entry that was last at the head: its offset, and when it expires
        self.deadline: tuple[int, int] | None = None
        self.expirations: DueIndex[Queue] | None = None  # of messages with an expiration of their own
        self.waits: DueIndex[Queue] | None = None  # of a queue of messages that wait for their exchange
        self.used_at_us = 0  # last declared, consumed or got from (x-expires)
        self.delivered = self.delivered_no_ack = self.got = self.got_no_ack = self.redelivered = 0

    def expire_at(self, first: int, count: int, expires_us: int) -> None:
        """Some of the newest entries expire at that time or later, by an expiration of their own."""
        if self.expirations is None:
            self.timed, self.expirations = True, DueIndex(self._undo)
        if self.waits is None:
            self.expirations.expect(first, first + count, expires_us)

    def loaded(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run.block.expires_us < NEVER:
                self.expire_at(run.first, run.count, run.block.expires_us)

    def ready_again(self, parts: Iterable[Sequence[int]]) -> None:
        if self.expirations is not None:
            self.expirations.look_again(parts)

    def got_one(self, again: bool) -> bool:
        self.got += 1
        self.redelivered += again
        return again

    def deliveries(self) -> tuple[int, int, int, int, int]:
        return self.delivered, self.delivered_no_ack, self.got, self.got_no_ack, self.redelivered


class Queue:
    def __init__(
        self,
        queue_id: QueueId,
        name: str,
        blocks: Blocks,
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, object] | None = None,
        policy: Policy = NO_POLICY,
        vhost: str = VHOST,
        tally: Tally | None = None,
    ) -> None:
        self.queue_id = queue_id
        self.name, self.vhost = name, vhost
        # direct replies are bounded for their consumer, and do not count in its virtual host
        undo, tally = blocks.undo, Tally(blocks.undo) if tally is None or self.replies else tally
        self.durable = durable
        self.exclusive = exclusive
        self.auto_delete = auto_delete
        parsed = self.arguments = QueueArguments.parse(arguments or {}, policy)
        self.connection: object = None  # of an exclusive queue
        self.upstream: dict[Exchange[Queue], None] = {}  # the exchanges with a binding to it
        # an exclusive queue ends with its connection, so it has no records
        self.written = durable and not exclusive
        self.deleted = False
        self.consumers: Consumers[Any] = Consumers(self.full_name, undo, single=parsed.single_active_consumer)
        self.marks = Marks(parsed.ttl_ms, undo)
        self.log = Log(queue_id, name, blocks, tally)
        self.progress = Progress(undo, tally)
        if parsed.deduplication is not None:
            self.log.ids = MessageIds(parsed.deduplication, queue_id, self.progress, undo)
        self.room = Room(undo)
        deliveries = Deliveries(parsed.delivery_limit, undo) if parsed.counts_deliveries else None
        self.ready = Ready(
            self.log, self.progress, self.room, undo, max_priority=parsed.max_priority, deliveries=deliveries
        )

    @property
    def full_name(self) -> str:
        """Returns it as texts name it."""
        return f"queue '{self.name}' in vhost '{self.vhost}'"

    @property
    def replies(self) -> bool:
        """Returns whether it is a direct reply-to queue, which only supports publishing."""
        return self.name.startswith(REPLIES)

    @property
    def owner(self) -> str:
        """Returns the app that owns the queue, or ""."""
        return self.progress.owner

    # -- counts ----------------------------------------------------------------------------------------------
    @property
    def messages(self) -> int:
        """Returns how many entries are committed and not settled."""
        log, progress = self.log, self.progress
        if log.visible_end == log.next_offset:  # every hole is below
            return log.visible_end - progress.floor - progress.holes.total
        return progress.unsettled_below(log.visible_end)

    @property
    def depth(self) -> int:
        """Returns how many entries are not settled, with those of the commit in progress."""
        return self.log.next_offset - self.progress.floor - self.progress.holes.total

    def leave(self, undo: Undo) -> None:
        """The queue is deleted: its entries do not count any more."""
        self.log.tally.add(-self.depth)
        undo.attribute(self.log, "tally")
        undo.attribute(self.progress, "tally")
        self.log.tally = self.progress.tally = Tally(undo)

    @property
    def to_read(self) -> int:
        """Returns how many of ``messages`` the owner does not skip."""
        return self.messages - sum(end - start for start, end in self.progress.skipped())

    @property
    def unacknowledged(self) -> int:
        """Returns how many of ``messages`` are held by channels or prepared transactions."""
        return len(self.ready.unacked)

    @property
    def droppable(self) -> int:
        """Returns how many entries overflow may drop: not settled, held or claimed. Entries of the commit in
        progress count.
        """
        end, progress = self.log.next_offset, self.progress
        frozen = progress.frozen_below(end) if progress.owner else 0
        return end - progress.floor - progress.holes.total - len(self.ready.unacked) - frozen

    @property
    def has_news(self) -> bool:
        """Returns whether delivery counts have changed since they were recorded."""
        return self.ready.deliveries is not None and bool(self.ready.deliveries.changes)

    # -- settling --------------------------------------------------------------------------------------------
    def settle(self, start: int, end: int) -> None:
        """Settles entries that are acked, dead-lettered, expired or purged. It may be repeated."""
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
        self.free(start, end)

    def settle_range(self, start: int, end: int) -> None:
        """Like ``settle``, for entries that may be held."""
        if self.ready.unacked:
            self.ready.let_go(start, end)
        self.settle(start, end)

    def free(self, start: int, end: int) -> None:
        """Drops the runs that overlap [start, end) and have no needed entry."""
        progress = self.progress
        self.log.forget_below(progress.needed_from() if progress.owner else progress.floor)
        if progress.owner or progress.holes.total:
            self.log.forget_within(start, end, progress.is_needed)

    def forget_runs(self) -> None:
        """Drops all runs of a deleted queue."""
        if self.ready.deliveries is not None:
            self.ready.deliveries.forget_all()
        self.log.forget_all()

    # -- ownership (protocol S6) -----------------------------------------------------------------------------
    def claim(self, start: int, end: int) -> None:
        """Marks [start, end) as claimed by the owner, and as delivered."""
        if self.room.sizes is not None:
            self.room.claim(self.progress.claimed.outside(start, end))
        self.progress.claim(start, end)
        self.ready.sent_below(end)

    def settle_claimed(self, end: int) -> None:
        """Settles claimed entries below ``end``, which are consumed; skipped entries do not change."""
        for start, stop in self.progress.claimed_below(end):
            self.settle(start, stop)

    def ack_to(self, offset: int) -> None:
        """Settles claimed entries below ``offset`` and marks them as not needed: the source has acked them
        and the range after them (S5).
        """
        before = self.progress.acked
        if offset <= before:
            return
        self.settle_claimed(offset)
        self.progress.ack_to(offset)
        self.free(before, offset)

    def _unclaim(self) -> None:
        """Makes claimed and unsettled entries ready again, as redelivered."""
        claimed = self.progress.unclaim()
        self.ready.put_back_all(claimed)
        self.marks.ready_again(claimed)
        self.room.unclaim()

    def release(self) -> None:
        """Removes the owner."""
        self._unclaim()
        self.progress.release()
        self.free(0, self.log.next_offset)

    def reclaim(self, ranges: Iterable[Sequence[int]]) -> None:
        """Keeps only these ranges claimed."""
        self._unclaim()
        self.progress.reclaim(ranges)
        if self.room.sizes is not None:
            self.room.claim(self.progress.claimed)
        self.free(0, self.log.next_offset)

    # -- loading ---------------------------------------------------------------------------------------------
    def restore_progress(self, progress: ProgressRecord, holes: list[HoleRecord]) -> None:
        self.progress.restore(progress, holes)
        self.ready.dispatched_below = progress.dispatched_below
        self.log.next_offset = max([progress.next_offset, progress.floor, *(hole.end for hole in holes)])

    def restore_counts(self, records: Iterable[DeliveryRecord], undo: Undo) -> None:
        """After the progress: restores the delivery counts. The offset of a lost transient message is not
        used again.
        """
        records = list(records)
        self.log.next_offset = max([self.log.next_offset, *(record.offset + 1 for record in records)])
        if self.ready.deliveries is None:  # a policy is gone that had them counted
            self.ready.deliveries = Deliveries(None, undo)
        self.ready.deliveries.restore(
            record for record in records if not self.progress.is_settled(record.offset)
        )

    def reserve(self, offset: int) -> None:
        """Marks offsets below ``offset`` as used, even if their entries are lost (transient messages that a
        claim names).
        """
        log = self.log
        if offset > log.next_offset:
            gap, log.next_offset = log.next_offset, offset
            log.visible_end = max(log.visible_end, offset)
            self.settle(gap, offset)

    def loaded(self, *, clean: bool) -> None:
        """Finishes loading, after all runs are restored: settles entries without a run (transient messages)
        and marks what may have been delivered before.
        """
        there = IntervalSet((run.first, run.end) for run in self.log.runs)
        for start, end in there.outside(self.progress.floor, self.log.next_offset):
            self.settle(start, end)
        self.log.show()
        self.ready.loaded(clean=clean)
        self.marks.loaded(self.log.runs)
        self.free(0, self.log.next_offset)

    # -- durable ---------------------------------------------------------------------------------------------
    def record(self, change: Change) -> None:
        """Records changed progress and holes, and drops runs that no entry needs. Nothing is put for a
        deleted queue.
        """
        progress, ready = self.progress, self.ready
        if progress.dirty:
            progress.recorded()
            if ready.sent.total:
                ready.sent.drop_below(min(progress.floor, progress.acked))
            if self.written and not self.deleted:
                change.put(self.progress_record())
        if progress.hole_changes:
            progress.record_holes(change, self.queue_id, written=self.written, deleted=self.deleted)
        self.log.record(change)
        if ready.deliveries is not None and ready.deliveries.changes:
            ready.deliveries.record(change, self.queue_id, written=self.written, deleted=self.deleted)

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
