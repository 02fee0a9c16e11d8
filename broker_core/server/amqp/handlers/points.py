"""The insertion points of one connection: its events and commands pass through the handlers here.

Not here: the handlers (``handler.py``), and what an alarm is (``alarm.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.events import Command, Event
from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.server.amqp.handlers.handler import Handlers
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session


class Points:
    """``confirms`` decodes the bytes given to ``write`` if handlers see what is sent, else None."""

    __slots__ = ("_blocked", "_connection", "_guards", "_handlers", "_sessions", "confirms")

    def __init__(
        self,
        connection: ClientConnection,
        handlers: Handlers,
        sessions: Mapping[int, Session],
        frame_max: int,
    ) -> None:
        self._connection = connection
        self._handlers = handlers
        self._sessions = sessions  # by channel
        self._guards = ""  # the reason of an alarm that is on
        self._blocked = False  # it got connection.blocked, if it can, and is not read
        self.confirms = Decoder(frame_max, handshake=False) if handlers.session_out else None
        self._watch()

    def lost(self) -> None:
        """The socket is gone: no event comes, and the connection is freed without the collector."""
        del self._connection

    def _watch(self) -> None:
        watched = self._handlers.connection_in or self._handlers.session_in or self._guards
        self._connection.protocol.watch(self._come if watched else None)

    def _come(self, event: Event) -> Event | None:
        """The event to pass on in place of ``event``; None: none."""
        connection = self._connection
        number, method = (event.channel, event.method) if isinstance(event, Command) else (0, None)
        try:
            for look in self._handlers.connection_in:
                passed = look(connection, event)
                if passed is None:
                    return None
                event = passed
            session = self._sessions.get(event.channel) if isinstance(event, Command) else None
            if session is None or not isinstance(event, Command) or connection.protocol.closing:
                return event
            return self._come_to_session(session, event)
        except Exception as error:
            connection.fail(number, error, method)
            return None

    def _come_to_session(self, session: Session, command: Command) -> Command | None:
        for look in self._handlers.session_in:
            passed = look(session, command)
            if passed is None:
                return None
            command = passed
        if self._guards and not self._blocked and type(command.method) is m.BasicPublish:
            self._blocked = True
            if self._connection.announces("connection.blocked"):
                self._connection.send(0, m.ConnectionBlocked(self._guards))
            self._connection.pause("alarm")
        return command

    def go(self, session: Session, command: Command, queue: str) -> Command | None:
        """The command to send in place of ``command``; None: none."""
        for look in self._handlers.session_out:
            try:
                passed = look(session, command, queue)
            except Exception as error:
                self._connection.fail(command.channel, error, command.method)
                return None
            if passed is None:
                return None
            command = passed
        return command

    def guard(self, reason: str) -> None:
        """An alarm is on: a client that publishes from now on is blocked until it is off."""
        self._guards = reason
        self._watch()

    def unguard(self) -> None:
        """The alarm is off."""
        self._guards = ""
        self._watch()
        if self._blocked:
            self._blocked = False
            if (
                self._connection.announces("connection.blocked")
                and self._connection.state is ConnectionState.open
            ):
                self._connection.send(0, m.ConnectionUnblocked())
            self._connection.resume("alarm")
