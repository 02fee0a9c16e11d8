"""Which method may come when: tables of a connection and of a channel, as the broker sees them (specification 2.2.4, 4.9).

Not here: what a method does, and timers. Codes and texts are RabbitMQ's.

Invariant: a step is a function of state and method alone; it returns the state after the method or raises a ConnectionException, and a
state never goes back. In a closing state everything but close and close-ok is to be dropped: ``dropped_*`` says so.
"""

from __future__ import annotations

from enum import Enum

from broker_core.amqp.v0_9_1.methods import (
    METHODS,
    ChannelClose,
    ChannelCloseOk,
    ChannelFlowOk,
    ChannelOpen,
    ConnectionClose,
    ConnectionCloseOk,
    ConnectionOpen,
    ConnectionSecureOk,
    ConnectionStartOk,
    ConnectionTuneOk,
    ConnectionUpdateSecret,
    Method,
)
from broker_core.errors import ChannelNumberError, CommandInvalid


class ConnectionState(Enum):
    """What the broker waits for. The value is RabbitMQ's name of the state, which its texts hold."""

    awaiting_header = "pre_init"
    awaiting_start_ok = "starting"
    awaiting_secure_ok = "securing"
    awaiting_tune_ok = "tuning"
    awaiting_open = "opening"
    open = "running"
    closing = "closing"
    closed = "closed"


class ChannelState(Enum):
    """``closing``: the broker has sent channel.close and waits for close-ok."""

    open = "open"
    closing = "closing"
    closed = "closed"


_CONNECTION_STEPS: dict[tuple[ConnectionState, type[Method]], ConnectionState] = {
    # A mechanism with a challenge would go on to awaiting_secure_ok instead; the caller sets that.
    (ConnectionState.awaiting_start_ok, ConnectionStartOk): ConnectionState.awaiting_tune_ok,
    (ConnectionState.awaiting_secure_ok, ConnectionSecureOk): ConnectionState.awaiting_tune_ok,
    (ConnectionState.awaiting_tune_ok, ConnectionTuneOk): ConnectionState.awaiting_open,
    (ConnectionState.awaiting_open, ConnectionOpen): ConnectionState.open,
    (ConnectionState.open, ConnectionUpdateSecret): ConnectionState.open,
    # Either side may close at any time from connection.start on.
    (ConnectionState.awaiting_start_ok, ConnectionClose): ConnectionState.closed,
    (ConnectionState.awaiting_secure_ok, ConnectionClose): ConnectionState.closed,
    (ConnectionState.awaiting_tune_ok, ConnectionClose): ConnectionState.closed,
    (ConnectionState.awaiting_open, ConnectionClose): ConnectionState.closed,
    (ConnectionState.open, ConnectionClose): ConnectionState.closed,
    # Both closed at the same time: theirs is answered, the answer to ours still comes.
    (ConnectionState.closing, ConnectionClose): ConnectionState.closing,
    (ConnectionState.closing, ConnectionCloseOk): ConnectionState.closed,
}

# What a client may send on an open channel, beside channel.close. flow-ok and close-ok answer what the broker has not sent: it never
# sends channel.flow, and after its channel.close a channel is not open any more.
_WORK = frozenset(
    kind
    for kind in METHODS.values()
    if kind.SENT_BY != "server"
    and kind.CLASS_ID != ConnectionClose.CLASS_ID
    and kind not in (ChannelOpen, ChannelClose, ChannelCloseOk, ChannelFlowOk)
)


def connection_step(state: ConnectionState, method: Method) -> ConnectionState:
    """The state after ``method`` came on channel 0.

    Raises ChannelNumberError (504) for a method that may not come now.
    """
    after = _CONNECTION_STEPS.get((state, type(method)))
    if after is not None:
        return after
    if dropped_by_connection(state, method):
        return state
    raise ChannelNumberError(f"unexpected method in connection state {state.value}")


def dropped_by_connection(state: ConnectionState, method: Method) -> bool:
    """Whether a method, on whatever channel, is to be ignored because the connection is closing or closed."""
    if state is ConnectionState.closing:
        return not isinstance(method, (ConnectionClose, ConnectionCloseOk))
    return state is ConnectionState.closed


def channel_step(state: ChannelState, method: Method) -> ChannelState:
    """The state of a channel other than 0 after ``method`` came on it.

    Raises ChannelNumberError (504) on a channel that is not open and for a second channel.open, CommandInvalid (503) for a method
    that a client does not send or that belongs on channel 0.
    """
    if state is ChannelState.open:
        if type(method) in _WORK:
            return state
        if isinstance(method, ChannelClose):
            return ChannelState.closed
        if isinstance(method, ChannelOpen):
            raise ChannelNumberError("second 'channel.open' seen")
        raise CommandInvalid("unimplemented method")
    if state is ChannelState.closed:
        if isinstance(method, ChannelOpen):
            return ChannelState.open
        raise ChannelNumberError("expected 'channel.open'")
    return ChannelState.closed if isinstance(method, ChannelCloseOk) else state


def dropped_by_channel(state: ChannelState, method: Method) -> bool:
    """Whether a method is to be ignored because the broker has closed the channel and waits for close-ok."""
    return state is ChannelState.closing and not isinstance(method, (ChannelClose, ChannelCloseOk))
