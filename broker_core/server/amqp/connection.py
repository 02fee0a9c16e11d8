"""The socket of one AMQP connection: bytes in and out, flow control both ways, and the sweep of its timers.

Not here: the protocol (``amqp/v0_9_1/connection.py``), the login (``handshake.py``), what a command does
(``session.py``), how sessions end (``sessions.py``), handlers (``handlers/points.py``), listeners
(``server.py``).

Flow control: while a client does not read, ``writable`` is False and its consumers get no messages. If
replies still pile up, the broker stops reading from it. ``pause`` stops reading for any other reason.

Turns: what has come waits for its turn (``input.py``), so that nobody waits long for others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial
from typing import Any, Protocol, cast

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.connection import AmqpConnection
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.events import ChannelFailed, CloseRequested, Command, Failed, Publishes
from broker_core.amqp.v0_9_1.negotiation import Offer
from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.broker.access.rights import Rights
from broker_core.core.checks import assert_never
from broker_core.core.errors import ConnectionException
from broker_core.server.amqp import handshake
from broker_core.server.amqp.commands import returns
from broker_core.server.amqp.commands.basic import publish_many
from broker_core.server.amqp.handlers.handler import Handler, Handlers
from broker_core.server.amqp.handlers.points import Points
from broker_core.server.amqp.input import Input, Resumable
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.ports import FLUSH_BYTES, HIGH_BYTES, LOW_BYTES
from broker_core.server.amqp.sessions import Sessions
from broker_core.server.tls import TlsFiles, certified
from broker_core.server.turns import Turns

logger = logging.getLogger("txmq.amqp")


class Listener(handshake.AdmittingServer, Protocol):
    """The server, for its connections."""

    handlers: Handlers
    options: AmqpOptions
    tls: TlsFiles | None
    turns: Turns
    unwritten: Unwritten

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...


class Unwritten:
    """The connections of a loop that have gathered output. It is written at the end of the tick, and when
    commits are answered.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connections: list[Connection] = []
        self._flushes = False  # at the end of this tick

    def add(self, connection: Connection) -> None:
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._end_tick)
        self._connections.append(connection)

    def _end_tick(self) -> None:
        self._flushes = False
        self.flush()

    def flush(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.flush()


class Connection(asyncio.Protocol):
    """Implements ``ports.ClientConnection``; every method runs in the loop's thread."""

    def __init__(self, server: Listener, offer: Offer) -> None:
        self.server = server
        self.name = ""
        self.address = ""
        self.rights = Rights(server.broker.state.users, "")  # of nobody
        self.seen = server.broker.state
        self.attached: dict[Handler, Any] = {}
        self.writable = True
        self.protocol = AmqpConnection(offer, time.monotonic())
        self._out = self.protocol.out
        self.sessions = Sessions(self, server)
        self.observed: Decoder | None = None
        self.points = Points(self, server.handlers, self.sessions.by_number, server.options.frame_max)
        self._transport: asyncio.Transport | None = None
        self.input = Input(self.protocol, server.turns, self._carry_out, self.sessions.count_content)
        self._unwritten = False  # ``flush`` will be called

    @property
    def user(self) -> str:
        return self.rights.user

    @property
    def state(self) -> ConnectionState:
        return self.protocol.state

    @property
    def tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is not None

    def announces(self, capability: str) -> bool:
        return self.protocol.announces(capability)

    @property
    def closed_for_sending(self) -> bool:
        return self._out.closed_for_sending

    # -- the transport ---------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own classes do not inherit it
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(HIGH_BYTES, LOW_BYTES)
        self.input.begin(transport)
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.name = f"{_address(peer)} -> {_address(here)}"
        self.address = peer[0].partition("%")[0] if peer else ""
        self.server.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self.state is not ConnectionState.closed:
            logger.info("connection %s is lost: %s", self.name, error or "the client closed the socket")
        self.protocol.lost()
        self.input.lost()
        self.sessions.lost()
        returns.go_on(self)
        self.server.closed(self)
        self.points.lost()

    def data_received(self, data: bytes) -> None:
        self.input.came(data)
        if self._out.closed_for_sending:  # it may be the answer to connection.close
            self.flush_later()
            self.input.came_late(len(data), logged_in=self in self.server.quotas.connections)

    def eof_received(self) -> None:
        self.input.last_turn()

    def pause_writing(self) -> None:
        self.writable = False
        self.sessions.stop_deliveries()

    def resume_writing(self) -> None:
        self.writable = True
        self.server.loop.call_soon(self._go_on_writing)  # not here: the caller may hold the lock

    def _go_on_writing(self) -> None:
        if self.writable and not self.closed_for_sending:
            self.sessions.resume_deliveries()
            returns.go_on(self)
            self.resume("output")

    def abort(self, why: str) -> None:
        """Close the socket at once."""
        level = logging.INFO if self.state is ConnectionState.closed else logging.WARNING
        logger.log(level, "connection %s is closed: %s", self.name, why)
        self.protocol.lost()
        self.input.read_on()
        if self._transport is not None:
            self._transport.abort()

    # -- in --------------------------------------------------------------------------------------------------
    def _carry_out(self, ends: float) -> None:
        """The hot path: a command of an open channel goes straight to its session."""
        sessions, clock = self.sessions.by_number, time.monotonic
        for event in self.protocol.piece(clock()):
            if type(event) is not Command and type(event) is not Publishes:
                self._on_event(event)
            else:
                try:
                    session = sessions.get(event.channel)
                    if type(event) is Publishes:
                        if session is None or not publish_many(session, event):
                            self.protocol.separate(event)
                    elif session is not None:
                        session.handle(event)
                    else:
                        self._other(event)
                except Exception as error:
                    self.fail(event.channel, error, event.method)
            if clock() > ends:
                break
        out = self._out
        if out.closed_for_sending or (out.frames and not self._unwritten):
            self.flush_later()

    def _other(self, command: Command) -> None:
        """A command that is not for a session."""
        match command.method:
            case m.ChannelOpen():
                self.sessions.open(command.channel)
                self.send(command.channel, m.ChannelOpenOk())
            case m.ConnectionStartOk() as method:
                name = certified(self._transport, self.server.tls)
                handshake.log_in(self, method, self.server.logins, name)

    def logged_in(self, user: str) -> None:
        self.rights = Rights(self.server.broker.state.users, user)
        self.protocol.authenticated(partial(handshake.enter, self, self.server))
        self.flush_later()

    def _on_event(self, event: ChannelFailed | Failed | CloseRequested) -> None:
        match event:
            case ChannelFailed():
                self.sessions.by_number[event.channel].refuse(event)
            case Failed(_, error, ids):
                self.sessions.fail_all(error, ids, math.inf)
            case CloseRequested():
                self.input.read_on()
                self.sessions.close_all(partial(self.sessions.end_all, self._send_close_ok))
            case _:
                assert_never(event)

    # -- closing ---------------------------------------------------------------------------------------------
    def fail(
        self, number: int, error: BaseException, method: m.Method | None = None, order: float = math.inf
    ) -> None:
        self.sessions.refuse(number, error, method, order)

    def end_session(self, number: int) -> None:
        self.sessions.close(number)

    def close_channel(self, failed: ChannelFailed) -> None:
        self.sessions.fail(failed)

    def close(self, error: ConnectionException, ids: tuple[int, int]) -> None:
        self.protocol.close(error, time.monotonic(), ids)
        self.flush()
        self.input.read_on()

    def _send_close_ok(self) -> None:
        self.protocol.finish(time.monotonic())
        self.flush()

    # -- out -------------------------------------------------------------------------------------------------
    def send(
        self, number: int, method: m.Method, properties: bytes = b"", body: bytes = b"", *, queue: str = ""
    ) -> None:
        sessions = self.sessions.by_number
        if self.observed is not None and number in sessions and not self.closed_for_sending:
            passed = self.points.go(sessions[number], Command(number, method, properties, body), queue)
            if passed is None:
                return
            number, method, properties, body = passed
        self.protocol.send(number, method, properties, body)
        self.flush_later()

    def write(self, data: bytes) -> None:
        if self.observed is not None:
            for event in self.observed.feed(data):
                assert isinstance(event, Command)
                self.send(*event)
            return
        out = self._out  # as Outgoing.write and flush_later, in line: every delivery comes through here
        out.frames.append(data)
        out.size += len(data)
        if not self._unwritten or out.size > FLUSH_BYTES:
            self.flush_later()

    def flush_later(self) -> None:
        """What is gathered in a tick is written once, at its end."""
        if not self._unwritten:
            self._unwritten = True
            self.server.unwritten.add(self)
        if self._out.size > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what was gathered to the transport."""
        self._unwritten = False
        data, transport = self.protocol.data_to_send(time.monotonic()), self._transport
        if transport is None or transport.is_closing():
            return
        if data:
            transport.write(data)
            if not self.writable:
                self.sessions.count_unread(transport.get_write_buffer_size())
        if self._out.closed_for_sending and self.state is ConnectionState.closed:
            # the client ends its own half: to close both would reset what it still sends; TLS has no halves
            transport.write_eof() if transport.can_write_eof() else transport.close()

    # -- handlers --------------------------------------------------------------------------------------------
    def add_handler(self, handler: Handler) -> None:
        if self._transport is not None and all(each is not handler for each in self.points.handlers.all):
            self.points.use(Handlers([*self.points.handlers.all, handler]))

    def remove_handler(self, handler: Handler) -> None:
        if self._transport is not None:
            self.points.use(Handlers([each for each in self.points.handlers.all if each is not handler]))
        self.attached.pop(handler, None)
        self.resume(handler)

    # -- flow control ----------------------------------------------------------------------------------------
    def pause(self, why: object) -> None:
        self.input.pause(why)

    def resume(self, why: object) -> None:
        self.input.resume(why)

    def go_on(self, waiting: Resumable) -> None:
        self.input.go_on(waiting)

    def sweep(self, now: float) -> None:
        """Do what is due: heartbeats, and the time limits of handshake and close. What is left to return does
        not keep a connection that closes from it if the client does not read.
        """
        unheard_s = now - self.protocol.heard_at
        if self.protocol.stopped and not self.writable and unheard_s > self.server.options.close_timeout_s:
            self.abort("it does not read what is left")
        deadline = self.protocol.next_deadline()
        if deadline is not None and now >= deadline:
            timed_out = self.protocol.tick(now)
            if timed_out is not None:
                self.abort(timed_out.why)
            self.flush_later()


def _address(name: Any) -> str:
    return f"{f'[{name[0]}]' if ':' in name[0] else name[0]}:{name[1]}" if name else "?"
