"""Bytes of one direction of a connection become events: frames (specification 4.2.3), contents (4.2.6),
commands.

Not here: whether a command may come now (``states.py``), and what it does.

Invariant: events depend on the bytes alone, not on how they are cut into chunks. Any bytes give events and at
most one :class:`Violation`, the last event; ``feed`` raises nothing. What is kept when all that can be is
decoded is below ``frame_max`` for the frame that is not complete, and at most ``max_pending_bytes`` for all
contents in assembly together. ``piece`` takes a bounded time, whatever the bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from broker_core.amqp.v0_9_1.assembly import ASSEMBLY_BYTES, Assembly
from broker_core.amqp.v0_9_1.codec import blamed, decode_payload, snippet
from broker_core.amqp.v0_9_1.events import (
    Command,
    ContentHeader,
    ContentTooLarge,
    Decoded,
    Heartbeat,
    ProtocolHeader,
    Violation,
)
from broker_core.amqp.v0_9_1.method_cache import (
    METHODS_SEEN,
    SOUND_PROPERTIES,
    are_sound,
    check_properties,
    publish_of,
    remember,
)
from broker_core.amqp.v0_9_1.methods import (
    BasicAck,
    BasicPublish,
    ChannelCloseOk,
    ConnectionOpen,
    ConnectionTuneOk,
    Method,
)
from broker_core.amqp.v0_9_1.publish_template import PublishTemplates
from broker_core.core.errors import (
    ConnectionException,
    FrameError,
    MethodSyntaxError,
    ResourceExhausted,
    UnexpectedFrame,
)

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"

DEFAULT_FRAME_MAX = 131072
# both sides take frames of this size, and before tune-ok no larger ones (specification 4.2.3, 4.2.1)
FRAME_MIN = 4096
DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_PENDING_BYTES = 128 << 20, 256 << 20

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
_LEAST = {METHOD: 4, HEADER: 12, BODY: 0}  # bytes of a payload
FRAME_END, FRAME_OVERHEAD = 0xCE, 8  # type, channel and size before the payload, the end octet behind it

OPEN_BYTES = 64 * 1024  # that may come before connection.open
PIECE_BYTES = 16 * 1024  # of one piece, but for the last event: many publishes that differ in their bodies
PIECE_FRAMES = 128  # of them beside the fast path

_FRAME = struct.Struct(">BHI")  # type, channel, payload size
_CONTENT_HEADER = struct.Struct(">HHQ")  # class, weight, body size

# -- the fast path: what it looks up, bounded because clients choose the keys --------------------------------

_METHOD_FRAME = struct.Struct(">BHII").unpack_from  # type, channel, payload size, class and method in one
# type, channel, payload size, class and weight in one, body size
_HEADER_FRAME = struct.Struct(">BHIIQ").unpack_from
_FRAME_AT = _FRAME.unpack_from
_ACK_FIELDS = struct.Struct(">QBB").unpack_from  # delivery tag, bits, end of frame
_ACK_IDS = BasicAck.CLASS_ID << 16 | BasicAck.METHOD_ID
_PUBLISH_IDS = BasicPublish.CLASS_ID << 16 | BasicPublish.METHOD_ID
_BASIC_IDS = BasicPublish.CLASS_ID << 16  # weight 0
_METHOD_BYTES, _ACK_BYTES, _HEADER_BYTES = 12, 21, 22  # of the smallest frame of its kind

_new_tuple: Callable[[type[Command], tuple[int, Method, bytes, bytes]], Command] = tuple.__new__
# A frozen dataclass sets its fields through object.__setattr__, which is slower than the slots themselves.
_new_method: Callable[[type[BasicAck]], BasicAck] = object.__new__
_set_delivery_tag = vars(BasicAck)["delivery_tag"].__set__
_set_multiple = vars(BasicAck)["multiple"].__set__


class Decoder:
    """``frame_max``: largest frame in bytes that may be negotiated, 0 for the default; ``max_body_bytes``:
    largest content; ``max_pending_bytes``: see above.

    ``handshake`` False: the stream begins behind the protocol header and connection.open (a client's side, or
    a test).
    """

    def __init__(
        self,
        frame_max: int = DEFAULT_FRAME_MAX,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES,
        *,
        handshake: bool = True,
    ) -> None:
        self._repeated = PublishTemplates()
        self._negotiable = frame_max or DEFAULT_FRAME_MAX
        self.frame_max = min(FRAME_MIN, self._negotiable) if handshake else self._negotiable
        self.max_body_bytes = max_body_bytes
        self.max_pending_bytes = max_pending_bytes
        self.announces = False  # gives a ContentHeader
        self.expect_header = handshake
        self.expect_open = OPEN_BYTES + 1 if handshake else 0  # fewer may come before it
        self.pending_bytes = 0  # of contents in assembly
        self._assemblies: dict[int, Assembly] = {}
        self._discarded: set[int] = set()  # channels whose contents are skipped
        self._data, self._position = b"", 0  # what has come, and where the next piece begins
        self._rest = bytearray()  # what came behind it; without it, the beginning of a frame
        self._needed = 0  # bytes that have to be in _rest before looking at it makes sense
        self.empty_frames = 0  # that carried nothing: heartbeats, and empty pieces of a body
        self._over = False

    def tune(self, frame_max: int) -> None:
        """Accept frames of this size; 0: of the default."""
        self.frame_max = frame_max or DEFAULT_FRAME_MAX
        self._repeated.clear()

    def feed(self, data: bytes) -> list[Decoded]:
        """The events that ``data`` completes, in order. Raises nothing."""
        self.add(data)
        events: list[Decoded] = []
        while self.undecoded:
            events += self.piece()
        return events

    def add(self, data: bytes) -> None:
        """``data`` has come; ``piece`` decodes it."""
        if self._over:
            return
        if not (self._data or self._rest):
            self._data = data
            return
        self._rest += data
        if not self._data and len(self._rest) >= self._needed:
            self._data = bytes(self._rest)
            self._rest.clear()

    @property
    def undecoded(self) -> bool:
        """``piece`` has something to do."""
        return bool(self._data)

    def piece(self) -> list[Decoded]:
        """The events of the next bytes that have come, in order: there may be none."""
        events: list[Decoded] = []
        data = self._data
        position, complete = self._frames(data, self._position, events)
        if complete and position < len(data) and not self._over:
            self._position = position
            return events
        rest = data[position:] + self._rest if self._rest else data[position:]
        more = bool(self._rest) and not self._over
        self._position, self._data, self._rest = 0, rest if more else b"", bytearray(b"" if more else rest)
        return events

    def end(self) -> bytes:
        """No more is decoded. Returns what came from the violation on, or is not decoded."""
        self._over = True
        rest = self._data[self._position :] + self._rest
        self._data, self._position, self._rest = b"", 0, bytearray()
        return rest

    def discard(self, channel: int) -> None:
        """Drop the content in assembly on ``channel``, and every one that begins there until channel.close-ok
        comes.

        The rest of it is skipped as it comes; a method on that channel ends the skipping, since a client that
        was told to close the channel need not complete its content.
        """
        self._discarded.add(channel)
        assembly = self._assemblies.get(channel)
        if assembly is not None:
            self._skip(assembly)

    def decide(self, announced: ContentHeader, passed: ContentHeader | None) -> None:
        """A piece ended with ``announced``: its content goes on as ``passed``; None: it is skipped."""
        assembly = self._assemblies[announced.channel]
        if passed is None:
            self._skip(assembly)
        else:
            assembly.method, assembly.properties = passed.method, passed.properties

    # -- frames ----------------------------------------------------------------------------------------------

    def _frames(self, data: bytes, position: int, events: list[Decoded]) -> tuple[int, bool]:
        """Takes frames off ``data`` from ``position`` on, as many as are a piece. Returns the position of the
        next one, and False if that is not complete.
        """
        size = len(data)
        if self.expect_header:
            if size < len(PROTOCOL_HEADER):
                self._needed = len(PROTOCOL_HEADER)
                return 0, False
            position = len(PROTOCOL_HEADER)
            self.expect_header = False
            raw = data[:position]
            self._over = raw != PROTOCOL_HEADER
            events.append(ProtocolHeader(not self._over, raw))
        last = position + PIECE_BYTES
        for _ in range(PIECE_FRAMES):
            if self._over:
                break
            if not self.expect_open:
                position = self._fast(data, position, last, events)
            if position > last or position == size:
                break
            if size - position < FRAME_OVERHEAD - 1:
                self._needed = FRAME_OVERHEAD - 1
                return position, False
            kind, channel, length = _FRAME.unpack_from(data, position)
            # RabbitMQ's leniency: clients may count the 8 bytes around the payload out of frame_max
            if length > self.frame_max:
                largest = self.frame_max - FRAME_OVERHEAD
                text = f"type {kind}, all octets = <<>>: {{frame_too_large,{length},{largest}}}"
                self._violate(events, FrameError(text), channel)
                break
            end = position + FRAME_OVERHEAD - 1 + length
            if end >= size:
                self._needed = FRAME_OVERHEAD + length
                return position, False
            payload = data[position + FRAME_OVERHEAD - 1 : end]
            if data[end] != FRAME_END:
                text = f"type {kind}, {snippet(payload)}: {{invalid_frame_end_marker,{data[end]}}}"
                self._violate(events, FrameError(text), channel)
                break
            position = end + 1
            self._frame(events, kind, channel, payload)
            if self.announces and events and type(events[-1]) is ContentHeader:
                break  # it is decided before more of its content is decoded
        return position, True

    def _fast(self, data: bytes, position: int, last: int, events: list[Decoded]) -> int:
        """Takes acks, methods seen before and whole publishes off ``data`` that begin at ``last`` or before;
        the position of the first other frame.

        Incomplete, unusual and wrong frames are left to the plain path; ``test_fast_paths`` proves both
        equal. It is one long loop without calls, because a call costs as much as the rest of an ack.
        """
        assemblies = self._assemblies
        frame_max = self.frame_max
        max_body_bytes = self.max_body_bytes
        # where contents in assembly leave less room than one more could need, the plain path counts exactly
        roomy = self.pending_bytes + 2 * frame_max + ASSEMBLY_BYTES <= self.max_pending_bytes
        size = len(data)
        template = self._repeated
        most = min(max_body_bytes, frame_max)
        last = min(last, size - _METHOD_BYTES)
        while position <= last:
            kind, channel, length, ids = _METHOD_FRAME(data, position)
            if kind != METHOD or channel in assemblies or not channel:
                break
            if ids == _ACK_IDS:
                if position + _ACK_BYTES > size:
                    break
                tag, bits, end_octet = _ACK_FIELDS(data, position + 11)
                if length != 13 or end_octet != FRAME_END or frame_max < 13:
                    break
                ack = _new_method(BasicAck)
                _set_delivery_tag(ack, tag)
                _set_multiple(ack, bits & 1 == 1)
                events.append(_new_tuple(Command, (channel, ack, b"", b"")))
                position += _ACK_BYTES
                continue
            if ids == _PUBLISH_IDS and roomy and template[channel].complete:
                taken = template[channel].take(data, position, most, events)
                if taken > position:
                    position = taken
                    continue
            header = position + length + 8
            if header > size or length > frame_max or data[header - 1] != FRAME_END:
                break
            payload = data[position + 7 : header - 1]
            method = METHODS_SEEN.get(payload)
            if ids != _PUBLISH_IDS:
                if method is None:
                    break
                events.append(_new_tuple(Command, (channel, method, b"", b"")))
                position = header
                continue
            if method is None:
                method = publish_of(payload)
            if method is None or header + _HEADER_BYTES > size or not roomy:
                break
            kind, second, length, ids, body_size = _HEADER_FRAME(data, header)
            body = header + length + 8
            if (
                kind != HEADER
                or second != channel
                or ids != _BASIC_IDS
                or body_size > max_body_bytes
                or length > frame_max
            ):
                break
            end = body + body_size + 8 if body_size else body
            if end > size or data[body - 1] != FRAME_END:
                break
            properties = data[header + 19 : body - 1]
            if properties not in SOUND_PROPERTIES and not are_sound(properties):
                break
            if body_size:
                kind, second, length = _FRAME_AT(data, body)
                if (
                    kind != BODY
                    or second != channel
                    or length != body_size
                    or length > frame_max
                    or data[end - 1] != FRAME_END
                ):
                    break
                template[channel].learn(method, properties, data, position, header, body, end)
            if properties == b"\0\0":
                properties = b""
            events.append(
                _new_tuple(
                    Command, (channel, method, properties, data[body + 7 : end - 1] if body_size else b"")
                )
            )
            position = end
        return position

    def _frame(self, events: list[Decoded], kind: int, channel: int, payload: bytes) -> None:
        length = len(payload)
        valid = length >= _LEAST.get(kind, 1 << 32) or (kind == HEARTBEAT and not length)
        if self.expect_open:
            self.expect_open = self.expect_open - FRAME_OVERHEAD - length or -1
        if self.expect_open < 0:
            text = f"more than {OPEN_BYTES} bytes came before connection.open; log in first"
            self._violate(events, ResourceExhausted(text), channel)
        elif not valid:
            self._violate(events, FrameError(f"type {kind}, {snippet(payload)}: unknown_frame"), channel)
        elif kind == HEARTBEAT and channel == 0:
            self.empty_frames += 1
            events.append(Heartbeat())
        elif kind == HEARTBEAT or (channel == 0 and kind != METHOD) or (channel != 0 and self.expect_open):
            self._violate(events, UnexpectedFrame(f"type {kind}, {snippet(payload)}"), channel)
        elif kind == METHOD:
            self._method(events, channel, payload)
        elif channel not in self._assemblies:
            self._violate(
                events, UnexpectedFrame("expected method frame, got non method frame instead"), channel
            )
        elif kind == HEADER:
            self._header(events, channel, payload)
        else:
            self._body(events, channel, payload)

    def _violate(
        self,
        events: list[Decoded],
        error: ConnectionException,
        channel: int,
        method: type[Method] | None = None,
    ) -> None:
        self._over = True
        self._assemblies.clear()
        self.pending_bytes = 0
        events.append(Violation(error, channel, (method.CLASS_ID, method.METHOD_ID) if method else (0, 0)))

    # -- methods and contents --------------------------------------------------------------------------------

    def _method(self, events: list[Decoded], channel: int, payload: bytes) -> None:
        assembly = self._assemblies.get(channel)
        if assembly is not None:
            if not assembly.skipped:
                self._violate(events, assembly.interrupted(), channel, type(assembly.method))
                return
            self._forget(channel, assembly)
        try:
            method = decode_payload(payload)
        except ConnectionException as error:
            self._violate(events, error, channel, blamed(payload))
            return
        remember(payload, method)
        # A method with content on channel 0 is wrong whatever its content is; the state tables say so.
        if not method.HAS_CONTENT or channel == 0:
            if channel == 0 and isinstance(method, ConnectionOpen):
                self.expect_open = 0
            elif channel == 0 and isinstance(method, ConnectionTuneOk):
                self.tune(min(method.frame_max or self._negotiable, self._negotiable))
            elif isinstance(method, ChannelCloseOk):
                self._discarded.discard(channel)
            events.append(Command(channel, method))
            return
        assembly = Assembly(method, len(payload) + ASSEMBLY_BYTES)
        self._assemblies[channel] = assembly
        self.pending_bytes += assembly.cost
        if channel in self._discarded:
            self._skip(assembly)
        self._check_pending(events, channel)

    def _header(self, events: list[Decoded], channel: int, payload: bytes) -> None:
        assembly = self._assemblies[channel]
        class_id, weight, size = _CONTENT_HEADER.unpack_from(payload)
        expected = assembly.method.CLASS_ID
        if assembly.remaining is not None or weight:
            self._violate(events, assembly.interrupted(), channel, type(assembly.method))
            return
        if class_id != expected:
            text = f"expected content header for class {expected}, got one for class {class_id} instead"
            self._violate(events, UnexpectedFrame(text), channel, type(assembly.method))
            return
        properties = payload[12:]
        try:
            check_properties(properties)
        except MethodSyntaxError as error:
            self._violate(events, error, channel, type(assembly.method))
            return
        assembly.remaining = size
        if size > self.max_body_bytes and not assembly.skipped:
            self._skip(assembly)
            events.append(ContentTooLarge(channel, size))
        if not assembly.skipped:
            assembly.properties = b"" if properties == b"\0\0" else properties
            assembly.cost += len(properties)
            self.pending_bytes += len(properties)
            self._check_pending(events, channel)
        if self._over:
            return
        if not size:
            self._complete(events, channel, assembly, b"")
        elif self.announces and not assembly.skipped:
            events.append(ContentHeader(channel, assembly.method, assembly.properties, size))

    def _body(self, events: list[Decoded], channel: int, payload: bytes) -> None:
        assembly = self._assemblies[channel]
        remaining = assembly.remaining
        if remaining is None:
            self._violate(events, assembly.interrupted(), channel, type(assembly.method))
            return
        length = len(payload)
        if length > remaining:
            error = UnexpectedFrame(
                f"a content body frame has {length} bytes, at most {remaining} are left of the size in the "
                "content header"
            )
            self._violate(events, error, channel, type(assembly.method))
            return
        assembly.remaining = remaining - length
        if not length:
            self.empty_frames += 1
        if not assembly.skipped:
            if length == remaining and not assembly.body:
                self._complete(events, channel, assembly, payload)
                return
            assembly.body += payload
            assembly.cost += length
            self.pending_bytes += length
            self._check_pending(events, channel)
        if length == remaining and not self._over:
            self._complete(events, channel, assembly, bytes(assembly.body))

    def _complete(self, events: list[Decoded], channel: int, assembly: Assembly, body: bytes) -> None:
        self._forget(channel, assembly)
        if not assembly.skipped:
            events.append(Command(channel, assembly.method, assembly.properties, body))

    def _skip(self, assembly: Assembly) -> None:
        assembly.skipped = True
        assembly.properties = b""
        assembly.body = bytearray()
        self.pending_bytes -= assembly.cost - ASSEMBLY_BYTES
        assembly.cost = ASSEMBLY_BYTES

    def _forget(self, channel: int, assembly: Assembly) -> None:
        del self._assemblies[channel]
        self.pending_bytes -= assembly.cost

    def _check_pending(self, events: list[Decoded], channel: int) -> None:
        if self.pending_bytes > self.max_pending_bytes:
            limit = f"the connection may have {self.max_pending_bytes} (--connection-bytes)"
            text = f"contents in assembly need {self.pending_bytes} bytes, {limit}"
            self._violate(events, ResourceExhausted(text), channel)
