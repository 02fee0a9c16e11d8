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
from broker_core.broker.queue.parts import requeue_parts, settle_parts
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.state.block import Blocks, NotLoaded, together
from broker_core.broker.state.change import ACKNOWLEDGED, REJECTED, RETURNED, Change
from broker_core.broker.transaction.transaction import Settle
from broker_core.errors import StoreError
from broker_core.ids import BlockId

_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


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
        """Settles all of them in order. What follows in a queue with the same outcome is one step."""
        removals = Removals(change.effects)
        queues: dict[Queue, None] = {}
        grown: dict[Queue, None] = {}
        at, note = 0, change.effects.note
        while at < len(settles):
            queue, _, outcome = settles[at]
            parts, at = _parts(settles, at)
            if queue.deleted:
                continue
            queues[queue] = None
            if outcome == "ack" or outcome == "copied":
                if len(parts) == 1:
                    queue.settle_range(*parts[0])
                else:
                    settle_parts(queue, parts)
                for start, end in parts:
                    note(ACKNOWLEDGED if outcome == "ack" else REJECTED, queue, start, end)
            elif outcome == "requeue":
                requeue_parts(queue, parts)
                for start, end in parts:
                    note(RETURNED, queue, start, end)
                    self._give_up(queue, start, end, removals)
                self._pending_checks.wake(queue)
                if queue.arguments.limited:
                    grown[queue] = None
            else:
                for start, end in parts:
                    discard(queue, range(start, end), "rejected", removals)
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
        self, deliveries: Iterable[tuple[Queue, int]], change: Change | None = None, now: int = 0
    ) -> None:
        """Requeues deliveries that no channel holds. Only their delivery count is durable; without ``change``
        a later commit records it.
        """
        settles = [_new(Settle, (queue, offset, "requeue")) for queue, offset in deliveries]
        queues: dict[Queue, None] = {}
        removals = Removals((change or Change()).effects)
        at = 0
        while at < len(settles):
            queue = settles[at].queue
            parts, at = _parts(settles, at)
            if queue.deleted:
                continue
            requeue_parts(queue, parts)
            queues[queue] = None
            if change is not None:
                for start, end in parts:
                    self._give_up(queue, start, end, removals)
        if change is not None and removals:
            self._messages.dead_letter_all(change, removals, now)
        for queue in queues:
            self._pending_checks.wake(queue)
            if change is not None and queue.ready.deliveries is not None:
                queue.record(change)


def _parts(settles: Sequence[Settle], at: int) -> tuple[list[tuple[int, int]], int]:
    """Returns the entries that follow one another from ``at`` on in one queue with one outcome, as sorted
    [start, end) pairs, and where others begin.
    """
    queue, start, outcome = settles[at]
    end = start + 1
    parts: list[tuple[int, int]] = []
    for place in range(at + 1, len(settles)):
        other, offset, its = settles[place]
        if other is not queue or its != outcome or offset < end:
            return [*parts, (start, end)], place
        if offset > end:
            parts.append((start, end))
            start = offset
        end = offset + 1
    return [*parts, (start, end)], len(settles)
