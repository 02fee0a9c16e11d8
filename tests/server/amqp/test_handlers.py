"""Insertion points: what a handler may do at each of them, and the examples of the page, seen by clients."""

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
from broker_core.core.errors import ConnectionAccessRefused, NotAllowed, PreconditionFailed
from broker_core.launcher import Broker
from broker_core.message.properties import Properties
from broker_core.server.amqp.handlers.handler import POINTS, Handler, Handlers
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session
from tests.amqp_peer import Peer, content, peer

DOCS = Path(__file__).parents[3] / "docs" / "handlers.md"
EXAMPLE = DOCS.parents[1] / "examples" / "handlers.py"


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
    found = Handlers([Gate(), Answering(), documented("PublishRate")(1)])
    assert (len(found.connection_in), len(found.session_in), len(found.session_out)) == (1, 2, 1)
    assert not any(getattr(Handlers(), point) for point in POINTS)


def documented(name: str) -> Any:
    """The class of this name on the page, or of the program beside it."""
    blocks = [*re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL), EXAMPLE.read_text()]
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if f"class {name}(" in block), names)
    return names[name]


def test_the_handler_of_the_documentation_does_what_it_says() -> None:
    with serving(documented("Namespaces")(most=2)) as url:
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


def test_the_tracer_of_the_documentation_copies_what_is_published_and_changes_no_transaction() -> None:
    with (
        serving(documented("Tracer")()) as url,
        pika.BlockingConnection(pika.URLParameters(url)) as connection,
    ):
        channel = connection.channel()
        for queue in ("q", "copies"):
            channel.queue_declare(queue)
        channel.queue_bind("copies", "amq.rabbitmq.trace", "publish.#")
        channel.basic_publish("amq.direct", "nowhere", b"first")
        channel.tx_select()
        channel.basic_publish("", "q", b"dropped")
        channel.tx_rollback()
        channel.basic_publish("", "q", b"committed")
        channel.tx_commit()
        found = [channel.basic_get("q", auto_ack=True) for _ in range(2)]
        assert [body for _, _, body in found] == [b"committed", None]
        copies = [channel.basic_get("copies", auto_ack=True) for _ in range(4)]
    assert [body for _, _, body in copies] == [b"first", b"dropped", b"committed", None]
    method, properties, _ = copies[0]
    assert (method.routing_key, properties.delivery_mode) == ("publish.amq.direct", 1)
    assert properties.headers == {"exchange_name": "amq.direct", "routing_keys": ["nowhere"], "user": "guest"}


def test_the_publish_rate_of_the_documentation_slows_a_connection_and_loses_nothing() -> None:
    with serving(documented("PublishRate")(20, burst_s=0.5)) as url, peer(url, 1) as client:
        declare(client)
        began = time.monotonic()
        bodies = [bytes([number]) for number in range(40)]  # ten at once, then twenty a second
        client.write(b"".join(content(1, c.Basic.Publish(routing_key="q"), each) for each in bodies))
        assert [body(client) for _ in bodies] == bodies
        assert time.monotonic() - began > 1.4  # a lower bound alone: a slow machine passes
