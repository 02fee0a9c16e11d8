"""Prepared transactions (XA, first phase): durable, invisible, and independent of a session until they are
decided by their xid.

Not here: who may decide which (``decision.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from broker_core.address import VHOST
from broker_core.broker.access.own_id import disowned_key, is_owned, name_of, user_of
from broker_core.broker.commit import CommitResult, Commits
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.settlement import Settlement
from broker_core.broker.message.vhost_message_limit import VhostMessageLimit
from broker_core.broker.queue import Queue
from broker_core.broker.state.block import Blocks
from broker_core.broker.state.change import Change
from broker_core.broker.state.records import OutcomeRecord, PreparedRecord
from broker_core.broker.topology.virtual_hosts import VirtualHosts
from broker_core.broker.transaction.names import TransactionNames
from broker_core.broker.transaction.transaction import State, Transaction
from broker_core.errors import PreconditionFailed, TransactionState
from broker_core.ids import NO_SEQUENCE, QueueId

MOST = 10_000  # undecided ones, of all users


class Prepared:
    def __init__(
        self,
        blocks: Blocks,
        names: TransactionNames,
        overflow: Overflow,
        settlement: Settlement,
        transactions: Commits,
        virtual_hosts: VirtualHosts,
        vhost_message_limit: VhostMessageLimit,
    ) -> None:
        self._undo = blocks.undo
        self._blocks = blocks
        self._names = names
        self._overflow = overflow
        self._settlement = settlement
        self._transactions = transactions
        self._virtual_hosts = virtual_hosts
        self._vhost_message_limit = vhost_message_limit
        self.by_key = names.prepared
        self.vhosts = names.prepared_in
        self.since_us: dict[str, int] = {}  # by key: when it was prepared, in microseconds since the epoch

    def prepare(
        self,
        change: Change,
        transaction: Transaction,
        xid: str,
        now: int,
        vhost: str = VHOST,
        user: str = "",
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
        if len(self.by_key) >= MOST:
            raise PreconditionFailed(
                f"{MOST} prepared transactions are not decided, which is the limit",
                "`txmq transactions` lists them; commit or roll back the old ones",
            )
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

    def commit(self, change: Change, key: str, now: int) -> CommitResult:
        """Commits a prepared transaction; repeating it is allowed. Raises UnknownTransaction,
        TransactionState (rolled back), CorruptSegment.
        """
        if self._names.has_ended(key, "committed"):
            return CommitResult(NO_SEQUENCE, [])
        dropped = self.by_key[key].dropped
        self._overflow.give_room_back(self.by_key[key].incoming)
        committed = self._transactions.commit(change, self.by_key[key], now)
        self._forget(change, key)
        return committed._replace(dropped=dropped)

    def rollback(self, change: Change, key: str, now: int) -> None:
        """Rolls back a prepared transaction: its deliveries are ready again, as redelivered. Raises
        UnknownTransaction, TransactionState (committed).
        """
        if not self._names.has_ended(key, "rolled_back"):
            self._roll_back(change, key, now)

    def forget_vhost(self, change: Change, vhost: str, now: int) -> None:
        """A virtual host is deleted: what is prepared there is rolled back."""
        for key in [key for key, other in self.vhosts.items() if other == vhost]:
            self._roll_back(change, key, now)

    def _roll_back(self, change: Change, key: str, now: int) -> None:
        transaction = self.by_key[key]
        self._transactions.become(transaction, State.ROLLED_BACK)
        self._overflow.give_room_back(transaction.incoming)
        self._settlement.requeue(((queue, offset) for queue, offset, _ in transaction.settles), change, now)
        self._names.outcomes.remember(change, OutcomeRecord(key, "rolled_back", now))
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

    def of(self, xid: str, virtual_hosts: Collection[str], user: str | None) -> list[str]:
        """Returns the keys of those that are prepared with this name, in these virtual hosts. ``user`` None:
        of all users.
        """
        return [
            key
            for key, vhost in self.vhosts.items()
            if name_of(key) == xid and vhost in virtual_hosts and user in (None, user_of(key))
        ]

    def _keep(self, key: str, transaction: Transaction, since_us: int, vhost: str) -> None:
        self._note(key)
        self.by_key[key], self.since_us[key], self.vhosts[key] = transaction, since_us, vhost

    def _drop(self, key: str) -> Transaction:
        self._note(key)
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
        self.by_key[record.xid] = transaction
        self.since_us[record.xid] = record.prepared_at
        self.vhosts[record.xid] = record.vhost
