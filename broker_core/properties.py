"""The properties of a message: AMQP 0-9-1 property flags and list (specification 4.2.6.1) as bytes, and as :class:`Properties`.

Not here: what a property means to a queue or an exchange. A message keeps its properties as the bytes it came with; they are
decoded only where a rule needs one, and :func:`delivery_mode` and :func:`expiration` look at one without decoding the rest.

Invariant: ``Properties.decode(p.encode()) == p``; no properties are ``b""``. Bytes that are damaged (cut short, left over,
unknown flags or types, lengths that lie) raise RemoteProtocolError and nothing else.

Header values, by RabbitMQ's letters: ``t`` bool, ``b B s u I i l L`` int, ``f d`` float, ``D`` Decimal, ``S`` str (bytes where it is
no UTF-8), ``x`` bytes, ``A`` list, ``T`` :class:`Timestamp`, ``F`` dict, ``V`` None. An int is encoded as ``I``, or as ``l``
where it needs 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from broker_core.errors import LocalProtocolError, RemoteProtocolError

MAX_NESTING = 64

# In the order of their flags, from bit 15 down to bit 2.
NAMES = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
_FLAG = {name: 1 << (15 - index) for index, name in enumerate(NAMES)}
_UNKNOWN_FLAGS = 0b11  # bit 0 announces a second flag word, which no property of 0-9-1 needs; bit 1 names none
_OCTETS = frozenset({"delivery_mode", "priority"})

_U8, _U16, _U32, _U64 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")
_I8, _I16, _I32, _I64 = struct.Struct(">b"), struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_F32, _F64 = struct.Struct(">f"), struct.Struct(">d")
_DECIMAL = struct.Struct(">Bi")  # digits after the point, unscaled value

_NUMBERS: dict[int, struct.Struct] = {
    ord("b"): _I8,
    ord("B"): _U8,
    ord("s"): _I16,
    ord("u"): _U16,
    ord("I"): _I32,
    ord("i"): _U32,
    ord("l"): _I64,
    ord("L"): _I64,
    ord("f"): _F32,
    ord("d"): _F64,
}


class Timestamp(int):
    """Seconds since the epoch; a type of its own, so that a header keeps its AMQP type ``T``."""

    __slots__ = ()


class Long(int):
    """A header value that is encoded as ``l``, whatever its size: RabbitMQ's counts are, and Java clients tell the types apart."""

    __slots__ = ()


def _damaged(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"message properties are damaged: {what}; the sender must encode them as AMQP 0-9-1 4.2.6.1 says")


# -- reading -----------------------------------------------------------------------------------------------------------


class _Reader:
    """A position in bytes; every step checks that the bytes are there."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def number(self, shape: struct.Struct) -> Any:
        if self.position + shape.size > len(self.data):
            raise _damaged(f"they end at byte {len(self.data)} in the middle of a value")
        (value,) = shape.unpack_from(self.data, self.position)
        self.position += shape.size
        return value

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise _damaged(f"a length of {length} at byte {self.position} goes beyond their end at {len(self.data)}")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def short_string(self) -> str:
        start = self.position
        try:
            return self.take(self.number(_U8)).decode()
        except UnicodeDecodeError:
            raise _damaged(f"the short string at byte {start} is not UTF-8") from None

    def table(self, depth: int = 0) -> dict[str, Any]:
        if depth > MAX_NESTING:
            raise _damaged(f"tables are nested deeper than {MAX_NESTING}")
        end = self._end_of_length()
        table: dict[str, Any] = {}
        while self.position < end:
            name = self.short_string()
            table[name] = self.value(depth)
        if self.position != end:
            raise _damaged(f"a table that ends at byte {end} holds a value that goes on to byte {self.position}")
        return table

    def array(self, depth: int) -> list[Any]:
        if depth > MAX_NESTING:
            raise _damaged(f"arrays are nested deeper than {MAX_NESTING}")
        end = self._end_of_length()
        values: list[Any] = []
        while self.position < end:
            values.append(self.value(depth))
        if self.position != end:
            raise _damaged(f"an array that ends at byte {end} holds a value that goes on to byte {self.position}")
        return values

    def _end_of_length(self) -> int:
        length: int = self.number(_U32)
        end = self.position + length
        if end > len(self.data):
            raise _damaged(f"a length of {length} at byte {self.position - 4} goes beyond their end at {len(self.data)}")
        return end

    def value(self, depth: int) -> Any:
        kind: int = self.number(_U8)
        shape = _NUMBERS.get(kind)
        if shape is not None:
            return self.number(shape)
        read = _OTHERS.get(kind)
        if read is None:
            raise _damaged(f"unknown header type {chr(kind)!r} at byte {self.position - 1}")
        return read(self, depth + 1)

    def long_string(self) -> str | bytes:
        raw = self.take(self.number(_U32))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw  # a long string is any octets

    def decimal(self) -> Decimal:
        scale: int = self.number(_U8)
        unscaled: int = self.number(_I32)
        return Decimal((int(unscaled < 0), tuple(int(digit) for digit in str(abs(unscaled))), -scale))


_OTHERS: dict[int, Callable[[_Reader, int], Any]] = {
    ord("t"): lambda reader, _: reader.number(_U8) != 0,
    ord("D"): lambda reader, _: reader.decimal(),
    ord("S"): lambda reader, _: reader.long_string(),
    ord("x"): lambda reader, _: reader.take(reader.number(_U32)),
    ord("A"): lambda reader, depth: reader.array(depth),
    ord("T"): lambda reader, _: Timestamp(reader.number(_U64)),
    ord("F"): lambda reader, depth: reader.table(depth),
    ord("V"): lambda reader, _: None,
}


# -- writing -----------------------------------------------------------------------------------------------------------


def _short_string(value: object, name: str) -> bytes:
    if not isinstance(value, str):
        raise LocalProtocolError(f"property or header name {name!r} must be a str, not {type(value).__name__}")
    raw = value.encode()
    if len(raw) > 255:
        raise LocalProtocolError(f"{name!r} has {len(raw)} bytes, at most 255 fit into an AMQP short string")
    return _U8.pack(len(raw)) + raw


def _integer(value: object, name: str, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise LocalProtocolError(f"property {name!r} must be an int, not {type(value).__name__}")
    if not 0 <= value < 1 << bits:
        raise LocalProtocolError(f"property {name!r} is {value}, allowed is 0 to {(1 << bits) - 1}")
    return value


def encode_table(table: Mapping[str, Any], depth: int = 0) -> bytes:
    """A field table with its length in front. Raises LocalProtocolError for a value that AMQP has no type for."""
    if depth > MAX_NESTING:
        raise LocalProtocolError(f"headers are nested deeper than {MAX_NESTING}")
    parts = [_short_string(name, str(name)) + _value(value, name, depth + 1) for name, value in table.items()]
    return _sized(b"".join(parts))


def decode_table(data: bytes) -> dict[str, Any]:
    """The inverse of :func:`encode_table`. Raises RemoteProtocolError."""
    reader = _Reader(data)
    table = reader.table()
    _expect_end(reader)
    return table


def _sized(raw: bytes) -> bytes:
    return _U32.pack(len(raw)) + raw


def _value(value: Any, name: str, depth: int) -> bytes:
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\x01" if value else b"t\x00"
        case Timestamp():
            return b"T" + _U64.pack(_integer(int(value), name, 64))
        case Long():
            return b"l" + _I64.pack(value)
        case int():
            return _encode_int(value, name)
        case float():
            return b"d" + _F64.pack(value)
        case str():
            return b"S" + _sized(value.encode())
        case bytes() | bytearray():
            return b"x" + _sized(bytes(value))
        case Decimal():
            return _encode_decimal(value, name)
        case datetime():
            return b"T" + _U64.pack(_integer(int(value.timestamp()), name, 64))
        case Mapping():
            return b"F" + encode_table(value, depth)
        case list() | tuple():
            if depth > MAX_NESTING:
                raise LocalProtocolError(f"headers are nested deeper than {MAX_NESTING}")
            return b"A" + _sized(b"".join(_value(item, name, depth + 1) for item in value))
    raise LocalProtocolError(f"header {name!r} is a {type(value).__name__}, which AMQP has no type for")


def _encode_int(value: int, name: str) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"I" + _I32.pack(value)
    if -(1 << 63) <= value < 1 << 63:
        return b"l" + _I64.pack(value)
    raise LocalProtocolError(f"header {name!r} is {value}, which does not fit into 64 bits")


def _encode_decimal(value: Decimal, name: str) -> bytes:
    sign, digits, exponent = value.as_tuple()
    unscaled = int("".join(map(str, digits)) or "0") * (-1 if sign else 1)
    if not isinstance(exponent, int) or not -255 <= exponent <= 0 or not -(1 << 31) <= unscaled < 1 << 31:
        raise LocalProtocolError(f"header {name!r} is the decimal {value}, which does not fit into AMQP's 32 bits and 255 digits")
    return b"D" + _DECIMAL.pack(-exponent, unscaled)


# -- the whole list ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Properties:
    """The basic properties of AMQP 0-9-1; None where a message does not have one. ``headers`` empty: none.

    ``delivery_mode`` 1 transient, 2 persistent; ``priority`` 0 to 255; ``timestamp`` in seconds since the epoch; ``expiration`` in
    milliseconds as text, as the specification has it; ``cluster_id`` is reserved and kept only so that nothing of a foreign message
    is lost.
    """

    content_type: str | None = None
    content_encoding: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None

    def encode(self) -> bytes:
        """Flags and list; ``b""`` where there is nothing. Raises LocalProtocolError for a value that does not fit."""
        flags = 0
        parts: list[bytes] = []
        for name in NAMES:
            value = getattr(self, name)
            if value is None or (name == "headers" and not value):
                continue
            flags |= _FLAG[name]
            if name == "headers":
                parts.append(encode_table(value))
            elif name in _OCTETS:
                parts.append(_U8.pack(_integer(value, name, 8)))
            elif name == "timestamp":
                parts.append(_U64.pack(_integer(value, name, 64)))
            else:
                parts.append(_short_string(value, name))
        return _U16.pack(flags) + b"".join(parts) if flags else b""

    @classmethod
    def decode(cls, data: bytes) -> Properties:
        """Raises RemoteProtocolError where ``data`` is not exactly one flags-and-list."""
        if not data:
            return cls()
        reader = _Reader(data)
        flags = _flags(reader)
        values: dict[str, Any] = {}
        for name in NAMES:
            if flags & _FLAG[name]:
                values[name] = _property(reader, name)
        _expect_end(reader)
        return cls(**values)


def _flags(reader: _Reader) -> int:
    flags: int = reader.number(_U16)
    if flags & _UNKNOWN_FLAGS:
        raise _damaged(f"unknown property flags {flags & _UNKNOWN_FLAGS:#04b}")
    return flags


def _property(reader: _Reader, name: str) -> Any:
    if name == "headers":
        return reader.table()
    if name in _OCTETS:
        return reader.number(_U8)
    if name == "timestamp":
        return reader.number(_U64)
    return reader.short_string()


def _expect_end(reader: _Reader) -> None:
    if reader.position != len(reader.data):
        raise _damaged(f"{len(reader.data) - reader.position} bytes are left over at byte {reader.position}")


# -- checking ----------------------------------------------------------------------------------------------------------

_SIZES = {kind: shape.size for kind, shape in _NUMBERS.items()} | {ord("t"): 1, ord("D"): _DECIMAL.size, ord("T"): 8, ord("V"): 0}
_LONG_STRING, _BYTES = ord("S"), ord("x")


@lru_cache(maxsize=1024)
def _plan(flags: int) -> tuple[int, ...]:
    """For each property that ``flags`` announce: its size in bytes, 0 for a short string, -1 for the headers."""
    sizes = {"headers": -1, "delivery_mode": 1, "priority": 1, "timestamp": 8}
    return tuple(sizes.get(name, 0) for name in NAMES if flags & _FLAG[name])


def check(data: bytes) -> None:
    """Raises RemoteProtocolError exactly where ``Properties.decode`` does, in a fraction of its time."""
    try:
        sound = not data or (not data[1] & _UNKNOWN_FLAGS and _end_of_list(data) == len(data))
    except (IndexError, struct.error, UnicodeDecodeError):
        sound = False
    if not sound:
        Properties.decode(data)  # knows what to say


def _end_of_list(data: bytes) -> int:
    """The position behind the list; beyond the end of ``data`` where it is cut short."""
    position = 2
    for size in _plan(data[0] << 8 | data[1]):
        if size > 0:
            position += size
        elif size == 0:
            start = position + 1
            position = start + data[position]
            data[start:position].decode()
        else:
            position = _end_of_table(data, position)
    return position


def _end_of_table(data: bytes, position: int) -> int:
    (length,) = _U32.unpack_from(data, position)
    start, position = position, position + 4
    end: int = position + length
    while position < end:
        name = position + 1
        position = name + data[position]
        data[name:position].decode()
        kind = data[position]
        position += 1
        size = _SIZES.get(kind)
        if size is not None:
            position += size
        elif kind in (_LONG_STRING, _BYTES):
            position += 4 + _U32.unpack_from(data, position)[0]
        else:  # a table or an array inside: the plain way counts how deep they are
            reader = _Reader(data)
            reader.position = start
            reader.table()
            return reader.position
    return position if position == end else len(data) + 1


# -- one property ------------------------------------------------------------------------------------------------------


def _one(data: bytes, wanted: str) -> Any:
    """One property; what stands before it is skipped by its length, what stands behind it is not looked at."""
    if not data:
        return None
    reader = _Reader(data)
    flags = _flags(reader)
    if not flags & _FLAG[wanted]:
        return None
    for name in NAMES:
        if name == wanted:
            return _property(reader, name)
        if flags & _FLAG[name]:
            if name == "headers":
                reader.position = reader._end_of_length()
            elif name in _OCTETS:
                reader.number(_U8)
            else:
                reader.take(reader.number(_U8))
    raise AssertionError(wanted)


def delivery_mode(data: bytes) -> int | None:
    """1 transient, 2 persistent, None where the encoded properties do not say. Raises RemoteProtocolError."""
    if not data or not data[0] & 0x10:
        return None
    try:  # every publish comes by here: content type, encoding and headers are skipped by their lengths, as ``_one`` does
        flags, position = data[0], 2
        if flags & 0x80:
            position += 1 + data[position]
        if flags & 0x40:
            position += 1 + data[position]
        if flags & 0x20:
            position += 4 + int.from_bytes(data[position : position + 4], "big")
        return data[position]
    except IndexError:
        raise _damaged(f"they end at byte {len(data)} in the middle of a value") from None


def expiration(data: bytes) -> str | None:
    """The time to live in milliseconds as the sender's text, not checked to be a number; None: none. Raises RemoteProtocolError."""
    if not data or not data[0] & 0x01:
        return None
    text: str | None = _one(data, "expiration")
    return text


def priority(data: bytes) -> int | None:
    """The message's priority; None where the encoded properties do not say. Raises RemoteProtocolError."""
    found: int | None = _one(data, "priority")
    return found


def with_reply_to(data: bytes, reply_to: str) -> bytes:
    """Encoded properties that have a reply_to, with this one in its place; the rest stays byte for byte. Raises RemoteProtocolError."""
    reader = _Reader(data)
    flags = _flags(reader)
    for name in NAMES[: NAMES.index("reply_to")]:
        if flags & _FLAG[name]:
            if name == "headers":
                reader.position = reader._end_of_length()
            else:
                reader.take(1 if name in _OCTETS else reader.number(_U8))
    start = reader.position
    reader.short_string()
    return data[:start] + _short_string(reply_to, "reply_to") + data[reader.position :]


def rewrite(data: bytes, headers: Mapping[str, Any], without: Collection[str] = ()) -> bytes:
    """Encoded properties with some headers put in place of their old values (None: taken out), and some properties left out.

    Everything else stays byte for byte, so that header values keep their types. Raises RemoteProtocolError, LocalProtocolError.
    """
    found = _raw_properties(data) if data else {}
    return _rewritten(found, _raw_headers(found.get("headers")), headers, without)


def rewrite_of(
    data: bytes, headers: Callable[[dict[str, Any]], Mapping[str, Any]], read: Collection[str], without: Collection[str] = ()
) -> bytes:
    """As :func:`rewrite`, where the new headers depend on those in ``read``, which alone are decoded."""
    found = _raw_properties(data) if data else {}
    kept = _raw_headers(found.get("headers"))
    return _rewritten(found, kept, headers({name: _decoded(kept[name]) for name in read if name in kept}), without)


def _decoded(raw: bytes) -> Any:
    return _Reader(raw).value(0)


def _rewritten(found: dict[str, bytes], kept: dict[str, bytes], headers: Mapping[str, Any], without: Collection[str]) -> bytes:
    for name, value in headers.items():
        kept.pop(name, None)
        if value is not None:
            kept[name] = _value(value, name, 1)
    flags = 0
    parts: list[bytes] = []
    if kept:
        found["headers"] = _sized(b"".join(_short_string(name, name) + raw for name, raw in kept.items()))
    else:
        found.pop("headers", None)
    for name in NAMES:
        if name in found and name not in without:
            flags |= _FLAG[name]
            parts.append(found[name])
    return _U16.pack(flags) + b"".join(parts) if flags else b""


def encode_headers(headers: Mapping[str, Any]) -> bytes:
    """What :func:`append_headers` puts behind the others. Raises LocalProtocolError."""
    return encode_table(headers)[4:]


def append_headers(data: bytes, entries: bytes) -> bytes:
    """Encoded properties with more headers behind those they have, of other names, and without expiration. Raises RemoteProtocolError.

    Many times as fast as :func:`rewrite`: no header is looked at.
    """
    if not data:
        return b"\x20\x00" + _sized(entries)
    check(data)
    flags, at = data[0], 2
    if flags & 0x80:
        at += 1 + data[at]
    if flags & 0x40:
        at += 1 + data[at]
    start, table = at, b""
    if flags & 0x20:
        at += 4 + int.from_bytes(data[at : at + 4], "big")
        table = data[start + 4 : at]
    rest = data[at:]
    if flags & 0x01:
        end = _expiration_at(flags, data, at)
        rest = data[at:end] + data[end + 1 + data[end] :]
    return b"".join((bytes((flags & 0xFE | 0x20, data[1])), data[2:start], _sized(table + entries), rest))


def _expiration_at(flags: int, data: bytes, at: int) -> int:
    """Where the expiration of sound properties begins; ``at`` is behind the headers."""
    at += (flags >> 4 & 1) + (flags >> 3 & 1)  # delivery mode, priority
    if flags & 0x04:
        at += 1 + data[at]
    if flags & 0x02:
        at += 1 + data[at]
    return at


def _raw_properties(data: bytes) -> dict[str, bytes]:
    """Each property's bytes, undecoded."""
    reader = _Reader(data)
    flags = _flags(reader)
    found: dict[str, bytes] = {}
    for name in NAMES:
        if flags & _FLAG[name]:
            start = reader.position
            if name == "headers":
                reader.position = reader._end_of_length()
            elif name == "timestamp":
                reader.take(8)
            elif name in _OCTETS:
                reader.take(1)
            else:
                reader.take(reader.number(_U8))
            found[name] = data[start : reader.position]
    _expect_end(reader)
    return found


def _raw_headers(raw: bytes | None) -> dict[str, bytes]:
    """Of a table: each header's value with its type in front, undecoded."""
    if raw is None:
        return {}
    reader = _Reader(raw)
    end = reader._end_of_length()
    found: dict[str, bytes] = {}
    while reader.position < end:
        name = reader.short_string()
        start = reader.position
        reader.value(0)
        found[name] = raw[start : reader.position]
    return found
