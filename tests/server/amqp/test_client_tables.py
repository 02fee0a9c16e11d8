"""Tables and names that a client gives and the broker has for as long as something lives: consumers, and what a
channel remembers. Each has a bound.

Not here: state that outlives connections (``tests/server/test_retained.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pamqp.commands import Basic, Channel, Queue

from broker_core.broker import channel as broker_channel
from broker_core.server.amqp.commands import ack_timeout
from broker_core.server.amqp.commands.ack_timeout import AckTimeouts
from broker_core.server.amqp.commands.basic import ORDINARY_BYTES
from tests.amqp_in_process import Served, ended, serving
from tests.amqp_peer import Peer, encoded, peer

LARGE = {"a": "v" * 100_000}
MOST = 10_000_000


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(broker_channel, "MOST_CONSUMER_BYTES", MOST)
    with serving() as found:
        yield found


def taken(served: Served) -> int:
    shares = served.broker.state.names.shares
    assert shares.consumer_bytes == sum(shares.consumers.values()) and all(shares.consumers.values())
    return shares.consumer_bytes


def consume(client: Peer, channel: int, tag: str, queue: str = "q") -> None:
    client.call(channel, Basic.Consume(queue=queue, consumer_tag=tag, arguments=LARGE), Basic.ConsumeOk)


def test_the_bytes_of_consumers_are_bounded_with_one_error(served: Served) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
        count = MOST // (8 * 100_000)
        for number in range(count):
            consume(client, 1, f"c{number}")
        for channel in (2, 1):
            client.send(channel, Basic.Consume(queue="q", arguments=LARGE))
            close = client.expect(Channel.Close, channel)
            assert (close.reply_code, close.reply_text) == (
                406,
                f"PRECONDITION_FAILED - {MOST} bytes in consumers are there, which is the limit: cancel some",
            )
            client.send(channel, Channel.CloseOk())
            client.open(channel)
        consume(client, 2, "fits")  # the others have ended with their channel


@pytest.mark.parametrize("way", ["cancel", "channel", "queue", "connection"])
def test_what_ends_takes_no_room(way: str, served: Served) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
        consume(client, 1, "c")
        assert taken(served) > 8 * 100_000
        if way == "cancel":
            client.call(1, Basic.Cancel(consumer_tag="c"), Basic.CancelOk)
        elif way == "channel":
            client.call(1, Channel.Close(200, "", 0, 0), Channel.CloseOk)
        elif way == "queue":
            client.call(2, Queue.Delete(queue="q"), Queue.DeleteOk)
        else:
            client.abort()
            ended(served)
        assert taken(served) == 0


def test_a_channel_remembers_small_properties_alone(served: Served) -> None:
    with peer(served.url, 1) as client:
        client.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
        client.publish(1, "", "q", b"", headers={"a": "v" * 100_000})
        client.publish(1, "", "q", b"", headers={"a": "v"})
        client.publish(1, "", "q", b"", headers={"a": "v" * 100_000})
        assert client.count(1, "q") == 3
        (connection,) = served.server.connections
        assert 0 < len(connection.sessions.by_number[1].ordinary) <= ORDINARY_BYTES


def test_limits_of_time_of_consumers_that_are_gone_are_not_remembered(served: Served) -> None:
    with peer(served.url, 1) as client:
        client.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
        consumer = Basic.Consume(queue="q", consumer_tag="stays", arguments={"x-consumer-timeout": 1_000_000})
        client.call(1, consumer, Basic.ConsumeOk)
        for number in range(500):
            consumer = Basic.Consume(
                queue="q", consumer_tag="c", arguments={"x-consumer-timeout": 60_000 + number}, nowait=True
            )
            client.write(encoded(1, consumer) + encoded(1, Basic.Cancel(consumer_tag="c", nowait=True)))
        client.count(1, "q")
        (connection,) = served.server.connections
        (notes,) = connection.attached[AckTimeouts]._notes.values()
        assert len(notes) < ack_timeout.NOTED and 1_000_000 in notes
