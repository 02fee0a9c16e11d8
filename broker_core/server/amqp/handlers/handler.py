"""Handlers: intercepting AMQP commands. An ordered list of handlers may see, change, answer or refuse them.

Not here: the calls of the points (``points.py``). How to write one: ``docs/handlers.md``.

Invariant: a point that no handler overrides is not on the path of a command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker_core.amqp.v0_9_1.events import Command, ContentHeader, Event
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session


class Handler:
    """Override the points that you need; everything runs in the thread of the server's loop and must not
    block.

    A point gets an event or a command and returns it, or another one, to pass it on. It returns None if it
    has answered or swallowed it. It raises a ChannelError (closes the channel) or a ConnectionException
    (closes the connection) to refuse it. Any other exception closes the connection with 541 INTERNAL_ERROR. A
    handler keeps data of a connection in ``connection.attached[self]``; it ends with the connection.
    """

    def connection_in(self, connection: ClientConnection, event: Event) -> Event | None:
        """Every event: protocol header, heartbeats, commands of all channels (0 too), too large contents."""
        return event

    def content_in(self, session: Session, header: ContentHeader) -> ContentHeader | None:
        """Each content of the client, once, before its command; a body that comes in later frames is not
        gathered yet. Another header: the content has its method and properties. None: it is dropped as it
        comes.
        """
        return header

    def session_in(self, session: Session, command: Command) -> Command | None:
        """A command of the client on an open channel, before the session carries it out."""
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        """A reply, delivery, return or confirm. ``queue``: the queue of a delivery or get-ok, else ""."""
        return command


POINTS = ("connection_in", "content_in", "session_in", "session_out")


class Handlers:
    """An ordered list of handlers, as one list for each point of those that override it."""

    __slots__ = ("all", *POINTS)
    connection_in: Sequence[Callable[[ClientConnection, Event], Event | None]]
    content_in: Sequence[Callable[[Session, ContentHeader], ContentHeader | None]]
    session_in: Sequence[Callable[[Session, Command], Command | None]]
    session_out: Sequence[Callable[[Session, Command, str], Command | None]]

    def __init__(self, handlers: Sequence[Handler] = ()) -> None:
        self.all = tuple(handlers)
        for point in POINTS:
            overrides = [
                each for each in handlers if getattr(type(each), point) is not getattr(Handler, point)
            ]
            setattr(self, point, tuple(getattr(each, point) for each in overrides))
