"""Events: of a decoder about its bytes, and of a connection about its state.

Not here: what follows from it.
Invariant: every event is complete; a :class:`Command` has all of its content. A :class:`Publishes` is its
commands and nothing else: whether they come as one event depends on how the bytes are cut.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, final

from broker_core.amqp.v0_9_1.methods import Method
from broker_core.core.errors import ChannelError, ConnectionException


@final  # so that ``type(event) is Command`` narrows
class Command(NamedTuple):
    """A method with its content, if it has one.

    ``properties``: property flags and list as they came, ``b""`` if no property is set; they decode.
    ``body``: whole.
    """

    channel: int
    method: Method
    properties: bytes = b""
    body: bytes = b""


@final
class Publishes(NamedTuple):
    """Several commands: publishes that follow each other and differ only in their bodies."""

    channel: int
    method: Method
    properties: bytes
    bodies: list[bytes]

    def commands(self) -> list[Command]:
        channel, method, properties, bodies = self
        return [Command(channel, method, properties, body) for body in bodies]


class ProtocolHeader(NamedTuple):
    """The first 8 bytes of a client; not ``ok``: another protocol or version, and no event follows."""

    ok: bool
    raw: bytes


class Heartbeat(NamedTuple):
    """A heartbeat frame on channel 0."""


class ContentHeader(NamedTuple):
    """The header of a content whose ``size`` bytes of body have not come whole.

    Only for who asks for it; whether a content that comes in few bytes has one depends on how they are cut.
    """

    channel: int
    method: Method
    properties: bytes
    size: int


class ContentTooLarge(NamedTuple):
    """A content header announced ``size`` bytes, more than is allowed: the content is skipped as it comes."""

    channel: int
    size: int


class Violation(NamedTuple):
    """The peer broke the protocol: close the connection with ``error``. The last event of a decoder.

    ``method``: class and method number for connection.close, 0 and 0 if no method caused it.
    """

    error: ConnectionException
    channel: int
    method: tuple[int, int] = (0, 0)


Event: TypeAlias = Command | ContentHeader | ContentTooLarge | Heartbeat | ProtocolHeader | Violation
Decoded: TypeAlias = Event | Publishes


class ChannelFailed(NamedTuple):
    """The channel is to be closed with ``error``: it has no events until it is opened again. Call
    ``channels.close`` when what came before is answered. ``method``: of a :class:`Violation`.
    """

    channel: int
    error: ChannelError
    method: tuple[int, int]


class Failed(NamedTuple):
    """The connection is to be closed with ``error`` because of ``channel`` (0: none). Call ``stop``, and
    ``close`` when what came before is answered. ``method``: of a :class:`Violation`.
    """

    channel: int
    error: ConnectionException
    method: tuple[int, int]


class CloseRequested(NamedTuple):
    """The client has sent connection.close: no command follows. Call ``finish`` when all others are done."""


class TimedOut(NamedTuple):
    """The socket is to be closed at once."""

    why: str


ConnectionEvent: TypeAlias = Command | Publishes | ChannelFailed | Failed | CloseRequested
