"""Handlers of one connection: added and removed while it runs, seen by no other, and without cost when absent."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

import pytest
from pamqp import commands as c

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.encoder import encode_content, encode_method
from broker_core.amqp.v0_9_1.events import Command, ContentHeader, Event
from broker_core.broker.transaction.transaction import Limits
from broker_core.message.properties import Properties
from broker_core.server.amqp.handlers import handler as handler_module
from broker_core.server.amqp.handlers import points
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session
from tests.amqp_in_process import Served, ended, serving
from tests.amqp_peer import Peer, peer
from tests.progress import wait_until
from tests.server.amqp.test_publish_many import Server, begun

T = TypeVar("T")


class Recorder(Handler):
    """``seen``: the point and the method of each call, and of a delivery its queue."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.connection: ClientConnection | None = None

    def connection_in(self, connection: ClientConnection, event: Event) -> Event | None:
        if isinstance(event, Command):
            self.seen.append(("connection_in", event.method.NAME))
        self.connection = connection
        return event

    def content_in(self, session: Session, header: ContentHeader) -> ContentHeader | None:
        self.seen.append(("content_in", header.method.NAME))
        return header

    def session_in(self, session: Session, command: Command) -> Command | None:
        self.seen.append(("session_in", command.method.NAME))
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        self.seen.append((f"session_out {queue}".strip(), command.method.NAME))
        return command


def connection_of(served: Served, client: Peer) -> Any:
    """The broker's side of ``client``."""
    port = client.socket.getsockname()[1]
    found = served.in_loop(lambda: [each for each in served.server.connections if f":{port} ->" in each.name])
    assert len(found) == 1
    return found[0]


def consume(client: Peer, queue: str) -> None:
    client.call(1, c.Queue.Declare(queue=queue, exclusive=True), c.Queue.DeclareOk)
    client.call(1, c.Basic.Consume(queue=queue, consumer_tag="t", no_ack=True), c.Basic.ConsumeOk)


def round_trip(client: Peer, queue: str) -> None:
    """A publish that is delivered to its publisher."""
    client.publish(1, "", queue, b"x")
    client.expect(c.Basic.Deliver, 1)
    client.content(1)


def test_a_handler_sees_one_connection_from_when_it_is_added_until_it_is_removed() -> None:
    recorder = Recorder()
    with serving() as served, peer(served.url, 1) as client, peer(served.url, 1) as other:
        consume(client, "q")
        consume(other, "other")
        connection = connection_of(served, client)
        served.in_loop(lambda: connection.add_handler(recorder))
        served.in_loop(lambda: connection.add_handler(recorder))  # it is there already
        round_trip(other, "other")
        round_trip(client, "q")
        assert recorder.seen == [
            ("content_in", "basic.publish"),
            ("connection_in", "basic.publish"),
            ("session_in", "basic.publish"),
            ("session_out q", "basic.deliver"),  # also of a consumer that was there before
        ]
        assert recorder.connection is connection
        served.in_loop(lambda: connection.remove_handler(recorder))
        round_trip(client, "q")
        round_trip(other, "other")
        assert len(recorder.seen) == 4
        served.in_loop(lambda: connection.add_handler(recorder))
        round_trip(client, "q")
        assert len(recorder.seen) == 8
        with peer(served.url, 1) as later:
            consume(later, "later")
            round_trip(later, "later")
        assert len(recorder.seen) == 8


def test_one_that_is_there_for_all_is_removed_for_one_connection_alone() -> None:
    recorder = Recorder()
    with serving(recorder) as served, peer(served.url, 1) as client, peer(served.url, 1) as other:
        for each, queue in ((client, "q"), (other, "other")):
            consume(each, queue)
        connection = connection_of(served, client)
        served.in_loop(lambda: connection.remove_handler(recorder))
        before = len(recorder.seen)
        round_trip(client, "q")
        assert len(recorder.seen) == before
        round_trip(other, "other")
        assert len(recorder.seen) == before + 4


class Once(Handler):
    """Removes itself, at the point that its name says."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.calls = 0

    def _call(self, point: str, connection: ClientConnection) -> None:
        if point == self.point:
            self.calls += 1
            connection.remove_handler(self)

    def content_in(self, session: Session, header: ContentHeader) -> ContentHeader | None:
        self._call("content_in", session.connection)
        return header

    def session_in(self, session: Session, command: Command) -> Command | None:
        self._call("session_in", session.connection)
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        self._call("session_out", session.connection)  # a delivery: the state is locked
        return command


@pytest.mark.parametrize("point", ["content_in", "session_in", "session_out"])
def test_a_handler_may_remove_itself_and_the_others_go_on(point: str) -> None:
    once, recorder = Once(point), Recorder()
    with serving() as served, peer(served.url, 1) as client:
        consume(client, "q")
        connection = connection_of(served, client)
        for each in (once, recorder):
            served.in_loop(lambda each=each: connection.add_handler(each))  # type: ignore[misc]
        for _ in range(3):
            round_trip(client, "q")
    assert once.calls == 1
    assert recorder.seen.count(("content_in", "basic.publish")) == 3
    assert recorder.seen.count(("session_out q", "basic.deliver")) == 3


class Pausing(Handler):
    def session_in(self, session: Session, command: Command) -> Command | None:
        session.connection.attached[self] = "data"
        session.connection.pause(self)
        return command


def test_a_removed_handler_leaves_neither_data_nor_a_pause() -> None:
    pausing = Pausing()
    with serving() as served, peer(served.url, 1) as client:
        connection = connection_of(served, client)
        served.in_loop(lambda: connection.add_handler(pausing))
        client.call(1, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)
        client.send(1, c.Basic.Qos(prefetch_count=1))
        assert served.in_loop(lambda: connection.attached) == {pausing: "data"}
        served.in_loop(lambda: connection.remove_handler(pausing))
        client.expect(c.Basic.QosOk, 1)
        assert served.in_loop(lambda: connection.attached) == {}


def test_who_keeps_a_connection_that_is_gone_does_no_harm_with_it() -> None:
    recorder = Recorder()
    with serving(recorder) as served:
        with peer(served.url, 1) as client:
            consume(client, "q")
            session = served.in_loop(lambda: recorder.connection.sessions.by_number[1])  # type: ignore[union-attr]
        ended(served)
        connection = recorder.connection
        assert connection is not None

        def use() -> None:
            connection.add_handler(Recorder())
            connection.pause(recorder)
            connection.send(1, m.BasicQosOk())
            connection.send(0, m.ConnectionUnblocked())
            connection.write(encode_method(1, m.BasicQosOk()))
            session.send(m.BasicQosOk())
            connection.fail(1, ZeroDivisionError("late"))
            connection.remove_handler(recorder)
            connection.resume(recorder)

        served.in_loop(use)
        with peer(served.url, 1) as later:
            consume(later, "q2")
            round_trip(later, "q2")


class Gathering(Handler):
    """Fails at the end of a tick, in which others have gathered too."""

    def session_in(self, session: Session, command: Command) -> Command | None:
        session.connection.server.commits.gather(self)
        return command

    def hand_over(self) -> None:
        raise ZeroDivisionError("a bug")


def test_what_a_handler_gathers_and_fails_to_hand_over_keeps_no_confirm_back() -> None:
    with serving() as served, peer(served.url, 1) as client, peer(served.url, 1) as other:
        for each in (client, other):
            each.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
        connection = connection_of(served, client)
        gathering = Gathering()
        served.in_loop(lambda: connection.add_handler(gathering))
        for each in (client, other):
            each.publish(1, "", "nowhere", b"x")
            assert each.expect(c.Basic.Ack, 1).delivery_tag == 1


class Exits(Handler):
    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        if isinstance(command.method, m.BasicDeliver):
            raise SystemExit(3)
        return command


def test_an_exit_in_the_middle_of_a_dispatch_ends_one_connection() -> None:
    with serving(Exits()) as served, peer(served.url, 1) as client, peer(served.url, 1) as other:
        consume(client, "q")
        client.publish(1, "", "q", b"x")
        assert client.expect(c.Connection.Close, 0).reply_code == 541
        other.declare_exclusive(1, "q")


class Slow(Handler):
    """Drops what it gets; ``calls``: how many it got."""

    calls = 0

    def session_in(self, session: Session, command: Command) -> Command | None:
        self.calls += 1
        return None


def test_a_slow_handler_has_one_call_in_a_turn_that_is_over_whatever_it_drops() -> None:
    server = Server(Limits(), 1000)
    begun(server, ("", ""))
    slow = Slow()
    server.connection.add_handler(slow)
    publish = encode_content(1, m.BasicPublish("", "a"), b"", b"x", 4096)
    server.connection.protocol.receive(publish * 20, 0.0)
    for turns in range(1, 21):
        server.connection.input.turn(0.0)  # its end has passed
        assert slow.calls == turns


# -- what is absent costs nothing ----------------------------------------------------------------------------

FILES = (handler_module.__file__, points.__file__)


@contextlib.contextmanager
def calls() -> Iterator[list[str]]:
    """The functions of the product that this thread calls, in their order."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "broker_core" in frame.f_code.co_filename:
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    assert threading.current_thread() is threading.main_thread()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def traffic(server: Server) -> list[str]:
    """The calls of a publish in one piece, one in many, a delivery of each, a confirm, a get and an ack."""
    properties = Properties(delivery_mode=2).encode()
    server.feed(
        encode_content(1, m.BasicPublish("", "a"), properties, b"x", 4096)
    )  # what is remembered later
    with calls() as found:
        for size in (1, 20_000):
            stream = encode_content(1, m.BasicPublish("", "a"), properties, bytes(size), 4096)
            for at in range(0, len(stream), 5000):
                server.feed(stream[at : at + 5000])
        server.feed(encode_content(1, m.BasicPublish("", "b"), properties, b"x", 4096))
        server.feed(encode_method(2, m.BasicGet("b", False)))
    return found


def served_consumer() -> Server:
    server = Server(Limits(), 1000)
    begun(server, ("confirm", ""))
    server.feed(encode_method(2, m.BasicConsume(queue="a", consumer_tag="t", no_ack=True)))
    traffic(server)  # what is remembered after the first time is remembered
    return server


def test_without_handlers_no_command_passes_a_point_and_one_that_was_removed_leaves_none() -> None:
    server = served_consumer()
    plain = traffic(server)
    assert any(each.endswith(":encode") for each in plain) and any(
        each.endswith(":publish") for each in plain
    )
    assert [each for each in plain if each.startswith(FILES)] == []

    recorder = Recorder()
    server.connection.add_handler(recorder)
    assert [each for each in traffic(server) if each.startswith(FILES)] != []
    server.connection.remove_handler(recorder)
    traffic(server)
    assert traffic(server) == plain


class Inward(Handler):
    def session_in(self, session: Session, command: Command) -> Command | None:
        return command


def test_who_sees_no_replies_leaves_deliveries_as_they_are() -> None:
    server = served_consumer()
    plain = traffic(server)
    server.connection.add_handler(Inward())
    observed = traffic(server)
    for name in (":encode", ":write", ":deliver", ":feed"):
        assert sum(each.endswith(name) for each in observed) == sum(each.endswith(name) for each in plain), (
            name
        )


def test_a_connection_with_a_handler_of_its_own_is_freed_without_the_collector(no_collector: None) -> None:
    with serving() as served:
        with peer(served.url, 1) as client:
            consume(client, "q")
            gone = weakref.ref(connection_of(served, client))
            served.in_loop(lambda: gone().add_handler(Once("")))  # type: ignore[union-attr]
            client.publish(1, "", "q", bytes(200_000))
            client.expect(c.Basic.Deliver, 1)
        ended(served)
        wait_until(lambda: gone() is None)
