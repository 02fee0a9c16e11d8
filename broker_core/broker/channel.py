"""A channel: delivery tags, what its consumer holds, and its transaction.

Pure: what has to be durable comes out as a :class:`Transaction` that the caller commits (``local.py``); outside tx.select every
publish and every ack is a transaction of one. Errors are AMQP channel exceptions.

Invariant: tags count from 1 and are never used twice. A tag is in ``unacked`` from its delivery until its settling is committed
(in a transaction) or sent to the committer (outside one); ``marked`` names those of them that the open transaction settles.
"""

from __future__ import annotations

from broker_core.broker.broker import BrokerState
from broker_core.broker.exchange import Queues
from broker_core.broker.queue import Queue
from broker_core.broker.transaction import Limits, Outcome, Settle, State, Transaction
from broker_core.errors import PreconditionFailed, TransactionState
from broker_core.message import Delivery, Message
from broker_core.properties import expiration


class Channel:
    """``connection`` tells whose exclusive queues it may use."""

    def __init__(self, state: BrokerState, *, connection: object = None, limits: Limits | None = None) -> None:
        self._state = state
        self.connection = self if connection is None else connection
        self.limits = limits or Limits()
        self.transactional = False
        self.confirming = False
        self.closed = ""  # why, once it is
        self.transaction = Transaction(self.limits, 0)
        self.unacked: dict[int, tuple[Queue, int]] = {}
        self.marked: dict[int, Outcome] = {}
        self._next_tag = 1

    # -- modes ----------------------------------------------------------------------------------------------------------
    def tx_select(self, now_us: int) -> None:
        """May be repeated. Raises PreconditionFailed on a channel that confirms."""
        self.check_open()
        if self.confirming:
            raise PreconditionFailed("cannot switch from confirm to tx mode")
        if not self.transactional:
            self.transactional = True
            self.transaction = Transaction(self.limits, now_us)

    def confirm_select(self) -> None:
        """Raises PreconditionFailed on a transactional channel."""
        self.check_open()
        if self.transactional:
            raise PreconditionFailed("cannot switch from tx to confirm mode")
        self.confirming = True

    def check_open(self) -> None:
        if self.closed:
            raise TransactionState(f"the channel is closed: {self.closed}; open another")

    def check_transactional(self) -> None:
        self.check_open()
        if not self.transactional:
            raise PreconditionFailed("channel is not transactional: call tx_select first")

    # -- publishing -----------------------------------------------------------------------------------------------------
    def publish(self, message: Message, queues: Queues, mandatory: bool, now_us: int) -> Transaction | None:
        """``queues`` is where it is routed now; a transaction to commit at once, or None where it waits for tx_commit."""
        if message.properties:
            text = expiration(message.properties)
            if text is not None and not text.isdecimal():
                raise PreconditionFailed(f"invalid expiration {text!r}: give milliseconds as a whole number, 0 or more")
        if self.transactional:
            if not self.transaction:
                self.transaction.opened_us = now_us
            self.transaction.publish(message, queues, mandatory)
            return None
        single = Transaction(self.limits, now_us)
        single.publish(message, queues, mandatory)
        return single

    # -- deliveries -----------------------------------------------------------------------------------------------------
    def get(self, queue: Queue) -> Delivery | None:
        """The next message, held until it is settled or requeued."""
        offset = queue.head(queue.visible_end)
        if offset is None:
            return None
        row = self._state.fetch(queue, offset)  # before it is taken: a damaged segment must not lose it
        queue.take()
        tag = self._next_tag
        self._next_tag = tag + 1
        self.unacked[tag] = (queue, offset)
        message = Message(row.body, row.routing_key, row.exchange, row.properties)
        return Delivery(tag, queue.name, offset, queue.was_sent(offset), row.committed_at, message)

    def settle(self, tag: int, outcome: Outcome, multiple: bool, now_us: int) -> Transaction | None:
        """Ack, reject or requeue one tag, or all up to it (0: all). A transaction to commit at once, or None.

        Raises PreconditionFailed for a tag that is unknown or settled, also in the open transaction.
        """
        self.check_open()
        if multiple:
            tags = [held for held in self.unacked if (held <= tag or tag == 0) and held not in self.marked]
            unknown = tag != 0 and tag not in tags
        else:
            tags = [tag]
            unknown = tag not in self.unacked or tag in self.marked
        if unknown:
            raise PreconditionFailed(f"unknown delivery tag {tag}")
        if self.transactional:
            if not self.transaction:
                self.transaction.opened_us = now_us
            for held in tags:
                self.marked[held] = outcome
                self.transaction.settles.append(Settle(*self.unacked[held], outcome))
            return None
        single = Transaction(self.limits, now_us)
        single.settles = [Settle(*self.unacked.pop(held), outcome) for held in tags]
        return single

    def recover(self) -> int:
        """Requeue what is delivered and not settled, except what the open transaction settles; how many."""
        self.check_open()
        tags = [tag for tag in self.unacked if tag not in self.marked]
        self._state.requeue([self.unacked.pop(tag) for tag in tags])
        return len(tags)

    # -- the transaction ------------------------------------------------------------------------------------------------
    def finish(self, now_us: int) -> None:
        """The open transaction was committed or prepared: its deliveries are not this channel's any more."""
        for tag in self.marked:
            del self.unacked[tag]
        self.marked.clear()
        self.transaction = Transaction(self.limits, now_us)

    def rollback(self, now_us: int) -> Transaction:
        """Publishes are dropped; acked tags are unacked again, and not redelivered. The dropped transaction."""
        dropped = self.transaction
        if dropped.state is State.ACTIVE:
            dropped.become(State.ROLLED_BACK)
        self.marked.clear()
        self.transaction = Transaction(self.limits, now_us)
        return dropped

    def close(self, why: str = "it was closed") -> Transaction:
        """Roll back and requeue everything, acked in the transaction or not, as redelivered. The dropped transaction."""
        dropped = self.rollback(0)
        self._state.requeue(list(self.unacked.values()))
        self.unacked.clear()
        self.closed = self.closed or why
        return dropped
