"""The headers of a record on Kafka: the AMQP properties of a message, as any client of Kafka can read them.

A property is the header ``txmq.<property>``, its value as text. A header of the user keeps its own name: text
is UTF-8, bytes are as they are, null is null, anything else is JSON. ``txmq.types`` names the AMQP types of
those that are not text. The exchange is a header too, absent for the default one.

A pair of another client that no header of a message can be (its name is longer than 255 bytes, is one of
ours, steers the broker, or comes again) is in the list OTHERS, which is text, so that it survives a map of
strings. If they have more values than a table may have, all are.

Not here: the routing key, which is the record's key, and the body.
Invariant: ``to_message(of_message(exchange, properties)) == (exchange, properties)``, byte by byte, up to the
order of headers; an ``x-death`` that is no list, or ``x-delivery-count``, which the broker writes, is in
OTHERS afterwards. Any headers of another client are a message, of which ``of_message`` makes the same
headers, up to the order of names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

from broker_core.core.errors import OptionError, ProtocolError, RemoteProtocolError, TxmqError
from broker_core.message.field_table import (
    MAX_NESTING,
    NUMBERS,
    U8,
    FieldReader,
    Timestamp,
    encode_short_string,
    encode_value,
    sized,
)
from broker_core.message.properties import NAMES, Properties, raw_headers, require_readable, with_raw_headers
from broker_core.routing.carbon_copy import carbon_copies

PREFIX = "txmq."
EXCHANGE = f"{PREFIX}exchange"
# JSON object: header of the user -> its type, where that is not text. A letter of message/field_table.py; for
# a table an object with the types of its members, for an array a list of them, where null is text
TYPES = f"{PREFIX}types"
PROPERTIES = {f"{PREFIX}{name}": name for name in NAMES if name != "headers"}  # header -> property
# of a message: JSON list of [name, value], where a value that is no text is {"hex": its bytes}, or null
OTHERS = "x-kafka-headers"
_CHANGED = {OTHERS, "BCC", "x-delivery-count"}  # what a publish or a death takes from a message

Pair = tuple[str, bytes | None]

_NUMERIC = frozenset({"delivery_mode", "priority", "timestamp"})
_MAX_NAME = 255  # bytes of the name of a header in AMQP
_WRONG = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    struct.error,
    RecursionError,
    InvalidOperation,
    ProtocolError,
)


def of_message(exchange: str, properties: bytes) -> list[Pair]:
    """Returns the headers of a message. Raises OptionError for what Kafka cannot keep, RemoteProtocolError
    for damaged properties.
    """
    pairs: list[Pair] = [(EXCHANGE, exchange.encode())] if exchange else []
    if not properties:
        return pairs
    decoded = Properties.decode(properties)
    if decoded.expiration is not None:
        raise OptionError(
            f"a message has the expiration {decoded.expiration!r}, and Kafka cannot expire single messages",
            "leave it out; retention.ms of the topic deletes old messages",
        )
    for header, name in PROPERTIES.items():
        value = getattr(decoded, name)
        if value is not None:
            pairs.append((header, str(value).encode()))
    types: dict[str, object] = {}
    found = dict(raw_headers(properties))
    if (others := _others(found.get(OTHERS))) is not None:
        # first: of several headers with one name the last is that of the message
        pairs = [*others, *pairs]
        del found[OTHERS]
    for name, raw in found.items():
        if name.startswith(PREFIX):
            raise OptionError(
                f"the header {name!r} begins with {PREFIX!r}, as those of txmq do", "give it another name"
            )
        value, kind = _write(raw)
        pairs.append((name, value))
        if kind is not None:
            types[name] = kind
    if types:
        pairs.append((TYPES, _json(types)))
    return pairs


def to_message(pairs: Iterable[Pair]) -> tuple[str, bytes]:
    """Returns exchange and encoded properties. Of several headers with one name the last holds; the others
    are in OTHERS.
    """
    pairs = list(pairs)
    found, others = dict(pairs), []
    if len(found) < len(pairs):
        last = {name: at for at, (name, _) in enumerate(pairs)}
        others = [pair for at, pair in enumerate(pairs) if last[pair[0]] != at]
    exchange = _take_header(found, EXCHANGE) or ""
    values: dict[str, Any] = {
        name: value
        for header, name in PROPERTIES.items()
        if header in found and (value := _property(found, header, name)) is not None
    }
    properties = Properties(**values).encode()
    if not found:
        return exchange, (
            with_raw_headers(properties, [(OTHERS, _list_of(others))]) if others else properties
        )
    users = [*others, *found.items()]
    types = _types(found)
    raw: dict[str, bytes] = {}
    for pair in found.items():
        read = _read(pair[1], types.get(pair[0]))
        if _is_ordinary(pair[0], read):
            raw[pair[0]] = read
        else:
            others.append(pair)
    if others:
        raw[OTHERS] = _list_of(others)
    try:
        message = with_raw_headers(properties, [*raw.items()])
        require_readable(message)
    except RemoteProtocolError:  # too many
        message = with_raw_headers(properties, [(OTHERS, _list_of(users))])
    return exchange, message


def _is_ordinary(name: str, value: bytes) -> bool:
    """Whether a message can have the header, is published with it as with others, and rejected with it."""
    if name in _CHANGED or name.startswith(PREFIX):
        return False
    if name == "x-death":
        return value[:1] == b"A"
    if name == "CC":
        try:
            carbon_copies(with_raw_headers(b"", [(name, value)]))
        except TxmqError:
            return False
    return len(name) * 4 <= _MAX_NAME or len(name.encode()) <= _MAX_NAME


def _list_of(others: list[Pair]) -> bytes:
    listed = [
        (name, value.decode() if value is not None and _is_text(value) else value and {"hex": value.hex()})
        for name, value in others
    ]
    return b"S" + sized(_json(listed))


def _others(raw: bytes | None) -> list[Pair] | None:
    """The inverse of :func:`_list_of`; None for what is none: the header of somebody else."""
    if raw is None or raw[:1] != b"S":
        return None
    try:
        # to encode raises for half a surrogate, which JSON can have
        return [(name.encode().decode(), _bytes(value)) for name, value in json.loads(raw[5:])]
    except _WRONG:
        return None


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, str):
        return None if value is None else value.encode()
    return bytes.fromhex(value["hex"])


def _take_header(found: dict[str, bytes | None], header: str) -> str | None:
    """Removes a header of ours and returns its text; leaves one that is no text of AMQP, and returns None."""
    value = found.get(header)
    if value is None or len(value) > _MAX_NAME or (header == EXCHANGE and not value):
        return None  # the default exchange has no header
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    del found[header]
    return text


def _property(found: dict[str, bytes | None], header: str, name: str) -> str | int | None:
    """As :func:`_take_header`, for a property; leaves one that no message on Kafka has."""
    if name == "expiration":
        return None
    if name not in _NUMERIC:
        return _take_header(found, header)
    value = found[header]
    bits = 64 if name == "timestamp" else 8
    if value is None or not value.isdigit() or len(value) > 20 or int(value) >= 1 << bits:
        return None
    if str(int(value)).encode() != value or (name == "delivery_mode" and value not in (b"1", b"2")):
        return None
    del found[header]
    return int(value)


def _types(found: dict[str, bytes | None]) -> dict[str, object]:
    """Removes the header TYPES and returns what it says; leaves it where it is not what txmq writes of these
    headers.
    """
    if TYPES not in found:
        return {}
    try:
        types = json.loads(found[TYPES] or b"")
        if not types or not isinstance(types, dict) or _json(types) != found[TYPES]:
            return {}
        if list(types) != [name for name in found if name in types]:
            return {}
        for name, kind in types.items():
            read = _read(found[name], kind)
            if kind is None or _write(read) != (found[name], kind) or not _is_ordinary(name, read):
                return {}
    except _WRONG:
        return {}
    del found[TYPES]
    return types


# -- a value of AMQP as bytes on Kafka, and its type ---------------------------------------------------------


def _write(raw: bytes) -> tuple[bytes | None, Any]:
    """The value of a header, and its type; None for what is read without one."""
    match raw[:1]:
        case b"V":
            return None, None
        case b"S" | b"x":
            content = raw[5:]
            return content, (None if raw[:1] == b"S" and _is_text(content) else raw[:1].decode())
    value, kind = _describe(FieldReader(raw))
    return (value.encode() if kind == "D" else _json(value)), kind


def _describe(reader: FieldReader) -> tuple[Any, Any]:
    """The value at the reader as JSON, and its type."""
    start = reader.position
    kind = chr(reader.number(U8))
    if kind == "F":
        table, types = {}, {}
        end = reader.end_of_length()
        while reader.position < end:
            name = reader.short_string()
            table[name], inner = _describe(reader)
            if inner is not None:
                types[name] = inner
        return table, types
    if kind == "A":
        end = reader.end_of_length()
        members = []
        while reader.position < end:
            members.append(_describe(reader))
        return [value for value, _ in members], [inner for _, inner in members]
    reader.position = start
    value = reader.value(0)
    if kind == "S" and isinstance(value, str):
        return value, None
    if isinstance(value, bytes):
        return value.hex(), kind
    return (str(value) if kind == "D" else value), kind


def _read(value: bytes | None, kind: object) -> bytes:
    """The value as AMQP has it, its type in front; as text or bytes where it is not of the type."""
    if value is None:
        return b"V"
    if kind == "x" or kind == "S":
        return (b"x" if kind == "x" else b"S") + sized(value)
    if kind is not None:
        try:
            text = value.decode()
            return _encode(text if kind == "D" else json.loads(text), kind, 1)
        except _WRONG:
            pass
    return (b"S" if _is_text(value) else b"x") + sized(value)


def _encode(value: Any, kind: Any, depth: int) -> bytes:
    """The inverse of :func:`_describe`. Raises one of _WRONG."""
    if depth > MAX_NESTING:
        raise ValueError("too deep")
    if isinstance(kind, dict):
        table = b"".join(
            encode_short_string(name, name) + _encode(inner, kind.get(name), depth + 1)
            for name, inner in value.items()
        )
        return b"F" + sized(table)
    if isinstance(kind, list):
        if len(kind) != len(value):
            raise ValueError("each member has a type")
        return b"A" + sized(b"".join(_encode(inner, each, depth + 1) for inner, each in zip(value, kind)))
    match kind:
        case None:
            return b"S" + sized(value.encode())
        case "S" | "x":
            return bytes([ord(kind)]) + sized(bytes.fromhex(value))
        case "D":
            return encode_value(Decimal(value), "", depth)
        case "T":
            return encode_value(Timestamp(value), "", depth)
        case "V" if value is None:
            return b"V"
        case "t" if isinstance(value, bool):
            return encode_value(value, "", depth)
    if isinstance(value, bool):
        raise TypeError("a number is not a boolean")
    return kind.encode() + NUMBERS[ord(kind)].pack(value) if ord(kind) in NUMBERS else _no_type(kind)


def _no_type(kind: object) -> bytes:
    raise ValueError(f"{kind!r} is not a type")


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
