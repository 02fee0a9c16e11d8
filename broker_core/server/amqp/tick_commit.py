"""What a channel publishes and acks outside a transaction: gathered in a tick of the loop, then one commit.

Not here: the commit (``commit_queue.py``), and transactions (``commands/tx.py``). The parts of such a commit
succeed or fail separately. What is too much for one commit is several pieces, and other commits come between.

Invariant: a confirm is sent after its message is durable, and each publish of a channel that confirms gets
one. Pieces are committed in the order of publishing: while one waits, so do those of later ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple, Protocol

from broker_core.amqp.v0_9_1.encoder import encode_ack, encode_nack
from broker_core.amqp.v0_9_1.methods import Method
from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.commit import CommitResult
from broker_core.broker.message.settlement import rejects_of
from broker_core.broker.transaction.transaction import Transaction
from broker_core.core.change import Author, Change
from broker_core.message.message import Message
from broker_core.node.channel_commit import cut_piece
from broker_core.node.loaded_blocks import Look
from broker_core.node.local import LocalBroker
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.commit_queue import CommitQueue

IN_FLIGHT = 8  # ticks whose publishes and acks are not durable: then the client is not read


class _Piece(NamedTuple):
    """``publishes``: those that get a confirm, numbered from ``before`` + 1. ``last``: of its tick."""

    transaction: Transaction
    before: int
    publishes: int
    last: bool


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

    __slots__ = ("_in_flight", "_pieces", "_session", "published", "waits")

    def __init__(self, session: TickCommitSession) -> None:
        self._session = session
        self.waits = False
        self._in_flight = 0  # ticks that are not durable
        self._pieces: deque[_Piece] = deque()  # of such that have several, and of those behind them
        self.published = 0

    @property
    def durable(self) -> bool:
        """Whether every command of the batch is durable."""
        return not (self.waits or self._in_flight)

    def gather(self) -> None:
        """The channel's transaction is not empty: call ``hand_over`` at the end of the tick."""
        if not self.waits:
            self.waits = True
            self._session.commits.gather(self, self._session.connection)

    def end(self) -> None:
        """The session ends."""
        self.hand_over()
        self._let_go()

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
        found = [transaction]
        if len(transaction.publishes) > 1 or len(transaction.settles) > 1:
            found = session.broker.channel_commits.pieces(transaction)
        confirms = session.channel.confirming
        before = self.published - sum(each.messages for each in found)
        pieces: list[_Piece] = []
        for each in found:
            pieces.append(_Piece(each, before, each.messages if confirms else 0, each is found[-1]))
            before += each.messages
        in_line = bool(self._pieces)
        # a commit of several rejects may leave some for another one, before which those of later ticks wait
        if in_line or len(pieces) > 1 or (len(transaction.settles) > 1 and rejects_of(transaction.settles)):
            self._pieces += pieces
        if not in_line:
            self._commit(pieces[0])

    def _commit(self, piece: _Piece) -> None:
        session, transaction = self._session, piece.transaction
        try:
            if transaction.is_large or len(transaction.publishes) > 1:
                session.broker.channel_commits.spill_large(transaction)
        except Exception as error:
            self._committed(piece, None, error)
            return
        work = partial(commit, transaction, session.channel.who)
        session.commits.submit(work, partial(self._committed, piece), session)

    def _committed(self, piece: _Piece, committed: CommitResult | None, error: BaseException | None) -> None:
        pieces = self._pieces
        in_line = bool(pieces) and pieces[0] is piece
        over = [piece]
        if error is not None:
            if in_line:  # the rest of its tick fails with it
                over = [*takewhile(lambda each: not each.last, pieces)]
                over.append(pieces[len(over)])
            self._fail(over, error)
        elif committed is not None:
            self._answer(piece, committed)
            if committed.left:
                rest = _Piece(cut_piece(piece.transaction, [], committed.left), piece.before, 0, piece.last)
                pieces[0] = rest
                self._commit(rest)
                return
        if over[-1].last:
            self._end()
        if in_line:  # now, because an answer may end the session, which hands over what is left
            for _ in over:
                pieces.popleft()
            if pieces:
                self._commit(pieces[0])

    def _fail(self, failed: Sequence[_Piece], error: BaseException) -> None:
        session = self._session
        settles = [settle for piece in failed for settle in piece.transaction.settles]
        if settles:  # which the channel no longer holds
            with session.look as state:
                state.settlement.requeue((queue, offset) for queue, offset, _ in settles)
        if session.ended:
            return
        for _, before, publishes, _ in failed:
            for number in range(before + 1, before + publishes + 1):
                session.connection.write(encode_nack(session.number, number))
        session.fail(error, None)

    def _answer(self, piece: _Piece, committed: CommitResult) -> None:
        session = self._session
        if session.ended:
            return
        counts, vhost = session.broker.committer.counts, session.channel.state.topology.vhost
        for message in committed.returned:
            session.give_back(message)
        if piece.publishes and not session.ended:
            counts.confirmed[vhost] += piece.publishes - len(committed.rejected)
            self._confirm(piece.before, piece.publishes, committed.rejected)

    def _end(self) -> None:
        session = self._session
        self._in_flight -= 1
        if self._in_flight == IN_FLIGHT - 1:
            session.connection.resume(self)
        if session.ended:
            self._let_go()
        elif not (self.waits or self._in_flight):
            session.durable()

    def _let_go(self) -> None:
        """The session has ended. Once nothing of it waits for a commit, it is freed without the collector."""
        if not self._in_flight:
            del self._session

    def _confirm(self, before: int, publishes: int, rejected: list[int]) -> None:
        write, number = self._session.connection.write, self._session.number
        for index in rejected:
            write(encode_nack(number, before + 1 + index))
        last = publishes
        refused = set(rejected)
        while last and last - 1 in refused:
            last -= 1
        if last:
            write(encode_ack(number, before + last, multiple=last > 1))


def commit(
    transaction: Transaction, who: Author, state: BrokerState, change: Change, now: int
) -> CommitResult:
    change.effects.who = who
    return state.transactions.commit(change, transaction, now)
