"""One AMQP 0-9-1 connection on the side of the broker, without a socket and without a clock (sans-IO).

``receive`` takes the bytes that came and gives events; ``data_to_send`` gives the bytes to send; ``tick`` is to be called at
``next_deadline``. The caller is told of commands, logs the client in, and decides when channels and connection may close.

Not here: frames (``decoder.py``, ``encoder.py``), which method may come when (``states.py``), what a command of a channel does.

Invariant: what is sent leaves in the order of the calls. Once either side has closed the connection, nothing that comes passes but
close and close-ok; once it was this side, nothing else is said. Events depend on the bytes, not on how they are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.channels import Channels, reply_text
from broker_core.amqp.v0_9_1.decoder import (
    DEFAULT_FRAME_MAX,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_PENDING_BYTES,
    FRAME_MIN,
    PROTOCOL_HEADER,
    Decoder,
)
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_method
from broker_core.amqp.v0_9_1.events import (
    ChannelFailed,
    CloseRequested,
    Command,
    ConnectionEvent,
    ContentTooLarge,
    Event,
    Failed,
    ProtocolHeader,
    TimedOut,
    Violation,
)
from broker_core.amqp.v0_9_1.outgoing import Outgoing
from broker_core.amqp.v0_9_1.states import (
    CONNECTION_IGNORES,
    WORK,
    Cause,
    ChannelState,
    ConnectionState,
    Step,
    connection_step,
)
from broker_core.amqp.v0_9_1.timers import Timers
from broker_core.errors import (
    ChannelError,
    ConnectionAccessRefused,
    ConnectionException,
    NotAllowed,
    PreconditionFailed,
)

_CLOSE_OK = encode_method(0, m.ConnectionCloseOk())


@dataclass(frozen=True, slots=True)
class Offer:
    """What the broker offers to each client, and how long it waits for it. ``max_*_bytes`` as for the decoder."""

    start: m.ConnectionStart = field(default_factory=m.ConnectionStart)
    channel_max: int = 2047
    frame_max: int = DEFAULT_FRAME_MAX
    heartbeat_s: int = 60
    handshake_timeout_s: float = 10.0
    close_timeout_s: float = 10.0  # for the answer to connection.close, and for the last bytes to leave
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES


class _Listener:
    """Finds a connection.close-ok among bytes that are not decoded."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent = b""

    def hears_close_ok(self, data: bytes) -> bool:
        recent = self._recent + data
        self._recent = recent[-len(_CLOSE_OK) + 1 :]
        return _CLOSE_OK in recent


class AmqpConnection:
    """``now`` is the time of each call, in seconds of any clock that never goes back.

    ``out``: what waits for ``data_to_send``; it is mute once connection.close, or the last close-ok, is said.
    ``tuned``: the limits that were agreed on. ``state`` closed: all is said, and the sending half of the socket
    is to end behind it.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_listener",
        "_look",
        "_offer",
        "_passes",
        "_timers",
        "channels",
        "client_properties",
        "out",
        "state",
        "tuned",
    )

    def __init__(self, offer: Offer, now: float) -> None:
        self._offer = offer
        self.state = ConnectionState.awaiting_header
        self.out = Outgoing(offer.frame_max)
        self.channels = Channels(self.out)
        self.client_properties: dict[str, Any] = {}
        self.tuned = m.ConnectionTuneOk(offer.channel_max, offer.frame_max, 0)
        self._decoder = Decoder(offer.frame_max, offer.max_body_bytes, offer.max_pending_bytes)
        self._held: list[Event] | None = None  # decoded, while the caller holds events back
        self._look: Callable[[Event], Event | None] | None = None
        self._listener: _Listener | None = None  # what comes cannot be decoded, or does not matter
        self._passes = False  # commands of open channels pass without another look
        self._timers = Timers(now, offer.handshake_timeout_s)

    # -- in -----------------------------------------------------------------------------------------------
    def receive(self, data: bytes, now: float) -> Iterable[ConnectionEvent]:
        """The events that ``data`` completes, in order. Each takes effect when it is reached: reach them all.

        What the caller does with one of them, as ``close`` or ``hold``, holds for those behind it.
        """
        self._timers.heard_at = now
        if self._listener is not None:
            self._listen(data)
            return ()
        events = self._decoder.feed(data)
        if self._held is not None:
            self._held += events
            return ()
        return self._take(events, data)

    def holds(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """Give no more events until ``release``; those that come meanwhile wait."""
        if self._held is None and self.state not in CONNECTION_IGNORES:
            self._held = []

    def release(self, now: float) -> Iterable[ConnectionEvent]:
        """The events that were held back."""
        held, self._held = self._held, None
        self._timers.heard_at = now
        return self._take(held or [], b"")

    def watch(self, look: Callable[[Event], Event | None] | None) -> None:
        """``look`` is given all that comes, but violations, before it takes effect; what it gives back goes on in its place."""
        self._look = look
        self._passes = look is None and self.state is ConnectionState.open

    def _take(self, events: list[Event], data: bytes) -> Iterator[ConnectionEvent]:
        """The hot path: a command of an open channel passes with three look-ups."""
        channels, is_open, work = self.channels.states, ChannelState.open, WORK
        for event in events:
            if self._held is not None:
                self._held.append(event)
            elif self._passes and type(event) is Command and channels.get(event.channel) is is_open and type(event.method) in work:
                yield event
            else:
                passed = self._pass(event)
                if passed is not None:
                    yield passed
        if self._listener is not None:
            self._listen(data)

    def _pass(self, event: Event) -> ConnectionEvent | None:
        if _ignores(self.state, event):
            return None
        blamed = event.method if isinstance(event, Command) else None
        if self._look is not None and not isinstance(event, Violation):
            looked = self._look(event)
            if looked is None or _ignores(self.state, looked):  # it may have closed the connection
                return None
            event = looked
        try:
            match event:
                case Command(0, _):
                    return self._of_connection(event)
                case Command():
                    return self._of_channel(event)
                case ProtocolHeader():
                    self._header(event)
                case ContentTooLarge():
                    return self._too_large(event)
                case Violation():
                    return self._violated(event)
        except ConnectionException as error:
            number = event.channel if isinstance(event, Command) else 0
            return self._fail(error, number, (blamed.CLASS_ID, blamed.METHOD_ID) if blamed is not None else (0, 0))
        return None

    # -- handshake and channel 0 --------------------------------------------------------------------------
    def _header(self, event: ProtocolHeader) -> None:
        if event.ok:
            self._go(Step.header)
            self.send(0, self._offer.start)
        else:
            self.out.write(PROTOCOL_HEADER)  # specification 4.2.2: say what is spoken here, and close
            self._end(Step.end)

    def _of_connection(self, command: Command) -> ConnectionEvent | None:
        method = command.method
        before = self._go(type(method))
        match method:
            case m.ConnectionClose() if before is ConnectionState.closing:
                self.send(0, m.ConnectionCloseOk())
            case m.ConnectionClose():
                self._timers.limit = self._timers.heard_at + self._offer.close_timeout_s
                return CloseRequested()
            case m.ConnectionCloseOk():
                self._end(Step.end)
            case m.ConnectionStartOk():
                self.client_properties = dict(method.client_properties)
                return command
            case m.ConnectionTuneOk():
                check_tuned(method, self._offer)
                self.tuned = method
                self.out.frame_max = method.frame_max
                self._decoder.frame_max = method.frame_max
            case m.ConnectionOpen():
                if method.virtual_host != "/":
                    raise NotAllowed(f"vhost {method.virtual_host} not found", "there is one, '/'")
                self._timers.limit = None
                self.send(0, m.ConnectionOpenOk())
            case m.ConnectionUpdateSecret():  # a password does not end: the connection stays what it is, as in RabbitMQ
                self.send(0, m.ConnectionUpdateSecretOk())
        return None

    def authenticated(self) -> None:
        """The answer to a ConnectionStartOk, as ``close`` is."""
        offer = self._offer
        self.send(0, m.ConnectionTune(offer.channel_max, offer.frame_max, offer.heartbeat_s))

    # -- channels -----------------------------------------------------------------------------------------
    def _of_channel(self, command: Command) -> ConnectionEvent | None:
        method = command.method
        if self.state is not ConnectionState.open:
            connection_step(self.state, type(method))  # refuses it
            return None
        passes = self.channels.take(command)
        most = self.tuned.channel_max
        if isinstance(method, m.ChannelOpen) and passes and most and self.channels.opened > most:
            text = f"number of channels opened ({most}) has reached the negotiated channel_max ({most})"
            return self._fail(NotAllowed(text), 0)
        return command if passes else None

    def _too_large(self, event: ContentTooLarge) -> ConnectionEvent | None:
        number, most = event.channel, self._offer.max_body_bytes
        if not self.channels.is_open(number):
            return None
        error = PreconditionFailed(f"message size {event.size} is larger than configured max size {most}")
        ids = (m.BasicPublish.CLASS_ID, m.BasicPublish.METHOD_ID)
        return ChannelFailed(number, self.close_channel(number, error, ids))

    def close_channel(self, number: int, error: ChannelError, ids: tuple[int, int] = (0, 0)) -> str:
        """Send channel.close on an open channel, and ignore what comes on it until close-ok. The reply text.

        ``ids``: class and method to blame.
        """
        self._decoder.discard(number)
        return self.channels.close(number, error, ids)

    def channel_ended(self, number: int) -> None:
        """All that came on the channel before its end is done: a channel.close of the client is answered."""
        self.channels.ended(number)

    # -- closing ------------------------------------------------------------------------------------------
    def close(self, error: ConnectionException, now: float, ids: tuple[int, int] = (0, 0)) -> str:
        """Send connection.close, unless one side has closed the connection already. The reply text."""
        text = reply_text(error.reply_name, error.summary)
        if self.state in CONNECTION_IGNORES:
            return text
        refused = isinstance(error, ConnectionAccessRefused)
        self._timers.heard_at = now
        if self.state is ConnectionState.awaiting_header or (
            refused and not announces(self.client_properties, "authentication_failure_close")
        ):
            self._end(Step.end)  # the client would not understand it
            return text
        self.send(0, m.ConnectionClose(error.reply_code, text, *((0, 0) if refused else ids)))
        self.out.fall_silent()
        self._go(Step.close)
        self._timers.limit = now + self._offer.close_timeout_s
        held, self._held = self._held, None
        for event in held or ():
            self._pass(event)
        return text

    def finish(self, now: float) -> None:
        """Answer the connection.close of the client."""
        self._timers.heard_at = now
        if self.state is ConnectionState.ending:
            self.send(0, m.ConnectionCloseOk())
            self._end(Step.close_ok)

    def lost(self) -> None:
        """The socket is gone."""
        self._end(Step.end)
        self._timers.limit = None
        self.out.drop()

    def _fail(self, error: ConnectionException, number: int, ids: tuple[int, int] = (0, 0)) -> Failed:
        return Failed(number, self.close(error, self._timers.heard_at, ids))

    def _violated(self, event: Violation) -> ConnectionEvent | None:
        """Nothing that follows can be understood, but the client should hear why: drop what comes until it has answered or gone."""
        failed = None if self.state is ConnectionState.closing else self._fail(event.error, 0, event.method)
        self._listener = _Listener()
        return failed

    def _listen(self, data: bytes) -> None:
        if self._listener is not None and self._listener.hears_close_ok(data) and self.state is ConnectionState.closing:
            self._end(Step.end)

    def _end(self, step: Step) -> None:
        """Nothing is said behind what is said already, and what comes is dropped."""
        self._go(step)
        self.out.fall_silent()
        self._held = None
        self._listener = _Listener()
        self._timers.limit = self._timers.heard_at + self._offer.close_timeout_s

    def _go(self, cause: Cause) -> ConnectionState:
        """Change the state; the one before."""
        before, self.state = self.state, connection_step(self.state, cause)
        is_open = self.state is ConnectionState.open
        self._passes = is_open and self._look is None
        self._timers.heartbeat_s = self.tuned.heartbeat if is_open else 0
        return before

    # -- out ----------------------------------------------------------------------------------------------
    def send(self, number: int, method: m.Method, properties: bytes = b"", body: bytes = b"") -> None:
        """A method with its content. Raises LocalProtocolError for a value that its field cannot hold."""
        if not self.out.mute:
            self.out.send(number, method, properties, body)
        elif number == 0 and self.state is ConnectionState.closing:
            self.out.last_words(method)

    def data_to_send(self, now: float) -> bytes:
        """All that is to be sent, once."""
        data = self.out.take()
        if data:
            self._timers.said_at = now
        return data

    # -- time ---------------------------------------------------------------------------------------------
    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do; None: never."""
        return self._timers.next(listens=not self.holds())

    def tick(self, now: float) -> TimedOut | None:
        """Send a heartbeat where one is due; TimedOut where the client was silent, or too slow, for too long."""
        why = self._timers.expired(now, listens=not self.holds())
        if why:
            return TimedOut(why)
        if self._timers.heartbeat_due(now):
            self._timers.said_at = now
            self.out.write(HEARTBEAT)
        return None


def announces(client_properties: dict[str, Any], capability: str) -> bool:
    """Whether the client said that it can do this."""
    capabilities = client_properties.get("capabilities")
    return isinstance(capabilities, dict) and capabilities.get(capability) is True


def check_tuned(method: m.ConnectionTuneOk, offer: Offer) -> None:
    """Raises NotAllowed for a limit that is not within what was offered, as RabbitMQ says it."""
    _check_limit("frame_max", method.frame_max, offer.frame_max, FRAME_MIN)
    _check_limit("channel_max", method.channel_max, offer.channel_max, 1)


def _check_limit(name: str, wanted: int, most: int, least: int) -> None:
    shown = f"{wanted} (no limit)" if name == "channel_max" and wanted == 0 else str(wanted)
    if wanted and wanted < least:
        raise NotAllowed(f"negotiated {name} = {shown} is lower than the minimum allowed value ({least})")
    if most and (not wanted or wanted > most):
        raise NotAllowed(f"negotiated {name} = {shown} is higher than the maximum allowed value ({most})")


def _ignores(state: ConnectionState, event: Event) -> bool:
    """Whether the connection is closed by one side, and this is no part of closing it."""
    if state is not ConnectionState.closing:
        return state in CONNECTION_IGNORES
    if isinstance(event, Command):
        return event.channel != 0 or not isinstance(event.method, (m.ConnectionClose, m.ConnectionCloseOk))
    return not isinstance(event, Violation)
