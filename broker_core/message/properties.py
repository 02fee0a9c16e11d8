"""The properties of a message: AMQP 0-9-1 property flags and list (specification 4.2.6.1) as bytes, and as
:class:`Properties`.

Not here: what a property means to a queue or an exchange. A message keeps its properties as the received
bytes. They are decoded only if a rule needs one; :func:`delivery_mode` and :func:`expiration` read one
property without decoding the rest.

Invariant: ``Properties.decode(p.encode()) == p``; no properties are ``b""``. Damaged bytes (truncated, too
many, unknown flags or types, wrong lengths) raise RemoteProtocolError and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from broker_core.core.errors import LocalProtocolError
from broker_core.message.field_table import (
    MAX_VALUES,
    U8,
    U16,
    U64,
    FieldReader,
    check_integer,
    damaged,
    encode_short_string,
    encode_table,
    encode_value,
    end_of_table,
    expect_end,
    sized,
)

# bit 0 announces a second flag word, which no property of 0-9-1 needs; bit 1 has no meaning
_UNKNOWN_FLAGS = 0b11
TRANSIENT = 1  # a delivery mode
_OCTETS = frozenset({"delivery_mode", "priority"})
RawHeaders = list[tuple[str, bytes]]  # a header that was given twice is in it twice; the last one holds

# -- the whole list ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Properties:
    """The basic properties of AMQP 0-9-1, in the order of their flags; None if a message does not have one.
    ``headers`` empty: none.

    ``delivery_mode`` 1 transient, 2 persistent; ``priority`` 0 to 255; ``timestamp`` in seconds since the
    epoch; ``expiration`` in milliseconds as text, as in the specification; ``cluster_id`` is reserved and is
    only kept so that a message of another broker loses nothing.
    """

    content_type: str | None = None
    content_encoding: str | None = None
    headers: Mapping[str, object] = field(default_factory=dict)
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
        """Returns flags and list; ``b""`` if there are none. Raises LocalProtocolError for a value that does
        not fit.
        """
        flags = 0
        parts: list[bytes] = []
        for name in NAMES:
            value = getattr(self, name)
            if value is None or (name == "headers" and not value):
                continue
            flags |= _FLAG[name]
            if name == "headers":
                if not isinstance(value, Mapping):
                    raise LocalProtocolError(f"headers must be a mapping, not {type(value).__name__}")
                parts.append(encode_table(value))
            elif name in _OCTETS:
                parts.append(U8.pack(check_integer(value, name, 8)))
            elif name == "timestamp":
                parts.append(U64.pack(check_integer(value, name, 64)))
            else:
                parts.append(encode_short_string(value, name))
        return U16.pack(flags) + b"".join(parts) if flags else b""

    @classmethod
    def decode(cls, data: bytes) -> Properties:
        """Decodes ``data``. Raises RemoteProtocolError unless it is exactly one flags-and-list."""
        if not data:
            return cls()
        reader = FieldReader(data)
        flags = _flags(reader)
        values: dict[str, Any] = {}
        for name in NAMES:
            if flags & _FLAG[name]:
                values[name] = _property(reader, name)
        expect_end(reader)
        return cls(**values)


NAMES = tuple(each.name for each in fields(Properties))
_FLAG = {name: 1 << (15 - index) for index, name in enumerate(NAMES)}


def _flags(reader: FieldReader) -> int:
    flags: int = reader.number(U16)
    if flags & _UNKNOWN_FLAGS:
        raise damaged(f"unknown property flags {flags & _UNKNOWN_FLAGS:#04b}")
    return flags


def _property(reader: FieldReader, name: str) -> object:
    if name == "headers":
        return reader.table()
    if name in _OCTETS:
        return reader.number(U8)
    if name == "timestamp":
        return reader.number(U64)
    return reader.short_string()


def _skip(reader: FieldReader, name: str) -> None:
    if name == "headers":
        reader.position = reader.end_of_length()
    else:
        reader.take(8 if name == "timestamp" else 1 if name in _OCTETS else reader.number(U8))


# -- checking ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _plan(flags: int) -> tuple[int, ...]:
    """Returns the size in bytes of each property in ``flags``: 0 for a short string, -1 for the headers."""
    sizes = {"headers": -1, "delivery_mode": 1, "priority": 1, "timestamp": 8}
    return tuple(sizes.get(name, 0) for name in NAMES if flags & _FLAG[name])


def check(data: bytes) -> None:
    """Raises RemoteProtocolError exactly when ``Properties.decode`` does, in a fraction of its time."""
    try:
        sound = not data or (not data[1] & _UNKNOWN_FLAGS and _end_of_list(data) == len(data))
    except (IndexError, struct.error, UnicodeDecodeError):
        sound = False
    if not sound:
        Properties.decode(data)  # raises the exact error


def require_readable(data: bytes) -> None:
    """Raises RemoteProtocolError where sound headers have become too many for a table."""
    if len(data) > MAX_VALUES:
        check(data)


def _end_of_list(data: bytes) -> int:
    """Returns the position after the list; beyond the end of ``data`` if it is truncated."""
    position = 2
    for size in _plan(data[0] << 8 | data[1]):
        if size > 0:
            position += size
        elif size == 0:
            start = position + 1
            position = start + data[position]
            data[start:position].decode()
        else:
            position = end_of_table(data, position)
    return position


# -- one property --------------------------------------------------------------------------------------------


def property_of(data: bytes, field: str) -> Any:
    """Returns one property. The ones before it are skipped by their lengths, and the ones after it are not
    read.
    """
    if not data:
        return None
    reader = FieldReader(data)
    flags = _flags(reader)
    if not flags & _FLAG[field]:
        return None
    for name in NAMES:
        if name == field:
            return _property(reader, name)
        if flags & _FLAG[name]:
            _skip(reader, name)
    raise AssertionError(field)


def delivery_mode(data: bytes) -> int | None:
    """Returns 1 (transient), 2 (persistent) or None (not set). Raises RemoteProtocolError."""
    if not data or not data[0] & 0x10:
        return None
    # used for every publish: content type, encoding and headers are skipped by their lengths, like in
    # ``property_of``
    try:
        flags, position = data[0], 2
        if flags & 0x80:
            position += 1 + data[position]
        if flags & 0x40:
            position += 1 + data[position]
        if flags & 0x20:
            position += 4 + int.from_bytes(data[position : position + 4], "big")
        return data[position]
    except IndexError:
        raise damaged(f"they end at byte {len(data)} in the middle of a value") from None


def expiration(data: bytes) -> str | None:
    """Returns the time to live in milliseconds as the sender's text, not checked to be a number; None: none.
    Raises RemoteProtocolError.
    """
    if not data or not data[0] & 0x01:
        return None
    return _text(data, (data[0] & 0xFE) << 8, "expiration")


def priority(data: bytes) -> int | None:
    """Returns the message's priority; None if it is not set. Raises RemoteProtocolError."""
    found: int | None = property_of(data, "priority")
    return found


def message_id(data: bytes) -> str | None:
    """Returns the message-id; None if it is not set. Raises RemoteProtocolError."""
    if len(data) < 2 or not data[1] & 0x80:
        return None
    return _text(data, data[0] << 8, "message-id")


def _text(data: bytes, before: int, what: str) -> str:
    """Returns the text behind the properties of these flags, which are skipped by their lengths."""
    try:
        position = 2
        for size in _plan(before):
            if size < 0:
                size = 4 + int.from_bytes(data[position : position + 4], "big")
            position += size or 1 + data[position]
        end = position + 1 + data[position]
        text = data[position + 1 : end].decode()
    except (IndexError, UnicodeDecodeError):
        end = len(data) + 1
    if end > len(data):
        raise damaged(f"the {what} is not whole")
    return text


def with_reply_to(data: bytes, reply_to: str) -> bytes:
    """Replaces the reply_to of encoded properties that have one; other bytes do not change. Raises
    RemoteProtocolError.
    """
    reader = FieldReader(data)
    flags = _flags(reader)
    for name in NAMES[: NAMES.index("reply_to")]:
        if flags & _FLAG[name]:
            _skip(reader, name)
    start = reader.position
    reader.short_string()
    return data[:start] + encode_short_string(reply_to, "reply_to") + data[reader.position :]


def rewrite(data: bytes, headers: Mapping[str, object], without: Collection[str] = ()) -> bytes:
    """Returns encoded properties with some headers replaced (None: removed), and some properties omitted.

    Other bytes do not change, so that header values keep their types. Raises RemoteProtocolError,
    LocalProtocolError.
    """
    found = _raw_properties(data) if data else {}
    return _rewritten(found, _raw_headers(found.get("headers")), headers, without)


def rewrite_of(
    data: bytes,
    headers: Callable[[dict[str, object]], Mapping[str, object]],
    read: Collection[str],
    without: Collection[str],
) -> bytes:
    """Like :func:`rewrite`, for new headers that depend on those in ``read``; only these are decoded. Raises
    RemoteProtocolError for properties that do not decode, before or after.
    """
    check(data)
    found = _raw_properties(data) if data else {}
    pairs = _raw_headers(found.get("headers"))
    decoded = {name: FieldReader(raw).value(0) for name, raw in pairs if name in read}
    rewritten = _rewritten(found, pairs, headers(decoded), without)
    require_readable(rewritten)
    return rewritten


def _rewritten(
    found: dict[str, bytes], pairs: RawHeaders, headers: Mapping[str, object], without: Collection[str]
) -> bytes:
    pairs = [each for each in pairs if each[0] not in headers]
    pairs += [(name, encode_value(value, name, 1)) for name, value in headers.items() if value is not None]
    flags = 0
    parts: list[bytes] = []
    if pairs:
        found["headers"] = sized(b"".join(encode_short_string(name, name) + raw for name, raw in pairs))
    else:
        found.pop("headers", None)
    for name in NAMES:
        if name in found and name not in without:
            flags |= _FLAG[name]
            parts.append(found[name])
    return U16.pack(flags) + b"".join(parts) if flags else b""


def raw_headers(data: bytes) -> RawHeaders:
    """Returns each header with its value undecoded, the type in front. Raises RemoteProtocolError."""
    return _raw_headers(_raw_properties(data).get("headers")) if data else []


def with_raw_headers(data: bytes, headers: RawHeaders) -> bytes:
    """Returns encoded properties with exactly these headers, as :func:`raw_headers` has them."""
    return _rewritten(_raw_properties(data) if data else {}, headers, {}, ())


def encode_headers(headers: Mapping[str, object]) -> bytes:
    """Encodes headers for :func:`append_headers`. Raises LocalProtocolError."""
    return encode_table(headers)[4:]


def append_headers(data: bytes, entries: bytes) -> bytes:
    """Returns encoded properties with new headers, of other names, after the existing ones, and without
    expiration. Raises RemoteProtocolError.

    Many times as fast as :func:`rewrite`: it reads no header.
    """
    if not data:
        return b"\x20\x00" + sized(entries)
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
    parts = bytes((flags & 0xFE | 0x20, data[1])), data[2:start], sized(table + entries), rest
    appended = b"".join(parts)
    require_readable(appended)
    return appended


def _expiration_at(flags: int, data: bytes, at: int) -> int:
    """Returns where the expiration of valid properties begins; ``at`` is after the headers."""
    at += (flags >> 4 & 1) + (flags >> 3 & 1)  # delivery mode, priority
    if flags & 0x04:
        at += 1 + data[at]
    if flags & 0x02:
        at += 1 + data[at]
    return at


def _raw_properties(data: bytes) -> dict[str, bytes]:
    """Returns the bytes of each property, undecoded."""
    reader = FieldReader(data)
    flags = _flags(reader)
    found: dict[str, bytes] = {}
    for name in NAMES:
        if flags & _FLAG[name]:
            start = reader.position
            _skip(reader, name)
            found[name] = data[start : reader.position]
    expect_end(reader)
    return found


def _raw_headers(raw: bytes | None) -> RawHeaders:
    if raw is None:
        return []
    reader = FieldReader(raw)
    end = reader.end_of_length()
    found: RawHeaders = []
    while reader.position < end:
        name = reader.short_string()
        start = reader.position
        reader.value(0)
        found.append((name, raw[start : reader.position]))
    return found
