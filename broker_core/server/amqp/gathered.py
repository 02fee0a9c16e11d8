"""What a channel publishes and acks outside a transaction: gathered in a tick of the loop, then one commit.

Not here: the commit (``commit_queue.py``), and transactions (``commands/tx.py``). The parts of such a commit
succeed or fail separately.

Invariant: a confirm is sent after its message is durable, and each publish of a channel that confirms gets
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from broker_core.amqp.v0_9_1.encoder import encode_ack, encode_nack
from broker_core.amqp.v0_9_1.methods import Method
from broker_core.broker.broker import BrokerState
from broker_core.broker.change import Change
from broker_core.broker.channel import Channel
from broker_core.broker.commit import Committed
from broker_core.broker.transaction import Transaction
from broker_core.message import Message
from broker_core.node.burial import is_worth_it
from broker_core.node.committer import Look
from broker_core.node.local import LocalBroker
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.commit_queue import CommitQueue

REJECTS = 512  # in one commit, if a client rejects very many
IN_FLIGHT = 8  # ticks whose publishes and acks are not durable: then the client is not read


class Gatherer(Protocol):
    """The session whose publishes and acks are gathered. ``durable``: called when all of them are durable."""

    connection: ClientConnection
    number: int
    broker: LocalBroker
    commits: CommitQueue
    look: Look
    channel: Channel

    @property
    def ended(self) -> bool: ...

    def durable(self) -> None: ...

    def fail(self, error: BaseException, method: Method | None) -> None: ...

    def give_back(self, message: Message) -> None: ...


class Gathered:
    """``waits``: ``hand_over`` will be called at the end of the tick.

    ``published``: the number of the last publish, for confirms.
    """

    __slots__ = ("_in_flight", "_session", "published", "waits")

    def __init__(self, session: Gatherer) -> None:
        self._session = session
        self.waits = False
        self._in_flight = 0  # commits that are not durable
        self.published = 0

    @property
    def durable(self) -> bool:
        """All that was gathered is durable."""
        return not (self.waits or self._in_flight)

    def gather(self) -> None:
        """The channel's transaction is not empty: call ``hand_over`` at the end of the tick."""
        if not self.waits:
            self.waits = True
            self._session.commits.gather(self)

    def hand_over(self) -> None:
        """The tick ends: what was gathered becomes one transaction of separate parts."""
        if not self.waits:  # nothing was gathered, or the session ended and handed it over
            return
        self.waits = False
        session = self._session
        transaction = session.channel.take()
        self._in_flight += 1
        if self._in_flight == IN_FLIGHT:  # the commit of another thread is slow
            session.connection.pause(self)
        try:
            session.broker.spill_large(transaction)
        except Exception as error:
            self._committed(transaction, 0, 0, None, error)
            return
        publishes = transaction.messages if session.channel.confirming else 0
        then = partial(self._committed, transaction, self.published - publishes, publishes)
        if is_worth_it(transaction):
            self._commit_pieces(deque(transaction.pieces(REJECTS)), then)
        else:
            session.commits.submit(partial(commit, transaction), then, session)

    def _commit_pieces(
        self, pieces: deque[Transaction], then: Callable[[Committed | None, BaseException | None], None]
    ) -> None:
        """Very many rejects become several commits, so that other commits come between.

        ``then`` is called at the end, with the answer of the first.
        """
        session = self._session
        answers: list[Committed] = []

        def committed(answer: Committed | None, error: BaseException | None) -> None:
            piece = pieces.popleft()
            if answer is not None:
                answers.append(answer)
                if pieces:
                    session.commits.submit(partial(commit, pieces[0]), committed, session)
                else:
                    then(answers[0], None)
                return
            with session.look as state:
                state.settlement.requeue(
                    (queue, offset) for left in pieces for queue, offset, _ in left.settles
                )
                if answers:
                    state.settlement.requeue((queue, offset) for queue, offset, _ in piece.settles)
            then(answers[0] if answers else None, None if answers else error)
            if answers and not session.ended:
                assert error is not None
                session.fail(error, None)

        session.commits.submit(partial(commit, pieces[0]), committed, session)

    def _committed(
        self,
        transaction: Transaction,
        before: int,
        publishes: int,
        committed: Committed | None,
        error: BaseException | None,
    ) -> None:
        session = self._session
        self._in_flight -= 1
        if self._in_flight == IN_FLIGHT - 1:
            session.connection.resume(self)
        if committed is None:  # the channel no longer holds what it acked
            with session.look as state:
                state.settlement.requeue((queue, offset) for queue, offset, _ in transaction.settles)
        if session.ended:
            return
        if committed is None:
            assert error is not None
            for number in range(before + 1, before + publishes + 1):
                session.connection.write(encode_nack(session.number, number, multiple=False))
            session.fail(error, None)
        else:
            for message in committed.returned:
                session.give_back(message)
            if publishes and not session.ended:
                self._confirm(before, publishes, committed.rejected)
        if not (self.waits or self._in_flight):
            session.durable()

    def _confirm(self, before: int, publishes: int, rejected: list[int]) -> None:
        write, number = self._session.connection.write, self._session.number
        for index in rejected:
            write(encode_nack(number, before + 1 + index, multiple=False))
        last = publishes
        refused = set(rejected)
        while last and last - 1 in refused:
            last -= 1
        if last:
            write(encode_ack(number, before + last, multiple=last > 1))


def commit(transaction: Transaction, state: BrokerState, change: Change, now: int) -> Committed:
    return state.transactions.commit(change, transaction, now)
