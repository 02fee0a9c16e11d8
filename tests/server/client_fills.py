"""What clients of AMQP make the broker keep for as long as they are there, for ``test_retained.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp.commands import Basic, Queue, Tx

from broker_core.broker import channel as broker_channel
from broker_core.broker.access.shares import SHARE
from broker_core.broker.channel import Channel
from broker_core.core import errors
from broker_core.core.change import Author
from broker_core.launcher import Broker
from broker_core.message.message import Message
from broker_core.node import channel_commit
from broker_core.server.amqp import direct_reply
from broker_core.server.amqp.commands.returns import Returns
from broker_core.server.amqp.server import AmqpServer
from tests.amqp_peer import peer
from tests.progress import wait_until

LOW = 20
Things = list[tuple[str, str]]  # user, and a name


def consumer_bytes(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(broker_channel, "MOST_CONSUMER_BYTES", LOW * 100_000)
    with broker.channel() as channel:
        channel.queue_declare("q")
    state = broker.local.state
    for user, name in things:
        consumer = Channel(state)
        consumer.who = Author(user=user)
        with contextlib.suppress(errors.PreconditionFailed), broker.local.look:
            queue, arguments = state.topology.queue("q"), {"of": name.ljust(1_000)}
            consumer.consume(queue, name, lambda *_: 0, lambda _: None, arguments=arguments)
    consumers = state.names.shares.consumers
    assert max(consumers.values()) <= LOW * 100_000 * (SHARE if len({user for user, _ in things}) > 1 else 1)
    return consumers.total(), LOW * 100_000


def direct_replies(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(direct_reply, "MOST", LOW)
    with listening(broker) as server, peer(url(server), 1) as client, peer(url(server), 1) as other:
        client.call(1, Basic.Consume(queue=direct_reply.NAME, no_ack=True), Basic.ConsumeOk)
        (queue,) = (each for each in broker.local.state.topology.queues.values() if each.replies)
        for _user, name in things:
            other.publish(1, "", queue.name, name.encode() + bytes(10_000))
        other.call(1, Basic.Qos(), Basic.QosOk)
        return queue.messages, LOW


def returned(broker: Broker, things: Things, low: pytest.MonkeyPatch, _: Path) -> tuple[int, int]:
    low.setattr(channel_commit, "SPILL_ROWS", LOW)
    broker.local.channel_commits.spill_early(False)
    with listening(broker) as server, peer(url(server), 1) as client, peer(url(server), 1) as other:
        client.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
        client.call(1, Tx.Select(), Tx.SelectOk)
        for _user, name in things:
            client.publish(1, "", "nowhere", name.encode() + bytes(20_000), mandatory=True)
        client.publish(1, "", "q", b"")
        client.send(1, Tx.Commit())
        wait_until(lambda: other.count(1, "q") and any(not each.writable for each in server.connections))
        lines = [
            connection.attached[Returns]._line
            for connection in server.connections
            if Returns in connection.attached
        ]
        left = [each for line in lines for _, left, _ in line for each in left]
        assert any(not isinstance(each, Message) for each in left)
        return max(1, sum(isinstance(each, Message) for each in left)), LOW


def url(server: AmqpServer) -> str:
    return f"amqp://guest:guest@{server.addresses[0]}/"


@contextlib.contextmanager
def listening(broker: Broker) -> Iterator[AmqpServer]:
    server = AmqpServer(broker.local, ["127.0.0.1:0"])
    server.start()
    try:
        yield server
    finally:
        server.stop()
