"""Rules that clients know from RabbitMQ 3.10 and that the specification leaves open: limits of a channel,
names, arguments, copies.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal

import pytest
from pamqp import base, commands

from tests.amqp_peer import Closed, Peer, changed, content, encoded, method, peer
from tests.interop.conftest import Fresh

B, C, E, H, Q = commands.Basic, commands.Connection, commands.Exchange, commands.Channel, commands.Queue


@pytest.fixture
def client(url: str) -> Iterator[Peer]:
    with peer(url, 1, 2) as found:
        yield found


class Publisher:
    """A connection whose publishes are in their queues when ``publish`` returns."""

    def __init__(self, client: Peer) -> None:
        self._client = client
        client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)

    def publish(self, exchange: str, routing_key: str, body: bytes, **properties: object) -> None:
        self._client.publish(1, exchange, routing_key, body, **properties)
        self._client.expect(B.Ack)

    def count(self, queue: str) -> int:
        return self._client.count(1, queue)


@pytest.fixture
def publisher(url: str) -> Iterator[Publisher]:
    with peer(url, 1) as found:
        yield Publisher(found)


def queues(client: Peer, publisher: Publisher, fresh: Fresh, count: int, messages: int) -> list[str]:
    names = [fresh(f"q{number}") for number in range(count)]
    for name in names:
        client.call(2, Q.Declare(queue=name), Q.DeclareOk)
        for number in range(messages):
            publisher.publish("", name, str(number).encode())
    return names


def delivered(client: Peer) -> tuple[str, int]:
    """Consumer tag and delivery tag of the next delivery."""
    deliver = client.expect(B.Deliver)
    client.content()
    return deliver.consumer_tag, deliver.delivery_tag


def nothing_comes(client: Peer) -> None:
    """Two answers later still no delivery has come. What is missing may still come: tests that use it go on
    to see what comes.
    """
    for _ in range(2):
        client.call(1, Q.Declare(queue="amq.rabbitmq.reply-to", passive=True), Q.DeclareOk)


# -- the limit of a channel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("multiple", [False, True])
def test_the_queues_of_a_channel_share_its_limit_and_none_starves(
    client: Peer, publisher: Publisher, fresh: Fresh, limit: int, multiple: bool
) -> None:
    names = queues(client, publisher, fresh, 3, 40)
    client.call(1, B.Qos(prefetch_count=limit, global_=True), B.QosOk)
    for name in names:
        client.send(1, B.Consume(queue=name, consumer_tag=name))
    while not isinstance(client.receive()[1], B.ConsumeOk):
        pass
    found: Counter[str] = Counter()
    for _ in range(60):
        frame = client.receive()[1]
        while not isinstance(frame, B.Deliver):
            frame = client.receive()[1]
        client.content()
        found[frame.consumer_tag] += 1
        if not multiple or sum(found.values()) % limit == 0:
            client.send(1, B.Ack(frame.delivery_tag, multiple))
    assert len(found) == 3 and min(found.values()) >= 5


@pytest.mark.txmq_only  # RabbitMQ shuffles the queues
def test_credit_that_comes_back_goes_to_the_queue_that_was_served_longest_ago(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    names = queues(client, publisher, fresh, 4, 10)
    client.call(1, B.Qos(prefetch_count=1, global_=True), B.QosOk)
    client.send(1, *(B.Consume(queue=name, consumer_tag=name, nowait=True) for name in names))
    order = []
    for _ in range(40):
        tag, delivery = delivered(client)
        order.append(tag)
        client.send(1, B.Ack(delivery))
    assert order[:4] == names and order == names * 10


def test_a_consumer_without_acks_waits_while_its_channel_is_at_its_limit(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    acking, free = queues(client, publisher, fresh, 2, 0)
    client.call(1, B.Qos(prefetch_count=1, global_=True), B.QosOk)
    client.call(1, B.Consume(queue=acking, consumer_tag="acking"), B.ConsumeOk)
    publisher.publish("", acking, b"held")
    assert delivered(client) == ("acking", 1)
    client.call(1, B.Consume(queue=free, consumer_tag="free", no_ack=True), B.ConsumeOk)
    for _ in range(3):
        publisher.publish("", free, b"waits")
    assert publisher.count(free) == 3
    nothing_comes(client)
    assert publisher.count(free) == 3
    client.send(1, B.Ack(1))
    assert [delivered(client)[0] for _ in range(3)] == ["free"] * 3


def test_what_a_consumer_without_acks_takes_uses_up_nothing_of_the_limit(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    (free,) = queues(client, publisher, fresh, 1, 5)
    client.call(1, B.Qos(prefetch_count=1, global_=True), B.QosOk)
    client.call(1, B.Consume(queue=free, consumer_tag="free", no_ack=True), B.ConsumeOk)
    assert [delivered(client)[0] for _ in range(5)] == ["free"] * 5


def test_a_limit_that_is_raised_or_lifted_lets_everybody_go_on(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    acking, free = queues(client, publisher, fresh, 2, 3)
    client.call(1, B.Qos(prefetch_count=1, global_=True), B.QosOk)
    client.call(1, B.Consume(queue=acking, consumer_tag="acking"), B.ConsumeOk)
    assert delivered(client)[0] == "acking"
    client.call(1, B.Consume(queue=free, consumer_tag="free", no_ack=True), B.ConsumeOk)
    client.send(1, B.Qos(prefetch_count=0, global_=True))
    found: Counter[str] = Counter()
    while found.total() < 5:
        frame = client.receive()[1]
        if isinstance(frame, B.Deliver):
            client.content()
            found[frame.consumer_tag] += 1
    assert found == {"acking": 2, "free": 3}


def test_a_get_never_takes_what_a_consumer_is_ready_for(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    (name,) = queues(client, publisher, fresh, 1, 0)
    client.call(1, B.Consume(queue=name, no_ack=True), B.ConsumeOk)
    for number in range(20):
        client.write(
            content(2, B.Publish(routing_key=name), str(number).encode())
            + encoded(2, B.Get(queue=name, no_ack=True))
        )
        names = set()
        while len(names) < 2:
            channel, frame = client.receive()
            assert not isinstance(frame, B.GetOk)
            if isinstance(frame, (B.Deliver, B.GetEmpty)):
                names.add(frame.name)
                if isinstance(frame, B.Deliver):
                    assert client.content(channel)[1] == str(number).encode()


# -- names ---------------------------------------------------------------------------------------------------


def broken(name: str) -> str:
    return f"\r{name[:2]}\n{name[2:]}\r\n"


def test_line_ends_are_dropped_from_names_that_are_declared_bound_or_deleted(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    queue, source, target = fresh("q"), fresh("source"), fresh("target")

    def say(frame: base.Frame, answer: type[base.Frame], **names: str) -> base.Frame:
        return client.call(
            1, changed(frame, **{field: broken(name) for field, name in names.items()}), answer
        )

    assert say(Q.Declare(), Q.DeclareOk, queue=queue).queue == queue
    assert say(Q.Declare(passive=True), Q.DeclareOk, queue=queue).queue == queue
    for exchange in (source, target):
        say(E.Declare(), E.DeclareOk, exchange=exchange)
        say(E.Declare(passive=True), E.DeclareOk, exchange=exchange)
    say(E.Bind(routing_key="k"), E.BindOk, destination=target, source=source)
    say(Q.Bind(routing_key="k"), Q.BindOk, queue=queue, exchange=target)
    publisher.publish(source, "k", b"x")
    assert publisher.count(queue) == 1
    say(Q.Unbind(routing_key="k"), Q.UnbindOk, queue=queue, exchange=target)
    publisher.publish(source, "k", b"x")
    assert publisher.count(queue) == 1
    say(E.Unbind(routing_key="k"), E.UnbindOk, destination=target, source=source)
    for exchange in (source, target):
        say(E.Delete(), E.DeleteOk, exchange=exchange)
        client.send(1, E.Declare(exchange=exchange, passive=True))
        assert client.expect(H.Close, 1).reply_code == 404
        client.send(1, H.CloseOk())
        client.open(1)
    assert say(Q.Delete(), Q.DeleteOk, queue=queue).message_count == 1


@pytest.mark.parametrize("command", [B.Get(), B.Consume(), Q.Purge()], ids=lambda command: command.name)
def test_line_ends_stay_in_names_of_other_commands(
    client: Peer, publisher: Publisher, fresh: Fresh, command: base.Frame
) -> None:
    queue = fresh("q")
    client.call(1, Q.Declare(queue=queue), Q.DeclareOk)
    client.send(1, changed(type(command)(), queue=broken(queue)))
    assert client.expect(H.Close, 1).reply_code == 404


def test_a_name_of_line_ends_alone_is_no_name(client: Peer) -> None:
    declared = client.call(1, changed(Q.Declare(exclusive=True), queue="\n"), Q.DeclareOk)
    assert declared.queue.startswith("amq.gen-")


# -- arguments -----------------------------------------------------------------------------------------------


def table(**fields: bytes) -> bytes:
    raw = b"".join(
        bytes([len(name)]) + name.replace("_", "-").encode() + value for name, value in fields.items()
    )
    return struct.pack(">I", len(raw)) + raw


def declaration(queue: str, arguments: bytes) -> bytes:
    return method(1, 50, 10, struct.pack(">HB", 0, len(queue)) + queue.encode() + b"\0" + arguments)


INTEGERS = {"b": ">b", "B": ">B", "s": ">h", "u": ">H", "I": ">i", "i": ">I", "l": ">q"}


@pytest.mark.parametrize("argument", ["x_message_ttl", "x_expires", "x_max_length"])
def test_a_number_of_another_width_is_the_same_when_a_queue_is_declared_again(
    client: Peer, publisher: Publisher, fresh: Fresh, argument: str
) -> None:
    queue = fresh("q")
    for kind, shape in INTEGERS.items():
        client.write(declaration(queue, table(**{argument: kind.encode() + struct.pack(shape, 100)})))
        client.expect(Q.DeclareOk, 1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(b"d" + struct.pack(">d", 100), "'100.0'"), (b"S\0\0\0\x03100", "'100'"), (b"t\1", "'true'")],
    ids=["double", "text", "bool"],
)
def test_a_value_of_another_type_is_another_value_when_a_queue_is_declared_again(
    client: Peer, publisher: Publisher, fresh: Fresh, value: bytes, shown: str
) -> None:
    queue = fresh("q")
    client.write(declaration(queue, table(x_message_ttl=b"I\0\0\0\x64")))
    client.expect(Q.DeclareOk, 1)
    client.write(declaration(queue, table(x_message_ttl=value)))
    close = client.expect(H.Close, 1)
    assert close.reply_code == 406
    assert close.reply_text == (
        f"PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue '{queue}' in vhost '/': received "
        f"{shown} but current is '100'"
    )


def test_decimals_bytes_and_timestamps_are_values_of_arguments(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    queue, exchange = fresh("q"), fresh("e")
    arguments = {
        "a": Decimal("3.14"),
        "b": [Decimal("-0.5")],
        "c": {"d": Decimal(7)},
        "e": bytearray(b"\xff\x00"),
        "f": None,
        "g": 1.5,
    }
    for _ in range(2):
        client.call(1, Q.Declare(queue=queue, arguments=arguments), Q.DeclareOk)
        client.call(
            1, E.Declare(exchange=exchange, exchange_type="headers", arguments=arguments), E.DeclareOk
        )
        client.call(
            1,
            Q.Bind(queue=queue, exchange=exchange, arguments={"x-match": "all", "a": Decimal("3.14")}),
            Q.BindOk,
        )
    publisher.publish(exchange, "", b"x", headers={"a": Decimal("3.14")})
    publisher.publish(exchange, "", b"x", headers={"a": Decimal("3.15")})
    assert publisher.count(queue) == 1
    client.call(
        1,
        Q.Unbind(queue=queue, exchange=exchange, arguments={"x-match": "all", "a": Decimal("3.14")}),
        Q.UnbindOk,
    )
    publisher.publish(exchange, "", b"x", headers={"a": Decimal("3.14")})
    assert publisher.count(queue) == 1


# -- copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["CC", "BCC"])
@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_every_key_of_a_message_may_match_at_every_exchange_on_its_way(
    client: Peer, publisher: Publisher, fresh: Fresh, header: str, kind: str
) -> None:
    first, second, queue, other = fresh("first"), fresh("second"), fresh("q"), fresh("other")
    for exchange in (first, second):
        client.call(1, E.Declare(exchange=exchange, exchange_type=kind), E.DeclareOk)
    for name in (queue, other):
        client.call(1, Q.Declare(queue=name), Q.DeclareOk)
    client.call(1, E.Bind(destination=second, source=first, routing_key="main"), E.BindOk)
    client.call(1, Q.Bind(queue=queue, exchange=second, routing_key="copy"), Q.BindOk)
    client.call(1, Q.Bind(queue=other, exchange=second, routing_key="neither"), Q.BindOk)
    publisher.publish(first, "main", b"x", headers={header: ["copy", "more"]})
    publisher.publish(first, "copy", b"x", headers={header: ["main"]})
    publisher.publish(first, "main", b"x", headers={header: ["more"]})
    assert (publisher.count(queue), publisher.count(other)) == (2, 0)


def test_an_alternate_exchange_gets_what_no_key_of_a_message_matches(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    exchange, alternate, queue, lost = fresh("e"), fresh("alternate"), fresh("q"), fresh("lost")
    client.call(1, E.Declare(exchange=alternate, exchange_type="fanout"), E.DeclareOk)
    client.call(1, E.Declare(exchange=exchange, arguments={"alternate-exchange": alternate}), E.DeclareOk)
    for name in (queue, lost):
        client.call(1, Q.Declare(queue=name), Q.DeclareOk)
    client.call(1, Q.Bind(queue=queue, exchange=exchange, routing_key="copy"), Q.BindOk)
    client.call(1, Q.Bind(queue=lost, exchange=alternate), Q.BindOk)
    publisher.publish(exchange, "main", b"x", headers={"CC": ["copy"]})
    assert (publisher.count(queue), publisher.count(lost)) == (1, 0)
    publisher.publish(exchange, "main", b"x", headers={"CC": ["more"]})
    assert (publisher.count(queue), publisher.count(lost)) == (1, 1)


# -- exchanges that go by themselves -------------------------------------------------------------------------


def test_an_auto_delete_exchange_with_many_bindings_goes_with_the_last_of_them(
    client: Peer, publisher: Publisher, fresh: Fresh
) -> None:
    exchange = fresh("e")
    names = queues(client, publisher, fresh, 10, 0)
    client.call(1, E.Declare(exchange=exchange, auto_delete=True), E.DeclareOk)
    for name in names:
        client.call(1, Q.Bind(queue=name, exchange=exchange, routing_key="k"), Q.BindOk)
    for name in names:
        client.call(1, B.Consume(queue=name, consumer_tag=name, no_ack=True), B.ConsumeOk)
    client.write(
        content(2, B.Publish(exchange=exchange, routing_key="k"), b"x")
        + encoded(2, *[B.Get(queue=names[0], no_ack=True)])
    )
    kinds: Counter[str] = Counter()
    while kinds.total() < 31:
        frame = client.receive()[1]
        kinds[frame.name] += 1
    assert kinds == {"Basic.Deliver": 10, "ContentHeader": 10, "ContentBody": 10, "Basic.GetEmpty": 1}
    for name in names:
        client.call(2, E.Declare(exchange=exchange, passive=True), E.DeclareOk)
        client.send(2, Q.Delete(queue=name))
        assert {client.receive()[1].name for _ in range(2)} == {"Basic.Cancel", "Queue.DeleteOk"}
    client.send(2, E.Declare(exchange=exchange, passive=True))
    assert client.expect(H.Close, 2).reply_code == 404


# -- frames --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "taken"), [(3_500, True), (5_000, False), pytest.param(100_000, False, marks=pytest.mark.soak)]
)
def test_a_frame_above_4096_bytes_is_refused_until_another_size_is_negotiated(
    url: str, size: int, taken: bool
) -> None:
    with Peer(url) as client:
        client.started()
        client.send(
            0, C.StartOk({"product": "x" * size}, "PLAIN", f"\0{client.user}\0{client.password}", "en_US")
        )
        if taken:
            client.expect(C.Tune, 0)
            return
        names = []
        with contextlib.suppress(Closed):  # RabbitMQ says nothing before, txmq says why
            while True:
                frame = client.receive()[1]
                assert isinstance(frame, C.Close) and frame.reply_code == 501
                names.append(frame.name)
                client.send(0, C.CloseOk())
        assert len(names) <= 1


@pytest.mark.parametrize("frame_max", [4_096, 8_192, 131_072])
def test_frames_of_the_negotiated_size_are_taken_in_the_packet_that_negotiates_it(
    url: str, frame_max: int
) -> None:
    with Peer(url) as client:
        client.tuned()
        body = bytes(frame_max - 8)
        said = encoded(0, C.TuneOk(2047, frame_max, 0)) + encoded(0, C.Open("/")) + encoded(1, H.Open())
        client.write(said + encoded(1, Q.Declare(queue="", exclusive=True)))
        client.expect(C.OpenOk, 0)
        client.expect(H.OpenOk, 1)
        name = client.expect(Q.DeclareOk, 1).queue
        client.write(content(1, changed(B.Publish(), routing_key=name), body, frame_max=frame_max))
        client.send(1, changed(B.Get(no_ack=True), queue=name))
        client.expect(B.GetOk, 1)
        assert client.content(1)[1] == body
    with Peer(url) as client:
        client.tuned()
        publish = content(1, B.Publish(routing_key="nowhere"), bytes(frame_max - 8), frame_max=frame_max)
        client.write(said + publish + encoded(1, B.Qos(prefetch_count=1)))
        client.expect(C.OpenOk, 0)
        client.expect(H.OpenOk, 1)
        client.expect(B.QosOk, 1)
