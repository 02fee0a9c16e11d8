"""The tables of states: every method in every state is a step, is dropped, or is refused with RabbitMQ's code
and text.
"""

from __future__ import annotations

import pytest

from broker_core.amqp.v0_9_1.methods import (
    METHODS,
    ChannelClose,
    ChannelCloseOk,
    ChannelOpen,
    ConnectionClose,
    ConnectionCloseOk,
    ConnectionOpen,
    ConnectionStartOk,
    ConnectionTuneOk,
    ConnectionUpdateSecret,
    Method,
)
from broker_core.amqp.v0_9_1.states import (
    ChannelState,
    ConnectionState,
    Step,
    channel_step,
    connection_step,
)
from broker_core.core.errors import ChannelNumberError, CommandInvalid

HANDSHAKE = [
    (ConnectionState.awaiting_start_ok, ConnectionStartOk, ConnectionState.awaiting_tune_ok),
    (ConnectionState.awaiting_tune_ok, ConnectionTuneOk, ConnectionState.awaiting_open),
    (ConnectionState.awaiting_open, ConnectionOpen, ConnectionState.open),
    (ConnectionState.open, ConnectionUpdateSecret, ConnectionState.open),
    (ConnectionState.open, ConnectionClose, ConnectionState.ending),
]
ALL = sorted(METHODS.values(), key=lambda kind: kind.NAME)


@pytest.mark.parametrize(("state", "kind", "after"), HANDSHAKE)
def test_the_handshake_goes_forward_step_by_step(
    state: ConnectionState, kind: type[Method], after: ConnectionState
):
    assert connection_step(state, kind) is after


REFUSING = [state for state in ConnectionState if state.value not in ("closing", "ending", "closed")]


@pytest.mark.parametrize(("state", "name"), [(state, state.value) for state in REFUSING])
def test_any_other_method_on_channel_0_is_a_channel_error_that_names_the_state(
    state: ConnectionState, name: str
):
    accepted = {kind for before, kind, _ in HANDSHAKE if before is state}
    if state is not ConnectionState.awaiting_header:
        accepted.add(ConnectionClose)
    for kind in ALL:
        if kind in accepted:
            continue
        with pytest.raises(ChannelNumberError) as raised:
            connection_step(state, kind)
        assert raised.value.summary == f"unexpected method in connection state {name}"
        assert raised.value.reply_code == 504


@pytest.mark.parametrize(
    "state", [state for state in ConnectionState if state.value in ("starting", "tuning", "opening")]
)
def test_a_client_may_close_during_the_handshake(state: ConnectionState):
    assert connection_step(state, ConnectionClose) is ConnectionState.ending


def test_a_closing_connection_ignores_all_but_close_and_close_ok():
    for kind in ALL:
        after = connection_step(ConnectionState.closing, kind)
        assert after is (ConnectionState.closed if kind is ConnectionCloseOk else ConnectionState.closing)
        assert connection_step(ConnectionState.ending, kind) is ConnectionState.ending
        assert connection_step(ConnectionState.closed, kind) is ConnectionState.closed
    assert connection_step(ConnectionState.ending, Step.close_ok) is ConnectionState.closed


@pytest.mark.parametrize("state", ConnectionState)
def test_the_end_of_the_socket_closes_a_connection_in_any_state(state: ConnectionState):
    assert connection_step(state, Step.end) is ConnectionState.closed


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.NAME)
def test_a_channel_that_is_not_open_takes_channel_open_and_nothing_else(kind: type[Method]):
    if kind is ChannelOpen:
        assert channel_step(ChannelState.closed, kind) is ChannelState.open
        return
    with pytest.raises(ChannelNumberError) as raised:
        channel_step(ChannelState.closed, kind)
    assert raised.value.summary == "expected 'channel.open'"


# What RabbitMQ answers with 503 "unimplemented method" on an open channel.
UNIMPLEMENTED = {
    kind
    for kind in ALL
    if kind.NAME.startswith("connection.")
    or (kind.NAME.endswith("-ok") and not kind.NAME.startswith("connection."))
    or kind.NAME in ("basic.deliver", "basic.return", "basic.get-empty")
}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.NAME)
def test_an_open_channel_takes_what_a_client_sends_and_refuses_the_rest(kind: type[Method]):
    if kind is ChannelOpen:
        with pytest.raises(ChannelNumberError) as second:
            channel_step(ChannelState.open, kind)
        assert second.value.summary == "second 'channel.open' seen"
    elif kind in UNIMPLEMENTED:
        with pytest.raises(CommandInvalid) as refused:
            channel_step(ChannelState.open, kind)
        assert refused.value.summary == "unimplemented method"
    else:
        assert channel_step(ChannelState.open, kind) is (
            ChannelState.ending if kind is ChannelClose else ChannelState.open
        )


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.NAME)
def test_a_closing_channel_ignores_all_but_close_and_close_ok(kind: type[Method]):
    after = channel_step(ChannelState.closing, kind)
    answered = {ChannelCloseOk: ChannelState.closed, ChannelClose: ChannelState.both}
    assert after is answered.get(kind, ChannelState.closing)
    again = channel_step(ChannelState.both, kind)
    assert again is (ChannelState.closed if kind is ChannelCloseOk else ChannelState.both)
    if kind is ChannelOpen:  # nobody would answer it
        with pytest.raises(ChannelNumberError):
            channel_step(ChannelState.ending, kind)
    else:
        assert channel_step(ChannelState.ending, kind) is ChannelState.ending


def test_a_channel_that_fails_before_the_clients_close_is_answered_waits_for_close_ok():
    assert channel_step(ChannelState.ending, Step.close) is ChannelState.both
    assert channel_step(ChannelState.ending, Step.close_ok) is ChannelState.closed
