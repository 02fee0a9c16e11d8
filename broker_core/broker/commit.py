"""Commit: everything that a transaction publishes, settles and consumes becomes one change.
Prepared transactions (XA, first phase) wait for theirs until they are decided by their xid.

Every transaction ends here: of a channel, prepared, of a micro-batch, of a batch write. All its effects
become visible and durable together, or not at all. The committer (``node/committer.py``) writes the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from broker_core.broker.access.shares import PREPARED, PREPARED_BYTES
from broker_core.broker.access.users import disowned_key, is_owned, name_of, owner_of, payer_of, user_of
from broker_core.broker.history.history import CommitHistory
from broker_core.broker.message.expiry import Expiry
from broker_core.broker.message.messages import Messages, StoredMessages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.settlement import Settlement
from broker_core.broker.message.vhost_message_limit import VhostMessageLimit
from broker_core.broker.queue import Queue
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.topology.virtual_hosts import VirtualHosts
from broker_core.broker.transaction.names import TransactionNames
from broker_core.broker.transaction.spilled import Unreached
from broker_core.broker.transaction.transaction import Settle, State, Transaction
from broker_core.core.address import VHOST
from broker_core.core.block import Blocks
from broker_core.core.change import BROKER, CONSUMED, Author, Change, Numbers
from broker_core.core.errors import TransactionState
from broker_core.core.ids import NO_SEQUENCE, CommitSequence, QueueId
from broker_core.core.records import PreparedRecord
from broker_core.message.message import Message

_UNUSED = CommitSequence(1)  # for rows that become messages, which have none
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


class CommitResult(NamedTuple):
    """The result of a commit: its sequence number (NO_SEQUENCE: nothing was published, outside a
    transaction), and mandatory messages that no queue has got. Those of ``stored`` come before ``returned``.

    ``rejected``: indexes in ``publishes`` that a full queue refused, in a transaction that is not atomic;
    ``left``: its rejects whose dead letters are too many for one commit, for another one.
    ``dropped``: messages and settlements of a prepared transaction that have no effect because their queue
    was deleted.
    """

    sequence: CommitSequence
    returned: list[Message]
    rejected: list[int] = []
    left: Sequence[Settle] = ()
    dropped: int = 0
    stored: Sequence[Unreached] = ()


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

    def commit(
        self, change: Change, transaction: Transaction, now: int, by_hand: bool = False, later: bool = False
    ) -> CommitResult:
        """Adds the whole transaction to one change (decision 1). ``by_hand``: somebody else than who named it
        has decided; ``later``: the caller takes back what is ``stored``. Raises, with nothing changed,
        PreconditionFailed (it is full), TransactionState, CorruptSegment.
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
        if stored := transaction.blocks_with_ids():
            self._messages.admission.require_ids(stored)
        letters = transaction.letters
        if settles:
            self._settlement.check_readable(settles)
            if transaction.atomic and letters is not None:
                self._settlement.check_letters(transaction, letters, now)
        returned, unreached = self._unreached(change, transaction, later)
        self.become(transaction, State.COMMITTED)
        if transaction.transactional and (
            publishes or settles or transaction.spilled or transaction.staged or transaction.decided
        ):
            change.sequence = self._numbers.next_sequence(transaction=True)
        if xid:
            self._name(change, xid, now)
        for spilled in transaction.spilled:
            self._stored.enqueue_spilled(change, spilled, now, transaction.connection)
        if publishes:
            returned += self._messages.enqueue(
                change, publishes, now, transaction.atomic, rejected, transaction.connection
            )
        for staged in transaction.staged:
            self._stored.enqueue_staged(change, staged, now)
        left: Sequence[Settle] = ()
        ahead = None if letters is None else letters.ahead
        if settles:
            left = self._settlement.settle(
                change, settles, now, whole=transaction.atomic, ahead=ahead is not None
            )
        for queue, start, end in transaction.consumed:
            queue.settle(start, end)
            change.effects.note(CONSUMED, queue, start, end)
            queue.record(change)
        for written in ahead or ():
            self._stored.enqueue_letters(change, written, now)
        if xid and not transaction.decided:
            self._names.end(change, xid, "committed", now, by_hand)
        return _new(CommitResult, (change.sequence, returned, rejected, left, 0, unreached))

    def _name(self, change: Change, xid: str, now: int) -> None:
        change.effects.xid, change.effects.is_plain = name_of(xid), False
        if change.effects.who is BROKER:  # an operator commits it for its user
            change.effects.who = Author(user=user_of(xid) or "")
        self._names.of_messages.give(change.effects.xid, now)

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

    def _unreached(
        self, change: Change, transaction: Transaction, later: bool
    ) -> tuple[list[Message], list[Unreached]]:
        """Returns what its publisher gets back of what is stored, now or ``later``."""
        found: list[Unreached] = []
        if transaction.state is State.ACTIVE:  # nobody gets back those of a prepared one
            for spilled in transaction.spilled:
                if (unreached := spilled.unreached()) is not None:
                    found.append(unreached)
                    if later:
                        self._blocks.hold(spilled.block_id, spilled.rows, spilled.size_bytes)
                        change.names.append(spilled.block_id)
        return ([], found) if later else ([each for lost in found for each in self.messages_of(lost)], [])

    def take_back(self, change: Change, unreached: Unreached) -> list[Message]:
        """Returns the messages; their block need not stay any more. Raises CorruptSegment."""
        found = self.messages_of(unreached)
        self._blocks.unhold(change, unreached.block_id)
        return found

    def messages_of(self, unreached: Unreached) -> list[Message]:
        rows = self._blocks.decode(*unreached, _UNUSED, 0)
        return [Message(row.body, row.routing_key, row.exchange, row.properties) for row in rows]

    def become(self, transaction: Transaction, state: State) -> None:
        """Changes the state of the transaction. Raises TransactionState."""
        self._undo.append((setattr, transaction, "state", transaction.state))
        transaction.become(state)


MOST_PREPARED = 10_000  # undecided ones, of all users
MOST_PREPARED_BYTES = 512 * 1024 * 1024  # that they have in memory: half of what stops publishers


class Prepared:
    """Prepared transactions: durable, invisible, and independent of a session until they are decided."""

    def __init__(self, transactions: Commits) -> None:
        self._transactions = transactions
        self._undo, self._blocks = transactions._undo, transactions._blocks
        self._names, self._overflow = transactions._names, transactions._overflow
        self._settlement, self._virtual_hosts = transactions._settlement, transactions._virtual_hosts
        self._vhost_message_limit = transactions._vhost_message_limit
        self.by_key = self._names.prepared
        self.vhosts = self._names.prepared_in
        self.since_us: dict[str, int] = {}  # by key: when it was prepared, in microseconds since the epoch
        self.keys_of: dict[str, dict[str, None]] = {}  # user whose share they take -> keys

    def prepare(
        self, change: Change, transaction: Transaction, xid: str, now: int, vhost: str = VHOST, user: str = ""
    ) -> Literal["prepared", "read_only"]:
        """Prepares a transaction of ``user``: it becomes durable, invisible and transferable (XA). All checks
        that could refuse its commit are done now.

        Returns "read_only" for an empty transaction, which is over. Raises, with nothing changed,
        TransactionState, PreconditionFailed (a full queue, too many are prepared), CorruptSegment.
        """
        if not xid:
            raise TransactionState("a prepared transaction needs an xid: give it a unique one")
        key = self._names.key(vhost, xid, user)
        self._names.check_new(key)
        if not transaction:
            self._transactions.become(transaction, State.COMMITTED)
            return "read_only"
        payer = payer_of(key)
        mine = self.keys_of.get(payer, {})
        vhosts = map(self.vhosts.__getitem__, mine)
        self._names.shares.require(PREPARED, payer, len(mine), len(self.by_key), MOST_PREPARED, vhosts)
        if self._names.shares.over(payer, MOST_PREPARED_BYTES, MOST_PREPARED_BYTES) > 0:  # it has a share
            size = transaction.memory_bytes + sum(self.by_key[each].memory_bytes for each in mine)
            self._names.shares.require(PREPARED_BYTES, payer, size - 1, 0, MOST_PREPARED_BYTES, vhosts)
        self._overflow.check(transaction.incoming)
        if self._virtual_hosts.limited:
            self._vhost_message_limit.check(transaction)
        self._settlement.check_readable(transaction.settles)
        self._transactions.become(transaction, State.PREPARED)
        for spilled in transaction.spilled:
            self._blocks.name(spilled.block_id, spilled.rows, spilled.size_bytes)
            self._blocks.pin(spilled.block_id)
            change.names.append(spilled.block_id)
        self._undo.attribute(transaction, "xid")
        transaction.xid = key
        self._keep(key, transaction, now, vhost)
        self._overflow.keep_room(transaction.incoming)
        change.put(transaction.record(now, vhost))
        return "prepared"

    def commit(self, change: Change, key: str, now: int, by_hand: bool = False) -> CommitResult:
        """Commits a prepared transaction; repeating it is allowed. ``by_hand``: not as who named it decides.
        Raises UnknownTransaction, TransactionState (rolled back), HeuristicOutcome, CorruptSegment.
        """
        if self._names.has_ended(key, "committed", by_hand):
            return CommitResult(NO_SEQUENCE, [])
        dropped = self.by_key[key].dropped
        self._overflow.give_room_back(self.by_key[key].incoming)
        committed = self._transactions.commit(change, self.by_key[key], now, by_hand)
        self._forget(change, key)
        return committed._replace(dropped=dropped)

    def rollback(self, change: Change, key: str, now: int, by_hand: bool = False) -> None:
        """Rolls back a prepared transaction: its deliveries are ready again, as redelivered. Raises
        UnknownTransaction, TransactionState (committed), HeuristicOutcome.
        """
        if not self._names.has_ended(key, "rolled_back", by_hand):
            self._roll_back(change, key, now, by_hand)

    def forget_vhost(self, change: Change, vhost: str, now: int) -> None:
        """A virtual host is deleted: what is prepared there is rolled back."""
        for key in [key for key, other in self.vhosts.items() if other == vhost]:
            self._roll_back(change, key, now)

    def _roll_back(self, change: Change, key: str, now: int, by_hand: bool = False) -> None:
        transaction = self.by_key[key]
        self._transactions.become(transaction, State.ROLLED_BACK)
        self._overflow.give_room_back(transaction.incoming)
        self._settlement.requeue(((queue, offset) for queue, offset, _ in transaction.settles), change, now)
        change.forgets += [spilled.block_id for _, spilled in transaction.letters_ahead]
        self._names.end(change, key, "rolled_back", now, by_hand)
        self._forget(change, key)

    def disown(self, change: Change, user: str) -> None:
        """The user is deleted: an operator decides what it has prepared, and not a later user of its name."""
        for key in [key for key in self.by_key if is_owned(key) and user_of(key) == user]:
            since_us, vhost, transaction = self.since_us[key], self.vhosts[key], self.by_key[key]
            other = disowned_key(key, since_us)
            self._undo.attribute(transaction, "xid")
            transaction.xid = other
            self._drop(key)
            self._keep(other, transaction, since_us, vhost)
            change.drop(PreparedRecord, (key,))
            change.put(transaction.record(since_us, vhost))
        self._names.forget_user(change, user)

    def all_of(self, vhost: str, user: str, *, disowned: bool) -> list[str]:
        """Returns the keys of what the user has prepared in a virtual host, oldest first. ``disowned``: also
        what a deleted user of this name has.
        """
        keys = [*self.keys_of.get(user, ())]
        if disowned and user:
            keys += [key for key in self.keys_of.get("", ()) if user in (user_of(key), owner_of(key))]
        return sorted((key for key in keys if self.vhosts[key] == vhost), key=self.since_us.__getitem__)

    def _keep(self, key: str, transaction: Transaction, since_us: int, vhost: str) -> None:
        self._note(key)
        self.by_key[key], self.since_us[key], self.vhosts[key] = transaction, since_us, vhost
        self._undo.enter(self.keys_of, payer_of(key), key)

    def _drop(self, key: str) -> Transaction:
        self._note(key)
        self._undo.leave(self.keys_of, payer_of(key), key)
        del self.since_us[key], self.vhosts[key]
        return self.by_key.pop(key)

    def _note(self, key: str) -> None:
        self._undo.item(self.by_key, key)
        self._undo.item(self.since_us, key)
        self._undo.item(self.vhosts, key)

    def _forget(self, change: Change, key: str) -> None:
        for spilled in self._drop(key).spilled:
            self._blocks.unpin(spilled.block_id)
        self._blocks.record(change)
        change.drop(PreparedRecord, (key,))

    def restore(self, record: PreparedRecord, queues: Mapping[QueueId, Queue]) -> None:
        """Restores a record while loading, after the queues."""
        transaction = Transaction.restore(record, queues)
        for queue, offset, _ in transaction.settles:
            queue.reserve(offset + 1)  # a transient message is lost; its offset must not be used again
            if not queue.progress.is_settled(offset):
                queue.ready.hold(offset)
        for spilled in transaction.spilled:
            self._blocks.pin(spilled.block_id)
        self._overflow.keep_room(transaction.incoming)
        self._keep(record.xid, transaction, record.prepared_at, record.vhost)
