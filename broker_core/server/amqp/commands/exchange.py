"""Class exchange. Not here: the rules (``broker/topology/topology.py``).

Each command is a work of the committer, answered when it is durable.
"""

from __future__ import annotations

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker import command_permissions
from broker_core.broker.broker import BrokerState
from broker_core.core.change import Change
from broker_core.node.committer import changes
from broker_core.routing.exchange_types import check_type
from broker_core.server.amqp.commands.names import one_line
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import Session


@command
def declare(session: Session, method: m.ExchangeDeclare, command: Command) -> None:
    if not method.passive:
        check_type(method.type)
    name, rights, topology = one_line(method.exchange), session.connection.rights, session.state.topology
    if not method.passive:
        command_permissions.declare_exchange(rights, topology, name, method.type, method.arguments)

    def work(state: BrokerState, change: Change, _now: int) -> None:
        if method.passive:
            state.topology.exchange(name)
        else:
            state.topology.declare_exchange(
                change,
                name,
                method.type,
                durable=method.durable,
                auto_delete=method.auto_delete,
                internal=method.internal,
                arguments=dict(method.arguments),
            )

    session.submit(method, work, lambda _: None if method.nowait else m.ExchangeDeclareOk())


@command
def delete(session: Session, method: m.ExchangeDelete, _: Command) -> None:
    name, topology = one_line(method.exchange), session.state.topology
    command_permissions.delete_exchange(session.connection.rights, name)
    reply = None if method.nowait else m.ExchangeDeleteOk()
    work = changes(topology.delete_exchange, name, if_unused=method.if_unused)
    session.submit(method, work, lambda _: reply)


@command
def bind(session: Session, method: m.ExchangeBind, _: Command) -> None:
    reply, binding = None if method.nowait else m.ExchangeBindOk(), _binding(session, method)
    session.submit(method, changes(session.state.topology.bind_exchange, *binding), lambda _: reply)


@command
def unbind(session: Session, method: m.ExchangeUnbind, _: Command) -> None:
    reply, binding = None if method.nowait else m.ExchangeUnbindOk(), _binding(session, method)
    session.submit(method, changes(session.state.topology.unbind_exchange, *binding), lambda _: reply)


def _binding(
    session: Session, method: m.ExchangeBind | m.ExchangeUnbind
) -> tuple[str, str, str, dict[str, object]]:
    """What ``Topology.bind_exchange`` takes, if it is permitted."""
    destination, source = one_line(method.destination), one_line(method.source)
    rights, topology = session.connection.rights, session.state.topology
    command_permissions.bind(rights, topology, "exchange", destination, source, method.routing_key)
    return destination, source, method.routing_key, dict(method.arguments)
