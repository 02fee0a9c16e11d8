"""Prepared transactions (XA, first phase): durable, invisible, and independent of a session until they are
decided by their xid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from broker_core.broker.block import Blocks
from broker_core.broker.change import Change
from broker_core.broker.commit import Committed, Transactions
from broker_core.broker.overflow import Overflow
from broker_core.broker.queue import Queue
from broker_core.broker.records import OutcomeRecord, PreparedRecord
from broker_core.broker.settlement import Settlement
from broker_core.broker.transaction import State, Transaction
from broker_core.broker.transaction_names import TransactionNames
from broker_core.errors import TransactionState
from broker_core.ids import NO_SEQUENCE, QueueId


class Prepared:
    def __init__(
        self,
        blocks: Blocks,
        names: TransactionNames,
        overflow: Overflow,
        settlement: Settlement,
        transactions: Transactions,
    ) -> None:
        self._undo = blocks.undo
        self._blocks = blocks
        self._names = names
        self._overflow = overflow
        self._settlement = settlement
        self._transactions = transactions
        self.by_xid = names.prepared
        self.since_us: dict[str, int] = {}  # by xid: when it was prepared, in microseconds since the epoch

    def prepare(
        self, change: Change, transaction: Transaction, xid: str, now: int
    ) -> Literal["prepared", "read_only"]:
        """Prepares a transaction: it becomes durable, invisible and transferable (XA). All checks that could
        refuse its commit are done now.

        Returns "read_only" for an empty transaction, which is over. Raises, with nothing changed,
        TransactionState, PreconditionFailed (a full queue), CorruptSegment.
        """
        if not xid:
            raise TransactionState("a prepared transaction needs an xid: give it a unique one")
        self._names.check_new(xid)
        if not transaction:
            self._transactions.become(transaction, State.COMMITTED)
            return "read_only"
        self._overflow.check(transaction.incoming)
        self._settlement.check_readable(transaction.settles)
        self._transactions.become(transaction, State.PREPARED)
        for spilled in transaction.spilled:
            self._blocks.name(spilled.block_id, spilled.rows, spilled.size_bytes)
            self._blocks.pin(spilled.block_id)
            change.names.append(spilled.block_id)
        self._undo.attribute(transaction, "xid")
        self._undo.item(self.by_xid, xid)
        self._undo.item(self.since_us, xid)
        transaction.xid = xid
        self.by_xid[xid] = transaction
        self.since_us[xid] = now
        self._overflow.keep_room(transaction.incoming)
        change.put(transaction.record(now))
        return "prepared"

    def commit(self, change: Change, xid: str, now: int) -> Committed:
        """Commits a prepared transaction; repeating it is allowed. Raises UnknownTransaction,
        TransactionState (rolled back), CorruptSegment.
        """
        if self._names.has_ended(xid, "committed"):
            return Committed(NO_SEQUENCE, [])
        dropped = self.by_xid[xid].dropped
        self._overflow.give_room_back(self.by_xid[xid].incoming)
        committed = self._transactions.commit(change, self.by_xid[xid], now)
        self._forget(change, xid)
        return committed._replace(dropped=dropped)

    def rollback(self, change: Change, xid: str, now: int) -> None:
        """Rolls back a prepared transaction: its deliveries are ready again, as redelivered. Raises
        UnknownTransaction, TransactionState (committed).
        """
        if self._names.has_ended(xid, "rolled_back"):
            return
        transaction = self.by_xid[xid]
        self._transactions.become(transaction, State.ROLLED_BACK)
        self._overflow.give_room_back(transaction.incoming)
        self._settlement.requeue(((queue, offset) for queue, offset, _ in transaction.settles), change, now)
        self._names.outcomes.remember(change, OutcomeRecord(xid, "rolled_back", now))
        self._forget(change, xid)

    def _forget(self, change: Change, xid: str) -> None:
        self._undo.item(self.by_xid, xid)
        self._undo.item(self.since_us, xid)
        for spilled in self.by_xid.pop(xid).spilled:
            self._blocks.unpin(spilled.block_id)
        self._blocks.record(change)
        del self.since_us[xid]
        change.drop(PreparedRecord, (xid,))

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
        self.by_xid[record.xid] = transaction
        self.since_us[record.xid] = record.prepared_at
