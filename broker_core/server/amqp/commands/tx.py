"""Class tx: select, commit, rollback.

Not here: the steps of a commit (``node/channel_commit.py``), what it means (``broker/``), named transactions
(``named.py``).
"""

from __future__ import annotations

from functools import partial

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker.broker import BrokerState
from broker_core.broker.commit import CommitResult
from broker_core.broker.transaction.spilled import Spilled
from broker_core.broker.transaction.transaction import Transaction
from broker_core.core.change import Change
from broker_core.node.channel_commit import reaches_many_queues
from broker_core.server.amqp import transaction_exchange
from broker_core.server.amqp.commands import open_time
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.commands.returns import add
from broker_core.server.amqp.session import Move, Session


@command
def select(session: Session, method: m.TxSelect, command: Command) -> None:
    session.channel.tx_select()
    open_time.watch(session)
    session.send(m.TxSelectOk())


@command
def commit(session: Session, method: m.TxCommit, _: Command) -> None:
    channel = session.channel
    channel.check_transactional()
    transaction, name = channel.transaction, session.transaction_name
    if not transaction and not name:
        session.send(m.TxCommitOk())
        return
    transaction.check_open_time(session.clock())
    steps = session.broker.channel_commits
    if reaches_many_queues(transaction):  # 1. spill, in another thread
        session.move(Move.submit)
        then = partial(_spilled, session, method, transaction)
        session.commits.aside(partial(steps.write, transaction), then)
        return
    if transaction.is_large:
        steps.spill_large(transaction, prepare=bool(name.prepare))
    session.move(Move.submit)
    _submit(session, method, transaction)


def _spilled(
    session: Session,
    method: m.TxCommit,
    transaction: Transaction,
    spilled: Spilled | None,
    error: BaseException | None,
) -> None:
    """What reaches very many queues is in a segment, which is forgotten if the session ended meanwhile."""
    if session.ended:
        if spilled is not None:
            discard = partial(session.broker.channel_commits.discard, [spilled.block_id])
            session.commits.aside(discard, lambda _answer, _error: None)
        return
    if error is not None:
        session.fail(error, method)
        session.go_on()
        return
    if spilled is not None:
        transaction.spill(spilled)
    _submit(session, method, transaction)


def _submit(session: Session, method: m.TxCommit, transaction: Transaction) -> None:
    """2. commit"""
    steps, channel, rights = session.broker.channel_commits, session.channel, session.connection.rights
    name, user = session.transaction_name, session.connection.user

    def commit(_state: BrokerState, change: Change, now: int) -> CommitResult | None:
        if name.prepare:
            steps.prepare(channel, transaction, rights, None, name.prepare, user, change, now)
            return None
        return steps.commit(channel, transaction, rights, None, change, now, later=True)

    if name.token:
        transaction.xid = session.state.names.key(session.state.vhost, name.token, user)
    session.commits.submit(commit, partial(_committed, session, method), session)


def _committed(
    session: Session, method: m.TxCommit, committed: CommitResult | None, error: BaseException | None
) -> None:
    """``committed`` None, without an error: it is prepared."""
    if session.ended:
        return
    if error is not None:
        session.fail(error, method)
        session.go_on()
        return
    with session.look:
        session.channel.finish()  # 3. finish
    session.transaction_name = transaction_exchange.NamedTransaction()
    if committed is not None and (committed.stored or committed.returned):
        add(session, committed, partial(_answer, session))  # 4. return
    else:
        _answer(session)


def _answer(session: Session) -> None:
    session.send(m.TxCommitOk())
    if session.channel.consumers:
        session.commits.wake()
    session.go_on()


@command
def rollback(session: Session, method: m.TxRollback, _: Command) -> None:
    session.channel.check_transactional()
    session.transaction_name = transaction_exchange.NamedTransaction()
    with session.look:
        batch_ids = session.channel.rollback()
    if not batch_ids:
        session.send(m.TxRollbackOk())
        return

    def work(_state: BrokerState, change: Change, _now: int) -> None:
        change.forgets.extend(batch_ids)

    session.submit(method, work, lambda _: m.TxRollbackOk())
