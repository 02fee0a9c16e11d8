"""Direct reply-to (a RabbitMQ extension): a requester consumes ``amq.rabbitmq.reply-to`` and needs no
queue for answers.

Its publishes have ``reply_to=amq.rabbitmq.reply-to``. The broker replaces it with a name that only this
consumer has. A message to that name through the default exchange, from any client, reaches the consumer.
Errors and counts are those of RabbitMQ 3.10, with one difference: in a transaction a reply is sent by its
commit.

The name is that of a queue which is exclusive to the connection, lives in memory and is deleted with its
consumer. It is not listed, and cannot be bound, consumed, read, purged or deleted. Of what a client does not
read, the newest wait for it, as ``txmq connection channels`` shows.
Invariant: a channel has at most one such consumer, ``session.replies`` names its queue, and no two consumers
ever have the same name.
"""

from __future__ import annotations

import secrets

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import REPLIES
from broker_core.broker.queue.consumer import Consumer
from broker_core.core.change import Change
from broker_core.core.errors import NotAllowed, PreconditionFailed
from broker_core.message.properties import Properties, with_reply_to
from broker_core.routing import refusals
from broker_core.server.amqp.session import Session, sender

NAME = REPLIES[:-1]
RAW_NAME = NAME.encode()
MOST, MOST_BYTES = 20_000, 16 * 1024 * 1024  # that wait for one consumer


def consume(session: Session, method: m.BasicConsume, tag: str) -> None:
    """Raises NotAllowed (the tag is in use), PreconditionFailed (without no_ack, or there is one already)."""
    if method.consumer_tag in session.channel.consumers:
        raise NotAllowed(f"attempt to reuse consumer tag '{tag}'")
    if not method.no_ack:
        raise PreconditionFailed("reply consumer cannot acknowledge", "consume with no_ack")
    if session.replies:
        raise PreconditionFailed(
            "reply consumer already set", "a channel has one; cancel it first, or use another channel"
        )
    name = REPLIES + secrets.token_urlsafe(24)

    def work(state: BrokerState, change: Change, _now: int) -> Consumer:
        queue = state.topology.declare_queue(
            change,
            name,
            durable=False,
            exclusive=True,
            auto_delete=True,
            arguments={"x-max-length": MOST, "x-max-length-bytes": MOST_BYTES},
            connection=session.connection,
        )
        send = sender(session, tag, name)
        consumer = session.channel.consume(queue, tag, send, session.cancelled, no_ack=True)
        consumer.limited = False
        return consumer

    def consuming(consumer: Consumer) -> m.Method | None:
        session.replies = name
        consumer.writable = session.connection.writable and not session.connection.closed_for_sending
        return None if method.nowait else m.BasicConsumeOk(tag)

    session.submit(method, work, consuming)


def declare(session: Session, method: m.QueueDeclare, name: str) -> None:
    """A declare, passive or not, only checks that the requester exists. Raises QueueNotFound."""

    def work(state: BrokerState, _change: Change, _now: int) -> None:
        if name != NAME and (name not in state.topology.queues or not state.topology.queues[name].replies):
            raise refusals.no_queue(name, state.vhost)

    def declared(_: None) -> m.Method | None:
        session.last_queue = name
        return None if method.nowait else m.QueueDeclareOk(name, 0, 1)

    session.submit(method, work, declared)


def addressed(session: Session, properties: bytes) -> bytes:
    """``properties`` with the name of this channel's consumer. Raises PreconditionFailed without one."""
    if Properties.decode(properties).reply_to != NAME:
        return properties
    if not session.replies:
        raise PreconditionFailed(
            "fast reply consumer does not exist", f"consume '{NAME}' on this channel first"
        )
    return with_reply_to(properties, session.replies)
