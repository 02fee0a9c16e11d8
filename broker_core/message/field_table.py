"""Field tables of AMQP 0-9-1 (specification 4.2.5.5) as bytes and as Python values.

Not here: the properties of a message, one of which is a table (``properties.py``). Invariant:
``decode_table(encode_table(t)) == t``. Damaged bytes (truncated, too many, unknown types, wrong lengths)
raise RemoteProtocolError and nothing else.

Values, by RabbitMQ's letters: ``t`` bool, ``b B s u I i l L`` int, ``f d`` float, ``D`` Decimal, ``S`` str
(bytes if it is not UTF-8), ``x`` bytes, ``A`` list, ``T`` :class:`Timestamp`, ``F`` dict, ``V`` None. An int
is encoded as ``I``, or as ``l`` if it needs 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from broker_core.core.errors import LocalProtocolError, RemoteProtocolError

MAX_NESTING = 64
MAX_VALUES = 5_000  # of a table with all that is in it: each takes some hundred times as long as its bytes

U8, U16, U32, U64 = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")
_I8, _I16, _I32, _I64 = struct.Struct(">b"), struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
_F32, _F64 = struct.Struct(">f"), struct.Struct(">d")
_DECIMAL = struct.Struct(">Bi")  # digits after the point, unscaled value

NUMBERS: dict[int, struct.Struct] = {
    ord("b"): _I8,
    ord("B"): U8,
    ord("s"): _I16,
    ord("u"): U16,
    ord("I"): _I32,
    ord("i"): U32,
    ord("l"): _I64,
    ord("L"): _I64,
    ord("f"): _F32,
    ord("d"): _F64,
}


class Timestamp(int):
    """Seconds since the epoch; a separate type, so that a header keeps its AMQP type ``T``."""

    __slots__ = ()


class Long(int):
    """A header value that is always encoded as ``l``, like RabbitMQ's counts: Java clients distinguish the
    types.
    """

    __slots__ = ()


def damaged(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"message properties are damaged: {what}; the sender must encode them as AMQP 0-9-1 4.2.6.1 says"
    )


# -- reading -------------------------------------------------------------------------------------------------


class FieldReader:
    """A position in bytes; every step checks that enough bytes follow."""

    __slots__ = ("data", "left", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.left = MAX_VALUES

    def number(self, shape: struct.Struct) -> Any:
        if self.position + shape.size > len(self.data):
            raise damaged(f"they end at byte {len(self.data)} in the middle of a value")
        (value,) = shape.unpack_from(self.data, self.position)
        self.position += shape.size
        return value

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise damaged(
                f"a length of {length} at byte {self.position} goes beyond their end at {len(self.data)}"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def short_string(self) -> str:
        start = self.position
        try:
            return self.take(self.number(U8)).decode()
        except UnicodeDecodeError:
            raise damaged(f"the short string at byte {start} is not UTF-8") from None

    def table(self, depth: int = 0) -> dict[str, object]:
        if depth > MAX_NESTING:
            raise damaged(f"tables are nested deeper than {MAX_NESTING}")
        end = self.end_of_length()
        table: dict[str, object] = {}
        while self.position < end:
            name = self.short_string()
            table[name] = self.value(depth)
        if self.position != end:
            raise damaged(
                f"a table that ends at byte {end} holds a value that continues to byte {self.position}"
            )
        return table

    def array(self, depth: int) -> list[object]:
        if depth > MAX_NESTING:
            raise damaged(f"arrays are nested deeper than {MAX_NESTING}")
        end = self.end_of_length()
        values: list[object] = []
        while self.position < end:
            values.append(self.value(depth))
        if self.position != end:
            raise damaged(
                f"an array that ends at byte {end} holds a value that continues to byte {self.position}"
            )
        return values

    def end_of_length(self) -> int:
        length: int = self.number(U32)
        end = self.position + length
        if end > len(self.data):
            raise damaged(
                f"a length of {length} at byte {self.position - 4} goes beyond their end at {len(self.data)}"
            )
        return end

    def value(self, depth: int) -> object:
        kind: int = self.number(U8)
        self.left -= 1
        if self.left < 0:
            raise RemoteProtocolError(
                f"a table has more than {MAX_VALUES} values: send fewer, or put them into the body"
            )
        shape = NUMBERS.get(kind)
        if shape is not None:
            return self.number(shape)
        read = _OTHERS.get(kind)
        if read is None:
            raise damaged(f"unknown header type {chr(kind)!r} at byte {self.position - 1}")
        return read(self, depth + 1)

    def long_string(self) -> str | bytes:
        raw = self.take(self.number(U32))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw  # a long string is any octets

    def decimal(self) -> Decimal:
        scale: int = self.number(U8)
        unscaled: int = self.number(_I32)
        return Decimal((int(unscaled < 0), tuple(int(digit) for digit in str(abs(unscaled))), -scale))


_OTHERS: dict[int, Callable[[FieldReader, int], object]] = {
    ord("t"): lambda reader, _: reader.number(U8) != 0,
    ord("D"): lambda reader, _: reader.decimal(),
    ord("S"): lambda reader, _: reader.long_string(),
    ord("x"): lambda reader, _: reader.take(reader.number(U32)),
    ord("A"): lambda reader, depth: reader.array(depth),
    ord("T"): lambda reader, _: Timestamp(reader.number(U64)),
    ord("F"): lambda reader, depth: reader.table(depth),
    ord("V"): lambda reader, _: None,
}


# -- writing -------------------------------------------------------------------------------------------------


def encode_short_string(value: object, name: str) -> bytes:
    if not isinstance(value, str):
        raise LocalProtocolError(
            f"property or header name {name!r} must be a str, not {type(value).__name__}"
        )
    raw = _encode_text(value, name)
    if len(raw) > 255:
        raise LocalProtocolError(f"{name!r} has {len(raw)} bytes, at most 255 fit into an AMQP short string")
    return U8.pack(len(raw)) + raw


def _encode_text(value: str, name: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise LocalProtocolError(
            f"property or header {name!r} cannot be encoded as UTF-8: give it without lone surrogates"
        ) from None


def check_integer(value: object, name: str, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise LocalProtocolError(f"property {name!r} must be an int, not {type(value).__name__}")
    if not 0 <= value < 1 << bits:
        raise LocalProtocolError(f"property {name!r} is {_number(value)}, allowed is 0 to {(1 << bits) - 1}")
    return value


def encode_table(table: Mapping[str, object], depth: int = 0) -> bytes:
    """Returns a field table after its length. Raises LocalProtocolError for a value without an AMQP type."""
    if depth > MAX_NESTING:
        raise LocalProtocolError(f"headers are nested deeper than {MAX_NESTING}")
    parts = [
        encode_short_string(name, str(name)) + encode_value(value, name, depth + 1)
        for name, value in table.items()
    ]
    return sized(b"".join(parts))


def decode_table(data: bytes) -> dict[str, object]:
    """The inverse of :func:`encode_table`. Raises RemoteProtocolError."""
    reader = FieldReader(data)
    table = reader.table()
    expect_end(reader)
    return table


def sized(raw: bytes) -> bytes:
    return U32.pack(len(raw)) + raw


def encode_value(value: object, name: str, depth: int) -> bytes:
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\x01" if value else b"t\x00"
        case Timestamp():
            return b"T" + U64.pack(check_integer(int(value), name, 64))
        case Long():
            return b"l" + _I64.pack(_checked_long(value, name))
        case int():
            return _encode_int(value, name)
        case float():
            return b"d" + _F64.pack(value)
        case str():
            return b"S" + sized(_encode_text(value, name))
        case bytes() | bytearray():
            return b"x" + sized(bytes(value))
        case Decimal():
            return _encode_decimal(value, name)
        case datetime():
            return b"T" + U64.pack(check_integer(_seconds(value, name), name, 64))
        case Mapping():
            return b"F" + encode_table(value, depth)
        case list() | tuple():
            if depth > MAX_NESTING:
                raise LocalProtocolError(f"headers are nested deeper than {MAX_NESTING}")
            return b"A" + sized(b"".join(encode_value(item, name, depth + 1) for item in value))
    raise LocalProtocolError(f"header {name!r} is a {type(value).__name__}, which AMQP has no type for")


def _encode_int(value: int, name: str) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"I" + _I32.pack(value)
    return b"l" + _I64.pack(_checked_long(value, name))


def _checked_long(value: int, name: str) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise LocalProtocolError(f"header {name!r} is {_number(value)}, which does not fit into 64 bits")
    return value


def _number(value: int) -> str:
    """Python writes no decimal number of thousands of digits."""
    return str(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"


def _seconds(value: datetime, name: str) -> int:
    try:
        return int(value.timestamp())
    except (ValueError, OverflowError):  # near the first and the last year
        raise LocalProtocolError(f"header {name!r} is a time that has no seconds since the epoch") from None


def _encode_decimal(value: Decimal, name: str) -> bytes:
    sign, digits, exponent = value.as_tuple()
    few = "".join(map(str, digits[:11])) or "0"  # more than 32 bits have
    unscaled = int(few) * (-1 if sign else 1)
    if (
        not isinstance(exponent, int)
        or len(digits) > len(few)
        or not -255 <= exponent <= 0
        or not -(1 << 31) <= unscaled < 1 << 31
    ):
        raise LocalProtocolError(
            f"header {name!r} is the decimal {value:.20}, which does not fit into AMQP's 32 bits and 255 "
            "digits"
        )
    return b"D" + _DECIMAL.pack(-exponent, unscaled)


def expect_end(reader: FieldReader) -> None:
    if reader.position != len(reader.data):
        raise damaged(f"{len(reader.data) - reader.position} bytes are left over at byte {reader.position}")


# -- skipping ------------------------------------------------------------------------------------------------

_SIZES = {kind: shape.size for kind, shape in NUMBERS.items()} | {
    ord("t"): 1,
    ord("D"): _DECIMAL.size,
    ord("T"): 8,
    ord("V"): 0,
}
_LONG_STRING, _BYTES, _ARRAY, _TABLE = ord("S"), ord("x"), ord("A"), ord("F")


def end_of_table(data: bytes, position: int) -> int:
    """Returns the position after the table at ``position``; beyond the end of ``data`` if it is damaged, and
    sometimes if it is truncated: the full reader says how.
    """
    damaged = len(data) + 1
    (length,) = U32.unpack_from(data, position)
    position += 4
    end: int = position + length
    is_table, left = True, MAX_VALUES
    around: list[tuple[int, bool]] = []  # the tables and arrays around this one
    while True:
        while position < end:
            if is_table:
                name = position + 1
                position = name + data[position]
                data[name:position].decode()
            kind = data[position]
            position += 1
            left -= 1
            size = _SIZES.get(kind)
            if size is not None:
                position += size
            elif kind in (_LONG_STRING, _BYTES):
                position += 4 + U32.unpack_from(data, position)[0]
            elif kind in (_ARRAY, _TABLE) and len(around) < MAX_NESTING and left >= 0:
                around.append((end, is_table))
                (length,) = U32.unpack_from(data, position)
                position += 4
                end, is_table = position + length, kind == _TABLE
            else:
                return damaged
        if position != end or left < 0:
            return damaged
        if not around:
            return position
        end, is_table = around.pop()
