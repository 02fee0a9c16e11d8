"""Expiry: messages that are too old, or were returned too often, leave their queue in bounded steps.

Pure.
Not here: when it is called (``node/upkeep.py``, get and consume), dead-lettering (``messages.py``), and what
becomes of messages that wait (``delays.py``), which are due in the same steps.
Invariant: messages leave at the head of their queue, in the order in which they would be delivered, and by an
expiration of their own also behind it; held or claimed ones never expire. One call does a bounded amount of
work. The caller does the rest in further commits, so that other work is served between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from broker_core.broker.message.dead_letter import Reason
from broker_core.broker.message.delays import Delays
from broker_core.broker.message.due_entries import DueEntries, Rows
from broker_core.broker.message.messages import Messages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.removals import Removals, leave, ranges
from broker_core.broker.queue import Queue
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.topology.registry import Registry
from broker_core.core.block import Blocks, NotLoaded, together
from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import ResourceShortage, StoreError
from broker_core.core.records import NEVER
from broker_core.routing.content import own_expiration_us

SLICE = 160  # messages that expire in one commit: dead letters of so many take 10 ms
SLICE_BYTES = 4 * 1024 * 1024  # of bodies that are dead-lettered
TOGETHER = 16  # blocks that one call asks for together
_AT_ONCE = 0


class Expirations(DueEntries):
    """Of the messages themselves. What is held or claimed is looked at again when it is ready again."""

    def index(self, queue: Queue) -> DueIndex[Queue] | None:
        return queue.marks.expirations

    def release(self, change: Change, queue: Queue, rows: Rows, now: int, removals: Removals) -> int:
        return removals.add(queue, rows, "expired")


class Expiry:
    def __init__(
        self,
        registry: Registry,
        blocks: Blocks,
        messages: Messages,
        overflow: Overflow,
        pending_checks: PendingChecks,
    ) -> None:
        self._registry = registry
        self._blocks = blocks
        self._messages = messages
        self.delays = Delays(blocks, messages)
        self.expirations = Expirations(blocks, own_expiration_us)
        self._overflow = overflow
        self._pending_checks = pending_checks

    def plan(self, queue: Queue) -> None:
        """Notes when the head of the queue expires, or the next of its messages is due."""
        try:
            if queue.marks.waits is not None:
                self._pending_checks.plan(queue, self.delays.deadline(queue))
                return
            self._pending_checks.plan(queue, self.expirations.deadline(queue))
            if queue.arguments.ttl_ms is None:
                return
            offset = queue.ready.head(queue.log.visible_end)
            deadline = NEVER if offset is None else self.deadline(queue, offset)
            if offset is None or self._pending_checks.is_planned(queue, deadline):
                return
            if queue.arguments.dead_letters:
                with contextlib.suppress(NotLoaded):
                    self._messages.fetch(queue, offset)
        except NotLoaded:
            deadline = _AT_ONCE  # ``expire`` loads it, and plans again
        except Exception:  # called after a commit that is durable already
            # an unreadable message does not expire; reading it raises, and ``due`` reports other errors
            return
        self._pending_checks.plan(queue, deadline)

    def due(self, now: int) -> list[Queue]:
        """Returns queues whose head must leave now, of those that were planned for now. ``next_deadline`` is
        the next known time to ask.
        """
        return self.due_of(self._pending_checks.take_due(now), now)

    def due_of(self, queues: Iterable[Queue], now: int) -> list[Queue]:
        """Returns those of ``queues`` whose head must leave now, or whose delivery counts are to be recorded,
        and plans the others.
        """
        due: list[Queue] = []
        for queue in queues:
            if queue.deleted:
                continue
            try:
                if queue.marks.waits is not None:
                    expired = self.delays.deadline(queue) <= now
                else:
                    expired = self.expirations.deadline(queue) <= now or self.head_expired(queue, now)
            except StoreError:
                expired = False
            except (NotLoaded, Exception):
                expired = True  # perhaps: ``expire`` loads it, or raises the error
            if expired or queue.has_news or queue in self._pending_checks.overfull:
                due.append(queue)
            elif queue.marks.timed:
                self.plan(queue)
        return due

    def deadline(self, queue: Queue, offset: int) -> int:
        """Returns when an entry expires, in microseconds since the epoch; NEVER or later: it does not. The
        time to live starts at commit. The last answer is kept: it never changes, and the next block may be on
        disk.
        """
        cached = queue.marks.deadline
        if cached is not None and cached[0] == offset:
            return cached[1]
        run, _ = queue.log.locate(offset)
        ttl_ms = queue.arguments.ttl_ms
        if run.block.expires_us >= NEVER and (run.sequence or ttl_ms is None):
            return NEVER if ttl_ms is None else run.committed_at + ttl_ms * 1000
        row = self._messages.fetch(queue, offset)
        deadline = row.committed_at + lifetime_us(queue, row)
        if run.block.inbox is None:
            queue.marks.deadline = (offset, deadline)
        return deadline

    def head_expired(self, queue: Queue, now: int) -> bool:
        """Returns whether the next message must leave instead of being delivered: it is too old, or was
        returned too often.

        Raises CorruptSegment, DataLoss if it must leave and cannot be read.
        """
        offset = queue.ready.head(queue.log.visible_end)
        if offset is None:
            return False
        late = queue.ready.over_limit(offset) or self.deadline(queue, offset) <= now
        if late and queue.arguments.dead_letters:
            self._messages.fetch(queue, offset)
        return late

    def expire(
        self, change: Change, now: int, queues: Iterable[Queue] | None = None, limit: int = SLICE
    ) -> list[Queue]:
        """Expires messages at the heads of queues, about ``limit`` in all. Returns the queues with more to
        expire, the next one first.

        A message that cannot be read blocks only its own queue. The queues are woken. Raises NotLoaded, for
        several queues together, only if it could not look at any queue.
        """
        looked = [
            queue
            for queue in (list(self._registry.by_id.values()) if queues is None else queues)
            if not queue.deleted
        ]
        left: list[Queue] = []
        cut: list[Queue] = []
        missing: list[NotLoaded] = []
        removals = self._messages.removals(change, now)
        room, room_bytes = limit, SLICE_BYTES
        for queue in looked:
            if room <= 0 or room_bytes <= 0 or removals.full or len(missing) == TOGETHER:
                left.append(queue)
                continue
            changed, done = queue.has_news, False
            while not (done or removals.full) and room > 0 and room_bytes > 0:
                bounds = now, room, room_bytes, removals
                try:
                    cost, size_bytes, done = self._expire_some(change, queue, *bounds)
                except NotLoaded as error:
                    missing.append(error)
                    changed = True  # its head may have left before, in a commit that other queues go on with
                    break
                changed = changed or cost > 0
                room -= cost
                room_bytes -= size_bytes
            if changed:
                queue.record(change)
            if self._pending_checks.was_cut(queue):
                self._overflow.cut(change, queue, now, removals)
            if not done or queue in self._pending_checks.overfull:
                cut.append(queue)
        if missing and len(missing) + len(left) == len(looked):
            raise together(missing)
        if removals:
            self._messages.dead_letter_all(change, removals, now)
        for queue in looked:
            self.plan(queue)
            if queue.consumers:
                self._pending_checks.wake(queue)
        return left + cut

    def _expire_some(
        self, change: Change, queue: Queue, now: int, room: int, room_bytes: int, removals: Removals
    ) -> tuple[int, int, bool]:
        """Expires the next ready entries that must leave, and once none is at the head, those behind it.
        Returns what it used of ``room`` and ``room_bytes``, and whether the others stay.
        """
        if queue.marks.waits is not None:
            return self.delays.leave(change, queue, now, room, room_bytes, removals)
        cost, size_bytes, done = self._expire_head(queue, now, room, room_bytes, removals)
        if not done:
            return cost, size_bytes, False
        more = self.expirations.leave(change, queue, now, room - cost, room_bytes - size_bytes, removals)
        return cost + more[0], size_bytes + more[1], more[2]

    def _expire_head(
        self, queue: Queue, now: int, room: int, room_bytes: int, removals: Removals
    ) -> tuple[int, int, bool]:
        """As ``_expire_some``, of those at the head."""
        entries: Sequence[int] = ()
        try:
            unread = self._unread(queue, now)
            entries = queue.ready.take_next(unread or room)
            if not entries or queue.progress.is_settled(entries[0]):
                return 0, 0, True
            if unread:
                leave(queue, entries, "expired", removals.effects)
                return 1, 0, False
            rows, reason, whole = self._late(queue, entries, now, room_bytes)
        except NotLoaded:
            queue.ready.untake(entries)
            raise
        except (StoreError, ResourceShortage):  # it stays until it can be read
            queue.ready.untake(entries)
            return 0, 0, True
        late = removals.add(queue, rows, reason)
        queue.ready.untake(entries[late:])
        if not late:
            return 0, 0, True
        leave(queue, entries[:late], reason, removals.effects)
        size_bytes = sum(len(row.body) for row in rows[:late]) if queue.arguments.dead_letters else 0
        return late, size_bytes, not whole and late == len(rows)

    def _unread(self, queue: Queue, now: int) -> int:
        """Returns how many entries at the head expire without being read: they are of one stored commit, and
        are not dead-lettered.
        """
        ttl_ms, deliveries = queue.arguments.ttl_ms, queue.ready.deliveries
        counted = deliveries is not None and deliveries.counts
        if queue.arguments.dead_letters or counted or queue.ready.ranks is not None or ttl_ms is None:
            return 0
        head = queue.ready.head(queue.log.visible_end)
        if head is None:
            return 0
        run, _ = queue.log.locate(head)
        if not run.sequence or run.committed_at + ttl_ms * 1000 > now or run.block.expires_us < NEVER:
            return 0
        return run.end - head

    def _late(
        self, queue: Queue, entries: Sequence[int], now: int, room_bytes: int
    ) -> tuple[list[InboxRow], Reason, bool]:
        """Returns the first of the taken entries that leave for one reason. False: the next one stays. True:
        another call must check it.

        Raises CorruptSegment, DataLoss and NotLoaded for the first entry only: entries before it may leave.
        """
        rows: list[InboxRow] = []
        reason: Reason = "expired"
        deliveries = queue.ready.deliveries
        for start, end in ranges(entries):
            while start < end:
                try:
                    found = queue.log.rows(start, end)
                except (StoreError, ResourceShortage, NotLoaded):
                    if not rows:
                        raise
                    return rows, reason, True
                for offset, row in enumerate(found, start):
                    why: Reason = "expired"
                    if deliveries is not None and deliveries.over_limit(offset):
                        why = "delivery_limit"
                    elif (deadline := row.committed_at + lifetime_us(queue, row)) > now:
                        # known from now on, though the block may be gone from memory before its row is
                        queue.marks.deadline = (offset, deadline)
                        return rows, reason, False
                    if not rows:
                        reason = why
                    elif why != reason or room_bytes <= 0:
                        return rows, reason, True
                    rows.append(row)
                    room_bytes -= len(row.body)
                start += len(found)
        return rows, reason, True


def lifetime_us(queue: Queue, row: InboxRow) -> int:
    """Returns how long after its commit a message expires; NEVER: it does not."""
    ttl_ms, own_us = queue.arguments.ttl_ms, own_expiration_us(row.properties)
    return own_us if ttl_ms is None else min(own_us, ttl_ms * 1000)
