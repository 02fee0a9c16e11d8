"""A connection with very many channels ends in turns, so that nobody waits for it; what ends is what ended in
one piece.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from pamqp import commands

from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.server import commit_queue, turns
from broker_core.server.amqp.session import Session
from broker_core.server.quotas import QuotaLimits, Quotas, UserLimit
from tests.amqp_in_process import Leader, Served, ended, serving
from tests.amqp_peer import Peer, content, encoded, peer
from tests.progress import wait_until

B, C, H, Q, T = commands.Basic, commands.Connection, commands.Channel, commands.Queue, commands.Tx
CHANNELS = 300
NUMBERS = range(1, CHANNELS + 1)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Each command is a turn."""
    for name in ("TURN_S", "SHARE_S", "WINDOW_S"):
        monkeypatch.setattr(turns, name, -1.0)
    with serving() as found:
        yield found


@contextlib.contextmanager
def many(served: Served) -> Iterator[Peer]:
    with Peer(served.url) as client:
        client.opened()
        client.write(b"".join(encoded(number, H.Open()) for number in NUMBERS))
        for number in NUMBERS:
            client.expect(H.OpenOk, number)
        yield client


def lost(_served: Served, client: Peer) -> None:
    client.abort()


def closed(_served: Served, client: Peer) -> None:
    client.end()


def failed(_served: Served, client: Peer) -> None:
    client.send(1, H.Open())
    until_close(client)


def by_an_operator(served: Served, client: Peer) -> None:
    connection = next(each for each in served.server.connections if len(each.sessions.by_number) == CHANNELS)
    assert served.broker.open_channels.close(connection.name)
    until_close(client)


def closed_and_lost(_served: Served, client: Peer) -> None:
    client.send(0, C.Close(200, "bye", 0, 0))
    client.abort()


def until_close(client: Peer) -> None:
    while not isinstance(client.receive()[1], C.Close):
        pass
    client.send(0, C.CloseOk())
    client.abort()


ENDS: list[Callable[[Served, Peer], None]] = [lost, closed, failed, by_an_operator, closed_and_lost]


@pytest.mark.parametrize("end", ENDS)
def test_a_turn_ends_one_channel_and_others_have_theirs(
    served: Served, end: Callable[[Served, Peer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By count: how many sessions end in one iteration of the loop, whatever that takes."""
    loop, session_end = served.server.loop, Session.end
    iterations = [0]
    in_iteration: Counter[int] = Counter()

    def next_iteration() -> None:
        iterations[0] += 1
        loop.call_soon(next_iteration)

    def counted(self: Session, why: str, then: Callable[[], None] | None = None) -> None:
        in_iteration[iterations[0]] += 1
        session_end(self, why, then)

    loop.call_soon_threadsafe(next_iteration)
    monkeypatch.setattr(Session, "end", counted)
    with many(served) as client, peer(served.url, 1) as other:
        end(served, client)
        answered = 0
        while in_iteration.total() < CHANNELS and end is lost:
            other.call(1, Q.Declare(queue="q"), Q.DeclareOk)
            answered += 1
        ended(served, other)
    assert in_iteration.total() >= CHANNELS
    assert max(in_iteration.values()) <= 2  # the first one at once
    assert end is not lost or answered > 1


@pytest.mark.parametrize("end", ENDS)
def test_what_its_channels_held_comes_back_in_order_and_nothing_else_stays(
    served: Served, end: Callable[[Served, Peer], None]
) -> None:
    with peer(served.url, 1) as other:
        other.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        for number in NUMBERS:
            other.publish(1, "", "q", b"%d" % number)
        assert other.count(1, "q") == CHANNELS
        with many(served) as client:
            client.call(7, Q.Declare(queue="mine", exclusive=True), Q.DeclareOk)
            for number in reversed(NUMBERS):  # the channels end in another order than the messages have
                assert client.get(number, "q", no_ack=False)
            client.write(
                b"".join(
                    encoded(number, T.Select()) + content(number, B.Publish(routing_key="q"), b"open")
                    for number in NUMBERS[::2]
                )
            )
            for number in NUMBERS[::2]:
                client.expect(T.SelectOk, number)
            end(served, client)
        ended(served, other)
        assert [body for _, body in other.drain(1, "q")] == [b"%d" % number for number in NUMBERS]
        assert served.counts() == {"q": 0}
        assert len(served.broker.open_channels) == 1 == len(served.server.quotas.channels)
        assert len(served.server.quotas.connections) == 1


def test_what_was_asked_for_before_a_close_is_carried_out_though_the_socket_is_lost(served: Served) -> None:
    asked = NUMBERS[: commit_queue.MOST - 1]  # with more the broker does not come to read the close
    with peer(served.url, 1) as other:
        other.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        with many(served) as client:
            connection = next(each for each in served.server.connections if 2 in each.sessions.by_number)
            with Leader(served):
                for number in asked:
                    client.call(number, T.Select(), T.SelectOk)
                    client.publish(number, "", "q", b"%d" % number)
                    client.send(number, T.Commit())
                client.send(0, C.Close(200, "bye", 0, 0))
                wait_until(lambda: connection.state is ConnectionState.ending)
                client.abort()
                wait_until(lambda: len(served.server.connections) == 1)
        ended(served, other)
        assert other.count(1, "q") == len(asked)


@pytest.mark.parametrize("end", [lost, closed_and_lost])
def test_a_broker_that_stops_meanwhile_ends_all_of_them(
    served: Served, end: Callable[[Served, Peer], None]
) -> None:
    with many(served) as client:
        client.call(1, Q.Declare(queue="mine", exclusive=True), Q.DeclareOk)
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.publish(1, "", "q", b"x")
        assert client.get(1, "q", no_ack=False)
        sessions = list(next(iter(served.server.connections)).sessions.by_number.values())
        end(served, client)
        served.server.stop()
        assert all(session.channel.closed for session in sessions)
        assert served.counts() == {"q": 1}
        assert len(served.server.quotas.channels) == 0


def test_a_broker_that_stops_closes_a_connection_of_many_channels(served: Served) -> None:
    with many(served) as client:
        sessions = list(next(iter(served.server.connections)).sessions.by_number.values())
        served.server.stop()
        assert client.expect(C.Close, 0).reply_code == 320
        assert all(session.channel.closed for session in sessions)


def test_channels_count_for_their_user_until_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody has more than its share by connections that are lost one after another."""
    with serving() as served:
        served.server.quotas = Quotas(QuotaLimits(channels=UserLimit(1000, CHANNELS + 1)))
        with many(served) as client, peer(served.url, 1) as other:
            with Leader(served):
                client.abort()
                wait_until(lambda: len(served.server.connections) == 1)
                with peer(served.url) as again:  # a login waits for nothing
                    again.send(1, H.Open())
                    refused = again.expect(C.Close, 0)
                    assert refused.reply_code == 530 and "user limit" in refused.reply_text
                assert len(served.server.quotas.channels) == CHANNELS + 1
            ended(served, other)
            assert len(served.server.quotas.channels) == 1
            with many(served) as again:
                assert len(served.server.quotas.channels) == CHANNELS + 1
                again.end()


def test_no_consumer_of_a_connection_that_closes_gets_more_when_its_client_reads_on(served: Served) -> None:
    with peer(served.url, 1) as client:
        client.call(1, Q.Declare(queue="q"), Q.DeclareOk)
        client.call(1, B.Consume(queue="q", consumer_tag="c", no_ack=True), B.ConsumeOk)
        connection = next(iter(served.server.connections))
        consumer = next(iter(connection.sessions.by_number.values())).channel.consumers["c"]
        with Leader(served):
            client.publish(1, "", "q", b"x")
            client.send(0, C.Close(200, "bye", 0, 0))
            wait_until(lambda: not consumer.writable)
            served.server.loop.call_soon_threadsafe(connection.pause_writing)
            served.server.loop.call_soon_threadsafe(connection.resume_writing)
            with peer(served.url):
                pass  # the loop has been round
            assert not consumer.writable
        assert isinstance(client.receive()[1], C.CloseOk)
        client.abort()
        ended(served)
        assert served.counts() == {"q": 1}
