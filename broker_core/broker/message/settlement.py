"""Settlement of deliveries: they are acknowledged, rejected (dead-lettered or dropped), or requeued.

Pure.
Not here: what a channel holds (``channel.py``). Codes and meaning are AMQP's and RabbitMQ's.
Invariant: a message that was returned more often than x-delivery-limit leaves in the commit that returned it,
or, where those are too many for one commit, before it is delivered again (``expiry.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from broker_core.broker.message.messages import Messages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.removals import Removals, discard, leave, rows_of
from broker_core.broker.queue import Queue
from broker_core.broker.queue.parts import requeue_parts, settle_parts
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.transaction.spilled import Letters
from broker_core.broker.transaction.transaction import LettersNotAhead, Settle, Transaction
from broker_core.core.block import Blocks, NotLoaded, together
from broker_core.core.change import ACKNOWLEDGED, REJECTED, RETURNED, Change
from broker_core.core.errors import StoreError
from broker_core.core.ids import BlockId

MANY_REJECTS = 1_024  # dead letters that are too many for one commit, whatever they reach
_FEW = 16  # so few may be large

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
                run, _ = queue.log.locate(offset)
                if run.block.inbox is None and run.block_id not in read:
                    read.add(run.block_id)
                    try:
                        self._blocks.read(run.block_id)
                    except NotLoaded as error:
                        missing.append(error)
        if missing:
            raise together(missing)

    def check_letters(self, transaction: Transaction, letters: Letters, now: int) -> None:
        """Checks, before anything is changed, that one commit has room for the dead letters of a transaction
        that must not be cut. Raises LettersNotAhead, and why they could not be written.
        """
        if letters.failure is not None:
            failure, letters.failure = letters.failure, None  # whoever tries again may succeed
            raise failure
        ahead = letters.ahead
        if ahead is None:
            if letters.count >= MANY_REJECTS or not self._fit(transaction.settles, letters.count, now):
                raise LettersNotAhead(transaction)
        elif any(source.deleted for sources, _ in ahead for source in sources):
            raise LettersNotAhead(transaction)  # without those of that queue

    def _fit(self, settles: Sequence[Settle], count: int, now: int) -> bool:
        """Whether one commit has room for the dead letters, ``count`` of them."""
        removals = self._messages.removals(Change(), now)
        rejected = rejects_of(settles)
        widest = self._messages.widest
        if (
            count < _FEW
            and sum(len(found) * widest(queue) for queue, found in rejected.items()) < removals.entries
        ):
            return True
        for queue, offsets in rejected.items():
            removals.add(queue, rows_of(queue, offsets), "rejected")
        return not removals.full

    def settle(
        self, change: Change, settles: Sequence[Settle], now: int, *, whole: bool = True, ahead: bool = False
    ) -> list[Settle]:
        """Settles them in order. What follows in a queue with the same outcome is one step. Returns the
        rejects for whose dead letters there is no room, for another commit; none if ``whole``. ``ahead``: the
        dead letters were written ahead.
        """
        removals = self._messages.removals(change, now)
        left: list[Settle] = []
        queues: dict[Queue, None] = {}
        grown: dict[Queue, None] = {}
        at, note = 0, change.effects.note
        while at < len(settles):
            queue, _, outcome = settles[at]
            parts, at = _parts(settles, at)
            if queue.deleted:
                continue
            queues[queue] = None
            if outcome == "ack" or (ahead and outcome == "reject" and queue.arguments.dead_letters):
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
                    self._give_up(queue, start, end, now, removals)
                self._pending_checks.wake(queue)
                if queue.arguments.limited:
                    grown[queue] = None
            else:
                for start, end in parts:
                    if whole:
                        discard(queue, range(start, end), "rejected", removals)
                    else:
                        done = _reject_some(queue, start, end, removals)
                        left += [_new(Settle, (queue, offset, "reject")) for offset in range(done, end)]
        for queue in grown:
            # as in RabbitMQ: a requeued message counts again, and is the oldest
            self._overflow.cut(change, queue, now, removals)
        if removals:
            self._messages.dead_letter_all(change, removals, now)
        for queue in queues:
            queue.record(change)
        return left

    def _give_up(self, queue: Queue, start: int, end: int, now: int, removals: Removals) -> None:
        """Discards entries that were returned more often than x-delivery-limit. One that cannot be read
        stays.
        """
        if queue.ready.deliveries is None:
            return
        for offset in range(start, end):
            if queue.ready.over_limit(offset):
                if removals.full:
                    self._pending_checks.plan(queue, now)
                    return
                with contextlib.suppress(StoreError):
                    discard(queue, (offset,), "delivery_limit", removals)

    def requeue(
        self, deliveries: Iterable[tuple[Queue, int]], change: Change | None = None, now: int = 0
    ) -> None:
        """Requeues deliveries that no channel holds. Only their delivery count is durable; without ``change``
        a later commit records it.
        """
        settles = [_new(Settle, (queue, offset, "requeue")) for queue, offset in deliveries]
        queues, at = dict[Queue, None](), 0
        removals = self._messages.removals(change or Change(), now)
        while at < len(settles):
            queue = settles[at].queue
            parts, at = _parts(settles, at)
            if queue.deleted:
                continue
            requeue_parts(queue, parts)
            queues[queue] = None
            if change is not None:
                for start, end in parts:
                    self._give_up(queue, start, end, now, removals)
        if change is not None and removals:
            self._messages.dead_letter_all(change, removals, now)
        for queue in queues:
            self._pending_checks.wake(queue)
            if queue.arguments.limited:  # as in RabbitMQ: what comes back counts again
                self._pending_checks.obey_soon(queue, now)
            if change is not None and queue.ready.deliveries is not None:
                queue.record(change)


def rejects_of(settles: Sequence[Settle]) -> dict[Queue, list[int]]:
    """Returns the offsets that are rejected of each queue with a dead-letter exchange."""
    offsets: dict[Queue, list[int]] = {}
    for queue, offset, outcome in settles:
        if outcome == "reject" and queue.arguments.dead_letters and not queue.deleted:
            offsets.setdefault(queue, []).append(offset)
    return offsets


def _reject_some(queue: Queue, start: int, end: int, removals: Removals) -> int:
    """Rejects the first of the entries [start, end), and returns where the dead letters found no more
    room.
    """
    if not queue.arguments.dead_letters:
        discard(queue, range(start, end), "rejected", removals)
        return end
    for first, last in queue.progress.unsettled_within(start, end):
        done = first + removals.add(queue, rows_of(queue, range(first, last)), "rejected")
        leave(queue, range(start, done), "rejected", removals.effects)
        start = done
        if done < last:
            return done
    leave(queue, range(start, end), "rejected", removals.effects)
    return end


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
