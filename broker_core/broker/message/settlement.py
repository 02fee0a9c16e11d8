"""Settlement of deliveries: they are acknowledged, rejected (dead-lettered or dropped), or requeued.

Pure.
Not here: what a channel holds (``channel.py``). Codes and meaning are AMQP's and RabbitMQ's.
Invariant: a message that was returned more often than x-delivery-limit leaves in the commit that returned it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from broker_core.broker.message.messages import Messages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.removals import Removals, discard
from broker_core.broker.queue import Queue
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.state.block import Blocks, NotLoaded, together
from broker_core.broker.state.change import ACKNOWLEDGED, REJECTED, RETURNED, Change
from broker_core.broker.transaction.transaction import Settle
from broker_core.errors import StoreError
from broker_core.ids import BlockId


class Settlement:
    def __init__(
        self, blocks: Blocks, messages: Messages, overflow: Overflow, pending_checks: PendingChecks
    ) -> None:
        self._blocks = blocks
        self._messages = messages
        self._overflow = overflow
        self._pending_checks = pending_checks

    def check_readable(self, settles: Sequence[Settle]) -> None:
        """Checks, before anything is changed, that messages to be dead-lettered can be read. Raises
        CorruptSegment, DataLoss, and NotLoaded for all of their blocks together.
        """
        read: set[BlockId] = set()
        missing: list[NotLoaded] = []
        for queue, offset, outcome in settles:
            if (
                outcome == "reject"
                and queue.arguments.dead_letters
                and not queue.deleted
                and not queue.progress.is_settled(offset)
            ):
                run, number = queue.log.locate(offset)
                if run.block.inbox is None and run.block_id not in read:
                    read.add(run.block_id)
                    try:
                        self._blocks.row(run.block_id, number)
                    except NotLoaded as wanted:
                        missing.append(wanted)
        if missing:
            raise together(missing)

    def settle(self, change: Change, settles: Sequence[Settle], now: int) -> None:
        """Settles all of them in order. Consecutive entries with the same outcome are one step."""
        removals = Removals(change.effects)
        queues: dict[Queue, None] = {}
        grown: dict[Queue, None] = {}
        at, count, note = 0, len(settles), change.effects.note
        while at < count:
            queue, offset, outcome = settles[at]
            at += 1
            if queue.deleted:
                continue
            queues[queue] = None
            end = offset + 1
            while at < count and settles[at] == (queue, end, outcome):
                end += 1
                at += 1
            if outcome == "ack" or outcome == "copied":
                queue.settle_range(offset, end)
                note(ACKNOWLEDGED if outcome == "ack" else REJECTED, queue, offset, end)
            elif outcome == "requeue":
                queue.requeue_range(offset, end)
                note(RETURNED, queue, offset, end)
                self._give_up(queue, offset, end, removals)
                self._pending_checks.wake(queue)
                if queue.arguments.limited:
                    grown[queue] = None
            else:
                discard(queue, range(offset, end), "rejected", removals)
        for queue in grown:
            # as in RabbitMQ: a requeued message counts again, and is the oldest
            self._overflow.cut(change, queue, now, removals)
        if removals:
            self._messages.dead_letter_all(change, removals, now)
        for queue in queues:
            queue.record(change)

    def _give_up(self, queue: Queue, start: int, end: int, removals: Removals) -> None:
        """Discards entries that were returned more often than x-delivery-limit. One that cannot be read
        stays.
        """
        if queue.ready.deliveries is None:
            return
        for offset in range(start, end):
            if queue.ready.over_limit(offset):
                with contextlib.suppress(StoreError):
                    discard(queue, (offset,), "delivery_limit", removals)

    def requeue(
        self, settles: Iterable[tuple[Queue, int]], change: Change | None = None, now: int = 0
    ) -> None:
        """Requeues deliveries that no channel holds. Only their delivery count is durable; without ``change``
        a later commit records it.
        """
        queues: dict[Queue, None] = {}
        removals = Removals((change or Change()).effects)
        last: Queue | None = None
        start = end = 0
        for queue, offset in (*settles, (None, 0)):
            if queue is not None and queue is last and offset == end:
                end += 1
                continue
            if last is not None and not last.deleted:
                last.requeue_range(start, end)
                if change is not None:
                    self._give_up(last, start, end, removals)
                queues[last] = None
            last, start, end = queue, offset, offset + 1
        if change is not None and removals:
            self._messages.dead_letter_all(change, removals, now)
        for queue in queues:
            self._pending_checks.wake(queue)
            if change is not None and queue.ready.deliveries is not None:
                queue.record(change)
