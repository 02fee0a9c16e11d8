"""The point that sees the header of a content before its body: what it refuses or drops is not gathered, what it
redirects goes there, and each content passes it once, however its bytes are cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pamqp import commands as c
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.encoder import encode_content, encode_method
from broker_core.amqp.v0_9_1.events import Command, ContentHeader
from broker_core.broker.transaction.transaction import Limits
from broker_core.core.errors import PreconditionFailed
from broker_core.core.password import hashed
from broker_core.launcher import Broker
from broker_core.server.amqp.handlers.handler import Handler, Handlers
from broker_core.server.amqp.session import Session
from tests.amqp_in_process import Leader, serving
from tests.amqp_peer import Peer, content, peer
from tests.amqp_server import serving as serving_process
from tests.server.amqp.gate import Gate
from tests.server.amqp.test_publish_many import Server, begun
from tests.server.flight.test_flight_bomb import peak_mb

LARGE = bytes(100 << 20)
ROOM_MB = 24  # of a broker that reads 100 MB and gathers none of it


def client(url: str, user: str = "guest") -> pika.BlockingConnection:
    parameters = pika.URLParameters(url)
    parameters.credentials = pika.PlainCredentials(user, user)
    return pika.BlockingConnection(parameters)


def published(channel: Any, key: str) -> None:
    """Raises what the broker says, whether pika hears it before or after it has written all."""
    channel.basic_publish("", key, LARGE)
    channel.queue_declare("q")


# -- 100 MB --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_100_mb_that_are_refused_or_dropped_are_not_gathered_and_redirected_ones_arrive(
    tmp_path: Path,
) -> None:
    handler = f"{Gate.__module__}:{Gate.__name__}"
    with serving_process(tmp_path, "--handler", handler) as served:
        with contextlib.closing(client(served.amqp_url)) as connection:
            other = connection.channel()
            other.queue_declare("q")
            other.basic_publish("", "q", b"warm")
            before = peak_mb(served.pid)

            refused = connection.channel()
            with pytest.raises(ChannelClosedByBroker, match="not this content"):
                published(refused, "channel")

            dropped = connection.channel()
            dropped.confirm_delivery()
            dropped.basic_publish("", "drop", LARGE)  # it returns when it is confirmed
            assert dropped.queue_declare("q").method.message_count == 1
        closed = client(served.amqp_url).channel()
        with pytest.raises(ConnectionClosedByBroker, match="no such content"):
            published(closed, "connection")
        assert peak_mb(served.pid) - before < ROOM_MB

        with contextlib.closing(client(served.amqp_url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.exchange_declare("there", "fanout")
            channel.queue_bind("q", "there")
            channel.queue_purge("q")
            channel.basic_publish("nowhere", "to there/key", LARGE)
            method, _, body = channel.basic_get("q", auto_ack=True)
            assert (method.exchange, method.routing_key, body) == ("there", "key", LARGE)
        assert peak_mb(served.pid) - before > ROOM_MB, "the bound finds what is gathered"


def test_what_is_refused_leaves_nothing_behind_in_the_decoder() -> None:
    server = Server(Limits(), 1000)
    begun(server, ("", ""))
    server.connection.add_handler(Gate())
    protocol = server.connection.protocol
    for key in ("drop", "channel"):
        start = encode_content(1, m.BasicPublish("", key), b"", bytes(1 << 20), 131_072)
        for at in range(0, len(start), 65_536):
            server.feed(start[at : at + 65_536])
            assert protocol.pending_bytes < 140_000
        assert protocol.pending_bytes == 0


# -- once, whatever the chunks are ---------------------------------------------------------------------------


class Order(Handler):
    """What comes to the two points, in its order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, str, int]] = []

    def content_in(self, session: Session, header: ContentHeader) -> ContentHeader | None:
        self.seen.append(("header", header.channel, header.method.routing_key, header.size))  # type: ignore[attr-defined]
        return header

    def session_in(self, session: Session, command: Command) -> Command | None:
        if isinstance(command.method, m.BasicPublish):
            self.seen.append(("command", command.channel, command.method.routing_key, len(command.body)))
        return command


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096, 5000, 1 << 20])
def test_each_content_passes_once_and_before_its_command(chunk: int) -> None:
    server = Server(Limits(), 1000)
    begun(server, ("confirm", ""))
    order = Order()
    server.connection.add_handler(order)
    sizes = [0, 1, 5000, 20_000, 1, 1, 1, 0]
    stream = b"".join(
        encode_content(1 + at % 2, m.BasicPublish("", "a"), b"", bytes(size), 4096)
        for at, size in enumerate(sizes)
    )
    for at in range(0, len(stream), chunk):
        server.feed(stream[at : at + chunk])
    expected = [
        (point, 1 + at % 2, "a", size) for at, size in enumerate(sizes) for point in ("header", "command")
    ]
    assert order.seen == expected
    assert server.broker.state.topology.queues["a"].log.next_offset == len(sizes)


def test_contents_of_two_channels_that_come_at_once_are_decided_each_by_its_own_header() -> None:
    server = Server(Limits(), 1000)
    begun(server, ("", ""))
    gate = Gate()
    server.connection.add_handler(gate)
    first = encode_content(1, m.BasicPublish("", "to /b"), b"", b"1" * 9000, 4096)
    second = encode_content(2, m.BasicPublish("", "drop"), b"", b"2" * 9000, 4096)
    cut = [len(encode_method(1, m.BasicPublish("", key))) + 22 for key in ("to /b", "drop")]
    server.feed(first[: cut[0]] + second[: cut[1]])
    server.feed(second[cut[1] :] + first[cut[0] :])
    assert gate.seen == [(1, "to /b", 9000), (2, "drop", 9000)]
    counts = {name: queue.log.next_offset for name, queue in server.broker.state.topology.queues.items()}
    assert (counts["a"], counts["b"]) == (0, 1)


class Adding(Handler):
    """Adds a handler at the first publish, when others that came with it are decoded already."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def session_in(self, session: Session, command: Command) -> Command | None:
        if isinstance(command.method, m.BasicPublish):
            session.connection.add_handler(self.gate)
        return command


def test_a_handler_that_is_added_sees_what_came_in_the_same_bytes() -> None:
    server = Server(Limits(), 1000)
    begun(server, ("", ""))
    gate = Gate()
    server.connection.add_handler(Adding(gate))
    server.feed(encode_content(1, m.BasicPublish("", "a"), b"", b"x", 4096) * 3)
    assert gate.seen == [(1, "a", 1)] * 2


def test_a_channel_that_fails_within_a_content_hides_no_content_of_the_next_one() -> None:
    server = Server(Limits(), 1000)
    begun(server, ("", ""))
    gate = Gate()
    server.connection.add_handler(gate)
    whole = encode_content(1, m.BasicPublish("", "a"), b"", bytes(9000), 4096)
    server.feed(whole[:3000])
    server.connection.fail(1, PreconditionFailed("meanwhile"))
    server.feed(whole[3000:] + encode_method(1, m.ChannelCloseOk()) + encode_method(1, m.ChannelOpen()))
    server.feed(encode_content(1, m.BasicPublish("", "drop"), b"", b"x", 4096))
    assert gate.seen == [(1, "a", 9000), (1, "drop", 1)]


# -- what it may do ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_users(handler: Handler) -> Iterator[str]:
    """``ann`` may write to ``open`` alone, and configure and read all."""
    with Broker.memory(amqp=["127.0.0.1:0"], handlers=[handler], users={"root": "root"}) as broker:
        broker.accounts.add_user("ann", hashed("ann"))
        broker.accounts.set_permissions("ann", ".*", "^open$", ".*")
        url = broker.amqp_urls[0]
        with contextlib.closing(client(url, "root")) as connection:
            channel = connection.channel()
            for name in ("open", "closed"):
                channel.exchange_declare(name, "fanout")
                channel.queue_declare(name)
                channel.queue_bind(name, name)
        yield url


@pytest.mark.parametrize("size", [1, 300_000])
def test_a_redirect_needs_the_right_of_the_user_on_what_is_carried_out(size: int) -> None:
    with two_users(Gate()) as url, contextlib.closing(client(url, "ann")) as connection:
        bypass = connection.channel()
        bypass.basic_publish("open", "to closed/", bytes(size))
        with pytest.raises(ChannelClosedByBroker, match=r"403.*access to exchange 'closed'"):
            bypass.queue_declare("closed", passive=True)
        allowed = connection.channel()
        allowed.confirm_delivery()
        allowed.basic_publish("closed", "to open/", bytes(size))
        assert allowed.queue_declare("closed", passive=True).method.message_count == 0
        assert allowed.basic_get("open", auto_ack=True)[2] == bytes(size)


@pytest.mark.parametrize("key", ["broken", "exit", "garbage"])
@pytest.mark.parametrize("size", [1, 300_000])
def test_a_point_that_breaks_closes_its_connection_alone(key: str, size: int) -> None:
    with serving(Gate()) as served, peer(served.url, 1) as client, peer(served.url, 1) as other:
        client.write(content(1, c.Basic.Publish(routing_key=key), bytes(size)))
        assert client.expect(c.Connection.Close, 0).reply_code == 541
        other.call(1, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)
        with peer(served.url, 1) as later:  # the loop lives
            later.end()


class Swallow(Handler):
    """Drops publishes with the key ``hole`` when they are whole."""

    def session_in(self, session: Session, command: Command) -> Command | None:
        method = command.method
        return None if isinstance(method, m.BasicPublish) and method.routing_key == "hole" else command


def confirmed(client: Peer, last: int) -> list[int]:
    """The numbers that are confirmed, in the order of the confirms, up to ``last``."""
    numbers: list[int] = []
    while len(numbers) < last:
        ack = client.expect(c.Basic.Ack, 1)
        begin = (numbers[-1] if numbers else 0) + 1 if ack.multiple else ack.delivery_tag
        numbers += range(begin, ack.delivery_tag + 1)
    return numbers


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("handler", "key"), [(Gate(), "drop"), (Swallow(), "hole")])
def test_a_dropped_publish_has_its_number_and_no_other_takes_it(
    handler: Handler, key: str, waits: bool
) -> None:
    keys = [key, "q", key, key, "q", key]
    with serving(handler) as served, peer(served.url, 1) as client:
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        stream = b"".join(content(1, c.Basic.Publish(routing_key=each), b"x") for each in keys)
        with Leader(served) if waits else contextlib.nullcontext():
            if waits:  # the command that confirms waits, and what follows with it
                client.send(1, c.Queue.Declare(queue="q2"))
            client.send(1, c.Confirm.Select())
            client.write(stream)
        if waits:
            client.expect(c.Queue.DeclareOk, 1)
        client.expect(c.Confirm.SelectOk, 1)
        assert confirmed(client, len(keys)) == [1, 2, 3, 4, 5, 6]
        assert client.count(1, "q") == keys.count("q")


def test_a_dropped_publish_is_not_part_of_its_transaction() -> None:
    with serving(Gate()) as served, peer(served.url, 1) as client:
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        client.call(1, c.Tx.Select(), c.Tx.SelectOk)
        for key in ("q", "drop"):
            client.write(content(1, c.Basic.Publish(routing_key=key), bytes(200_000)))
        client.call(1, c.Tx.Commit(), c.Tx.CommitOk)
        assert client.count(1, "q") == 1


def test_the_first_handler_decides_what_the_second_one_sees() -> None:
    gates = Gate(), Gate()
    with serving(*gates) as served, peer(served.url, 1) as client:
        client.write(content(1, c.Basic.Publish(routing_key="to /drop"), bytes(200_000)))
        client.write(content(1, c.Basic.Publish(routing_key="drop"), bytes(200_000)))
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
    assert [key for _, key, _ in gates[0].seen] == ["to /drop", "drop"]
    assert [key for _, key, _ in gates[1].seen] == ["drop"]


def test_only_who_overrides_the_point_has_headers_announced() -> None:
    assert Handlers([Swallow(), Gate()]).content_in and not Handlers([Swallow()]).content_in
