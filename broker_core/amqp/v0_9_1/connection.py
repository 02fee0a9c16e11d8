"""One AMQP 0-9-1 connection on the side of the broker, without a socket and without a clock (sans-IO).

``receive`` takes the bytes that came and gives events; ``data_to_send`` gives the bytes to send; ``tick`` is
to be called at ``next_deadline``. The caller carries out commands, logs the client in, and ends channels and
connection.

Not here: frames (``decoder.py``, ``encoder.py``), which method may come when (``states.py``), channel 0
(``negotiation.py``), what a command of a channel does.

Invariant: methods are sent in the order of the calls. After either side has closed the connection, only close
and close-ok are received; after this side has, nothing else is sent. Events depend on the bytes, not on how
they are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.channels import ChannelTable, reply_text
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, Outgoing, encode_method
from broker_core.amqp.v0_9_1.events import (
    ChannelFailed,
    Command,
    ConnectionEvent,
    ContentTooLarge,
    Decoded,
    Event,
    Failed,
    Heartbeat,
    ProtocolHeader,
    Publishes,
    TimedOut,
    Violation,
)
from broker_core.amqp.v0_9_1.lifecycle import Lifecycle, Timers
from broker_core.amqp.v0_9_1.negotiation import Negotiation, Offer
from broker_core.amqp.v0_9_1.states import WORK, ChannelState, ConnectionState, Step, connection_step
from broker_core.checks import assert_never
from broker_core.errors import (
    ConnectionAccessRefused,
    ConnectionException,
    NotAllowed,
    PreconditionFailed,
)

_CLOSE_OK = encode_method(0, m.ConnectionCloseOk())
_PUBLISH = (m.BasicPublish.CLASS_ID, m.BasicPublish.METHOD_ID)


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

    ``out``: what waits for ``data_to_send``; mute after connection.close or close-ok. ``stopped``: fails
    ``state`` closed: close the sending half of the socket after ``data_to_send``.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_life",
        "_listener",
        "_look",
        "_max_body_bytes",
        "_zero",
        "channels",
        "out",
        "stopped",
    )

    def __init__(self, offer: Offer, now: float) -> None:
        self.out = Outgoing(offer.frame_max)
        self._max_body_bytes = offer.max_body_bytes
        self._decoder = Decoder(offer.frame_max, offer.max_body_bytes, offer.max_pending_bytes)
        self.channels = ChannelTable(self.out, self._decoder)
        self._life = Lifecycle(self.out, Timers(now, offer.handshake_timeout_s), offer.close_timeout_s)
        self._zero = Negotiation(offer, self._life, self.out, self._decoder)
        self._held: list[Decoded] | None = None  # decoded while the caller holds events back
        self.stopped = False
        self._listener: _Listener | None = None  # set when the bytes cannot be decoded
        self._look: Callable[[Event], Event | None] | None = None

    @property
    def state(self) -> ConnectionState:
        return self._life.state

    @property
    def closing(self) -> bool:
        """One side has closed the connection, or it is lost."""
        return self._life.closing

    @property
    def tuned(self) -> m.ConnectionTuneOk:
        """The negotiated limits."""
        return self._zero.tuned

    @property
    def client_properties(self) -> dict[str, object]:
        return self._zero.client_properties

    def announces(self, capability: str) -> bool:
        """Whether the client announced this capability."""
        return self._zero.announces(capability)

    # -- in -----------------------------------------------------------------------------------------------
    def receive(self, data: bytes, now: float) -> Iterable[ConnectionEvent]:
        """The events that ``data`` completes, in order. Each takes effect when it is reached: take them all.

        What the caller does with one of them, such as ``close`` or ``hold``, applies to the next ones.
        """
        life = self._life
        life.timers.heard_at = now
        if self._listener is not None or life.state is ConnectionState.closed:
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
        if self._held is None and not self.closing:
            self._held = []

    def release(self, now: float) -> Iterable[ConnectionEvent]:
        """The events that were held back."""
        held, self._held = self._held, None
        self._life.timers.heard_at = now
        return self._take(held or [], b"")

    def separate(self, publishes: Publishes) -> Iterable[ConnectionEvent]:
        """The events of ``publishes``, which takes no effect itself then."""
        return self._take(publishes.commands(), b"")

    def watch(self, look: Callable[[Event], Event | None] | None) -> None:
        """``look`` gets every event but violations before it takes effect, and returns the one to pass on."""
        self._look = look
        self._life.watch(look is not None)

    def _take(self, events: Sequence[Decoded], data: bytes) -> Iterator[ConnectionEvent]:
        """The hot path: a command of an open channel passes with three look-ups."""
        life, channels, is_open, work = self._life, self.channels.states, ChannelState.open, WORK
        for event in events:
            if self._held is not None:
                self._held.append(event)
            elif (
                life.passes
                and (type(event) is Command or type(event) is Publishes)
                and channels.get(event.channel) is is_open
                and type(event.method) in work
            ):
                yield event
            elif type(event) is Publishes:
                yield from self.separate(event)
            else:
                passed = self._pass(event)
                if passed is not None:
                    yield passed
        if self._listener is not None:
            self._listen(data)

    def _pass(self, event: Event) -> ConnectionEvent | None:
        life = self._life
        if life.ignores(event):
            return None
        blamed = event.method if isinstance(event, Command) else None
        if self._look is not None and not isinstance(event, Violation):
            looked = self._look(event)
            if looked is None or self.stopped or life.ignores(looked):  # it may have closed the connection
                return None
            event = looked
        try:
            match event:
                case Command(0, _):
                    return self._zero.take(event)
                case Command():
                    return self._of_channel(event)
                case ProtocolHeader():
                    self._zero.header(event)
                case Heartbeat():
                    pass  # ``receive`` has noted the time
                case ContentTooLarge():
                    return self._too_large(event)
                case Violation():
                    return self._violated(event)
                case _:
                    assert_never(event)
        except ConnectionException as error:
            number = event.channel if isinstance(event, Command) else 0
            return self._fail(
                error, number, (blamed.CLASS_ID, blamed.METHOD_ID) if blamed is not None else (0, 0)
            )
        return None

    def _of_channel(self, command: Command) -> ConnectionEvent | None:
        method = command.method
        if self.state is not ConnectionState.open:
            connection_step(self.state, type(method))  # refuses it
            return None
        passes, most = self.channels.take(command), self.tuned.channel_max
        if isinstance(method, m.ChannelOpen) and passes and most and self.channels.opened > most:
            text = f"number of channels opened ({most}) has reached the negotiated channel_max ({most})"
            return self._fail(NotAllowed(text), 0)
        return command if passes else None

    def _too_large(self, event: ContentTooLarge) -> ConnectionEvent | None:
        number, most = event.channel, self._max_body_bytes
        if not self.channels.is_open(number):
            return None
        error = PreconditionFailed(f"message size {event.size} is larger than configured max size {most}")
        self.channels.fail(number)
        return ChannelFailed(number, error, _PUBLISH)

    def _violated(self, event: Violation) -> ConnectionEvent | None:
        """Later bytes cannot be decoded: only close-ok is looked for."""
        failed = None if self.state is ConnectionState.closing else self._fail(event.error, 0, event.method)
        self._listener = _Listener()
        return failed

    def _fail(self, error: ConnectionException, number: int, ids: tuple[int, int] = (0, 0)) -> Failed:
        return Failed(number, error, ids)

    def _listen(self, data: bytes) -> None:
        if (
            self._listener is not None
            and self._listener.hears_close_ok(data)
            and self.state is ConnectionState.closing
        ):
            self._life.end(Step.end)

    # -- what the caller decides --------------------------------------------------------------------------
    def authenticated(self, admit: Callable[[str], None] | None = None) -> None:
        """Accept the login of a ConnectionStartOk; ``close`` refuses it. ``admit`` is called with the virtual
        host of ConnectionOpen, and raises NotAllowed to refuse it.
        """
        self._zero.authenticated(admit)

    def stop(self) -> None:
        """Give no more events: ``close`` is called when what came before is answered."""
        self.hold()
        self.stopped = True

    def close(self, error: ConnectionException, now: float, ids: tuple[int, int] = (0, 0)) -> str:
        """Send connection.close, unless it is closed already. Returns the reply text."""
        text = reply_text(error.reply_name, error.summary)
        ending = self.state is ConnectionState.ending
        self.stopped = False
        if self.closing and not ending:
            return text
        self._life.timers.heard_at = now
        refused = isinstance(error, ConnectionAccessRefused)
        sends_close = not refused or self.announces("authentication_failure_close")
        if self.state is ConnectionState.awaiting_header or not sends_close:
            self._life.end(Step.end)
        else:
            self.out.send(0, m.ConnectionClose(error.reply_code, text, *((0, 0) if refused else ids)))
            self.out.stop_after_current()
            self._life.go(Step.close)
            if ending:
                self.out.final_frame(m.ConnectionCloseOk())
        held, self._held = self._held, None
        for event in held or ():
            if type(event) is not Publishes:  # which are ignored from now on
                self._pass(event)
        return text

    def finish(self, now: float) -> None:
        """Answer the connection.close of the client."""
        self._life.timers.heard_at = now
        if self.state is ConnectionState.ending:
            self.out.send(0, m.ConnectionCloseOk())
            self._life.end(Step.close_ok)

    def lost(self) -> None:
        """The socket is gone."""
        self._life.end(Step.end)
        self._life.timers.limit = None
        self._held = None
        self.out.drop()

    # -- out ----------------------------------------------------------------------------------------------
    def send(self, number: int, method: m.Method, properties: bytes = b"", body: bytes = b"") -> None:
        """Send a method with its content. Raises LocalProtocolError for a value that does not fit."""
        if not self.out.closed_for_sending:
            self.out.send(number, method, properties, body)
        elif number == 0 and self.state is ConnectionState.closing:
            self.out.final_frame(method)

    def data_to_send(self, now: float) -> bytes:
        """All that is to be sent, once."""
        data = self.out.take()
        if data:
            self._life.timers.said_at = now
        return data

    # -- time ---------------------------------------------------------------------------------------------
    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do; None: never."""
        return self._life.timers.next(listens=not self.holds())

    @property
    def heard_at(self) -> float:
        """When bytes last came."""
        return self._life.timers.heard_at

    def tick(self, now: float) -> TimedOut | None:
        """Send a heartbeat if one is due; TimedOut if the client was silent, or too slow, for too long."""
        timers = self._life.timers
        why = timers.expired(now, listens=not self.holds())
        if why:
            return TimedOut(why)
        if timers.heartbeat_due(now):
            timers.said_at = now
            self.out.write(HEARTBEAT)
        return None
