"""Commit: everything that a transaction publishes, settles and consumes becomes one change.

Every transaction ends here: of a channel, prepared, of a micro-batch, of a batch write. All its effects
become visible and durable together, or not at all. The committer (``node/committer.py``) writes the change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from broker_core.broker.access.own_id import name_of, user_of
from broker_core.broker.history.history import CommitHistory
from broker_core.broker.message.expiry import Expiry
from broker_core.broker.message.messages import Messages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.removals import Removals
from broker_core.broker.message.settlement import Settlement
from broker_core.broker.message.stored import StoredMessages
from broker_core.broker.message.vhost_message_limit import VhostMessageLimit
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.state.block import Blocks
from broker_core.broker.state.change import BROKER, CONSUMED, Change, Numbers, Who
from broker_core.broker.state.records import OutcomeRecord
from broker_core.broker.topology.virtual_hosts import VirtualHosts
from broker_core.broker.transaction.names import TransactionNames
from broker_core.broker.transaction.spilled import Spilled
from broker_core.broker.transaction.transaction import State, Transaction
from broker_core.ids import CommitSequence
from broker_core.message.message import Message

_UNUSED = CommitSequence(1)  # for rows that become messages, which have none
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


class CommitResult(NamedTuple):
    """The result of a commit: its sequence number (NO_SEQUENCE: nothing was published, outside a
    transaction), and mandatory messages whose queues have been deleted.

    ``rejected``: indexes in ``publishes`` that a full queue refused, in a transaction that is not atomic.
    ``dropped``: messages and settlements of a prepared transaction that have no effect because their queue
    was deleted.
    """

    sequence: CommitSequence
    returned: list[Message]
    rejected: list[int] = []
    dropped: int = 0


class Commits:
    def __init__(
        self,
        numbers: Numbers,
        blocks: Blocks,
        names: TransactionNames,
        overflow: Overflow,
        messages: Messages,
        stored: StoredMessages,
        settlement: Settlement,
        virtual_hosts: VirtualHosts,
        vhost_message_limit: VhostMessageLimit,
        expiry: Expiry,
        pending_checks: PendingChecks,
    ) -> None:
        self.history = CommitHistory(blocks.undo, numbers)
        self._undo = blocks.undo
        self._numbers = numbers
        self._blocks = blocks
        self._names = names
        self._overflow = overflow
        self._messages = messages
        self._stored = stored
        self._settlement = settlement
        self._virtual_hosts = virtual_hosts
        self._vhost_message_limit = vhost_message_limit
        self._expiry = expiry
        self._pending_checks = pending_checks

    def commit(self, change: Change, transaction: Transaction, now: int) -> CommitResult:
        """Adds the whole transaction to one change (decision 1).

        Raises, with nothing changed, PreconditionFailed (a full queue or virtual host), TransactionState,
        CorruptSegment.
        """
        xid, publishes, settles = transaction.xid, transaction.publishes, transaction.settles
        rejected: list[int] = []
        # a prepared one was checked when it was prepared, and its room is reserved
        if transaction.state is State.ACTIVE:
            if transaction.atomic and transaction.incoming:
                self._overflow.check(transaction.incoming)
            if self._virtual_hosts.limited:
                if transaction.atomic:
                    self._vhost_message_limit.check(transaction)
                else:
                    publishes = self._vhost_message_limit.admit(transaction, rejected)
            if xid and not transaction.decided:
                self._names.check_new(xid)
        if settles:
            self._settlement.check_readable(settles)
        returned: list[Message] = []
        for spilled in transaction.spilled:
            returned += self._unreached(spilled)
        self.become(transaction, State.COMMITTED)
        if transaction.transactional and (
            publishes or settles or transaction.spilled or transaction.staged or transaction.decided
        ):
            change.sequence = self._numbers.next_sequence(transaction=True)
        if xid:
            change.effects.xid, change.effects.is_plain = name_of(xid), False
            if change.effects.who is BROKER:  # an operator commits it for its user
                change.effects.who = Who(user=user_of(xid) or "")
            self._names.give(change.effects.xid, now)
        for spilled in transaction.spilled:
            self._stored.enqueue_spilled(change, spilled, now, transaction.connection)
        if publishes:
            removals = Removals()
            removals.effects = change.effects
            returned += self._messages.enqueue(
                change, publishes, now, removals, transaction.atomic, rejected, transaction.connection
            )
            if removals:
                self._messages.dead_letter_all(change, removals, now)
        for staged in transaction.staged:
            self._stored.enqueue_staged(change, staged, now)
        if settles:
            self._settlement.settle(change, settles, now)
        for queue, start, end in transaction.consumed:
            queue.settle(start, end)
            change.effects.note(CONSUMED, queue, start, end)
            queue.record(change)
        for dead_letter_block in transaction.dead_letter_blocks:
            self._stored.enqueue_dead_letters(change, dead_letter_block, now)
        if xid and not transaction.decided:
            self._names.outcomes.remember(change, OutcomeRecord(xid, "committed", now))
        return _new(CommitResult, (change.sequence, returned, rejected, 0))

    def publish(self) -> None:
        """Makes the durable commits in progress visible. The committer calls it under the state lock."""
        pending_checks = self._pending_checks
        for queue in pending_checks.touched:
            if queue.deleted:  # in one of these commits, after the work that touched it
                continue
            queue.log.show()
            if queue.consumers.rings or queue.marks.hasty:
                pending_checks.runnable[queue] = None
            if queue.marks.timed:
                self._expiry.plan(queue)
        pending_checks.touched.clear()

    def _unreached(self, spilled: Spilled) -> list[Message]:
        """Returns mandatory messages whose queues have all been deleted. Raises CorruptSegment."""
        lost = spilled.unreached()
        if not lost:
            return []
        rows = self._blocks.decode(spilled.block_id, np.array(lost, np.int64), _UNUSED, 0)
        return [Message(row.body, row.routing_key, row.exchange, row.properties) for row in rows]

    def become(self, transaction: Transaction, state: State) -> None:
        """Changes the state of the transaction. Raises TransactionState."""
        self._undo.append((setattr, transaction, "state", transaction.state))
        transaction.become(state)
