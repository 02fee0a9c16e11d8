"""The insertion points of one connection: its events and commands pass through the handlers here.

Not here: the handlers (``handler.py``), and what an alarm is (``alarm.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.events import Command, ContentHeader, Event
from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.server.amqp.handlers.handler import Handlers
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import DroppedPublish, Session


class Points:
    """``handlers``: of this connection; ``use`` changes them."""

    __slots__ = ("_announced", "_blocked", "_connection", "_frame_max", "_guards", "_sessions", "handlers")

    def __init__(
        self,
        connection: ClientConnection,
        handlers: Handlers,
        sessions: Mapping[int, Session],
        frame_max: int,
    ) -> None:
        self._connection = connection
        self._sessions = sessions  # by channel
        self._frame_max = frame_max
        self._announced: set[int] = set()  # channels with a content whose header has passed, and not the rest
        self._guards = ""  # the reason of an alarm that is on
        self._blocked = False  # it got connection.blocked, if it can, and is not read
        self.use(handlers)

    def use(self, handlers: Handlers) -> None:
        """From the next event on."""
        self.handlers = handlers
        decoder = Decoder(self._frame_max, handshake=False) if handlers.session_out else None
        self._connection.observed = decoder
        if not handlers.content_in:
            self._announced.clear()
        self._watch()

    def lost(self) -> None:
        """The socket is gone: no event comes, and the connection is freed without the collector."""
        del self._connection

    def _watch(self) -> None:
        points = self.handlers
        watched = points.connection_in or points.content_in or points.session_in or self._guards
        self._connection.protocol.watch(self._come if watched else None, headers=bool(points.content_in))

    def _come(self, event: Event) -> Event | None:
        """The event to pass on in place of ``event``; None: none."""
        number, method = (
            (event.channel, event.method) if isinstance(event, Command | ContentHeader) else (0, None)
        )
        try:
            if isinstance(event, ContentHeader):
                passed: Event | None = self._content(event)
                if passed is not None:
                    self._announced.add(number)
            else:
                passed = self._event(event)
            if passed is None and type(method) is m.BasicPublish and number in self._sessions:
                self._sessions[number].handle(Command(number, DroppedPublish()))
            return passed
        except BaseException as error:  # SystemExit too: it would end the thread of all connections
            self._connection.fail(number, error, method)
            return None

    def _content(self, header: ContentHeader) -> ContentHeader | None:
        session = self._session(header.channel)
        if session is None:
            return header
        for look in self.handlers.content_in:
            passed = look(session, header)
            if passed is None:
                return None
            header = header._replace(method=passed.method, properties=passed.properties)
        return header

    def _session(self, number: int) -> Session | None:
        return None if self._connection.protocol.closing else self._sessions.get(number)

    def _event(self, event: Event) -> Event | None:
        if isinstance(event, Command):
            number, method, properties, body = event
            announced = number in self._announced
            self._announced.discard(number)
            if method.HAS_CONTENT and not announced and self.handlers.content_in:  # it came whole
                header = self._content(ContentHeader(number, method, properties, len(body)))
                if header is None:
                    return None
                event = event._replace(method=header.method, properties=header.properties)
        for look in self.handlers.connection_in:
            passed = look(self._connection, event)
            if passed is None:
                return None
            event = passed
        session = self._session(event.channel) if isinstance(event, Command) else None
        if session is None or not isinstance(event, Command):
            return event
        for change in self.handlers.session_in:
            changed = change(session, event)
            if changed is None:
                return None
            event = changed
        if self._guards and not self._blocked and type(event.method) is m.BasicPublish:
            self._blocked = True
            if self._connection.announces("connection.blocked"):
                self._connection.send(0, m.ConnectionBlocked(self._guards))
            self._connection.pause("alarm")
        return event

    def go(self, session: Session, command: Command, queue: str) -> Command | None:
        """The command to send in place of ``command``; None: none."""
        for look in self.handlers.session_out:
            try:
                passed = look(session, command, queue)
            except BaseException as error:
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
