"""Named transactions of a session (semantics 20, 21): publish to ``amq.transaction``, and get from the queues
that answer for them.

Not here: what the words mean (``transaction_exchange.py``).
"""

from __future__ import annotations

from functools import partial

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.encoder import encode_ack
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker.access.rights import actor_of
from broker_core.broker.decision import Decided, decide
from broker_core.core.errors import PreconditionFailed
from broker_core.node.local import log_dropped
from broker_core.server.amqp import audit, transaction_exchange
from broker_core.server.amqp.commands import open_time
from broker_core.server.amqp.session import Session


def publish_to_transaction(session: Session, method: m.BasicPublish, command: Command) -> None:
    channel, tick_commit = session.channel, session.tick_commit
    verb, xid = transaction_exchange.parse(method.routing_key, command.body)
    if verb == "prepare" or verb == "token":
        channel.check_transactional()
        session.transaction_name = session.transaction_name.with_name(verb, xid)
        return
    if verb == "timeout":
        channel.check_transactional()
        open_time.limit(session, transaction_exchange.seconds(xid))
        return
    if channel.transactional:
        text = f"cannot {verb} transaction '{xid}' on a channel that is transactional: use another one"
        raise PreconditionFailed(text)
    if session.wait_for_tick_commit(command):
        return
    if channel.confirming:
        tick_commit.published += 1
    number = tick_commit.published

    def decided(done: Decided) -> None:
        log_dropped(xid, done.dropped)
        audit.decided(session.connection, verb, xid, done.user)
        if channel.confirming:
            session.connection.write(encode_ack(session.number, number, multiple=False))

    actor, rights = actor_of(session.state.users, session.connection.user), session.connection.rights
    work = partial(decide, verb, xid, actor=actor, rights=rights, vhost=session.state.vhost)
    session.submit(method, work, decided)


def get_answer(session: Session, method: m.BasicGet, name: str) -> None:
    """What is asked of the named transactions of the user, by the name of a queue."""
    if not method.no_ack:
        text = f"queue '{name}' only answers: it has nothing to acknowledge, so get with no_ack"
        raise PreconditionFailed(text)

    def answer(found: transaction_exchange.Answer | None) -> m.Method | None:
        if found is None:
            return m.BasicGetEmpty()
        tag, exchange = session.channel.next_tag(), transaction_exchange.NAME
        head = m.BasicGetOk(tag, False, exchange, found.routing_key, found.left)
        session.send(head, found.properties, found.body)
        return None

    if name == transaction_exchange.CURRENT:
        session.channel.check_transactional()
        current = session.broker.open_channels.transaction_id(session.channel)
        answer(transaction_exchange.Answer(current.encode(), b"", ""))
        return
    session.submit(method, transaction_exchange.question(name, session.connection.user), answer)
