"""Class queue. Not here: the rules (``broker/topology/topology.py``).

Each command is a work of the committer, answered when it is durable. Commands that return counts wait for
earlier publishes of the channel.
"""

from __future__ import annotations

import secrets

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker import command_permissions
from broker_core.broker.broker import BrokerState
from broker_core.broker.message.purge import Purge
from broker_core.core.change import Change
from broker_core.message.arguments import check_reserved
from broker_core.node.committer import changes
from broker_core.server.amqp import direct_reply
from broker_core.server.amqp.commands.names import one_line
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import Session, submit_steps


@command
def declare(session: Session, method: m.QueueDeclare, command: Command) -> None:
    name = one_line(method.queue)
    if name.startswith(direct_reply.NAME):
        direct_reply.declare(session, method, name)
        return
    if not method.passive:
        rights, topology = session.connection.rights, session.state.topology
        if name:
            check_reserved(name, topology.queues)
        name = name or f"amq.gen-{secrets.token_urlsafe(16)}"
        command_permissions.declare_queue(rights, topology, name, method.arguments)

    def work(state: BrokerState, change: Change, now: int) -> tuple[int, int]:
        if method.passive:
            state.topology.visible_to(name, session.connection)
        else:
            state.topology.declare_queue(
                change,
                name,
                durable=method.durable,
                exclusive=method.exclusive,
                auto_delete=method.auto_delete,
                arguments=dict(method.arguments),
                connection=session.connection,
            )
        state.topology.queues[name].marks.used_at_us = now
        return state.topology.queue_counts(name)

    def declared(counts: tuple[int, int]) -> m.Method | None:
        session.last_queue = name
        return None if method.nowait else m.QueueDeclareOk(name, *counts)

    session.submit(method, work, declared)


@command
def bind(session: Session, method: m.QueueBind, _: Command) -> None:
    reply, binding = None if method.nowait else m.QueueBindOk(), _binding(session, method)
    work = changes(session.state.topology.bind, *binding, connection=session.connection)
    session.submit(method, work, lambda _: reply)


@command
def unbind(session: Session, method: m.QueueUnbind, _: Command) -> None:
    unbind, binding = session.state.topology.unbind, _binding(session, method)
    work = changes(unbind, *binding, connection=session.connection)
    session.submit(method, work, lambda _: m.QueueUnbindOk())


def _binding(
    session: Session, method: m.QueueBind | m.QueueUnbind
) -> tuple[str, str, str, dict[str, object]]:
    """What ``Topology.bind`` takes, if it is permitted.

    With neither a queue nor a key, the key is the queue's name too (specification 1.7.2.3.3).
    """
    queue = session.queue_name(one_line(method.queue))
    routing_key = method.routing_key or ("" if method.queue else queue)
    exchange, topology = one_line(method.exchange), session.state.topology
    command_permissions.bind(session.connection.rights, topology, "queue", queue, exchange, routing_key)
    return queue, exchange, routing_key, dict(method.arguments)


@command
def purge(session: Session, method: m.QueuePurge, command: Command) -> None:
    name = session.queue_name(method.queue)
    command_permissions.read_queue(session.connection.rights, name)

    purge = Purge(session.state.topology, name, session.connection)
    submit_steps(session, method, purge.step, lambda: None if method.nowait else m.QueuePurgeOk(purge.count))


@command
def delete(session: Session, method: m.QueueDelete, command: Command) -> None:
    name, connection = session.queue_name(one_line(method.queue)), session.connection
    command_permissions.delete_queue(session.connection.rights, name)

    work = changes(
        session.state.topology.delete_queue,
        name,
        if_unused=method.if_unused,
        if_empty=method.if_empty,
        connection=connection,
    )
    session.submit(method, work, lambda count: None if method.nowait else m.QueueDeleteOk(count))
