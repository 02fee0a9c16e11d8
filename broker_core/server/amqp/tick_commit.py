"""What a channel publishes and acks outside a transaction: gathered in a tick of the loop, then one commit.

Not here: the commit (``commit_queue.py``), and transactions (``commands/tx.py``). The parts of such a commit
succeed or fail separately.

Invariant: a confirm is sent after its message is durable, and each publish of a channel that confirms gets
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from broker_core.amqp.v0_9_1.encoder import encode_ack, encode_nack
from broker_core.amqp.v0_9_1.methods import Method
from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.commit import CommitResult
from broker_core.broker.state.change import Change, Who
from broker_core.broker.transaction.transaction import Transaction
from broker_core.message.message import Message
from broker_core.node.loaded_blocks import Look
from broker_core.node.local import LocalBroker
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.commit_queue import CommitQueue

REJECTS = 512  # in one commit, if a client rejects very many
IN_FLIGHT = 8  # ticks whose publishes and acks are not durable: then the client is not read

Answer = Callable[[CommitResult | None, BaseException | None], None]


class TickCommitSession(Protocol):
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


class TickCommit:
    """``waits``: ``hand_over`` will be called at the end of the tick.

    ``published``: the number of the last publish, for confirms.
    """

    __slots__ = ("_in_flight", "_session", "published", "waits")

    def __init__(self, session: TickCommitSession) -> None:
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
            if transaction.is_large or len(transaction.publishes) > 1:
                session.broker.channel_commits.spill_large(transaction)
        except Exception as error:
            self._answer(transaction, 0, 0, None, error)
            self._end()
            return
        publishes = transaction.messages if session.channel.confirming else 0
        answer = partial(self._answer, transaction, self.published - publishes, publishes)
        pieces = deque(transaction.pieces(REJECTS) if transaction.rejects_many else (transaction,))
        self._commit(pieces, answer)

    def _commit(self, pieces: deque[Transaction], answer: Answer) -> None:
        """Commits the pieces, if very many rejects make several, one by one, so that other commits come
        between. The first has all publishes.
        """

        def committed(committed: CommitResult | None, error: BaseException | None) -> None:
            answer(committed, error)
            del pieces[0]
            if committed is None:
                self._requeue(pieces)
            if committed is None or not pieces:
                self._end()
            else:
                self._commit(pieces, partial(self._answer, pieces[0], 0, 0))

        session = self._session
        session.commits.submit(partial(commit, pieces[0], session.channel.who), committed, session)

    def _requeue(self, pieces: Iterable[Transaction]) -> None:
        """The channel no longer holds what it acked."""
        with self._session.look as state:
            state.settlement.requeue(
                (queue, offset) for piece in pieces for queue, offset, _ in piece.settles
            )

    def _answer(
        self,
        piece: Transaction,
        before: int,
        publishes: int,
        committed: CommitResult | None,
        error: BaseException | None,
    ) -> None:
        session = self._session
        if committed is None:
            self._requeue([piece])
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

    def _end(self) -> None:
        session = self._session
        self._in_flight -= 1
        if self._in_flight == IN_FLIGHT - 1:
            session.connection.resume(self)
        if not (self.waits or self._in_flight or session.ended):
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


def commit(transaction: Transaction, who: Who, state: BrokerState, change: Change, now: int) -> CommitResult:
    change.effects.who = who
    return state.transactions.commit(change, transaction, now)
