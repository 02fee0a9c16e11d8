"""Methods as payloads of method frames (specification 4.2.4, 4.2.5), field by field along ``Method.LAYOUT``.

Not here: frames, and the fast paths of ``decoder.py`` and ``encoder.py``; tests prove them equal to this.

Invariant: ``decode_payload(encode_payload(m)) == m`` for every method whose values the wire can hold. Bytes
that are no method raise only a ConnectionException, values that do not fit only LocalProtocolError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from broker_core.amqp.v0_9_1.methods import METHODS, Method
from broker_core.core.errors import (
    CommandInvalid,
    ConnectionException,
    FrameError,
    LocalProtocolError,
    MethodSyntaxError,
    RemoteProtocolError,
)
from broker_core.message.field_table import decode_table, encode_table

_IDS = struct.Struct(">HH")
_U32 = struct.Struct(">I")
_NUMBERS = {
    "octet": struct.Struct(">B"),
    "short": struct.Struct(">H"),
    "long": struct.Struct(">I"),
    "longlong": struct.Struct(">Q"),
}
_ZEROS: dict[str, bytes] = {
    "octet": b"\0",
    "short": b"\0\0",
    "long": b"\0\0\0\0",
    "shortstr": b"\0",
    "longstr": b"\0\0\0\0",
}


def erlang_binary(raw: bytes) -> str:
    """``raw`` as RabbitMQ prints it in its error texts: ``<<"text">>`` where all is printable, ``<<1,2,3>>``
    elsewhere.
    """
    if raw and all(32 <= octet < 127 for octet in raw):
        text = raw.decode("ascii").replace("\\", "\\\\").replace('"', '\\"')
        return f'<<"{text}">>'
    return f"<<{','.join(map(str, raw))}>>"


# -- reading -------------------------------------------------------------------------------------------------


class _Cut(Exception):
    """The fields end before the layout does, or after it."""


def method_type(payload: bytes) -> type[Method]:
    """The class of the method in a payload of at least 4 bytes. Raises CommandInvalid if there is none."""
    ids = _IDS.unpack_from(payload)
    found = METHODS.get(ids)
    if found is None:
        raise CommandInvalid(f"unknown method {ids[0]},{ids[1]}")
    return found


def decode_payload(payload: bytes) -> Method:
    """A payload of at least 4 bytes as its method.

    Raises CommandInvalid (503) for an unknown method, FrameError (501, RabbitMQ's text) if the fields are cut
    short, left over or no UTF-8, and MethodSyntaxError (502) if a field table is damaged.
    """
    kind = method_type(payload)
    try:
        return kind(**_fields(kind, payload))
    except _Cut:
        raise FrameError(f"cannot decode {erlang_binary(payload[4:])}") from None


def _fields(kind: type[Method], payload: bytes) -> dict[str, object]:
    values: dict[str, object] = {}
    position = 4
    bit = 0  # of the octet at ``position - 1``; 0: the next bit opens an octet
    for name, field_type in kind.LAYOUT:
        if field_type == "bit":
            if not bit & 7:
                _expect(payload, position + 1)
                position, bit = position + 1, 0
            value: object = bool(payload[position - 1] >> bit & 1)
            bit += 1
        else:
            bit = 0
            value, position = _field(payload, position, field_type)
        if name is not None:
            values[name] = value
    if position != len(payload):
        raise _Cut
    return values


def _expect(payload: bytes, end: int) -> None:
    if end > len(payload):
        raise _Cut


def _field(payload: bytes, position: int, field_type: str) -> tuple[object, int]:
    number = _NUMBERS.get(field_type)
    if number is not None:
        _expect(payload, position + number.size)
        return number.unpack_from(payload, position)[0], position + number.size
    if field_type == "shortstr":
        _expect(payload, position + 1)
        start = position + 1
        end = start + payload[position]
        _expect(payload, end)
        try:
            return payload[start:end].decode(), end
        except UnicodeDecodeError:
            raise FrameError("Malformed UTF-8 in shortstr") from None
    _expect(payload, position + 4)
    start = position + 4
    end = start + _U32.unpack_from(payload, position)[0]
    _expect(payload, end)
    if field_type == "longstr":
        return payload[start:end], end
    try:
        return decode_table(payload[position:end]), end
    except RemoteProtocolError as damaged:
        raise MethodSyntaxError(f"a field table is damaged: {damaged.summary}") from None


# -- writing -------------------------------------------------------------------------------------------------


def short_string(value: str, what: str = "a short string") -> bytes:
    """``value`` with its length in front. Raises LocalProtocolError above 255 bytes; ``what`` names it in the
    text.
    """
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except (UnicodeEncodeError, AttributeError):
        raise LocalProtocolError(f"{what} must be text that UTF-8 can hold, not {value!r}") from None
    if len(raw) > 255:
        raise LocalProtocolError(f"{what} has {len(raw)} bytes, at most 255 fit into an AMQP short string")
    return bytes((len(raw),)) + raw


def encode_payload(method: Method) -> bytes:
    """The payload of a method frame. Raises LocalProtocolError for a value that its field cannot hold."""
    parts = [_IDS.pack(method.CLASS_ID, method.METHOD_ID)]
    bits: list[bool] = []
    for name, field_type in method.LAYOUT:
        if field_type == "bit":
            bits.append(name is not None and bool(getattr(method, name)))
            continue
        if bits:
            parts.append(_packed(bits))
            bits = []
        parts.append(
            _ZEROS[field_type]
            if name is None
            else _WRITERS[field_type](getattr(method, name), f"{method.NAME}: {name}")
        )
    if bits:
        parts.append(_packed(bits))
    return b"".join(parts)


def _packed(bits: list[bool]) -> bytes:
    """At most 8 bits, as in every method; the first is the lowest."""
    return bytes((sum(1 << place for place, bit in enumerate(bits) if bit),))


def _number_writer(shape: struct.Struct) -> Callable[[object, str], bytes]:
    def write(value: object, what: str) -> bytes:
        try:
            return shape.pack(value)
        except struct.error:
            raise LocalProtocolError(
                f"{what} is {value!r}, allowed is 0 to {(1 << shape.size * 8) - 1}"
            ) from None

    return write


def _long_string(value: object, what: str) -> bytes:
    if not isinstance(value, bytes):
        raise LocalProtocolError(f"{what} must be bytes, not {type(value).__name__}")
    return _U32.pack(len(value)) + value


def _table(value: Any, what: str) -> bytes:
    return encode_table(value)


_WRITERS: dict[str, Callable[[Any, str], bytes]] = {
    **{name: _number_writer(shape) for name, shape in _NUMBERS.items()},
    "shortstr": short_string,
    "longstr": _long_string,
    "table": _table,
}


def blamed(payload: bytes) -> type[Method] | None:
    """The method of a payload that could not be decoded; None if there is no such method."""
    try:
        return method_type(payload)
    except ConnectionException:
        return None


def snippet(payload: bytes) -> str:
    """The beginning of a payload as RabbitMQ's texts have it."""
    if len(payload) <= 16:
        return f"all octets = {erlang_binary(payload)}"
    return f"first 16 octets = {erlang_binary(payload[:16])}"
