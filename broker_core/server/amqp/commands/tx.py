"""Class tx: select, commit, rollback.

Not here: what a commit means (``broker/``), named transactions (``named.py``).
"""

from __future__ import annotations

from functools import partial

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker.broker import BrokerState
from broker_core.broker.command_permissions import publish_again
from broker_core.broker.commit import CommitResult
from broker_core.broker.state.change import Change
from broker_core.broker.transaction.transaction import Transaction
from broker_core.node.dead_letter_batch import DeadLetterBatch
from broker_core.server.amqp import transaction_exchange
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import Move, Session


@command
def select(session: Session, method: m.TxSelect, command: Command) -> None:
    if session.wait_for_tick_commit(command):
        return
    session.channel.tx_select(session.clock())
    session.send(m.TxSelectOk())


@command
def commit(session: Session, method: m.TxCommit, _: Command) -> None:
    channel, broker = session.channel, session.broker
    channel.check_transactional()
    transaction, named = channel.transaction, session.named
    if not transaction and not named:
        session.send(m.TxCommitOk())
        return
    if session.timed:
        transaction.check_open_time(session.clock())
    if named.prepare:
        broker.spill_before_prepare(transaction)
    else:
        broker.spill_large(transaction)
    session.move(Move.submit)
    if not named.prepare and transaction.rejects_many:
        session.commits.aside(
            partial(broker.write_ahead, transaction), partial(_written_ahead, session, method, transaction)
        )
    else:
        _submit(session, method, transaction)


def _written_ahead(
    session: Session,
    method: m.TxCommit,
    transaction: Transaction,
    dead_letters: DeadLetterBatch | None,
    error: BaseException | None,
) -> None:
    """Its many dead letters are in segments."""
    if session.ended:
        if dead_letters is not None:
            session.commits.aside(
                partial(session.broker.forget_dead_letters, dead_letters), lambda _answer, _error: None
            )
    elif dead_letters is None:
        assert error is not None
        session.fail(error, method)
    else:
        dead_letters.apply(transaction)
        _submit(session, method, transaction)


def _submit(session: Session, method: m.TxCommit, transaction: Transaction) -> None:
    named, then = session.named, partial(_committed, session, method)
    if named.prepare:
        session.commits.submit(partial(_prepare, transaction, named.prepare, session), then, session)
    else:
        state = session.state
        user = session.connection.user
        transaction.xid = state.names.key(state.vhost, named.token, user) if named.token else ""
        session.commits.submit(partial(_commit, transaction, session), then, session)


def _prepare(
    transaction: Transaction, xid: str, session: Session, state: BrokerState, change: Change, now: int
) -> None:
    seen = session.state
    seen.topology.require_there()
    _ask_again(transaction, session)
    state.prepared.prepare(change, transaction, xid, now, seen.vhost, session.connection.user)


def _commit(
    transaction: Transaction, session: Session, state: BrokerState, change: Change, now: int
) -> CommitResult:
    _ask_again(transaction, session)
    change.effects.who = session.tick_commit.who
    return state.transactions.commit(change, transaction, now)


def _ask_again(transaction: Transaction, session: Session) -> None:
    """Rights may have changed since it began. Raises AccessRefused."""
    seen = session.state
    if not session.rights.holds(session.channel.asked):
        publish_again(session.rights, seen.topology, transaction, seen.blocks)


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
        session.channel.finish(session.now)
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
