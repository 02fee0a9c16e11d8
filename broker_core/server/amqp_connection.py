"""One AMQP connection: bytes to commands to sessions, and back; handshake, heartbeats, back-pressure, closing.

Not here: frames (``amqp/``), who may come in (``handshake.py``), what a command does (``session.py``), listeners and the sweep that calls
``sweep`` (``amqp.py``).

Back-pressure: a client that does not read makes ``writable`` False, and its consumers get nothing; if replies pile up all the same,
it is not read either. ``pause`` stops reading for any other reason; what has been read and not carried out waits in ``_held``.
Invariant: what is written leaves in the order of the calls of ``send`` and ``write``. Every session ends exactly once, and after all
of them the connection's exclusive queues go; close-ok is said when that is durable. Once either side has closed the connection, nothing
that comes is looked at but close and close-ok, and once it was this side, nothing else is said. What came before on channels without
tx is still carried out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, PROTOCOL_HEADER, encode_content, encode_method
from broker_core.amqp.v0_9_1.events import Command, ContentTooLarge, Event, ProtocolHeader, Violation
from broker_core.amqp.v0_9_1.states import ChannelState, ConnectionState, channel_step, connection_step, dropped_by_channel
from broker_core.errors import (
    ChannelError,
    ConnectionAccessRefused,
    ConnectionException,
    InternalFault,
    NotAllowed,
    PreconditionFailed,
    TxmqError,
)
from broker_core.server import handshake
from broker_core.server.session import Session, as_amqp, end_connection

if TYPE_CHECKING:
    from broker_core.server.amqp import AmqpServer
    from broker_core.server.handler import Handler

logger = logging.getLogger("txmq.amqp")

HIGH_BYTES = 1024 * 1024  # unsent above this: consumers stop, until it is below LOW_BYTES
LOW_BYTES = 256 * 1024
HARD_BYTES = 16 * 1024 * 1024  # unsent above this: the client is not read any more
FLUSH_BYTES = 256 * 1024  # gathered in a tick before it is written in the middle of it
_CLOSE_OK = encode_method(0, m.ConnectionCloseOk())
_WITH_CONNECTION = m.ChannelClose()  # the client has closed the connection: its channels close, and nobody waits for close-ok


class Connection(asyncio.Protocol):
    """``attached`` is for handlers: what they keep as long as the connection lives. Everything is for the loop's thread."""

    __slots__ = (
        "_closing_channels",
        "_confirms",
        "_deadline",
        "_decoder",
        "_elsewhere",
        "_ended",
        "_ending",
        "_finish",
        "_heard",
        "_heard_at",
        "_held",
        "_out",
        "_out_bytes",
        "_overheard",
        "_paused",
        "_said",
        "_said_at",
        "_session_in",
        "_transport",
        "_watched",
        "attached",
        "blocked",
        "channel_max",
        "client_capabilities",
        "client_properties",
        "frame_max",
        "heartbeat_s",
        "loopback",
        "mute",
        "name",
        "server",
        "sessions",
        "state",
        "user",
        "writable",
    )

    def __init__(self, server: AmqpServer) -> None:
        options = server.options
        self.server = server
        self.name = ""
        self.loopback = False
        self.user = ""
        self.state = ConnectionState.awaiting_header
        self.sessions: dict[int, Session] = {}
        self.attached: dict[Handler, Any] = {}
        self.client_properties: dict[str, Any] = {}
        self.client_capabilities: dict[str, Any] = {}
        self.channel_max = options.channel_max
        self.frame_max = options.frame_max
        self.heartbeat_s = 0
        self.writable = True
        self.blocked = ""  # why it may not publish, once it was told
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder(options.frame_max, options.max_body_bytes, options.max_pending_bytes)
        self._session_in = server.handlers.session_in
        self._watched = bool(server.handlers.connection_in or self._session_in)
        # confirms reach ``write`` as bytes; handlers get them as commands
        self._confirms = Decoder(options.frame_max, handshake=False) if server.handlers.session_out else None
        self._closing_channels: set[int] = set()  # with channel.close said by one side
        self._ending = 0  # sessions whose channel the client has closed and whose end is not durable yet
        self._overheard: bytes | None = None  # after a violation: the last bytes that came, for close-ok is looked for among them
        self._elsewhere: Callable[[Event], None] | None = None  # where events go instead of being carried out: paused, or closing
        self._held: list[Event] | None = None  # paused: what is decoded and waits
        self._finish: Callable[[], None] | None = None  # closing: what is left to do when all sessions have ended
        self.mute = False  # connection.close is said: only close-ok may follow
        self._paused: set[object] = set()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._ended = False
        self._heard = self._said = False  # since the last sweep
        self._heard_at = self._said_at = time.monotonic()
        self._deadline: float | None = self._heard_at + options.handshake_timeout_s

    # -- the transport --------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's own classes do not inherit it
        transport.set_write_buffer_limits(HIGH_BYTES, LOW_BYTES)
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.name = f"{_address(peer)} -> {_address(here)}"
        self.loopback = bool(peer) and ipaddress.ip_address(peer[0].partition("%")[0]).is_loopback
        self.server.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self.state is not ConnectionState.closed:
            logger.info("connection %s is lost: %s", self.name, error or "the client closed the socket")
        self.state = ConnectionState.closed
        self._drop_what_comes()
        if self._finish is None:  # else its sessions end by themselves
            self._end("its connection was lost")
        self.server.closed(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if not self._deaf:
            events = self._decoder.feed(data)
            if self._held is None:
                self._carry_out(events)
            else:
                self._held += events
        if self._deaf:
            self._listen_for_close_ok(data)

    @property
    def _deaf(self) -> bool:
        """Nothing that comes can be understood, or matters, any more."""
        return self._overheard is not None

    def pause_writing(self) -> None:
        self.writable = False
        for session in self.sessions.values():
            for consumer in tuple(session.channel.consumers.values()):  # a copy: this thread may not hold the lock of the state
                consumer.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self.server.loop.call_soon(self._go_on_writing)  # not here: who writes may hold the lock of the state

    def _go_on_writing(self) -> None:
        if not self.writable or self.mute:
            return
        state = self.server.broker.state
        with self.server.broker.committer.lock:
            for session in self.sessions.values():
                for consumer in session.channel.consumers.values():
                    consumer.writable = True
                    state.wake(consumer.queue)
        self.server.commits.wake()
        self.resume("output")

    def abort(self, why: str) -> None:
        """Close the socket at once."""
        logger.log(logging.INFO if self.state is ConnectionState.closed else logging.WARNING, "connection %s is closed: %s", self.name, why)
        self.state = ConnectionState.closed
        self._drop_what_comes()
        if self._transport is not None:
            self._transport.abort()

    # -- in -------------------------------------------------------------------------------------------------------------
    def _carry_out(self, events: list[Event]) -> None:
        """The hot path: a command of an open channel goes straight to its session."""
        sessions, watched = self.sessions, self._watched
        for event in events:
            if self._elsewhere is not None:  # paused or closed by the one before
                self._elsewhere(event)
            elif watched or type(event) is not Command:
                self._carry_out_watched(event)
            else:
                session = sessions.get(event.channel)
                if session is None:
                    self._other(event)
                    continue
                try:
                    session.handle(event)
                except Exception as error:
                    self.fail(event.channel, error, event.method)

    def _carry_out_watched(self, event: Event) -> None:
        """The same through the insertion points."""
        number, method = (event.channel, event.method) if isinstance(event, Command) else (0, None)
        try:
            for look in self.server.handlers.connection_in if not isinstance(event, Violation) else ():
                passed = look(self, event)
                if passed is None:
                    return
                event = passed
            if self._closing and not _closes(event):  # a handler closed it
                return
            session = self.sessions.get(event.channel) if isinstance(event, Command) else None
            if session is None or not isinstance(event, Command):
                self._other(event)
                return
            for change in self._session_in:
                command = change(session, event)
                if command is None:
                    return
                event = command
            if not (session.ended or self._closing):
                session.handle(event)
        except Exception as error:
            self.fail(number, error, method)

    @property
    def _closing(self) -> bool:
        """Whether one side has closed the connection."""
        return self.state is ConnectionState.closing or self.state is ConnectionState.closed

    def _drop_what_comes(self) -> None:
        """The connection is closed by one side: from now on, and in what waits, nothing is looked at but close and close-ok."""
        self._elsewhere = self._after_close
        self._paused.clear()
        held, self._held = self._held or [], None
        for event in held:
            self._after_close(event)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _after_close(self, event: Event) -> None:
        if self.state is ConnectionState.closing and _closes(event):
            (self._carry_out_watched if self._watched else self._other)(event)

    def _other(self, event: Event) -> None:
        """All that is not for an open channel."""
        method = event.method if isinstance(event, Command) else None
        try:
            match event:
                case Command(0, _):
                    self._connection_method(event)
                case Command():
                    self._closed_channel(event)
                case ProtocolHeader():
                    self._header(event)
                case ContentTooLarge(_, size):
                    method = m.BasicPublish()
                    most = self.server.options.max_body_bytes
                    raise PreconditionFailed(f"message size {size} is larger than configured max size {most}")
                case Violation():
                    self._violated(event)
        except Exception as error:
            self.fail(0 if isinstance(event, (ProtocolHeader, Violation)) else getattr(event, "channel", 0), error, method)

    def _violated(self, event: Violation) -> None:
        """Nothing that follows can be understood, but the client should hear why: drop what comes until it has answered or gone."""
        if self._closing:
            self._overheard = b""
            return
        self._close(event.error, event.method)
        self._overheard = b""

    def _listen_for_close_ok(self, data: bytes) -> None:
        assert self._overheard is not None
        if self.state is ConnectionState.closed:
            return
        recent = self._overheard + data
        if _CLOSE_OK in recent:
            self._shut()
        self._overheard = recent[-len(_CLOSE_OK) + 1 :]

    # -- handshake and channel 0 ----------------------------------------------------------------------------------------
    def _header(self, event: ProtocolHeader) -> None:
        if not event.ok:
            self._gather(PROTOCOL_HEADER)  # specification 4.2.2: say what is spoken here, and close
            self._overheard = b""
            self._shut()
            return
        self.state = ConnectionState.awaiting_start_ok
        self.send(0, handshake.start(self.server.options))

    def _connection_method(self, command: Command) -> None:
        method = command.method
        before, self.state = self.state, connection_step(self.state, method)
        match method:
            case m.ConnectionClose() if before is ConnectionState.closing:
                self.send(0, m.ConnectionCloseOk())  # both at once; the answer to ours still comes
            case m.ConnectionClose():
                self._closed_by_client()
            case _ if before in (ConnectionState.closing, ConnectionState.closed):
                if self.state is ConnectionState.closed:
                    self._shut()
            case m.ConnectionStartOk():
                self._start_ok(method)
            case m.ConnectionTuneOk():
                self._tune_ok(method)
            case m.ConnectionOpen():
                self._open(method)
            case m.ConnectionUpdateSecret():  # a password does not end: the connection stays what it is, as in RabbitMQ
                self.send(0, m.ConnectionUpdateSecretOk())

    def _start_ok(self, method: m.ConnectionStartOk) -> None:
        self.client_properties = dict(method.client_properties)
        capabilities = self.client_properties.get("capabilities")
        self.client_capabilities = capabilities if isinstance(capabilities, dict) else {}
        self.user = handshake.login(method, self.server.options, self.name, self.loopback)
        options = self.server.options
        self.send(0, m.ConnectionTune(options.channel_max, options.frame_max, options.heartbeat_s))

    def _tune_ok(self, method: m.ConnectionTuneOk) -> None:
        handshake.check_tuned(method, self.server.options)
        self.channel_max, self.frame_max = method.channel_max, method.frame_max
        self.heartbeat_s = method.heartbeat
        self._decoder.frame_max = method.frame_max

    def _open(self, method: m.ConnectionOpen) -> None:
        if method.virtual_host != "/":
            raise NotAllowed(f"vhost {method.virtual_host} not found", "there is one, '/'")
        self._deadline = None
        self.send(0, m.ConnectionOpenOk())

    def announces(self, capability: str) -> bool:
        """Whether the client said that it can do this."""
        return self.client_capabilities.get(capability) is True

    # -- channels -------------------------------------------------------------------------------------------------------
    def _closed_channel(self, command: Command) -> None:
        """A command of a channel that is not open, or closing."""
        number, method = command.channel, command.method
        if self.state is not ConnectionState.open:
            connection_step(self.state, method)  # raises before the connection is open; while it closes, nothing is done any more
        elif number in self._closing_channels:
            if dropped_by_channel(ChannelState.closing, method):
                return
            if isinstance(method, m.ChannelClose):
                self.send(number, m.ChannelCloseOk())  # both at once; the answer to ours still comes
            else:
                self._closing_channels.discard(number)
        else:
            channel_step(ChannelState.closed, method)
            if self.channel_max and len(self.sessions) >= self.channel_max:
                text = f"number of channels opened ({len(self.sessions)}) has reached the negotiated channel_max ({self.channel_max})"
                self._close(NotAllowed(text), (0, 0))
                return
            self.sessions[number] = Session(self, number, self.server)
            self.send(number, m.ChannelOpenOk())

    def close_session(self, session: Session, method: m.Method = _WITH_CONNECTION) -> None:
        """The client closes the channel, and all that it asked for before is done: end it, and answer when that is durable."""
        number = session.number
        if self.sessions.get(number) is not session:
            return
        del self.sessions[number]
        self._closing_channels.add(number)
        self._ending += 1
        session.end("it was closed", partial(self._session_closed, number, method is not _WITH_CONNECTION))

    def _session_closed(self, number: int, asked: bool) -> None:
        self._closing_channels.discard(number)
        self._ending -= 1
        if asked:
            self.send(number, m.ChannelCloseOk())
        self._finish_when_all_ended()

    def _finish_when_all_ended(self) -> None:
        if self._finish is not None and not self.sessions and not self._ending:
            self._finish()

    # -- closing --------------------------------------------------------------------------------------------------------
    def fail(self, number: int, error: BaseException, method: m.Method | None = None, *, late: bool = False) -> None:
        """Close channel ``number``, or the connection, as ``error`` asks for; ``method`` is the one to blame.

        ``late``: the command waited, so what waits in other channels may have come behind it.
        """
        if self._closing:
            session = self.sessions.get(number)
            if session is not None:  # this channel will not get to its end by itself
                self.close_session(session)
            return
        if not isinstance(error, TxmqError):
            logger.error("connection %s: %s failed", self.name, method.NAME if method else "a command", exc_info=error)
        shown = as_amqp(error)
        ids = (method.CLASS_ID, method.METHOD_ID) if method is not None and not isinstance(error, ConnectionAccessRefused) else (0, 0)
        if isinstance(shown, ChannelError) and number:
            self._close_channel(number, shown, ids)
        else:
            self._close(shown if isinstance(shown, ConnectionException) else InternalFault(shown.summary), ids, number, late=late)

    def _close_channel(self, number: int, error: ChannelError, ids: tuple[int, int]) -> None:
        session = self.sessions.pop(number, None)
        if session is None:
            return
        self._closing_channels.add(number)
        self._decoder.discard(number)
        text = _reply_text(error.reply_name, error.summary)
        logger.info("connection %s: channel %d is closed: %s", self.name, number, text)
        self.send(number, m.ChannelClose(error.reply_code, text, *ids))
        if session.waits_for_close:
            self.send(number, m.ChannelCloseOk())
        session.end(text)

    def _close(self, error: ConnectionException, ids: tuple[int, int], number: int = 0, *, late: bool = False) -> None:
        """Say connection.close because of channel ``number``. What was asked for before is still done, but by transactional channels."""
        before, self.state = self.state, ConnectionState.closing
        text = _reply_text(error.reply_name, error.summary)
        logger.warning("connection %s is closed: %s", self.name, text)
        silent = isinstance(error, ConnectionAccessRefused) and not self.announces("authentication_failure_close")
        if before is not ConnectionState.awaiting_header and not silent:
            self.send(0, m.ConnectionClose(error.reply_code, text, *ids))
        self.flush()
        self.mute = True
        self._deadline = time.monotonic() + self.server.options.close_timeout_s
        self._drop_what_comes()
        self._finish = partial(self._end, text)
        for session in list(self.sessions.values()):
            session.stop_deliveries()
            if late or session.number == number or session.channel.transactional:
                self.close_session(session)
            else:
                session.handle(Command(session.number, _WITH_CONNECTION))  # behind what it has still to do
        self._finish_when_all_ended()
        if before is ConnectionState.awaiting_header or silent:
            self._shut()

    def _closed_by_client(self) -> None:
        """Answer when all that it asked for before is done; nothing else is read any more."""
        self._deadline = time.monotonic() + self.server.options.close_timeout_s
        self._drop_what_comes()
        self._finish = partial(self._end, "its connection was closed", self._say_close_ok)
        for session in list(self.sessions.values()):
            session.handle(Command(session.number, _WITH_CONNECTION))  # behind what it has still to do
        self._finish_when_all_ended()

    def _say_close_ok(self) -> None:
        self.send(0, m.ConnectionCloseOk())
        self._shut()

    def _end(self, why: str, then: Any = None) -> None:
        """All sessions end, then what belongs to the connection; once."""
        if self._ended:
            return
        self._ended = True
        sessions, self.sessions = self.sessions, {}
        for session in sessions.values():
            session.end(why)
        end_connection(self.server, self, then or _nothing)

    def _shut(self) -> None:
        """Send what is left and end our half of the socket. The client ends its own: to close both would reset what it still sends."""
        self.state = ConnectionState.closed
        self._deadline = time.monotonic() + self.server.options.close_timeout_s
        self._overheard = b""  # what comes now is dropped
        self.flush()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    # -- out ------------------------------------------------------------------------------------------------------------
    def send(self, number: int, method: m.Method, properties: bytes = b"", body: bytes = b"", *, queue: str = "") -> None:
        """A method with its content. ``queue`` is where a delivery comes from: handlers want to know it."""
        if self.mute:
            if number == 0 and self._transport is not None and not self._transport.is_closing():
                self._transport.write(encode_method(number, method))
            return
        if self._confirms is not None:
            session = self.sessions.get(number)
            command = Command(number, method, properties, body)
            for look in self.server.handlers.session_out if session is not None else ():
                assert session is not None
                try:
                    passed = look(session, command, queue)
                except Exception as error:
                    self.fail(number, error, method)
                    return
                if passed is None:
                    return
                command = passed
            number, method, properties, body = command
        if method.HAS_CONTENT:
            self._gather(encode_content(number, method, properties, body, self.frame_max))
        else:
            self._gather(encode_method(number, method))

    def write(self, data: bytes) -> None:
        """Encoded frames, whole commands of one open channel."""
        if self._confirms is not None:
            for event in self._confirms.feed(data):
                assert isinstance(event, Command)
                self.send(*event)
            return
        out = self._out  # as _gather, in line: every delivery comes through here
        if not out:
            self.server.unwritten(self)
        out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > FLUSH_BYTES:
            self.flush()

    def _gather(self, data: bytes) -> None:
        """What is gathered in a tick is written once, at its end."""
        out = self._out
        if not out:
            self.server.unwritten(self)
        out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what was gathered to the transport."""
        out, transport = self._out, self._transport
        if not out:
            return
        self._out, self._out_bytes = [], 0
        if transport is None or transport.is_closing() or self.mute:
            return
        self._said = True
        transport.write(out[0] if len(out) == 1 else b"".join(out))
        if not self.writable and transport.get_write_buffer_size() > HARD_BYTES:
            self.pause("output")

    # -- back-pressure --------------------------------------------------------------------------------------------------
    def pause(self, why: object) -> None:
        """Carry out and read nothing more, until every one that paused has resumed."""
        if self._held is None:
            if self._transport is None or self._closing:
                return
            self._held = []
            self._elsewhere = self._held.append
            if not self._transport.is_closing():
                self._transport.pause_reading()
        self._paused.add(why)

    def resume(self, why: object) -> None:
        """Nothing happens where it was not paused for this reason."""
        if self._paused:
            self._paused.discard(why)
            if not self._paused:
                self.server.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        held = self._held
        if self._paused or held is None:
            return
        self._held = self._elsewhere = None
        self._carry_out(held)
        if self._held is None and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def guard(self, reason: str) -> None:
        """An alarm is on: whoever publishes from now on is told so, and not read any more."""

        def block(session: Session, command: Command) -> Command:
            if type(command.method) is m.BasicPublish and not self.blocked:
                self.blocked = reason
                if self.announces("connection.blocked"):
                    self.send(0, m.ConnectionBlocked(reason))
                self.pause("alarm")
            return command

        self._session_in = (*self.server.handlers.session_in, block)
        self._watched = True

    def unguard(self) -> None:
        """The alarm is off."""
        self._session_in = self.server.handlers.session_in
        self._watched = bool(self.server.handlers.connection_in or self._session_in)
        if self.blocked:
            self.blocked = ""
            if self.announces("connection.blocked") and self.state is ConnectionState.open:
                self.send(0, m.ConnectionUnblocked())
            self.resume("alarm")

    # -- time -----------------------------------------------------------------------------------------------------------
    def sweep(self, now: float) -> None:
        """Heartbeats (specification 4.2.7), and the time limits of handshake, close and open transactions. ``now`` is monotonic."""
        if self._heard or self._held is not None:  # who is not read cannot be heard
            self._heard, self._heard_at = False, now
        if self._said:
            self._said, self._said_at = False, now
        if self._deadline is not None and now > self._deadline:
            self.abort("it took too long to open or to close")
        elif self.heartbeat_s and self.state is ConnectionState.open:
            if now - self._heard_at > 2 * self.heartbeat_s:
                self.abort(f"missed heartbeats from client, timeout: {self.heartbeat_s}s")
            elif now - self._said_at >= self.heartbeat_s / 2:
                self._gather(HEARTBEAT)
        if self.server.broker.limits.open_s is not None:
            for session in list(self.sessions.values()):
                session.check_open_time()


def _reply_text(name: str, summary: str) -> str:
    """At most 255 bytes: it has to fit into a short string."""
    raw = f"{name} - {summary}".encode(errors="surrogateescape")
    return raw.decode(errors="surrogateescape") if len(raw) <= 255 else raw[:255].decode(errors="ignore")


def _address(name: Any) -> str:
    return f"{f'[{name[0]}]' if ':' in name[0] else name[0]}:{name[1]}" if name else "?"


def _closes(event: Event) -> bool:
    return isinstance(event, Violation) or (
        isinstance(event, Command) and event.channel == 0 and isinstance(event.method, (m.ConnectionClose, m.ConnectionCloseOk))
    )


def _nothing() -> None:
    pass
