"""Which method may come when: the states of a connection and of a channel, as tables (specification 2.2.4,
4.9).

Not here: what a method does, and timers. Codes and texts of refusals are RabbitMQ's.
``docs/connection_states.md`` has both tables as diagrams; a test makes them from here.

Invariant: a step is a function of state and cause alone. It gives the state after it or raises a
ConnectionException.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

from broker_core.amqp.v0_9_1.methods import (
    METHODS,
    ChannelClose,
    ChannelCloseOk,
    ChannelFlowOk,
    ChannelOpen,
    ConnectionClose,
    ConnectionCloseOk,
    ConnectionOpen,
    ConnectionStartOk,
    ConnectionTuneOk,
    ConnectionUpdateSecret,
    Method,
)
from broker_core.core.errors import ChannelNumberError, CommandInvalid


class ConnectionState(Enum):
    """The value is RabbitMQ's name of the state, for its error texts.

    ``closing``: the broker has sent connection.close and waits for close-ok. ``ending``: the client has sent
    connection.close and waits for close-ok, which the broker sends when all that came before is done.
    """

    awaiting_header = "pre_init"
    awaiting_start_ok = "starting"
    awaiting_tune_ok = "tuning"
    awaiting_open = "opening"
    open = "running"
    closing = "closing"
    ending = "ending"
    closed = "closed"


class ChannelState(Enum):
    """``closing`` and ``ending`` as for a connection; ``both``: closing, and the client's close is answered.
    ``failing``: the broker sends channel.close when what came before is answered.
    """

    open = "open"
    failing = "failing"
    closing = "closing"
    both = "closing at both ends"
    ending = "ending"
    closed = "closed"


class Step(Enum):
    """What changes a state besides a method of the client."""

    header = "protocol header"
    fail = "a command fails"
    close = "the broker sends close"
    close_ok = "the broker sends close-ok"
    end = "the broker ends the socket, or it is lost"


Cause: TypeAlias = type[Method] | Step

_C, _H = ConnectionState, ChannelState

CONNECTION: Mapping[tuple[ConnectionState, Cause], ConnectionState] = {
    (_C.awaiting_header, Step.header): _C.awaiting_start_ok,
    (_C.awaiting_start_ok, ConnectionStartOk): _C.awaiting_tune_ok,
    (_C.awaiting_tune_ok, ConnectionTuneOk): _C.awaiting_open,
    (_C.awaiting_open, ConnectionOpen): _C.open,
    (_C.open, ConnectionUpdateSecret): _C.open,
    # Either side may close at any time from connection.start on.
    (_C.awaiting_start_ok, ConnectionClose): _C.ending,
    (_C.awaiting_tune_ok, ConnectionClose): _C.ending,
    (_C.awaiting_open, ConnectionClose): _C.ending,
    (_C.open, ConnectionClose): _C.ending,
    (_C.awaiting_start_ok, Step.close): _C.closing,
    (_C.awaiting_tune_ok, Step.close): _C.closing,
    (_C.awaiting_open, Step.close): _C.closing,
    (_C.open, Step.close): _C.closing,
    # Both closed at once: the client's close is answered, and the answer to the broker's still comes.
    (_C.closing, ConnectionClose): _C.closing,
    (_C.closing, ConnectionCloseOk): _C.closed,
    # A command before the client's close failed: both are answered.
    (_C.ending, Step.close): _C.closing,
    (_C.ending, Step.close_ok): _C.closed,
    **{(state, Step.end): _C.closed for state in _C if state is not _C.closed},
}

# What a client may send on an open channel besides channel.close. flow-ok and close-ok are not in it: the
# broker never sends channel.flow, and after its channel.close a channel is not open.
WORK = frozenset(
    kind
    for kind in METHODS.values()
    if kind.SENT_BY != "server"
    and kind.CLASS_ID != ConnectionClose.CLASS_ID
    and kind not in (ChannelOpen, ChannelClose, ChannelCloseOk, ChannelFlowOk)
)

CHANNEL: Mapping[tuple[ChannelState, Cause], ChannelState] = {
    (_H.closed, ChannelOpen): _H.open,
    **{(_H.open, kind): _H.open for kind in WORK},
    (_H.open, ChannelClose): _H.ending,
    (_H.open, Step.fail): _H.failing,
    (_H.open, Step.close): _H.closing,
    (_H.failing, ChannelClose): _H.ending,
    (_H.failing, Step.close): _H.closing,
    (_H.ending, Step.fail): _H.ending,
    (_H.ending, Step.close_ok): _H.closed,
    # It failed before the client's close was answered: the answer to the broker's close still comes.
    (_H.ending, Step.close): _H.both,
    (_H.closing, ChannelClose): _H.both,
    (_H.closing, ChannelCloseOk): _H.closed,
    (_H.both, ChannelCloseOk): _H.closed,
}

# In these states a method that is not in the table is ignored; in all others it is refused.
CONNECTION_IGNORES = frozenset({_C.closing, _C.ending, _C.closed})
CHANNEL_IGNORES = frozenset({_H.failing, _H.closing, _H.both, _H.ending})


def connection_step(state: ConnectionState, cause: Cause) -> ConnectionState:
    """The state after ``cause``: a method on channel 0, or a step.

    Raises ChannelNumberError (504) for a method that may not come now.
    """
    after = CONNECTION.get((state, cause))
    if after is not None:
        return after
    if state in CONNECTION_IGNORES:
        return state
    raise ChannelNumberError(f"unexpected method in connection state {state.value}")


def channel_step(state: ChannelState, cause: Cause) -> ChannelState:
    """The state of a channel other than 0 after ``cause``.

    Raises ChannelNumberError (504) on a channel that is closed, and for a channel.open before close-ok,
    CommandInvalid (503) for a method that a client does not send or that belongs on channel 0.
    """
    after = CHANNEL.get((state, cause))
    if after is not None:
        return after
    if cause is ChannelOpen and state in (ChannelState.open, ChannelState.ending):  # else nobody answers it
        raise ChannelNumberError("second 'channel.open' seen")
    if state in CHANNEL_IGNORES:
        return state
    if state is ChannelState.closed:
        raise ChannelNumberError("expected 'channel.open'")
    raise CommandInvalid("unimplemented method")
