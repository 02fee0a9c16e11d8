"""Dispatch: ready entries go to consumers that have credit.

Pure: called with the state lock held, by one thread.
Not here: who consumes (``queue/ring.py``), what a channel holds (``channel.py``), bytes (the shell's
``send``). What must become durable is returned in :class:`Dispatched`.

Invariant: a queue that may have something for a consumer is in ``PendingChecks.runnable``. It is added when
entries become visible or ready again, when a consumer comes or goes, and when credit is returned. An entry is
read before it is delivered, so a damaged segment loses nothing. A consumer never gets more than its credit,
nor anything while a consumer of higher priority has credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from broker_core.broker.message.expiry import Expiry, lifetime_us
from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer, Unacked
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.topology.registry import Registry
from broker_core.broker.transaction.transaction import Settle
from broker_core.core.block import Blocks, NotLoaded
from broker_core.core.change import InboxRow
from broker_core.core.errors import LocalProtocolError, RemoteProtocolError, StoreError
from broker_core.core.records import NEVER
from broker_core.message.field_table import Long
from broker_core.message.properties import rewrite

BUDGET = 4096  # messages of one call
SLICE = 256  # messages of one queue before the next queue gets its turn
PIECE = 4  # from so many messages each, consumers are served one after the other instead of in turns

_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


class Dispatched(NamedTuple):
    """``settles`` (of consumers that do not ack) must be committed soon. The queues of ``due`` continue after
    ``expire(change, now, due)``.

    The consumers of the queues in ``failed``, whose messages cannot be read, are in ``cancelled``; the queues
    do not change. The queues of ``unread`` continue when their blocks are loaded and they are woken. Those of
    ``stuck`` failed for another reason; they continue when they are woken.
    """

    sent: int
    settles: list[Settle]
    due: list[Queue]
    failed: list[tuple[Queue, StoreError]]
    unread: list[tuple[Queue, NotLoaded]]
    stuck: list[tuple[Queue, Exception]]


class Dispatch:
    def __init__(
        self, registry: Registry, blocks: Blocks, expiry: Expiry, pending_checks: PendingChecks
    ) -> None:
        self._registry = registry
        self._blocks = blocks
        self._expiry = expiry
        self._runnable = pending_checks.runnable

    def send(self, now_us: int, budget: int = BUDGET) -> Dispatched:
        """Sends until no queue is runnable or ``budget`` messages are sent. Call it again while ``runnable``
        is not empty.
        """
        settles: list[Settle] = []
        due: list[Queue] = []
        failed: list[tuple[Queue, StoreError]] = []
        unread: list[tuple[Queue, NotLoaded]] = []
        stuck: list[tuple[Queue, Exception]] = []
        sent = 0
        while self._runnable and sent < budget:
            queue = next(iter(self._runnable))
            del self._runnable[queue]
            if queue.deleted or queue.owner:
                continue
            try:
                sent += self._send_queue(queue, now_us, min(SLICE, budget - sent), settles, due)
            except NotLoaded as missing:
                unread.append((queue, missing))
            except StoreError as error:
                failed.append((queue, error))
                self._registry.cancelled += queue.consumers.clear()
            except Exception as error:  # other queues go on
                stuck.append((queue, error))
        return Dispatched(sent, settles, due, failed, unread, stuck)

    def _send_queue(
        self, queue: Queue, now_us: int, limit: int, settles: list[Settle], due: list[Queue]
    ) -> int:
        consumers = queue.consumers
        sent = 0
        while True:
            ready = consumers.ready()
            if not ready:
                break
            if sent >= limit:
                self._runnable[queue] = None  # after the other queues
                return sent
            if queue.consumers.publishers is None:
                credit = ready[0].credit if len(ready) == 1 else sum(consumer.credit for consumer in ready)
                if 1 < len(ready) <= credit // PIECE and credit <= queue.messages - len(queue.ready.unacked):
                    # There is enough for all consumers: each gets all it has credit for at once, so that it
                    # acks consecutive entries.
                    queue.consumers.turn(ready[0])
                    ready = ready[:1]
                    credit = ready[0].credit
                entries = queue.ready.take_next(min(limit - sent, credit))
                if not entries:
                    break
                rows, whole = self._read(queue, entries, now_us)
                try:
                    if len(ready) == 1:
                        taken = self._give_one(queue, ready[0], entries, rows, settles)
                    else:
                        taken = self._give_round(queue, ready, entries, rows, settles)
                except BaseException:  # no entry is lost, whatever a consumer's connection raises
                    queue.ready.untake([entry for entry in entries if entry not in queue.ready.unacked])
                    raise
                queue.ready.untake(entries[taken:])
                if not whole and taken == len(rows):
                    due.append(queue)
                    return sent + taken
            else:
                taken, late = self._give_others(queue, ready, limit - sent, now_us, settles)
                if late:
                    due.append(queue)
                    return sent + taken
                if not taken:
                    break
            sent += taken
        if queue.marks.hasty:
            queue.marks.offered = queue.log.visible_end
            if self._expiry.head_expired(queue, now_us):
                due.append(queue)
        return sent

    def _read(self, queue: Queue, entries: Sequence[int], now_us: int) -> tuple[list[InboxRow], bool]:
        """Returns the messages of the first taken entries, and False if the next one must be expired
        first. Raises NotLoaded for the first entry only.
        """
        try:
            if isinstance(entries, range):  # as many as one run holds
                rows = queue.log.rows(entries.start, entries.stop)
                expiring = (
                    queue.arguments.ttl_ms is not None
                    or queue.log.locate(entries.start)[0].block.expires_us < NEVER
                )
            else:
                rows = []
                try:
                    for offset in entries:
                        rows += queue.log.rows(offset, offset + 1)
                except NotLoaded:
                    if not rows:
                        raise
                expiring = True
        except BaseException:
            queue.ready.untake(entries)
            raise
        if (deliveries := queue.ready.deliveries) is not None:
            for at, offset in enumerate(entries[: len(rows)]):
                if deliveries.over_limit(offset):
                    return rows[:at], False
                rows[at] = with_header(rows[at], "x-delivery-count", Long(deliveries.count(offset)))
        if expiring:
            for at, row in enumerate(rows):
                if _is_late(queue, entries[at], row, now_us):
                    return rows[:at], False
        return rows, True

    def _give_one(
        self,
        queue: Queue,
        consumer: Consumer,
        entries: Sequence[int],
        rows: list[InboxRow],
        settles: list[Settle],
    ) -> int:
        """Sends to one consumer while it is writable and returns how many. This is the hot path."""
        channel = consumer.channel
        first_tag = channel.last_tag + 1
        fresh = isinstance(entries, range) and queue.ready.none_sent(entries.start, entries.stop)
        if fresh:
            redelivered = [False] * len(rows)
        else:
            redelivered = [queue.ready.was_sent(offset) for offset in entries[: len(rows)]]
        taken = consumer.send(consumer, first_tag, redelivered, rows)
        channel.last_tag += taken
        if consumer.no_ack:
            settles += [_new(Settle, (queue, offset, "ack")) for offset in entries[:taken]]
        else:
            unacked = [_new(Unacked, (queue, offset, consumer)) for offset in entries[:taken]]
            channel.unacked.update(zip(range(first_tag, first_tag + taken), unacked))
        if taken:
            if not fresh:
                queue.marks.redelivered += sum(redelivered[:taken])
            queue.ready.hold_all(entries[:taken])
            if consumer.no_ack:
                queue.marks.delivered_no_ack += taken
            else:
                queue.marks.delivered += taken
                consumer.unacked += taken
                channel.consuming += taken
            if channel.prefetch:
                channel.served(consumer)
        return taken

    def _give_round(
        self,
        queue: Queue,
        ready: list[Consumer],
        entries: Sequence[int],
        rows: list[InboxRow],
        settles: list[Settle],
    ) -> int:
        """Sends one message to each consumer in turn while they have credit, and returns how many. It does
        the same as ``_give_one`` for each, but faster.
        """
        taken = 0
        turns = deque(ready)
        last = ready[0]
        try:
            for offset, row in zip(entries, rows):
                sent = 0
                while not sent:
                    while turns and not turns[0].credit:
                        turns.popleft().parked = True
                    if not turns:
                        break
                    consumer = turns[0]
                    turns.rotate(-1)
                    channel = consumer.channel
                    tag, again = channel.last_tag + 1, queue.ready.was_sent(offset)
                    sent = consumer.send(consumer, tag, (again,), (row,))
                if not sent:
                    break
                channel.last_tag, last = tag, consumer
                queue.marks.redelivered += again
                if consumer.no_ack:
                    queue.marks.delivered_no_ack += 1
                    settles.append(_new(Settle, (queue, offset, "ack")))
                else:
                    queue.marks.delivered += 1
                    channel.unacked[tag] = _new(Unacked, (queue, offset, consumer))
                    consumer.unacked += 1
                    channel.consuming += 1
                taken += 1
        finally:
            if taken:
                queue.ready.hold_all(entries[:taken])
                queue.consumers.turn(last)
                for consumer in ready[:taken]:
                    if consumer.channel.prefetch:
                        consumer.channel.served(consumer)
        return taken

    def _give_others(
        self, queue: Queue, ready: list[Consumer], limit: int, now_us: int, settles: list[Settle]
    ) -> tuple[int, bool]:
        """Like ``_give_round``, for a queue with a no-local consumer: messages of its own connection go to
        other consumers or stay in the queue.
        """
        aside: list[int] = []
        taken = 0
        publishers = queue.consumers.publishers or {}
        try:
            while taken < limit and ready and (entries := queue.ready.take_next(1)):
                rows, whole = self._read(queue, entries, now_us)
                if not whole:
                    queue.ready.untake(entries)
                    return taken, True
                publisher = publishers.get(entries[0], self)
                ready = [consumer for consumer in ready if consumer.credit]
                consumer = next(
                    (one for one in ready if not (one.no_local and one.channel.connection is publisher)), None
                )
                aside.append(entries[0])
                if consumer is None:
                    continue
                if not self._give_one(queue, consumer, entries, rows, settles):
                    continue
                taken += 1
                aside.pop()
                queue.consumers.turn(consumer)
                ready.remove(consumer)
                ready.append(consumer)
        finally:
            queue.ready.untake(aside)
        return taken, False


def _is_late(queue: Queue, offset: int, row: InboxRow, now_us: int) -> bool:
    """Returns whether the entry is too old. With a time to live of 0: consumers had their chance."""
    after_us = lifetime_us(queue, row)
    return row.committed_at + after_us <= now_us and (after_us > 0 or offset < queue.marks.offered)


def with_header(row: InboxRow, name: str, value: object) -> InboxRow:
    """Returns the message with another header; None: without it."""
    try:
        return row._replace(properties=rewrite(row.properties, {name: value}))
    except (RemoteProtocolError, LocalProtocolError):
        return row  # invalid properties are sent unchanged
