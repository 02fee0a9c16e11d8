"""Class confirm (a RabbitMQ extension): publisher confirms."""

from __future__ import annotations

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import Session


@command
def select(session: Session, method: m.ConfirmSelect, command: Command) -> None:
    session.channel.confirm_select()
    if not method.nowait:
        session.send(m.ConfirmSelectOk())
