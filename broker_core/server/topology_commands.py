"""The commands about exchanges, queues and bindings, as a session carries them out.

Not here: the rules (``broker/topology.py``). Each is a work of the committer, answered when it is durable. Those that speak of counts
wait for what the channel published before. As in RabbitMQ, CR and LF are dropped from the names of queues and exchanges that are
declared, bound or deleted; other commands take a name as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker.broker import BrokerState
from broker_core.broker.change import Change
from broker_core.errors import AccessRefused
from broker_core.server import direct_reply

if TYPE_CHECKING:
    from broker_core.server.session import Session


def exchange_declare(session: Session, command: Command) -> None:
    if session.wait_for_gathered(command):
        return
    method = command.method
    assert isinstance(method, m.ExchangeDeclare)
    name = _one_line(method.exchange)

    def work(state: BrokerState, change: Change, _now: int) -> None:
        if method.passive:
            state.exchange(name)
        else:
            state.declare_exchange(
                change,
                name,
                method.type,
                durable=method.durable,
                auto_delete=method.auto_delete,
                internal=method.internal,
                arguments=dict(method.arguments),
            )

    session.submit(command, work, lambda _: None if method.nowait else m.ExchangeDeclareOk())


def exchange_delete(session: Session, command: Command) -> None:
    method = command.method
    assert isinstance(method, m.ExchangeDelete)
    session.submit(
        command,
        lambda state, change, _now: state.delete_exchange(change, _one_line(method.exchange), if_unused=method.if_unused),
        lambda _: None if method.nowait else m.ExchangeDeleteOk(),
    )


def exchange_bind(session: Session, command: Command) -> None:
    method = command.method
    assert isinstance(method, (m.ExchangeBind, m.ExchangeUnbind))
    binds = isinstance(method, m.ExchangeBind)

    def work(state: BrokerState, change: Change, _now: int) -> None:
        act = state.bind_exchange if binds else state.unbind_exchange
        act(change, _one_line(method.destination), _one_line(method.source), method.routing_key, dict(method.arguments))

    done: m.Method = m.ExchangeBindOk() if binds else m.ExchangeUnbindOk()
    session.submit(command, work, lambda _: None if method.nowait else done)


def queue_declare(session: Session, command: Command) -> None:
    if session.wait_for_gathered(command):
        return
    method = command.method
    assert isinstance(method, m.QueueDeclare)
    name = _one_line(method.queue)
    if name.startswith(direct_reply.NAME):
        direct_reply.declare(session, command, name)
        return
    if not name and not method.passive:
        name = f"amq.gen-{secrets.token_urlsafe(16)}"
    elif name.startswith("amq.") and not method.passive and name not in session.state.queues:
        raise AccessRefused(f"queue name '{name}' contains reserved prefix 'amq.*'")

    def work(state: BrokerState, change: Change, now: int) -> tuple[int, int]:
        if method.passive:
            state.visible_to(name, session.connection)
        else:
            state.declare_queue(
                change,
                name,
                durable=method.durable,
                exclusive=method.exclusive,
                auto_delete=method.auto_delete,
                arguments=dict(method.arguments),
                connection=session.connection,
            )
        state.touch(state.queues[name], now)
        return state.queue_counts(name)

    def declared(counts: tuple[int, int]) -> m.Method | None:
        session.last_queue = name
        return None if method.nowait else m.QueueDeclareOk(name, *counts)

    session.submit(command, work, declared)


def queue_bind(session: Session, command: Command) -> None:
    method = command.method
    assert isinstance(method, (m.QueueBind, m.QueueUnbind))
    queue = session.queue_name(_one_line(method.queue))
    # with neither a queue nor a key, the key is the queue's name too (specification 1.7.2.3.3)
    routing_key = method.routing_key or ("" if method.queue else queue)
    binds = isinstance(method, m.QueueBind)

    def work(state: BrokerState, change: Change, _now: int) -> None:
        act = state.bind if binds else state.unbind
        act(change, queue, _one_line(method.exchange), routing_key, dict(method.arguments), connection=session.connection)

    if isinstance(method, m.QueueBind):
        bound = None if method.nowait else m.QueueBindOk()
        session.submit(command, work, lambda _: bound)
    else:
        session.submit(command, work, lambda _: m.QueueUnbindOk())


def queue_purge(session: Session, command: Command) -> None:
    if session.wait_for_gathered(command):
        return
    method = command.method
    assert isinstance(method, m.QueuePurge)
    name = session.queue_name(method.queue)
    session.submit(
        command,
        lambda state, change, _now: state.purge(change, name, session.connection),
        lambda count: None if method.nowait else m.QueuePurgeOk(count),
    )


def queue_delete(session: Session, command: Command) -> None:
    if session.wait_for_gathered(command):
        return
    method = command.method
    assert isinstance(method, m.QueueDelete)
    name = session.queue_name(_one_line(method.queue))

    def work(state: BrokerState, change: Change, _now: int) -> int:
        return state.delete_queue(change, name, if_unused=method.if_unused, if_empty=method.if_empty, connection=session.connection)

    session.submit(command, work, lambda count: None if method.nowait else m.QueueDeleteOk(count))


def _one_line(name: str) -> str:
    return name.replace("\r", "").replace("\n", "")


HANDLERS: dict[type[m.Method], Callable[[Session, Command], None]] = {
    m.ExchangeDeclare: exchange_declare,
    m.ExchangeDelete: exchange_delete,
    m.ExchangeBind: exchange_bind,
    m.ExchangeUnbind: exchange_bind,
    m.QueueDeclare: queue_declare,
    m.QueueBind: queue_bind,
    m.QueueUnbind: queue_bind,
    m.QueuePurge: queue_purge,
    m.QueueDelete: queue_delete,
}
