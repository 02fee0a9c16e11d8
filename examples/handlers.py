"""Handlers of AMQP commands: a copy of each message (RabbitMQ's firehose), and a limit of the publish rate.

``txmq serve --data data --handler handlers:PublishRate --handler-option rate=1000``, if PYTHONPATH has this
folder, or ``serve("data", ServeOptions(handlers=[Tracer(), PublishRate(1000)]))``. docs/handlers.md has more.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from broker_core.amqp.v0_9_1.events import Command
from broker_core.amqp.v0_9_1.methods import BasicPublish
from broker_core.broker.transaction.transaction import Transaction
from broker_core.message.message import Message
from broker_core.message.properties import Properties
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.session import Session

TRACE = "amq.rabbitmq.trace"


class Tracer(Handler):
    def session_in(self, session: Session, command: Command) -> Command | None:
        method, connection = command.method, session.connection
        if isinstance(method, BasicPublish):
            keys = [method.routing_key]
            headers = {"exchange_name": method.exchange, "routing_keys": keys, "user": connection.user}
            properties = Properties(headers=headers, delivery_mode=1).encode()
            copy = Message(command.body, f"publish.{method.exchange}", TRACE, properties)
            trace = session.state.topology.exchanges[TRACE]
            work = partial(self.commit, Transaction(connection.server.broker.limits, 0), trace, copy)
            connection.server.commits.submit(work, lambda answer, error: None)
        return command

    def commit(
        self, transaction: Transaction, trace: Any, copy: Message, state: Any, change: Any, now_us: int
    ) -> None:
        transaction.publish(copy, trace.route(copy.routing_key, b""), False)
        state.transactions.commit(change, transaction, now_us)


class PublishRate(Handler):
    def __init__(self, rate: float, burst_s: float = 1.0) -> None:
        self.rate, self.burst_s = rate, burst_s

    def session_in(self, session: Session, command: Command) -> Command | None:
        if isinstance(command.method, BasicPublish):
            connection, now = session.connection, time.monotonic()
            due = max(connection.attached.get(self, 0.0), now - self.burst_s) + 1 / self.rate
            connection.attached[self] = due
            if due > now:
                connection.pause(self)
                connection.server.loop.call_later(due - now, connection.resume, self)
        return command
