"""What has ended leaves nothing to the collector of cycles: sessions of thousands of channels would be in memory
until a collection, which then stops every client.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import pytest
from pamqp import commands

from broker_core.node import upkeep
from broker_core.server.amqp.connection import Connection
from tests.amqp_in_process import Served, ended, serving
from tests.amqp_peer import Peer, content
from tests.progress import wait_until

B, C, H, Q, T = commands.Basic, commands.Connection, commands.Channel, commands.Queue, commands.Tx


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # the upkeep keeps the channel that it has looked at last until it looks again
    monkeypatch.setattr(upkeep, "TICK_S", 0.02)
    with serving() as found:
        yield found


def nothing(_client: Peer) -> None:
    pass


def publish(client: Peer) -> None:
    client.write(content(1, B.Publish(routing_key="q"), b"x") * 3)


def confirmed(client: Peer) -> None:
    client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
    client.write(content(1, B.Publish(routing_key="q"), b"x"))
    client.expect(B.Ack, 1)


def committed(client: Peer) -> None:
    client.call(1, T.Select(), T.SelectOk)
    client.write(content(1, B.Publish(routing_key="q"), b"x"))
    client.call(1, T.Commit(), T.CommitOk)


def open_transaction(client: Peer) -> None:
    client.call(1, T.Select(), T.SelectOk)
    client.write(content(1, B.Publish(routing_key="q"), b"x"))


def consumed(client: Peer) -> None:
    publish(client)
    client.call(1, B.Consume(queue="q"), B.ConsumeOk)
    client.expect(B.Deliver, 1)


def exclusive(client: Peer) -> None:
    client.call(1, Q.Declare(queue="mine", exclusive=True), Q.DeclareOk)


WORK: list[Callable[[Peer], None]] = [
    nothing, publish, confirmed, committed, open_transaction, consumed, exclusive
]  # fmt: skip


def client_closes(client: Peer) -> None:
    client.send(0, C.Close(reply_code=200, reply_text="", class_id=0, method_id=0))


def channel_closes(client: Peer) -> None:
    client.send(1, H.Close(reply_code=200, reply_text="", class_id=0, method_id=0))


def channel_fails(client: Peer) -> None:
    client.send(1, Q.Declare(queue="none", passive=True))


def connection_fails(client: Peer) -> None:
    client.send(3, Q.Declare(queue="none", passive=True))


def lost(client: Peer) -> None:
    client.abort()


ENDS: list[Callable[[Peer], None]] = [client_closes, channel_closes, channel_fails, connection_fails, lost]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("work", WORK)
def test_a_session_and_its_connection_are_freed_without_the_collector(
    work: Callable[[Peer], None], end: Callable[[Peer], None], served: Served, no_collector: None
) -> None:
    with contextlib.closing(served.broker.channel()) as channel:
        channel.queue_declare("q")
    with Peer(served.url) as client:
        client.opened(1)
        connection = next(iter(served.server.connections))
        sessions = [weakref.ref(each) for each in connection.sessions.by_number.values()]
        channels = [weakref.ref(session().channel) for session in sessions]  # type: ignore[union-attr]
        connections: list[weakref.ref[Connection]] = [weakref.ref(connection)]
        del connection
        work(client)
        end(client)
        assert sessions and channels
        wait_until(lambda: all(each() is None for each in [*sessions, *channels]))
    wait_until(lambda: all(each() is None for each in connections))


def test_channels_that_end_behind_their_connection_answer_nobody(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that fails does not wait for their commits, and its socket may be gone before them."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(Peer(served.url))
            client.opened(*range(1, 301))
            client.send(400, Q.Declare(queue="none", passive=True))
            client.expect(C.Close)
            client.abort()
    ended(served)
    assert "an answer to a commit failed" not in caplog.text
