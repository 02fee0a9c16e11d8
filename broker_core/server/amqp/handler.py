"""The insertion points of the AMQP server: where an ordered list of handlers may look at, change, answer or refuse what passes.

Not here: the real handlers (``trace.py``, ``rate_limit.py``), and where the points stand (``points.py``). How to write a
handler: ``docs/handlers.md``.

Invariant: a point that no handler overrides is not on the path of a command at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_core.amqp.v0_9_1.events import Command, Event
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session


class Handler:
    """Override the points that you need; everything runs in the thread of the server's loop and must not block.

    Each point is given what passes and returns it, or another one in its place, to pass on; returns None where it has answered or
    swallowed it; or raises a ChannelError (closes the channel) or a ConnectionException (closes the connection) to refuse it. Any
    other exception closes the connection with 541 INTERNAL_ERROR. What a handler keeps of a connection belongs into
    ``connection.attached[self]``: it goes with the connection.
    """

    def connection_in(self, connection: ClientConnection, event: Event) -> Event | None:
        """All that comes in: the protocol header, heartbeats, whole commands of every channel (0 too), contents that are too large."""
        return event

    def session_in(self, session: Session, command: Command) -> Command | None:
        """A command of the client on an open channel, before the session carries it out."""
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        """A reply, delivery, return or confirm to the client. ``queue``: where a delivery or get-ok comes from, else ""."""
        return command


class Handlers:
    """An ordered list of handlers, as the three lists that are gone through. False where it is empty."""

    __slots__ = ("all", "connection_in", "session_in", "session_out")

    def __init__(self, handlers: Sequence[Handler] = ()) -> None:
        self.all = tuple(handlers)
        self.connection_in = tuple(each.connection_in for each in handlers if type(each).connection_in is not Handler.connection_in)
        self.session_in = tuple(each.session_in for each in handlers if type(each).session_in is not Handler.session_in)
        self.session_out = tuple(each.session_out for each in handlers if type(each).session_out is not Handler.session_out)

    def __bool__(self) -> bool:
        return bool(self.all)
