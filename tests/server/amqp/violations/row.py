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


# of the channel below 500, else of the connection
CODES = {
    "ACCESS_REFUSED": 403, "NOT_FOUND": 404, "RESOURCE_LOCKED": 405, "PRECONDITION_FAILED": 406,
    "FRAME_ERROR": 501, "SYNTAX_ERROR": 502, "COMMAND_INVALID": 503, "CHANNEL_ERROR": 504,
    "UNEXPECTED_FRAME": 505, "NOT_ALLOWED": 530, "NOT_IMPLEMENTED": 540, "INTERNAL_ERROR": 541,
}  # fmt: skip


def closed(text: Text, ids: tuple[int, int] = BLAMED) -> Outcome:
    """With the reply code that the text begins with."""
    words = text.pattern if isinstance(text, Like) else text
    code = CODES[words.split(" - ")[0]]
    return (ChannelClosed if code < 500 else ConnectionClosed)(code, text, ids)


def row(name: str, *sends: Any, ids: tuple[int, int] = BLAMED, here: Any = None, **fields: Any) -> Row:
    """What is sent, and last the outcome, or the text of a close with the ``ids`` that it names; without one,
    each method is answered that has an answer.
    """
    *frames, outcome = sends
    if isinstance(outcome, Text):
        outcome = closed(outcome, ids)
    elif not isinstance(outcome, Outcome):
        frames = [*sends]
        methods = [sent[1] if type(sent) is tuple else sent for sent in frames]
        outcome = Answered(tuple(f"{each.name}Ok" for each in methods if isinstance(each, HAS_ANSWER)))
    last = frames[-1][1] if type(frames[-1]) is tuple else frames[-1]
    blamed = divmod(last.index, 1 << 16) if isinstance(last, base.Frame) else (0, 0)

    def complete(found: Any) -> Any:
        found = closed(found) if isinstance(found, Text) else found
        return found._replace(ids=blamed) if getattr(found, "ids", ()) == BLAMED else found

    return Row(name, tuple(frames), complete(outcome), here=complete(here), **fields)
