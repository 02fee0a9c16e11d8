"""One AMQP 0-9-1 connection on the side of the broker, without a socket and without a clock (sans-IO).

``receive`` takes the bytes that came, and ``piece`` gives the next events while there are ``due`` ones;
``data_to_send`` gives the bytes to send; ``tick`` is to be called at ``next_deadline``. The caller carries
out commands, logs the client in, and ends channels and connection.

Not here: frames (``decoder.py``, ``encoder.py``), which method may come when (``states.py``), channel 0
(``negotiation.py``), what a command of a channel does.

Invariant: methods are sent in the order of the calls. After either side has closed the connection, only close
and close-ok are received; after this side has, nothing else is sent. Events depend on the bytes, not on how
they are cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.channels import ChannelTable, reply_text
from broker_core.amqp.v0_9_1.decoder import PIECE_FRAMES, Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, Outgoing, encode_method
from broker_core.amqp.v0_9_1.events import (
    ChannelFailed,
    Command,
    ConnectionEvent,
    ContentHeader,
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
from broker_core.core.checks import assert_never
from broker_core.core.errors import (
    ConnectionAccessRefused,
    ConnectionException,
    NotAllowed,
    PreconditionFailed,
    ResourceExhausted,
)

_CLOSE_OK = encode_method(0, m.ConnectionCloseOk())
_PUBLISH = (m.BasicPublish.CLASS_ID, m.BasicPublish.METHOD_ID)
# Heartbeats and empty pieces of a body: a client that sends heartbeats each second sends two of them.
EMPTY_FRAMES, EMPTY_FRAMES_PER_S = 1000, 100


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
        "_counted_at", "_decoder", "_events", "_holds", "_life", "_listener", "_look",
        "_max_body_bytes", "_may_be_empty", "_zero", "channels", "out", "stopped",
    )  # fmt: skip

    def __init__(self, offer: Offer, now: float) -> None:
        self.out = Outgoing(offer.frame_max)
        self._max_body_bytes = offer.max_body_bytes
        self._decoder = Decoder(offer.frame_max, offer.max_body_bytes, offer.max_pending_bytes)
        self.channels = ChannelTable(self.out, self._decoder)
        self._life = Lifecycle(self.out, Timers(now, offer.handshake_timeout_s), offer.close_timeout_s)
        self._zero = Negotiation(offer, self._life, self.out, self._decoder)
        self._events: deque[Decoded] = deque()  # decoded, and not given yet
        self._holds = False
        self._may_be_empty, self._counted_at = float(EMPTY_FRAMES_PER_S), now
        self.stopped = False
        self._listener: _Listener | None = None  # set when the bytes cannot be decoded
        self._look: Callable[[Event], Event | None] | None = None

    @property
    def state(self) -> ConnectionState:
        return self._life.state

    @property
    def pending_bytes(self) -> int:
        """Of contents that have not come whole."""
        return self._decoder.pending_bytes

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
    def receive(self, data: bytes, now: float) -> None:
        """``data`` has come."""
        self._life.timers.heard_at = now
        if self._listener is not None or self._life.state is ConnectionState.closed:
            self._listen(data)
        else:
            self._decoder.add(data)

    @property
    def due(self) -> bool:
        """``piece`` has something to do."""
        return not self._holds and (bool(self._events) or self._decoder.undecoded)

    def piece(self, now: float) -> Iterator[ConnectionEvent]:
        """The next events, in order: a bounded number, or none. Each takes effect when it is reached, and
        what the caller does with it, such as ``close`` or ``hold``, applies to the next ones. Those that it
        does not take come with the next piece.
        """
        life = self._life
        life.timers.heard_at = now
        if not self._events:
            before = self._decoder.empty_frames
            self._events += self._decoder.piece()
            if self._decoder.empty_frames > before:
                self._empty_frames(self._decoder.empty_frames - before, now)
        return self._take()

    def hold(self) -> None:
        """There are no more events until ``release``."""
        self._holds = not self.closing

    def release(self, now: float) -> None:
        self._holds = False
        self._life.timers.heard_at = now

    def separate(self, publishes: Publishes) -> None:
        """The next events are those of ``publishes``, which takes no effect itself then."""
        self._events.extendleft(reversed(publishes.commands()))

    def watch(self, look: Callable[[Event], Event | None] | None, *, headers: bool = False) -> None:
        """``look`` gets every event but violations before it takes effect, and returns the one to pass on;
        ``headers``: that of a content too, before the body has come.
        """
        self._look = look
        self._decoder.announces = headers
        self._life.watch(look is not None)

    def _take(self) -> Iterator[ConnectionEvent]:
        """The hot path: a command of an open channel passes with three look-ups."""
        life, channels, is_open, work = self._life, self.channels.states, ChannelState.open, WORK
        events, passed_over = self._events, 0
        most = PIECE_FRAMES if self._look is None else 1  # who looks may be slow
        while events and not self._holds and passed_over < most:
            event = events.popleft()
            if (
                life.passes
                and (type(event) is Command or type(event) is Publishes)
                and channels.get(event.channel) is is_open
                and type(event.method) in work
            ):
                yield event
            elif type(event) is Publishes:
                if not life.closing:
                    self.separate(event)
            else:
                passed = self._pass(event)
                if passed is not None:
                    yield passed
                else:
                    passed_over += 1

    def _empty_frames(self, count: int, now: float) -> None:
        """Refuses more than a client has a reason to send. What waited in the socket may come at once."""
        since, self._counted_at = now - self._counted_at, now
        allowed = since * EMPTY_FRAMES_PER_S
        left = self._may_be_empty
        self._may_be_empty = max(left, min(left + allowed, EMPTY_FRAMES), allowed) - count
        if self._may_be_empty < 0 and not self.closing:
            text = (
                f"more than {EMPTY_FRAMES_PER_S} frames a second are heartbeats or empty pieces of a body; "
                "send heartbeats at the negotiated interval"
            )
            self._events.append(Violation(ResourceExhausted(text), 0))

    def _pass(self, event: Event) -> ConnectionEvent | None:
        life = self._life
        if isinstance(event, ContentHeader):
            passed = None if life.ignores(event) else self._look(event) if self._look is not None else event
            self._decoder.decide(event, passed if isinstance(passed, ContentHeader) else None)
            return None
        if life.ignores(event):
            return None
        came = event
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
                case ContentHeader():
                    pass  # decided above; nothing else passes one on
                case _:
                    assert_never(event)
        except ConnectionException as error:
            number, ids = _blamed(came)
            return Failed(number, error.with_traceback(None), ids)  # its frames have the event: a cycle
        return None

    def _of_channel(self, command: Command) -> ConnectionEvent | None:
        method = command.method
        if self.state is not ConnectionState.open:
            connection_step(self.state, type(method))  # refuses it
            return None
        passes, most = self.channels.take(command), self.tuned.channel_max
        if isinstance(method, m.ChannelOpen) and passes and most and self.channels.opened > most:
            text = f"number of channels opened ({most}) has reached the negotiated channel_max ({most})"
            return Failed(0, NotAllowed(text), (0, 0))
        return command if passes else None

    def _too_large(self, event: ContentTooLarge) -> ConnectionEvent | None:
        number, most = event.channel, self._max_body_bytes
        if self._of_channel(Command(number, m.BasicPublish())) is None:
            return None
        error = PreconditionFailed(f"message size {event.size} is larger than configured max size {most}")
        self.channels.fail(number)
        return ChannelFailed(number, error, _PUBLISH)

    def _violated(self, event: Violation) -> ConnectionEvent | None:
        """Later bytes cannot be decoded: only close-ok is looked for."""
        failed = None if self.state is ConnectionState.closing else Failed(0, event.error, event.method)
        self._listener = _Listener()
        self._listen(self._decoder.end())
        return failed

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
        self._holds = False  # only close and close-ok take effect from now on
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
        self._events.clear()
        self._look = None
        self._zero.lost()
        self._decoder.end()
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
        return self._life.timers.next(listens=not (self._holds or self.due))

    @property
    def heard_at(self) -> float:
        """When bytes last came."""
        return self._life.timers.heard_at

    def tick(self, now: float) -> TimedOut | None:
        """Send a heartbeat if one is due; TimedOut if the client was silent, or too slow, for too long."""
        timers = self._life.timers
        why = timers.expired(now, listens=not (self._holds or self.due))
        if why:
            return TimedOut(why)
        if timers.heartbeat_due(now):
            timers.said_at = now
            self.out.write(HEARTBEAT)
        return None


def _blamed(event: Event) -> tuple[int, tuple[int, int]]:
    """The channel, and the ids of class and method, that an error of it names; 0 for neither."""
    if isinstance(event, Command):
        return event.channel, (event.method.CLASS_ID, event.method.METHOD_ID)
    return (event.channel, _PUBLISH) if isinstance(event, ContentTooLarge) else (0, (0, 0))
