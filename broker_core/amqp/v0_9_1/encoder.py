"""Commands become frames (specification 4.2.3 to 4.2.6), which wait in their order to be sent.

Not here: sockets, and when a frame may be sent.
Invariant: every fast path gives the bytes of ``encode_method`` and ``encode_content``; no frame is larger
than ``frame_max``. After ``stop_after_current`` only ``final_frame`` adds to what is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from broker_core.amqp.v0_9_1.codec import encode_payload
from broker_core.amqp.v0_9_1.methods import BasicAck, BasicDeliver, BasicNack, Method
from broker_core.core.errors import PreconditionFailed

HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"

_DEFAULT_FRAME_MAX = 131072
_FRAME = struct.Struct(">BHI")
_CONTENT_FRAME = struct.Struct(">BHIHHQ")

# Of the fast paths. Class and weight, or class and method, are packed as one number.
_BASIC = BasicDeliver.CLASS_ID << 16
_TAG_END = 1 << 64
_ROUTES = 256  # remembered by each consumer; publishers choose the routing keys
_KIND_AND_CHANNEL = struct.Struct(">BH")
_TAG = struct.Struct(">QB").pack  # delivery tag, redelivered
_TAG_BYTES = 9
_HEADER_BYTES = 7 + 12 + 1  # of the frame of a content header, around the properties
_HEADER_REST = struct.Struct(">IIQ").pack  # payload size, class and weight, body size
_BODY_HEAD = struct.Struct(">BBHI").pack  # end of the header frame; type, channel, payload size
_CONFIRM = struct.Struct(">BHIHHQBB").pack
_BARE = struct.Struct(">BHIHHB").pack  # a method without fields


def encode_method(channel: int, method: Method) -> bytes:
    """One method frame. Raises LocalProtocolError for a value that its field cannot hold."""
    if not method.LAYOUT:  # an answer such as tx.commit-ok
        return _BARE(1, channel, 4, method.CLASS_ID, method.METHOD_ID, 0xCE)
    payload = encode_payload(method)
    return b"%b%b\xce" % (_FRAME.pack(1, channel, len(payload)), payload)


def encode_content(channel: int, method: Method, properties: bytes, body: bytes, frame_max: int) -> bytes:
    """Method frame, content header, and body frames of at most ``frame_max`` (0: 131072); none if empty.

    ``properties`` are flags and list, ``b""`` for none. Raises LocalProtocolError as encode_method.
    """
    flags_and_list = properties or b"\0\0"
    parts = [
        encode_method(channel, method),
        _CONTENT_FRAME.pack(2, channel, 12 + len(flags_and_list), method.CLASS_ID, 0, len(body)),
        flags_and_list,
        b"\xce",
    ]
    most = (frame_max or _DEFAULT_FRAME_MAX) - 8
    for start in range(0, len(body), most):
        part = body[start : start + most]
        parts += (_FRAME.pack(3, channel, len(part)), part, b"\xce")
    return b"".join(parts)


def require_header_fits(properties: bytes, frame_max: int) -> None:
    """A content header is one frame (specification 2.3.5.2), and a peer must not send a larger frame than was
    agreed on (4.2.3). Raises PreconditionFailed.
    """
    most = frame_max or _DEFAULT_FRAME_MAX
    size = _HEADER_BYTES + len(properties)
    if size > most:
        raise PreconditionFailed(
            f"the properties of a message need a frame of {size} bytes, and frame_max of this connection is "
            f"{most}: "
            "the message stays where it is; connect with a larger frame_max"
        )


class DeliverEncoder:
    """Deliveries to one consumer; ``frame_max`` in bytes, 0: 131072."""

    __slots__ = ("_channel", "_consumer_tag", "_frame_max", "_most_properties", "_routes")

    def __init__(self, channel: int, consumer_tag: str, frame_max: int) -> None:
        self._channel = channel
        self._consumer_tag = consumer_tag
        self._frame_max = frame_max or _DEFAULT_FRAME_MAX
        self._most_properties = self._frame_max - _HEADER_BYTES
        self._routes: dict[tuple[str, str], tuple[bytes, bytes]] = {}  # bytes before and after the tag

    def encode(
        self,
        delivery_tag: int,
        redelivered: bool,
        exchange: str,
        routing_key: str,
        properties: bytes,
        body: bytes,
    ) -> bytes:
        """The frames of one delivery. Raises LocalProtocolError for a value that its field cannot hold, and
        PreconditionFailed for properties that are too large.
        """
        if len(properties) > self._most_properties:
            require_header_fits(properties, self._frame_max)
        route = self._routes.get((exchange, routing_key)) or self._route(exchange, routing_key)
        size = len(body)
        if not 0 < size <= self._frame_max - 8 or not properties or not 0 <= delivery_tag < _TAG_END:
            method = BasicDeliver(self._consumer_tag, delivery_tag, redelivered, exchange, routing_key)
            return encode_content(self._channel, method, properties, body, self._frame_max)
        return b"".join(
            (
                route[0],
                _TAG(delivery_tag, redelivered),
                route[1],
                _HEADER_REST(12 + len(properties), _BASIC, size),
                properties,
                _BODY_HEAD(0xCE, 3, self._channel, size),
                body,
                b"\xce",
            )
        )

    def encode_many(
        self,
        first_tag: int,
        redelivered: Sequence[bool],
        messages: Sequence[tuple[str, str, bytes, bytes]],
        most_bytes: int,
    ) -> tuple[bytes, int]:
        """The frames of deliveries with consecutive tags, until they have more than ``most_bytes``, or the
        properties of the next one are too large; and how many these are. ``messages``: the last arguments of
        ``encode``. Raises as it does, for the first one.
        """
        if not 0 <= first_tag < _TAG_END - len(messages):
            return self.encode(first_tag, redelivered[0], *messages[0]), 1
        channel, most = self._channel, self._frame_max - 8
        parts: list[bytes] = []
        total, tag, each = 0, first_tag, 0
        like = ("", "", b"", 0)  # the last one; ``before``, ``between`` and ``each`` are of it
        before = between = b""
        for (exchange, routing_key, properties, body), again in zip(messages, redelivered):
            size = len(body)
            if (exchange, routing_key, properties, size) != like:
                if parts and len(properties) > self._most_properties:
                    break
                if not 0 < size <= most or not properties or len(properties) > self._most_properties:
                    data = self.encode(tag, again, exchange, routing_key, properties, body)
                    parts.append(data)
                    total += len(data)
                    tag += 1
                    if total > most_bytes:
                        break
                    continue
                like = (exchange, routing_key, properties, size)
                before, behind = self._routes.get((exchange, routing_key)) or self._route(
                    exchange, routing_key
                )
                header = _HEADER_REST(12 + len(properties), _BASIC, size)
                between = b"".join((behind, header, properties, _BODY_HEAD(0xCE, 3, channel, size)))
                each = len(before) + len(between) + size + _TAG_BYTES + 1
            parts += (before, _TAG(tag, again), between, body, b"\xce")
            tag += 1
            total += each
            if total > most_bytes:
                break
        return b"".join(parts), tag - first_tag

    def _route(self, exchange: str, routing_key: str) -> tuple[bytes, bytes]:
        payload = encode_payload(BasicDeliver(self._consumer_tag, 0, False, exchange, routing_key))
        tag = 5 + payload[4]  # after class, method and the consumer tag
        before = _FRAME.pack(1, self._channel, len(payload)) + payload[:tag]
        route = before, payload[tag + 9 :] + b"\xce" + _KIND_AND_CHANNEL.pack(2, self._channel)
        if len(self._routes) >= _ROUTES:
            self._routes.clear()
        self._routes[exchange, routing_key] = route
        return route


def encode_ack(channel: int, delivery_tag: int, multiple: bool) -> bytes:
    """A basic.ack frame (a confirm). Raises LocalProtocolError for a tag above 64 bits."""
    if not 0 <= delivery_tag < _TAG_END:
        return encode_method(channel, BasicAck(delivery_tag, multiple))  # raises the error
    return _CONFIRM(1, channel, 13, 60, 80, delivery_tag, multiple, 0xCE)


def encode_nack(channel: int, delivery_tag: int) -> bytes:
    """A basic.nack frame (a negative confirm). Raises LocalProtocolError for a tag above 64 bits."""
    if not 0 <= delivery_tag < _TAG_END:
        return encode_method(channel, BasicNack(delivery_tag))
    return _CONFIRM(1, channel, 13, 60, 120, delivery_tag, 0, 0xCE)


class Outgoing:
    """``frames`` wait for ``take``, ``size`` is their length in bytes.

    ``frame_max``: of one frame. ``closed_for_sending``: has fallen silent.
    """

    __slots__ = ("_last", "closed_for_sending", "frame_max", "frames", "size")

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self.frames: list[bytes] = []
        self.size = 0
        self.closed_for_sending = False
        self._last: list[bytes] = []

    def send(self, number: int, method: Method, properties: bytes = b"", body: bytes = b"") -> None:
        """Add a method with its content. Raises LocalProtocolError for a value that its field cannot hold."""
        if method.HAS_CONTENT:
            self.write(encode_content(number, method, properties, body, self.frame_max))
        else:
            self.write(encode_method(number, method))

    def write(self, data: bytes) -> None:
        self.frames.append(data)
        self.size += len(data)

    def take(self) -> bytes:
        """All of it, once."""
        frames = self._last if self.closed_for_sending else self.frames
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        self.frames.clear()
        self._last.clear()
        self.size = 0
        return data

    def stop_after_current(self) -> None:
        """Send nothing after the frames that were written."""
        if not self.closed_for_sending:
            self.closed_for_sending = True
            self._last = self.frames[:]

    def final_frame(self, method: Method) -> None:
        """Add ``method`` on channel 0 after the last frame."""
        self._last.append(encode_method(0, method))

    def drop(self) -> None:
        """Drop all frames: the socket is gone."""
        self.stop_after_current()
        self._last.clear()
