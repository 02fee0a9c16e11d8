"""Insertion points: what a handler may do at each of them, and the two that come with the server, seen by
clients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pamqp import commands as c

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.events import Command, Event, Heartbeat, ProtocolHeader
from broker_core.errors import ConnectionAccessRefused, NotAllowed, OptionError, PreconditionFailed
from broker_core.launcher import Broker
from broker_core.message.properties import Properties
from broker_core.server.amqp.handlers.handler import Handler, Handlers
from broker_core.server.amqp.handlers.rate_limit import PublishRateLimit
from broker_core.server.amqp.handlers.trace import Tracer
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session
from tests.amqp_peer import Peer, content, peer

DOCS = Path(__file__).parents[3] / "docs" / "handlers.md"


@contextlib.contextmanager
def serving(*handlers: Handler, options: AmqpOptions | None = None) -> Iterator[str]:
    with Broker.memory(amqp=["127.0.0.1:0"], handlers=handlers, amqp_options=options) as broker:
        yield broker.amqp_urls[0].replace("amqp://", "amqp://guest:guest@")


def declare(client: Peer, queue: str = "q") -> None:
    client.call(1, c.Queue.Declare(queue=queue, exclusive=True), c.Queue.DeclareOk)


def body(client: Peer, queue: str = "q") -> bytes | None:
    found = client.get(1, queue)
    return None if found is None else found[1]


class Recorder(Handler):
    """Passes everything on, and remembers it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.inward: list[Command] = []
        self.outward: list[tuple[Command, str]] = []

    def connection_in(self, connection: ClientConnection, event: Event) -> Event | None:
        self.events.append(event)
        return event

    def session_in(self, session: Session, command: Command) -> Command | None:
        self.inward.append(command)
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        self.outward.append((command, queue))
        return command


# -- the points ----------------------------------------------------------------------------------------------


def test_a_handler_sees_every_event_command_and_answer_and_changes_nothing() -> None:
    recorder = Recorder()
    with serving(recorder) as url, peer(url, 1) as client:
        declare(client)
        client.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
        client.publish(1, "", "q", b"one", delivery_mode=2)
        assert client.expect(c.Basic.Ack, 1).delivery_tag == 1
        assert body(client) == b"one"
        client.call(1, c.Basic.Consume(queue="q", consumer_tag="t", no_ack=True), c.Basic.ConsumeOk)
        client.publish(1, "", "q", b"two")
        found: dict[str, object] = {}
        while len(found) < 2:  # a confirm and a delivery, in either order
            _, frame = client.receive()
            found[frame.name] = client.content(1)[1] if isinstance(frame, c.Basic.Deliver) else frame
        assert found["Basic.Deliver"] == b"two"
        client.end()
    assert isinstance(recorder.events[0], ProtocolHeader)
    names = [event.method.NAME for event in recorder.events if isinstance(event, Command)]
    assert names[:4] == ["connection.start-ok", "connection.tune-ok", "connection.open", "channel.open"]
    assert names[-1] == "connection.close"
    assert [command.method.NAME for command in recorder.inward][:3] == [
        "queue.declare",
        "confirm.select",
        "basic.publish",
    ]
    assert (
        recorder.inward[2].body == b"one"
        and Properties.decode(recorder.inward[2].properties).delivery_mode == 2
    )
    outward = {command.method.NAME: (command, queue) for command, queue in recorder.outward}
    assert outward["basic.get-ok"] == (
        Command(1, m.BasicGetOk(1, False, "", "q", 0), b"\x10\x00\x02", b"one"),
        "q",
    )
    assert outward["basic.deliver"] == (Command(1, m.BasicDeliver("t", 2, False, "", "q"), b"", b"two"), "q")
    assert outward["basic.ack"][0].method == m.BasicAck(2, False)
    assert "queue.declare-ok" in outward


def test_heartbeats_pass_the_connection() -> None:
    recorder = Recorder()
    with serving(recorder) as url, peer(url, 1) as client:
        client.write(b"\x08\0\0\0\0\0\0\xce")
        declare(client)
    assert Heartbeat() in recorder.events


class Renamer(Handler):
    """Adds its letter to the body of each publish, on the way in, and of each get-ok, on the way out."""

    def __init__(self, letter: bytes) -> None:
        self.letter = letter

    def session_in(self, session: Session, command: Command) -> Command | None:
        if isinstance(command.method, m.BasicPublish):
            return command._replace(
                method=dataclasses.replace(command.method, routing_key="q"), body=command.body + self.letter
            )
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        return (
            command._replace(body=command.body + self.letter)
            if isinstance(command.method, m.BasicGetOk)
            else command
        )


def test_what_handlers_change_is_what_goes_on_in_their_order() -> None:
    with serving(Renamer(b"a"), Renamer(b"b")) as url, peer(url, 1) as client:
        declare(client)
        client.publish(1, "", "elsewhere", b"x")
        assert body(client) == b"xabab"


class Answering(Handler):
    """Answers basic.qos itself, swallows publishes to "hole", refuses by channel and by connection, and
    breaks.
    """

    def session_in(self, session: Session, command: Command) -> Command | None:
        match command.method:
            case m.BasicQos():
                session.connection.send(session.number, m.BasicQosOk())
                return None
            case m.BasicPublish(routing_key="hole"):
                return None
            case m.BasicPublish(routing_key="channel"):
                raise PreconditionFailed("not this key")
            case m.BasicPublish(routing_key="connection"):
                raise NotAllowed("not on this connection")
            case m.BasicPublish(routing_key="broken"):
                raise ZeroDivisionError("a bug")
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        if isinstance(command.method, m.QueuePurgeOk):
            raise PreconditionFailed("no purge")
        return command


def test_a_handler_answers_in_place_of_the_broker() -> None:
    with serving(Answering()) as url, peer(url, 1) as client:
        client.call(1, c.Basic.Qos(prefetch_size=5), c.Basic.QosOk)  # which the broker refuses


def test_what_a_handler_swallows_is_not_there() -> None:
    with serving(Answering()) as url, peer(url, 1) as client:
        declare(client, "hole")
        client.publish(1, "", "hole", b"x")
        assert body(client, "hole") is None


@pytest.mark.parametrize("refused", ["inward", "outward"])
def test_a_channel_error_of_a_handler_closes_the_channel_alone(refused: str) -> None:
    with serving(Answering()) as url, peer(url, 1, 2) as client:
        client.call(2, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)
        if refused == "inward":
            client.publish(1, "", "channel", b"x")
        else:
            client.send(1, c.Queue.Purge(queue="q"))
        close = client.expect(c.Channel.Close, 1)
        text, ids = ("not this key", (60, 40)) if refused == "inward" else ("no purge", (50, 31))
        assert (close.reply_code, close.reply_text) == (406, f"PRECONDITION_FAILED - {text}")
        assert (close.class_id, close.method_id) == ids
        client.call(2, c.Confirm.Select(), c.Confirm.SelectOk)


def test_a_connection_exception_of_a_handler_closes_the_connection() -> None:
    with serving(Answering()) as url, peer(url, 1) as client:
        client.publish(1, "", "connection", b"x")
        close = client.expect(c.Connection.Close, 0)
        assert (close.reply_code, close.reply_text) == (530, "NOT_ALLOWED - not on this connection")


def test_a_handler_that_breaks_closes_its_connection_and_says_so_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Answering()) as url, peer(url, 1) as client, peer(url, 1) as other:
        with caplog.at_level(logging.ERROR, "txmq.amqp"):
            client.publish(1, "", "broken", b"x")
            assert client.expect(c.Connection.Close, 0).reply_code == 541
        # as text, or as JSON where pyspark has set its logger class in this process
        assert "ZeroDivisionError" in caplog.text
        assert "a bug" in caplog.text
        declare(other)


class Gate(Handler):
    """Lets nobody in."""

    def connection_in(self, connection: ClientConnection, event: Event) -> Event | None:
        if isinstance(event, Command) and isinstance(event.method, m.ConnectionOpen):
            raise ConnectionAccessRefused(f"'{connection.name}' is not welcome")
        return event


def test_a_handler_refuses_a_connection_before_it_is_open() -> None:
    with (
        serving(Gate()) as url,
        pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="is not welcome"),
    ):
        pika.BlockingConnection(pika.URLParameters(url))


def test_a_point_that_nobody_overrides_is_not_on_the_path() -> None:
    found = Handlers([Gate(), Answering(), PublishRateLimit(1)])
    assert (len(found.connection_in), len(found.session_in), len(found.session_out)) == (1, 2, 1)
    assert not Handlers()


def test_the_handler_of_the_documentation_does_what_it_says() -> None:
    block = next(
        block
        for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
        if "class Namespaces" in block
    )
    names: dict[str, Any] = {}
    exec(block, names)
    with serving(names["Namespaces"](most=2)) as url:
        for queues, refused in [
            (["other"], True),
            (["guest.a", "guest.b"], False),
            (["guest.a", "guest.b", "guest.c"], True),
        ]:
            with peer(url, 1) as client:
                for queue in queues[:-1]:
                    declare(client, queue)
                client.send(1, c.Queue.Declare(queue=queues[-1], exclusive=True))
                if refused:
                    assert client.expect(c.Channel.Close, 1).reply_code == 403
                else:
                    client.expect(c.Queue.DeclareOk, 1)
                client.end()


# -- the firehose --------------------------------------------------------------------------------------------


def test_the_tracer_copies_what_comes_in_and_goes_out_as_rabbitmq_does() -> None:
    with serving(Tracer(node="here")) as url, pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.exchange_declare("logs", "fanout")
        for queue in ("q", "firehose"):
            channel.queue_declare(queue)
        channel.queue_bind("q", "logs")
        channel.queue_bind("firehose", "amq.rabbitmq.trace", "#")
        properties = pika.BasicProperties(
            content_type="text/plain", priority=3, headers={"n": 1}, timestamp=5
        )
        channel.basic_publish("logs", "key", b"body", properties)
        method, _, _ = channel.basic_get("q")
        channel.basic_reject(method.delivery_tag, requeue=True)
        consumed, _, _ = next(channel.consume("q", auto_ack=True))
        channel.cancel()
        traced = _all(channel, "firehose", 3)
        assert _all(channel, "firehose", 0) == []  # getting the copies is not traced
    assert [(method.routing_key, body) for method, _, body in traced] == [
        ("publish.logs", b"body"),
        ("deliver.q", b"body"),
        ("deliver.q", b"body"),
    ]
    common = {
        "exchange_name": "logs",
        "routing_keys": ["key"],
        "node": "here",
        "vhost": "/",
        "channel": 1,
        "user": "guest",
    }
    headers = [properties.headers for _, properties, _ in traced]
    for found in headers:
        assert {name: found[name] for name in common} == common
        assert re.fullmatch(r"127\.0\.0\.1:\d+ -> 127\.0\.0\.1:\d+", found["connection"])
        copied = found["properties"]
        assert (copied["content_type"], copied["priority"], copied["headers"]) == ("text/plain", 3, {"n": 1})
        assert copied["timestamp"] is not None and set(copied) == {
            "content_type",
            "priority",
            "headers",
            "timestamp",
        }
    assert headers[0]["routed_queues"] == ["q"] and "redelivered" not in headers[0]
    assert [found["redelivered"] for found in headers[1:]] == [0, 1]
    assert all(properties.delivery_mode == 1 for _, properties, _ in traced)
    assert consumed.redelivered


def _all(channel: Any, queue: str, count: int) -> list[tuple[Any, Any, bytes]]:
    """All messages of a queue, when there are ``count``."""
    deadline = time.monotonic() + 600
    while channel.queue_declare(queue, passive=True).method.message_count < count:
        assert time.monotonic() < deadline
    found = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        found.append(got)
    return found


def test_a_traced_transaction_is_still_all_or_nothing() -> None:
    with serving(Tracer()) as url, pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.tx_select()
        channel.basic_publish("", "q", b"dropped")
        channel.tx_rollback()
        channel.basic_publish("", "q", b"kept")
        channel.tx_commit()
        assert channel.basic_get("q")[2] == b"kept"
        assert channel.basic_get("q")[0] is None


# -- rate limits ---------------------------------------------------------------------------------------------


def publishes(count: int, size: int = 1) -> bytes:
    return b"".join(
        content(1, c.Basic.Publish(routing_key="q"), bytes([number]) * size) for number in range(count)
    )


@pytest.mark.parametrize(
    ("limit", "size"),
    [(PublishRateLimit(20, burst_s=0.5), 1), (PublishRateLimit(bytes_per_s=2_000, burst_s=0.5), 100)],
    ids=["messages", "bytes"],
)
def test_a_connection_over_its_rate_waits_loses_nothing_and_holds_up_no_other(
    limit: PublishRateLimit, size: int
) -> None:
    with serving(limit) as url, peer(url, 1) as fast, peer(url, 1) as other:
        declare(fast)
        declare(other, "other")
        started = time.monotonic()
        fast.write(publishes(40, size))  # ten at once, then twenty a second
        other.publish(1, "", "other", b"x")
        assert body(other, "other") == b"x"
        assert time.monotonic() - started < 1.4
        for number in range(40):
            assert body(fast) == bytes([number]) * size
        assert 1.4 < time.monotonic() - started < 10


def test_a_connection_over_its_rate_is_refused_where_that_is_asked_for() -> None:
    with serving(PublishRateLimit(5, refuse=True)) as url, peer(url, 1, 2) as client:
        client.call(2, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)
        client.write(publishes(6))
        close = client.expect(c.Channel.Close, 1)
        assert (close.reply_code, close.class_id, close.method_id) == (406, 60, 40)
        assert re.fullmatch(
            r"PRECONDITION_FAILED - connection '.*' publishes faster than 5 messages/s: publish more slowly",
            close.reply_text,
        )
        assert client.call(2, c.Queue.Declare(queue="q", passive=True), c.Queue.DeclareOk).message_count == 5


def test_a_body_larger_than_the_whole_burst_passes_when_the_bucket_is_full() -> None:
    now = 0.0
    limit = PublishRateLimit(bytes_per_s=1000, refuse=True, clock=lambda: now)
    with serving(limit) as url, peer(url, 1) as client:
        declare(client)
        client.write(publishes(1, 5000))
        assert body(client) == b"\0" * 5000
        now = 4.9  # the debt is paid, but the bucket is not full again
        client.write(publishes(1, 5000))
        assert client.expect(c.Channel.Close, 1).reply_code == 406


@pytest.mark.parametrize(
    "wrong", [{}, {"messages_per_s": 0}, {"bytes_per_s": -1}, {"messages_per_s": 1, "burst_s": 0}]
)
def test_a_limit_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        PublishRateLimit(**wrong)
