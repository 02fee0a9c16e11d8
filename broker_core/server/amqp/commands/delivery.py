"""Class basic, for consumers: qos, consume, cancel, get, acks and recover. Not here: publish
(``basic.py``).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple, cast

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.encoder import require_header_fits
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker import command_permissions
from broker_core.broker.broker import BrokerState
from broker_core.broker.message.dispatch import with_header
from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer, Send
from broker_core.broker.transaction.transaction import Outcome, Settle
from broker_core.core.block import NotLoaded
from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import NotImplementedFeature
from broker_core.message.arguments import check_consumer_arguments
from broker_core.message.message import Delivery
from broker_core.server.amqp import direct_reply, transaction_exchange
from broker_core.server.amqp.commands.ack_timeout import limit_of, watch
from broker_core.server.amqp.commands.named_transaction import get_answer
from broker_core.server.amqp.commands.registry import command
from broker_core.server.amqp.session import Session, sender


@command
def qos(session: Session, method: m.BasicQos, _: Command) -> None:
    if method.prefetch_size:
        raise NotImplementedFeature(f"prefetch_size!=0 ({method.prefetch_size})")
    # py-amqp (so kombu and Celery) means the whole channel, as in the specification, if the product is not
    # RabbitMQ
    whole = method.global_ or session.connection.protocol.client_properties.get("product") == "py-amqp"
    with session.look:
        session.channel.qos(method.prefetch_count, whole)
    session.send(m.BasicQosOk())
    session.commits.wake()


@command
def consume(session: Session, method: m.BasicConsume, command: Command) -> None:
    name = session.queue_name(method.queue)
    tag = method.consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
    if name == direct_reply.NAME:
        direct_reply.consume(session, method, tag)
        return
    if tag not in session.channel.consumers:  # else it is refused for that
        command_permissions.read_queue(session.connection.rights, name)
    topology = session.state.topology
    with session.look:
        topology.require_there()
        queue = topology.usable(name, session.connection)
        arguments, kind = dict(method.arguments), queue.arguments.queue_type
        check_consumer_arguments(name, topology.vhost, arguments, kind, strict=topology.strict)
        queue.marks.used_at_us = session.clock()
        if not method.no_ack:
            watch(session, limit_of(queue, arguments))
        send = sender(session, tag, name)
        consumer = session.channel.consume(
            queue,
            tag,
            _with_id(session, send) if arguments.get("x-transaction-id") else send,
            session.cancelled,
            no_ack=method.no_ack,
            exclusive=method.exclusive,
            no_local=method.no_local,
            priority=cast(int, arguments.get("x-priority", 0)),
            arguments=arguments,
        )
        consumer.writable = session.connection.writable
    if not method.nowait:
        session.send(m.BasicConsumeOk(tag))
    session.commits.wake()


def _with_id(session: Session, send: Send) -> Send:
    """Sends the id of the transaction that published a message with it, and none that its publisher wrote."""
    id_of = session.broker.state.names.of_messages.of

    def deliver(consumer: Consumer, tag: int, redelivered: Sequence[bool], rows: Sequence[InboxRow]) -> int:
        with_ids = [with_header(row, "x-transaction-id", id_of(row) or None) for row in rows]
        return send(consumer, tag, redelivered, with_ids)

    return deliver


@command
def cancel(session: Session, method: m.BasicCancel, command: Command) -> None:
    tag = method.consumer_tag
    reply = None if method.nowait else m.BasicCancelOk(tag)
    with session.look:
        consumer = session.channel.cancel(tag)
        if consumer is not None:
            consumer.queue.marks.used_at_us = session.clock()
            if consumer.queue.replies:
                session.replies = ""
    if consumer is not None and consumer.queue.auto_delete:
        session.submit(
            method, lambda state, change, _now: state.topology.delete_abandoned(change), lambda _: reply
        )
    else:
        session.send_unless_none(reply)
    session.commits.wake()  # a single active consumer may have made room


@command
def get(session: Session, method: m.BasicGet, command: Command) -> None:
    name = session.queue_name(method.queue)
    command_permissions.read_queue(session.connection.rights, name)
    if name.startswith(transaction_exchange.QUESTIONS):
        get_answer(session, method, name)
        return
    channel = session.channel
    if session.state.pending_checks.runnable:
        session.commits.dispatch(session.state.topology.queues.get(name))  # consumers come before a get

    def take(state: BrokerState, now: int) -> GetAnswer:
        queue = state.topology.usable(name, session.connection)
        queue.marks.used_at_us = now
        if state.expiry.head_expired(queue, now):
            return GetAnswer(None, 0, queue)
        if not method.no_ack:
            watch(session, limit_of(queue))
        delivery = channel.get(queue)
        ready, _ = state.topology.queue_counts(name)
        return GetAnswer(delivery, ready, None)

    def take_or_expire(state: BrokerState, change: Change, now: int) -> GetAnswer:
        taken = take(state, now)
        if taken.late is not None:
            state.expiry.expire(change, now, [taken.late])
        return taken

    def answer(taken: GetAnswer) -> None:
        if taken.late is not None:
            session.put_back(command)  # carried out again after the expiry
        elif taken.delivery is None:
            session.send(m.BasicGetEmpty())
        else:
            _give(session, method, taken.delivery, taken.ready)

    try:
        with session.look:
            taken = take(session.state, session.clock())
    except NotLoaded:
        session.submit(method, take_or_expire, answer)
        return
    if taken.late is not None:
        session.submit(method, take_or_expire, answer)
    else:
        answer(taken)


class GetAnswer(NamedTuple):
    """What basic.get found: a message and how many are ready after it, or a queue whose head must expire."""

    delivery: Delivery | None
    ready: int
    late: Queue | None


def _give(session: Session, method: m.BasicGet, delivery: Delivery, ready: int) -> None:
    if session.connection.closed_for_sending:
        return  # it could not be sent; the channel requeues it when it ends
    require_header_fits(delivery.message.properties, session.connection.protocol.tuned.frame_max)
    if method.no_ack:
        unacked = session.channel.unacked.pop(delivery.tag)
        unacked.queue.marks.got -= 1
        unacked.queue.marks.got_no_ack += 1
        session.commits.settle([Settle(unacked.queue, unacked.offset, "ack")])
    message = delivery.message
    found = m.BasicGetOk(delivery.tag, delivery.redelivered, message.exchange, message.routing_key, ready)
    session.send(found, message.properties, message.body, queue=delivery.queue)


@command
def ack(session: Session, method: m.BasicAck, _: Command) -> None:
    _settle(session, method.delivery_tag, "ack", method.multiple)


@command
def nack(session: Session, method: m.BasicNack, _: Command) -> None:
    _settle(session, method.delivery_tag, "requeue" if method.requeue else "reject", method.multiple)


@command
def reject(session: Session, method: m.BasicReject, _: Command) -> None:
    _settle(session, method.delivery_tag, "requeue" if method.requeue else "reject", False)


def _settle(session: Session, tag: int, outcome: Outcome, multiple: bool) -> None:
    channel = session.channel
    channel.settle(tag, outcome, multiple, session.begun_us if channel.transactional else 0)
    if not channel.transactional and not session.tick_commit.waits and channel.transaction:
        session.tick_commit.gather()


@command
def recover(session: Session, method: m.BasicRecover, command: Command) -> None:
    _recover(session, method, command, m.BasicRecoverOk())


@command
def recover_async(session: Session, method: m.BasicRecoverAsync, command: Command) -> None:
    _recover(session, method, command, None)


def _recover(
    session: Session, method: m.BasicRecover | m.BasicRecoverAsync, command: Command, reply: m.Method | None
) -> None:
    if not method.requeue:
        raise NotImplementedFeature("requeue=false")

    def work(_state: BrokerState, change: Change, now: int) -> None:
        session.channel.recover(change, now)

    session.submit(method, work, lambda _: reply)
