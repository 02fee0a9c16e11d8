"""Class basic, for publishers: publish. Not here: get, consume and acks (``delivery.py``)."""

from __future__ import annotations

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command, Publishes
from broker_core.broker import command_permissions
from broker_core.core.errors import NotImplementedFeature, PreconditionFailed
from broker_core.message.message import Message
from broker_core.message.properties import delivery_mode
from broker_core.routing.carbon_copy import has_copies
from broker_core.routing.content import USER_ID, check_user_id
from broker_core.server.amqp import direct_reply, transaction_exchange
from broker_core.server.amqp.commands.named_transaction import publish_to_transaction
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import DroppedPublish, Session

_REPLY_TO = 0x02  # in the first one
_DELIVERY_MODES = (2, 1, None)
ORDINARY_BYTES = 1024
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


@command
def publish(session: Session, method: m.BasicPublish, command: Command) -> None:
    properties, body, rights = command.properties, command.body, session.connection.rights
    name, routing_key = method.exchange, method.routing_key
    if method.immediate:
        raise NotImplementedFeature("immediate=true")
    if name not in rights.writable:
        command_permissions.publish(rights, session.state.topology, name, routing_key, properties)
    copies = False
    if properties and properties != session.ordinary:
        has_user = properties[1] & USER_ID
        if has_user and not rights.impersonates:
            check_user_id(properties, session.connection.user)
        if properties[0] & _REPLY_TO and direct_reply.RAW_NAME in properties:
            properties = direct_reply.addressed(session, properties)
        if delivery_mode(properties) not in _DELIVERY_MODES:
            raise PreconditionFailed(
                f"invalid message: {{delivery_mode_unknown,{delivery_mode(properties)}}}"
            )
        copies = has_copies(properties)
        # whom a message may name changes with the users; a channel has no share for what is large
        if not (copies or has_user) and len(properties) <= ORDINARY_BYTES:
            session.ordinary = properties
    source = session.state.topology.exchanges.get(name)
    if source is None or source.internal:
        if name == transaction_exchange.NAME:
            publish_to_transaction(session, method, command)
            return
        queues = None
    else:
        queues = source.cached(routing_key)
    if queues is None or copies:
        with session.look:
            queues, properties = session.state.topology.route_copies(name, routing_key, properties)
    channel = session.channel
    if channel.transactional:
        if queues or method.mandatory:
            message = _new(Message, (body, routing_key, name, properties))
            channel.publish(message, queues, method.mandatory, session.begun_us)
            session.broker.channel_commits.spill_full(channel.transaction)
        return
    tick_commit = session.tick_commit
    if not (channel.confirming or queues or method.mandatory):
        return
    channel.publish(_new(Message, (body, routing_key, name, properties)), queues, method.mandatory, 0)
    if channel.confirming:
        tick_commit.published += 1  # one that was refused has no number, and gets no confirm
    if not tick_commit.waits:
        tick_commit.gather()


@command
def drop(session: Session, method: DroppedPublish, command: Command) -> None:
    """It is confirmed as one that reaches no queue: in the order of publishing."""
    channel, tick_commit = session.channel, session.tick_commit
    if channel.confirming:
        channel.publish(Message(b"", "", "", b""), (), False, 0)
        tick_commit.published += 1
        tick_commit.gather()


def publish_many(session: Session, publishes: Publishes) -> bool:
    """Does what ``publish`` does with each of them, if they need nothing but their queues. Otherwise it
    returns False, with nothing done.
    """
    _, method, properties, bodies = publishes
    assert isinstance(method, m.BasicPublish)
    if (
        not session.ready
        or method.immediate
        or method.exchange not in session.connection.rights.writable
        or (properties and properties != session.ordinary)
    ):
        return False
    source = session.state.topology.exchanges.get(method.exchange)
    queues = None if source is None or source.internal else source.cached(method.routing_key)
    if not queues:
        return False
    channel, tick_commit = session.channel, session.tick_commit
    like = _new(Message, (b"", method.routing_key, method.exchange, properties))
    now = session.begun_us if channel.transactional else 0
    if not channel.transaction.publish_many(like, bodies, queues, method.mandatory, now):
        return False
    if channel.transactional:
        session.broker.channel_commits.spill_full(channel.transaction)
        return True
    if channel.confirming:
        tick_commit.published += len(bodies)
    if not tick_commit.waits:
        tick_commit.gather()
    return True
