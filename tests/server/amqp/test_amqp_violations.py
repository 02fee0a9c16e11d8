"""Every violation of the protocol and of what its methods mean: the specification's reply code, RabbitMQ's
text, and all others work on.

The rows are in ``violations``. With ``TXMQ_INTEROP_URL`` they are held against that broker, and their
outcomes are RabbitMQ's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp import base, commands, header, heartbeat

from tests.amqp_peer import Closed, Peer, content, described, encoded, peer
from tests.amqp_server import endpoint
from tests.server.amqp.violations import arguments, frames, handshake, messages, topology
from tests.server.amqp.violations.row import (
    HAS_ANSWER,
    Answered,
    AnySent,
    ChannelClosed,
    ConnectionClosed,
    Dropped,
    Outcome,
    Row,
    on_the_wire,
)

C, H, Q, B = commands.Connection, commands.Channel, commands.Queue, commands.Basic
REFERENCE = "TXMQ_INTEROP_URL" in os.environ


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with endpoint(Path(tmp_path_factory.mktemp("violations")) / "data") as found:
        yield found


@pytest.fixture(scope="module")
def witness(url: str) -> Iterator[Peer]:
    """A connection that never does anything wrong."""
    with peer(url, 1) as other:
        other.call(1, Q.Declare(queue="violation.witness", exclusive=True), Q.DeclareOk)
        yield other
        other.end()


ANSWER_S = 15.0  # a socket that is closed without a word may take a while


def works(other: Peer, channel: int, queue: str) -> None:
    other.publish(channel, "", queue, b"still here")
    found = other.get(channel, queue)
    assert found is not None and found[1] == b"still here"


def prepare(other: Peer, frames: tuple[AnySent, ...]) -> None:
    """Sends each frame and awaits its answer, which is none of a violation."""
    for sent in frames:
        other.write(on_the_wire(sent))
        frame = sent[1] if isinstance(sent, tuple) else sent
        if isinstance(frame, HAS_ANSWER):
            channel, answer = other.receive()
            assert not isinstance(answer, (C.Close, H.Close)), described(answer)
            if isinstance(answer, B.GetOk):
                other.content(channel)


def reach(other: Peer, row: Row) -> None:
    """The phase of the handshake that the row begins in."""
    if row.phase == "open":
        other.opened(1, 2, channel_max=row.channel_max)
        other.declare_exclusive(2, "violation.beside")
    elif row.phase == "started":
        other.started()
    elif row.phase != "connected":
        other.tuned()
        if row.phase == "tuned":
            other.send(0, C.TuneOk(row.channel_max, 131_072, 0))


BESIDE = Q.Declare(queue="violation.beside", passive=True)


def outcome(other: Peer, expected: Outcome, fenced: bool) -> tuple[Outcome, int]:
    """What comes back, and on which channel. ``fenced``: an answer on channel 2 is awaited too, behind which
    nothing else may come.
    """
    names: list[str] = []
    head = b""
    wanted = len(expected.names) + fenced if isinstance(expected, Answered) else 1 << 30
    while len(names) < wanted:
        try:
            channel, frame = other.receive()
        except Closed as closed:
            return Dropped(head + closed.received), 0
        if isinstance(frame, header.ProtocolHeader):
            head = encoded(0, frame)
        elif isinstance(frame, (C.Close, H.Close)):
            kind = ConnectionClosed if isinstance(frame, C.Close) else ChannelClosed
            return kind(frame.reply_code, frame.reply_text, (frame.class_id, frame.method_id)), channel
        elif isinstance(frame, base.Frame):
            names.append(frame.name)
        else:
            assert isinstance(frame, heartbeat.Heartbeat), described(frame)
    if fenced:
        names.remove(Q.DeclareOk.name)
    return Answered(tuple(names)), 0


def after_channel_close(other: Peer, channel: int) -> None:
    """What still comes on the closed channel is dropped; the other one works, and so does this one once it is
    open again.
    """
    other.write(on_the_wire((channel, Q.Declare(queue="violation.dropped", exclusive=True))))
    other.write(content(channel, B.Publish(exchange="violation.missing"), b"dropped"))
    works(other, 3 - channel, "violation.beside")
    other.send(channel, H.CloseOk())
    other.open(channel)
    works(other, channel, "violation.beside")
    other.end()


def after_connection_close(other: Peer, row: Row) -> None:
    """What still comes is dropped, and close-ok ends the socket."""
    if row.phase == "open":
        other.send(1, Q.Declare(queue="violation.dropped"))
    other.send(0, C.CloseOk())
    with pytest.raises(Closed) as closed:
        other.receive()
    assert closed.value.received == b""


ROWS = [*handshake.ROWS, *frames.ROWS, *topology.ROWS, *arguments.ROWS, *messages.ROWS]


def test_every_row_has_a_name_of_its_own_and_says_why_where_it_differs() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert [row.name for row in ROWS if bool(row.why) != (row.here is not None)] == []


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_violation_has_its_reply_code_and_others_work_on(url: str, witness: Peer, row: Row) -> None:
    expected = row.expected if REFERENCE else row.here or row.expected
    fenced = isinstance(expected, Answered) and row.phase == "open"
    with contextlib.ExitStack() as stack:
        if row.other:
            owner = stack.enter_context(peer(url, 1))
            stack.callback(owner.end)
            prepare(owner, row.other)
        other = stack.enter_context(Peer(url, ANSWER_S))
        reach(other, row)
        prepare(other, row.before)
        other.write(b"".join(map(on_the_wire, row.sends)))
        if fenced:
            other.send(2, BESIDE)
        found, channel = outcome(other, expected, fenced)
        assert found == expected
        if isinstance(found, ConnectionClosed):
            after_connection_close(other, row)
        elif isinstance(found, ChannelClosed):
            after_channel_close(other, channel)
        elif fenced and row.here is None:
            other.call(1, BESIDE, Q.DeclareOk)
            other.end()
    works(witness, 1, "violation.witness")
