"""Class tx: select, commit, rollback.

Not here: the steps of a commit (``node/channel_commit.py``), what it means (``broker/``), named transactions
(``named.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker.broker import BrokerState
from broker_core.broker.commit import CommitResult
from broker_core.broker.state.change import Change
from broker_core.broker.transaction.spilled import Spilled
from broker_core.broker.transaction.transaction import Transaction
from broker_core.ids import BlockId
from broker_core.node.channel_commit import DeadLetterBatch, reaches_many_queues
from broker_core.server.amqp import transaction_exchange
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import Move, Session

T = TypeVar("T")


@command
def select(session: Session, method: m.TxSelect, command: Command) -> None:
    if session.wait_for_tick_commit(command):
        return
    session.channel.tx_select(session.clock())
    session.send(m.TxSelectOk())


@command
def commit(session: Session, method: m.TxCommit, _: Command) -> None:
    channel = session.channel
    channel.check_transactional()
    transaction, named = channel.transaction, session.named
    if not transaction and not named:
        session.send(m.TxCommitOk())
        return
    if session.timed:
        transaction.check_open_time(session.clock())
    steps = session.broker.channel_commits
    if reaches_many_queues(transaction):  # 1. spill
        session.move(Move.submit)
        write = partial(steps.write, transaction)
        _aside(session, method, write, lambda spilled: [spilled.block_id], partial(_spilled, session, method))
        return
    if transaction.is_large:
        steps.spill_large(transaction, prepare=bool(named.prepare))
    session.move(Move.submit)
    _write_ahead(session, method, transaction)


def _spilled(session: Session, method: m.TxCommit, spilled: Spilled | None) -> None:
    """What reaches very many queues is in a segment."""
    transaction = session.channel.transaction
    if spilled is not None:
        transaction.spill(spilled)
    _write_ahead(session, method, transaction)


def _write_ahead(session: Session, method: m.TxCommit, transaction: Transaction) -> None:
    """2. write ahead"""
    if session.named.prepare or not transaction.rejects_many:
        _submit(session, method, transaction)
        return

    def go_on(dead_letters: DeadLetterBatch | None) -> None:
        assert dead_letters is not None
        dead_letters.apply(transaction)
        _submit(session, method, transaction)

    write = partial(session.broker.channel_commits.write_ahead, transaction)
    _aside(session, method, write, lambda dead_letters: dead_letters.appended, go_on)


def _aside(
    session: Session,
    method: m.TxCommit,
    write: Callable[[], T | None],
    appended: Callable[[T], list[BlockId]],
    go_on: Callable[[T | None], None],
) -> None:
    """Writes to segments in another thread, then goes on here. If the session ended meanwhile, what was
    ``appended`` is forgotten.
    """

    def written(found: T | None, error: BaseException | None) -> None:
        if session.ended:
            if found is not None:
                discard = partial(session.broker.channel_commits.discard, appended(found))
                session.commits.aside(discard, lambda _answer, _error: None)
        elif error is not None:
            session.fail(error, method)
        else:
            go_on(found)

    session.commits.aside(write, written)


def _submit(session: Session, method: m.TxCommit, transaction: Transaction) -> None:
    """3. commit"""
    steps, channel, rights = session.broker.channel_commits, session.channel, session.rights
    named, user = session.named, session.connection.user

    def commit(_state: BrokerState, change: Change, now: int) -> CommitResult | None:
        if named.prepare:
            steps.prepare(channel, transaction, rights, None, named.prepare, user, change, now)
            return None
        return steps.commit(channel, transaction, rights, None, change, now)

    if named.token:
        transaction.xid = session.state.names.key(session.state.vhost, named.token, user)
    session.commits.submit(commit, partial(_committed, session, method), session)


def _committed(
    session: Session, method: m.TxCommit, committed: CommitResult | None, error: BaseException | None
) -> None:
    """``committed`` None, without an error: it is prepared."""
    if session.ended:
        return
    if error is not None:
        session.fail(error, method)
        return
    with session.look:
        session.channel.finish(session.now)  # 4. finish
    session.named = transaction_exchange.NamedTransaction()
    if committed is not None:
        for message in committed.returned:
            session.give_back(message)
    session.send(m.TxCommitOk())
    if session.channel.consumers:
        session.commits.wake()
    session.go_on()


@command
def rollback(session: Session, method: m.TxRollback, _: Command) -> None:
    session.channel.check_transactional()
    session.named = transaction_exchange.NamedTransaction()
    with session.look:
        batch_ids = session.channel.rollback(session.now)
    if not batch_ids:
        session.send(m.TxRollbackOk())
        return

    def work(_state: BrokerState, change: Change, _now: int) -> None:
        change.forgets.extend(batch_ids)

    session.submit(method, work, lambda _: m.TxRollbackOk())
