"""Closing: nothing behind it is carried out, what came before it is, and a transaction never is committed by
it.

Which violation has which reply code is in ``test_amqp_violations.py``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from pamqp import base, commands

from broker_core.amqp.v0_9_1.events import Command, Event
from broker_core.core.errors import NotAllowed
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session
from tests.amqp_in_process import Leader, Served, ended, serving
from tests.amqp_peer import Closed, Peer, content, encoded, peer

B, C, H, Q, T = commands.Basic, commands.Connection, commands.Channel, commands.Queue, commands.Tx


class Looking(Handler):
    """Stands at every point and passes everything on."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def connection_in(self, connection: ClientConnection, event: Event) -> Event | None:
        self.seen.append(event)
        return event

    def session_in(self, session: Session, command: Command) -> Command | None:
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        return command


@pytest.fixture(params=["plain", "handlers"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(*([Looking()] if request.param == "handlers" else [])) as served:
        yield served


def rest(client: Peer, *, answer: bool = True) -> list[str]:
    """The methods that come until the broker closes the socket."""
    names = []
    while True:
        try:
            _, frame = client.receive()
        except Closed:
            return names
        if isinstance(frame, base.Frame):
            names.append(frame.name)
        if answer and isinstance(frame, C.Close):
            client.send(0, C.CloseOk())


def publish(channel: int, queue: str, body: bytes = b"x", **more: bool) -> bytes:
    return content(channel, B.Publish(routing_key=queue, **more), body)


def asked(channel: int, *frames: base.Frame) -> bytes:
    return b"".join(encoded(channel, frame) for frame in frames)


CLOSES_CONNECTION: dict[str, Callable[[], bytes]] = {
    "immediate": lambda: publish(1, "q", immediate=True),
    "prefetch_size": lambda: asked(1, B.Qos(prefetch_size=7)),
    "recover without requeue": lambda: asked(1, B.Recover(requeue=False)),
    "flow": lambda: asked(1, H.Flow(active=False)),
    "a consumer tag twice": lambda: asked(
        1, B.Consume(queue="q", consumer_tag="t"), B.Consume(queue="q", consumer_tag="t")
    ),
    "an unknown exchange type": lambda: asked(
        1, commands.Exchange.Declare(exchange="e", exchange_type="nonsense")
    ),
    "a command of a channel that is not open": lambda: asked(7, B.Get(queue="q")),
    "a second channel.open": lambda: asked(1, H.Open()),
}
BEHIND: dict[str, Callable[[int], bytes]] = {
    "get": lambda n: asked(n, B.Get(queue="full", no_ack=True)),
    "consume": lambda n: asked(n, B.Consume(queue="full", no_ack=True)),
    "purge": lambda n: asked(n, Q.Purge(queue="full")),
    "delete": lambda n: asked(n, Q.Delete(queue="full")),
    "declare": lambda n: asked(n, Q.Declare(queue="new")),
    "publish": lambda n: publish(n, "q"),
    "commit": lambda n: asked(n, T.Select()) + publish(n, "q") + asked(n, T.Commit()),
}


@pytest.mark.product
@pytest.mark.parametrize("later", [False, True], ids=["in the same packet", "in a later packet"])
@pytest.mark.parametrize("channel", [1, 2])
@pytest.mark.parametrize("bad", CLOSES_CONNECTION)
def test_nothing_behind_a_connection_error_is_carried_out_on_any_channel(
    served: Served, bad: str, channel: int, later: bool
) -> None:
    with peer(served.url, 1) as witness:
        witness.call(1, Q.Declare(queue="full"), Q.DeclareOk)
        witness.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        witness.publish(1, "", "full", b"kept")
        assert witness.count(1, "full") == 1
        with peer(served.url, 1, 2) as client:
            behind = b"".join(BEHIND[name](channel) for name in BEHIND)
            client.write(CLOSES_CONNECTION[bad]() + (b"" if later else behind))
            while not isinstance(client.receive()[1], C.Close):
                pass
            client.write((behind if later else b"") + encoded(0, C.CloseOk()))
            assert rest(client) == []
        ended(served, witness)
        assert served.counts() == {"full": 1, "q": 0}


@pytest.mark.product
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize(
    "bad",
    [B.Ack(7), B.Get(queue="missing"), Q.Declare(queue="missing", passive=True)],
    ids=lambda bad: bad.name,
)
def test_nothing_behind_a_channel_error_is_carried_out_until_close_ok(
    served: Served, bad: base.Frame, behind: str
) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(2, Q.Declare(queue="full"), Q.DeclareOk)
        client.call(2, Q.Declare(queue="q"), Q.DeclareOk)
        client.publish(2, "", "full", b"kept")
        assert client.count(2, "full") == 1
        client.write(encoded(1, bad) + BEHIND[behind](1))
        client.expect(H.Close, 1)
        client.write(BEHIND[behind](1))
        assert client.count(2, "full") == 1
        client.send(1, H.CloseOk())
        client.open(1)
        assert client.count(1, "q") == 0
        assert served.counts() == {"full": 1, "q": 0}


@pytest.mark.parametrize("cut", [1, 2, 3], ids=["method", "header", "part of the body"])
def test_a_content_begun_behind_a_channel_error_may_be_broken_off_or_completed(
    served: Served, cut: int
) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(2, Q.Declare(queue="q"), Q.DeclareOk)
        frames = [
            encoded(1, B.Publish(routing_key="q")),
            content(1, B.Publish(routing_key="q"), b"x" * 300, frame_max=108)[
                len(encoded(1, B.Publish(routing_key="q"))) :
            ],
        ]
        header_end = 7 + 14 + 1
        parts = {
            1: frames[0],
            2: frames[0] + frames[1][:header_end],
            3: frames[0] + frames[1][: header_end + 108],
        }
        whole = frames[0] + frames[1]
        for completed in (False, True):
            client.send(1, B.Ack(7))
            client.expect(H.Close, 1)
            client.write(parts[cut])  # begun only after the broker has closed the channel
            assert client.count(2, "q") == 0
            client.write(whole[len(parts[cut]) :] if completed else b"")
            client.send(1, H.CloseOk())
            client.open(1)
            assert client.count(1, "q") == 0
            client.write(content(1, B.Publish(routing_key="q"), b"taken" * 100, frame_max=100))
            assert client.count(1, "q") == 1
            client.call(1, Q.Purge(queue="q"), Q.PurgeOk)


BEFORE: dict[str, tuple[bytes, dict[str, int]]] = {
    "a publish": (publish(1, "q"), {"q": 1}),
    "a publish on another channel": (publish(2, "q"), {"q": 1}),
    "a publish behind a declare": (
        publish(2, "q") + asked(2, Q.Declare(queue="q2")) + publish(2, "q2"),
        {"q": 1, "q2": 1},
    ),
    "an open transaction": (asked(2, T.Select()) + publish(2, "q"), {"q": 0}),
    "a commit": (asked(2, T.Select()) + publish(2, "q") + asked(2, T.Commit()), {"q": 1}),
    "a commit and an open transaction": (
        asked(2, T.Select()) + publish(2, "q") + asked(2, T.Commit()) + publish(2, "q") + publish(2, "q"),
        {"q": 1},
    ),
}


@pytest.mark.product
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("leads", [False, True], ids=["", "another thread leads"])
def test_what_came_before_a_connection_error_is_carried_out_but_no_open_transaction(
    served: Served, before: str, leads: bool
) -> None:
    sent, expected = BEFORE[before]
    with contextlib.ExitStack() as stack:
        with peer(served.url, 1) as client:
            client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        ended(served)
        client = stack.enter_context(peer(served.url, 1, 2))
        if leads:
            stack.enter_context(Leader(served))
        client.write(sent + CLOSES_CONNECTION["prefetch_size"]())
        if not leads:
            while not isinstance(client.receive()[1], C.Close):
                pass
        client.abort()  # what it asked for before does not depend on it
    ended(served)
    assert served.counts() == expected


def test_commands_behind_a_commit_are_answered_before_the_error_of_another_channel(served: Served) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.call(1, T.Select(), T.SelectOk)
        with Leader(served):
            client.write(
                publish(1, "q", b"1")
                + asked(1, T.Commit())
                + publish(1, "q", b"2")
                + asked(1, T.Commit(), Q.Purge(queue="q"))
            )
            client.send(2, B.Qos(prefetch_size=7))
        assert rest(client) == ["Tx.CommitOk", "Tx.CommitOk", "Queue.PurgeOk", "Connection.Close"]
    ended(served)
    assert served.counts() == {"q": 0}


def test_an_error_behind_a_commit_drops_what_waits_behind_it_on_every_channel(served: Served) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.publish(1, "", "q", b"kept")
        client.call(1, Q.Declare(queue="q", passive=True), Q.DeclareOk)
        with Leader(served):
            client.write(
                asked(1, Q.Declare(queue="q", passive=True), B.Qos(prefetch_size=7), Q.Purge(queue="q"))
            )
            client.write(
                asked(
                    2,
                    Q.Declare(queue="q", passive=True),
                    Q.Declare(queue="q", passive=True),
                    Q.Purge(queue="q"),
                )
            )
            # answered: all before it is read
            client.send(0, commands.Connection.UpdateSecret(new_secret="s", reason="r"))
            client.expect(commands.Connection.UpdateSecretOk, 0)
        assert "Connection.Close" in rest(client)
    ended(served)
    assert served.counts() == {"q": 1}


def test_a_close_of_the_client_that_crosses_the_brokers_is_answered_and_nothing_else(served: Served) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.write(CLOSES_CONNECTION["flow"]() + encoded(0, C.Close(200, "", 0, 0)) + publish(1, "q"))
        client.expect(C.Close, 0)
        client.expect(C.CloseOk, 0)
        client.write(publish(2, "q") + asked(2, Q.Delete(queue="q")) + encoded(0, C.CloseOk()))
        assert rest(client) == []
    ended(served)
    assert served.counts() == {"q": 0}


def test_nothing_behind_the_clients_own_close_is_carried_out_though_a_commit_is_awaited(
    served: Served,
) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.call(1, T.Select(), T.SelectOk)
        with Leader(served):
            client.write(publish(1, "q") + asked(1, T.Commit()) + encoded(0, C.Close(200, "", 0, 0)))
            client.write(
                publish(1, "q")
                + asked(1, T.Commit())
                + asked(1, Q.Purge(queue="q"))
                + asked(2, Q.Purge(queue="q"))
            )
            client.write(encoded(0, C.Close(200, "", 0, 0)))
        assert rest(client) == ["Tx.CommitOk", "Connection.CloseOk"]
    ended(served)
    assert served.counts() == {"q": 1}


@pytest.mark.parametrize("bad", [B.Qos(prefetch_size=7), B.Ack(7)], ids=["connection", "channel"])
def test_no_message_goes_to_a_consumer_without_acks_once_its_channel_is_closed(
    served: Served, bad: base.Frame
) -> None:
    with peer(served.url, 1) as publisher, peer(served.url, 1) as client:
        publisher.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.call(1, B.Consume(queue="q", no_ack=True), B.ConsumeOk)
        with Leader(served):
            client.write(encoded(1, bad))
            client.expect(C.Close if isinstance(bad, B.Qos) else H.Close)
            publisher.publish(1, "", "q", b"for somebody else")
            publisher.send(0, C.UpdateSecret(new_secret="s", reason="answered: the publish is read"))
            publisher.expect(C.UpdateSecretOk, 0)
        assert publisher.count(1, "q") == 1
        client.abort()


class Refusing(Handler):
    """Closes the connection at the first get, and passes it on all the same."""

    def __init__(self, at: str) -> None:
        self._at = at

    def connection_in(self, connection: ClientConnection, event: Event) -> Event | None:
        if self._at == "connection_in":
            self._look(connection, event)
        return event

    def session_in(self, session: Session, command: Command) -> Command | None:
        if self._at == "session_in":
            self._look(session.connection, command)
        return command

    def _look(self, connection: ClientConnection, event: Event) -> None:
        if isinstance(event, Command) and event.method.NAME == "basic.get":
            connection.fail(event.channel, NotAllowed("no gets here"), event.method)


@pytest.mark.parametrize("at", ["connection_in", "session_in"])
def test_a_command_whose_handler_closes_the_connection_is_not_carried_out(at: str) -> None:
    with serving(Refusing(at)) as served, peer(served.url, 1) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.publish(1, "", "q", b"kept")
        assert client.count(1, "q") == 1
        client.write(asked(1, B.Get(queue="q", no_ack=True), Q.Purge(queue="q")))
        assert rest(client) == ["Connection.Close"]
        client.abort()
        ended(served)  # the broker keeps its side of the socket until the client has closed its own
        assert served.counts() == {"q": 1}


def test_handlers_are_shown_nothing_behind_a_close_but_close_and_close_ok() -> None:
    looking = Looking()
    with serving(looking) as served, peer(served.url, 1) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.write(
            asked(1, B.Qos(prefetch_size=7), Q.Purge(queue="q"), B.Get(queue="q"))
            + encoded(0, C.Close(200, "", 0, 0))
        )
        client.expect(C.Close, 0)
        client.expect(C.CloseOk, 0)
        client.write(asked(1, Q.Purge(queue="q")) + encoded(0, C.CloseOk()))
        assert rest(client) == []
    names = [event.method.NAME for event in looking.seen if isinstance(event, Command)]
    assert names[names.index("basic.qos") + 1 :] == ["connection.close", "connection.close-ok"]


def test_a_commit_that_fails_before_a_long_backlog_does_not_stop_the_reading_of_other_channels(
    served: Served,
) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(
            1,
            Q.Declare(queue="q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}),
            Q.DeclareOk,
        )
        client.call(1, T.Select(), T.SelectOk)
        with Leader(served):
            client.write(publish(1, "q") + publish(1, "q") + asked(1, T.Commit()) + publish(1, "q") * 2000)
            while not any(connection.input.paused for connection in served.server.connections):
                threading.Event().wait(0.005)
        client.send(2, B.Qos(prefetch_count=1))
        answers = {client.receive()[1].name for _ in range(2)}
        assert answers == {"Channel.Close", "Basic.QosOk"}
