"""Class channel: flow and close. ``channel.open`` makes the session, so it is not here."""

from __future__ import annotations

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.core.errors import NotImplementedFeature
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import Session


@command
def flow(session: Session, method: m.ChannelFlow, _: Command) -> None:
    if not method.active:
        raise NotImplementedFeature("active=false")
    session.send(m.ChannelFlowOk(True))


@command
def close(session: Session, method: m.ChannelClose, _: Command) -> None:
    session.connection.end_session(session.number)
