"""A connection without a socket: bytes go in, events and bytes come out, and the test is the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.connection import AmqpConnection
from broker_core.amqp.v0_9_1.decoder import PROTOCOL_HEADER, Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_content, encode_method
from broker_core.amqp.v0_9_1.events import (
    ChannelFailed,
    CloseRequested,
    Command,
    ConnectionEvent,
    Failed,
    TimedOut,
    Violation,
)
from broker_core.amqp.v0_9_1.methods import Method
from broker_core.amqp.v0_9_1.negotiation import Offer
from broker_core.amqp.v0_9_1.states import ChannelState, ConnectionState
from broker_core.core.errors import AccessRefused, ConnectionAccessRefused, ConnectionForced
from tests.amqp.strategies import STREAM, buffered_bytes, chunked
from tests.amqp.test_fuzz import FRAME_MAX, MAX_BODY, MAX_PENDING, mutated
from tests.gates import examples

OFFER = Offer(
    frame_max=FRAME_MAX,
    handshake_timeout_s=10,
    close_timeout_s=5,
    max_body_bytes=MAX_BODY,
    max_pending_bytes=MAX_PENDING,
)
START_OK = m.ConnectionStartOk(
    {"capabilities": {"authentication_failure_close": True}}, "PLAIN", b"\0guest\0guest", "en_US"
)


class Wire:
    """A connection, and a client that says what a test tells it to. ``now`` is the time of both."""

    def __init__(self, offer: Offer = OFFER) -> None:
        self.now = 100.0
        self.connection = AmqpConnection(offer, self.now)
        self._answers = Decoder(0, handshake=False)

    def receive(self, *sent: tuple[int, Method] | bytes) -> list[ConnectionEvent]:
        data = b"".join(each if isinstance(each, bytes) else encode_method(*each) for each in sent)
        return list(self.events(data))

    def events(self, data: bytes) -> Iterator[ConnectionEvent]:
        """What the caller does with one of them applies to the next ones."""
        self.connection.receive(data, self.now)
        for event in self.due():
            yield event
            match event:
                case Command(_, m.ConnectionStartOk()):
                    self.connection.authenticated()
                case Failed(_, error, method):
                    self.connection.close(error, self.now, method)
                case ChannelFailed(number, channel_error, method):
                    self.connection.channels.close(number, channel_error, method)

    def due(self) -> Iterator[ConnectionEvent]:
        while self.connection.due:
            yield from self.connection.piece(self.now)

    def answers(self) -> list[tuple[int, Method]]:
        """What the client gets."""
        events = self._answers.feed(self.connection.data_to_send(self.now))
        return [(event.channel, event.method) for event in events if isinstance(event, Command)]

    def names(self) -> list[str]:
        return [method.NAME for _, method in self.answers()]

    def opened(self, *channels: int, heartbeat_s: int = 0) -> Wire:
        self.receive(PROTOCOL_HEADER, (0, START_OK))
        self.receive((0, m.ConnectionTuneOk(10, FRAME_MAX, heartbeat_s)), (0, m.ConnectionOpen("/")))
        self.receive(*((channel, m.ChannelOpen()) for channel in channels))
        self.answers()
        return self


def publish(channel: int, body: bytes = b"x") -> bytes:
    return encode_content(channel, m.BasicPublish("", "q"), b"", body, FRAME_MAX)


# -- the handshake ------------------------------------------------------------------------------------------


def test_the_handshake_is_answered_step_by_step() -> None:
    wire = Wire()
    assert wire.receive(PROTOCOL_HEADER) == [] and wire.names() == ["connection.start"]
    assert wire.receive((0, START_OK)) == [Command(0, START_OK)]
    assert wire.answers() == [(0, m.ConnectionTune(2047, FRAME_MAX, 60))]
    assert wire.receive((0, m.ConnectionTuneOk(10, FRAME_MAX, 0)), (0, m.ConnectionOpen("/"))) == []
    assert wire.names() == ["connection.open-ok"]
    assert wire.receive((3, m.ChannelOpen())) == [Command(3, m.ChannelOpen())]
    assert wire.connection.state is ConnectionState.open
    assert wire.connection.channels.states == {3: ChannelState.open}


def test_another_protocol_is_answered_with_ours_and_the_end() -> None:
    wire = Wire()
    assert wire.receive(b"AMQP\0\0\x0a\x01") == []
    assert wire.connection.data_to_send(wire.now) == PROTOCOL_HEADER
    assert wire.connection.state is ConnectionState.closed
    assert wire.receive(PROTOCOL_HEADER, (0, START_OK)) == [] and wire.answers() == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ((0, m.ConnectionOpen("/")), 504),
        ((0, m.ConnectionTuneOk(10, 100, 0)), 530),
        ((0, m.ConnectionTuneOk(10, FRAME_MAX + 1, 0)), 530),
        ((0, m.ConnectionTuneOk(0, FRAME_MAX, 0)), 530),
        ((1, m.ChannelOpen()), 505),
    ],
)
def test_a_wrong_step_of_the_handshake_closes_the_connection(sent: tuple[int, Method], code: int) -> None:
    wire = Wire()
    wire.receive(PROTOCOL_HEADER, (0, START_OK))
    wire.answers()
    (failed,) = wire.receive(sent)
    assert isinstance(failed, Failed)
    ((channel, close),) = wire.answers()
    assert channel == 0 and isinstance(close, m.ConnectionClose) and close.reply_code == code


def test_a_refused_login_is_told_only_to_a_client_that_understands_it() -> None:
    for properties, told in ((START_OK.client_properties, ["connection.close"]), ({}, [])):
        wire = Wire()
        wire.receive(PROTOCOL_HEADER)
        wire.answers()
        start_ok = encode_method(0, m.ConnectionStartOk(properties, "PLAIN", b"\0a\0b", "en_US"))
        wire.connection.receive(start_ok, wire.now)
        (event,) = wire.due()
        assert isinstance(event, Command)
        wire.connection.close(ConnectionAccessRefused("no"), wire.now, (10, 11))
        assert wire.names() == told


# -- channels -----------------------------------------------------------------------------------------------


def test_a_frame_larger_than_negotiated_closes_the_connection_and_only_close_ok_is_heard() -> None:
    wire = Wire().opened(1)
    (failed,) = wire.receive(b"\x01\0\x01\0\1\0\0", publish(1))
    assert isinstance(failed, Failed) and failed.error.reply_name == "FRAME_ERROR"
    assert wire.names() == ["connection.close"]
    assert wire.receive(publish(1), encode_method(0, m.ConnectionCloseOk())[:5]) == []
    assert wire.connection.state is ConnectionState.closing
    assert wire.receive(encode_method(0, m.ConnectionCloseOk())[5:]) == []
    assert wire.connection.state is ConnectionState.closed


def test_a_content_that_is_too_large_closes_its_channel_alone() -> None:
    wire = Wire().opened(1, 2)
    large = publish(1, b"x" * (MAX_BODY + 1))
    first, second = wire.receive(large, publish(1), publish(2))
    assert isinstance(first, ChannelFailed) and first.channel == 1
    assert isinstance(second, Command) and second.channel == 2
    assert wire.names() == ["channel.close"]


def test_what_comes_behind_a_channel_error_is_ignored_until_close_ok() -> None:
    wire = Wire().opened(1)
    wire.connection.channels.close(1, AccessRefused("no"), (60, 40))
    assert wire.receive(publish(1), (1, m.TxCommit()), (1, m.ChannelClose())) == []
    assert wire.names() == ["channel.close", "channel.close-ok"]
    reopened = wire.receive((1, m.ChannelCloseOk()), (1, m.ChannelOpen()), publish(1))
    assert [type(event.method) for event in reopened if isinstance(event, Command)] == [
        m.ChannelOpen,
        m.BasicPublish,
    ]


def test_a_channel_error_in_the_middle_of_the_bytes_holds_for_the_rest_of_them() -> None:
    wire = Wire().opened(1, 2)
    seen = []
    wire.connection.receive(publish(1, b"1") + publish(1, b"2") + publish(2, b"3"), wire.now)
    for event in wire.due():
        assert isinstance(event, Command)
        seen.append(event.body)
        if event.body == b"1":
            wire.connection.channels.close(1, AccessRefused("no"))
    assert seen == [b"1", b"3"]


def test_a_channel_that_the_client_closes_is_answered_when_its_work_is_done() -> None:
    wire = Wire().opened(1)
    events = wire.receive(publish(1), (1, m.ChannelClose()), publish(1))
    assert [type(event.method) for event in events if isinstance(event, Command)] == [
        m.BasicPublish,
        m.ChannelClose,
    ]
    assert wire.names() == []
    wire.connection.channels.ended(1)
    assert wire.names() == ["channel.close-ok"] and not wire.connection.channels.states


def test_a_channel_that_fails_behind_the_clients_close_says_both() -> None:
    wire = Wire().opened(1)
    wire.receive((1, m.ChannelClose()))
    wire.connection.channels.close(1, AccessRefused("no"))
    assert wire.names() == ["channel.close", "channel.close-ok"]
    assert wire.connection.channels.states == {1: ChannelState.both}


@pytest.mark.parametrize("sent", [(1, m.ChannelOpen()), (1, m.BasicDeliver()), (7, m.TxCommit())])
def test_a_command_that_may_not_come_closes_the_connection(sent: tuple[int, Method]) -> None:
    wire = Wire().opened(1)
    data = encode_content(*sent, b"", b"", FRAME_MAX) if sent[1].HAS_CONTENT else encode_method(*sent)
    (failed,) = wire.receive(data, publish(1))
    assert isinstance(failed, Failed) and failed.channel == sent[0]


# -- closing ------------------------------------------------------------------------------------------------


def test_commands_behind_the_clients_close_are_ignored_and_close_ok_is_the_last_word() -> None:
    wire = Wire().opened(1)
    assert wire.receive((0, m.ConnectionClose()), publish(1), (0, m.ConnectionClose())) == [CloseRequested()]
    wire.connection.send(1, m.TxCommitOk())  # of what came before
    wire.connection.finish(wire.now)
    wire.connection.send(1, m.TxCommitOk())
    assert wire.names() == ["tx.commit-ok", "connection.close-ok"]
    assert wire.connection.state is ConnectionState.closed


def test_nothing_is_said_behind_our_close_but_the_answer_to_a_close_that_crosses_it() -> None:
    wire = Wire().opened(1)
    wire.connection.send(1, m.TxCommitOk())
    wire.connection.close(ConnectionForced("the broker ends"), wire.now)
    wire.connection.send(1, m.TxCommitOk())
    assert wire.receive(publish(1), (0, m.ConnectionClose()), publish(1)) == []
    assert wire.names() == ["tx.commit-ok", "connection.close", "connection.close-ok"]
    assert wire.receive((0, m.ConnectionCloseOk())) == []
    assert wire.connection.state is ConnectionState.closed


def test_events_that_are_held_back_come_in_order_and_are_dropped_by_a_close() -> None:
    wire = Wire().opened(1)
    for close in (False, True):
        wire.connection.hold()
        assert wire.receive(publish(1, b"1")) == [] and wire.receive(publish(1, b"2")) == []
        if close:
            wire.connection.close(ConnectionForced("the broker ends"), wire.now)
        wire.connection.release(wire.now)
        bodies = [event.body for event in wire.due() if isinstance(event, Command)]
        assert bodies == ([] if close else [b"1", b"2"])


# -- time ---------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_sent_twice_in_the_interval_and_a_silent_client_is_given_up() -> None:
    wire = Wire().opened(heartbeat_s=10)
    for passed in (5, 10, 15):
        assert wire.connection.next_deadline() == 100 + passed
        assert wire.connection.tick(100.0 + passed - 0.1) is None
        assert wire.connection.data_to_send(100.0 + passed - 0.1) == b""
        assert wire.connection.tick(100.0 + passed) is None
        assert wire.connection.data_to_send(100.0 + passed) == HEARTBEAT
    assert wire.connection.next_deadline() == 120
    assert isinstance(wire.connection.tick(120.0), TimedOut)


def test_a_client_that_is_heard_stays_and_one_that_is_not_read_is_not_missed() -> None:
    wire = Wire().opened(heartbeat_s=10)
    wire.now = 119.0
    assert wire.receive(HEARTBEAT) == []
    assert wire.connection.tick(130.0) is None
    wire.connection.hold()
    assert wire.connection.tick(500.0) is None
    wire.connection.release(500.0)
    assert wire.connection.tick(519.0) is None
    assert isinstance(wire.connection.tick(520.0), TimedOut)


def test_handshake_and_close_have_a_limit_and_an_open_connection_has_none() -> None:
    wire = Wire()
    assert wire.connection.next_deadline() == 110
    assert isinstance(wire.connection.tick(110.0), TimedOut)
    wire = Wire().opened(1)
    assert wire.connection.next_deadline() is None and wire.connection.tick(1e9) is None
    wire.connection.close(ConnectionForced("the broker ends"), 200.0)
    assert wire.connection.next_deadline() == 205


# -- any bytes ----------------------------------------------------------------------------------------------

HANDSHAKE = b"".join(
    (
        PROTOCOL_HEADER,
        encode_method(0, START_OK),
        encode_method(0, m.ConnectionTuneOk(10, FRAME_MAX, 0)),
        encode_method(0, m.ConnectionOpen("/")),
        *(encode_method(channel, m.ChannelOpen()) for channel in (1, 2, 3)),
    )
)


def seen(wire: Wire, chunks: list[bytes]) -> list[str]:
    """All events of these bytes, in order, with the invariants held after each piece."""
    found = []
    for chunk in chunks:
        for event in wire.events(chunk):
            assert not isinstance(event, Violation)
            if isinstance(event, Command) and isinstance(event.method, m.ChannelClose):
                wire.connection.channels.ended(event.channel)
            found.append(repr(event))
        assert buffered_bytes(wire.connection._decoder) <= MAX_PENDING + FRAME_MAX + 8
        assert len(wire.connection.channels.states) <= 11
    return found


@examples(200)
@given(st.booleans(), chunked(st.binary(max_size=300)))
def test_random_bytes_never_raise_and_end_in_one_close_at_most(
    open_first: bool, stream: tuple[bytes, list[bytes]]
) -> None:
    wire = Wire().opened(1) if open_first else Wire()
    failed = [event for event in seen(wire, stream[1]) if event.startswith("Failed")]
    assert len(failed) <= 1
    assert not failed or wire.connection.state in (ConnectionState.closing, ConnectionState.closed)


ENDED = [HANDSHAKE + encode_method(1, m.ChannelClose(0, "", 0, 0)), encode_method(1, m.ConnectionOpenOk())]


@pytest.mark.slow
@examples(200)
@example((b"".join(ENDED), ENDED))  # on a channel that has ended
@given(
    chunked(
        st.just(HANDSHAKE)
        | mutated(st.just(HANDSHAKE))
        | STREAM.map(HANDSHAKE.__add__)
        | mutated(STREAM).map(HANDSHAKE.__add__)
    )
)
def test_events_and_answers_do_not_depend_on_how_the_stream_is_cut(stream: tuple[bytes, list[bytes]]) -> None:
    whole, cut = Wire(), Wire()
    assert seen(cut, stream[1]) == seen(whole, [stream[0]])
    assert cut.connection.data_to_send(cut.now) == whole.connection.data_to_send(whole.now)
    assert cut.connection.state is whole.connection.state
    assert cut.connection.channels.states == whole.connection.channels.states
