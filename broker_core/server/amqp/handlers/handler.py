"""Handlers: intercepting AMQP commands. An ordered list of handlers may see, change, answer or refuse them.

Not here: the calls of the points (``points.py``). How to write one: ``docs/handlers.md``.

Invariant: a point that no handler overrides is not on the path of a command.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_core.amqp.v0_9_1.events import Command, Event
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

    def session_in(self, session: Session, command: Command) -> Command | None:
        """A command of the client on an open channel, before the session carries it out."""
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        """A reply, delivery, return or confirm. ``queue``: the queue of a delivery or get-ok, else ""."""
        return command


class Handlers:
    """An ordered list of handlers, as one list for each point. False if it is empty."""

    __slots__ = ("all", "connection_in", "session_in", "session_out")

    def __init__(self, handlers: Sequence[Handler] = ()) -> None:
        self.all = tuple(handlers)
        self.connection_in = tuple(
            each.connection_in for each in handlers if type(each).connection_in is not Handler.connection_in
        )
        self.session_in = tuple(
            each.session_in for each in handlers if type(each).session_in is not Handler.session_in
        )
        self.session_out = tuple(
            each.session_out for each in handlers if type(each).session_out is not Handler.session_out
        )

    def __bool__(self) -> bool:
        return bool(self.all)
