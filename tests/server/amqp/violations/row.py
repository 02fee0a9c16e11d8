"""What a row of the table of violations says: what is sent, and how the broker answers. Not here: how it is
run.

The outcomes are those of RabbitMQ 3.10.8, observed; where this broker must differ, ``why`` says so and names
the outcome there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pamqp import base, commands, header, heartbeat

from tests.amqp_peer import encoded

AnySent = bytes | base.Frame | header.ContentHeader | heartbeat.Heartbeat | tuple[int, base.Frame]
Phase = Literal["connected", "started", "tune", "tuned", "open"]


@dataclass(frozen=True)
class Like:
    """A text of which only this regular expression is fixed: the rest is Erlang's, or an address."""

    pattern: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and re.fullmatch(self.pattern, other, re.DOTALL) is not None

    def __hash__(self) -> int:
        return hash(self.pattern)


Text = str | Like


BLAMED = (-1, -1)  # class and method id of what was sent last; 0 and 0 of bytes


class ChannelClosed(NamedTuple):
    """channel.close on channel 1: reply code, reply text, class and method id."""

    code: int
    text: Text
    ids: tuple[int, int] = BLAMED


class ConnectionClosed(NamedTuple):
    """connection.close: reply code, reply text, class and method id."""

    code: int
    text: Text
    ids: tuple[int, int] = BLAMED


class Dropped(NamedTuple):
    """The socket is closed; these bytes come before, and no close method."""

    received: bytes = b""


class Answered(NamedTuple):
    """No violation for RabbitMQ: the names of the methods that come back; the channel works on."""

    names: tuple[str, ...] = ()


Outcome = ChannelClosed | ConnectionClosed | Dropped | Answered


@dataclass(frozen=True)
class Row:
    """One violation. A frame without a channel goes to channel 1.

    ``before`` and ``other`` are sent and answered first, ``other`` on another connection; ``phase`` says how
    far the handshake is, ``channel_max`` what the client tunes to.
    """

    name: str
    sends: tuple[AnySent, ...]
    expected: Outcome
    before: tuple[AnySent, ...] = ()
    other: tuple[AnySent, ...] = ()
    phase: Phase = "open"
    channel_max: int = 2047
    why: str = ""
    here: Outcome | None = None  # the outcome of this broker, where it differs

    def __str__(self) -> str:
        return self.name


def inequivalent(argument: str, of: str, how: str) -> str:
    """The text of a declaration that differs from what is there."""
    return f"PRECONDITION_FAILED - inequivalent arg '{argument}' for {of} in vhost '/': {how}"


def invalid(argument: str, how: str) -> str:
    """The text of a queue argument that means nothing."""
    return (
        f"PRECONDITION_FAILED - invalid arg '{argument}' for queue 'violation.arguments' in vhost '/': {how}"
    )


def locked(queue: str) -> str:
    """The text of a queue that belongs to another connection, cut to the 255 bytes of a short string."""
    text = f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue '{queue}' in vhost '/'. It could be originally declared on "
    return (
        text + "another connection or the exclusive property value does not match that of the original "
        "declaration."
    )[:255]


def on_the_wire(sent: AnySent) -> bytes:
    if isinstance(sent, bytes):
        return sent
    channel, frame = sent if isinstance(sent, tuple) else (1, sent)
    return encoded(channel, frame)


HAS_ANSWER = tuple(
    kind
    for group in (
        commands.Channel,
        commands.Exchange,
        commands.Queue,
        commands.Basic,
        commands.Tx,
        commands.Confirm,
    )
    for kind in vars(group).values()
    if isinstance(kind, type) and issubclass(kind, base.Frame) and kind.synchronous
)


def row(name: str, *sends: Any, **fields: Any) -> Row:
    """What is sent, and last the outcome; without one, each method is answered that has an answer."""
    frames: list[Any] = [sent[1] if type(sent) is tuple else sent for sent in sends]
    outcome: Outcome
    if isinstance(sends[-1], Outcome):
        *_, outcome = sends
        sends, frames = sends[:-1], frames[:-1]
    else:
        outcome = Answered(tuple(f"{frame.name}Ok" for frame in frames if isinstance(frame, HAS_ANSWER)))
    last = frames[-1].index if isinstance(frames[-1], base.Frame) else 0

    def complete(found: Outcome | None) -> Outcome | None:
        blames = isinstance(found, ChannelClosed | ConnectionClosed) and found.ids == BLAMED
        return found._replace(ids=divmod(last, 1 << 16)) if blames else found  # type: ignore[union-attr,call-arg]

    outcome, here = complete(outcome), complete(fields.pop("here", None))  # type: ignore[assignment]
    return Row(name, sends, outcome, here=here, **fields)
