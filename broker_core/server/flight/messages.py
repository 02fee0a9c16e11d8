"""The messages of Arrow Flight that the server reads and writes (Flight.proto), as protobuf has them.

Not here: what an action, a ticket or a descriptor carries (``broker_core/flight/contract.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from broker_core.arrow.parts import stream_of
from broker_core.core.errors import RemoteProtocolError

_DESCRIPTOR, _HEADER, _METADATA, _BODY = 1, 2, 3, 1000  # of FlightData
FIELDS = 32
_FIXED = {1: 8, 5: 4}  # octets of a field of this type


class Data(NamedTuple):
    """A FlightData that came. ``command``: of its descriptor; b"" without one."""

    command: bytes
    header: memoryview
    metadata: memoryview | None
    body: memoryview


def action(data: bytes) -> tuple[str, pa.Buffer]:
    """Type and body. Raises RemoteProtocolError."""
    found = _fields(data)
    try:
        return bytes(found.get(1, b"")).decode(), pa.py_buffer(found.get(2, b""))
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"the type of an action is not UTF-8: {error}") from None


def ticket(data: bytes) -> pa.Buffer:
    """Raises RemoteProtocolError."""
    return pa.py_buffer(_fields(data).get(1, b""))


def data(message: bytes) -> Data:
    """Raises RemoteProtocolError."""
    found = _fields(message)
    nothing = memoryview(b"")
    command = bytes(_fields(found.get(_DESCRIPTOR, nothing)).get(2, nothing))
    return Data(command, found.get(_HEADER, nothing), found.get(_METADATA), found.get(_BODY, nothing))


def schema(header: memoryview) -> pa.Schema:
    """Of the header of a stream's first message. Raises what Arrow does."""
    return pa.ipc.read_schema(
        pa.py_buffer(b"".join((b"\xff" * 4, len(header).to_bytes(4, "little"), header)))
    )


def answer(body: Any) -> bytes:
    """A Result, or a PutResult: the field is the same."""
    return b"".join(_field(1, body)) if len(memoryview(body)) else b""


def head(schema: pa.Schema) -> Iterator[bytes]:
    """FlightData of a stream: its schema."""
    return _data(stream_of([], schema))


def rows(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> list[bytes]:
    """The next batch, behind the dictionaries that it needs; [] at the end."""
    return [part for each in islice(batches, 1) for part in islice(_data(stream_of([each], schema)), 1, None)]


def _data(stream: pa.Buffer) -> Iterator[bytes]:
    for message in pa.ipc.MessageReader.open_stream(stream):
        body = _field(_BODY, message.body) if message.body is not None and message.body.size else ()
        yield b"".join((*_field(_HEADER, message.metadata), *body))


def _field(number: int, value: Any) -> tuple[bytes, bytes, Any]:
    """``value``: octets."""
    return _varint(number << 3 | 2), _varint(len(memoryview(value))), value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _fields(message: bytes | memoryview) -> dict[int, memoryview]:
    """Those with a length; of a field that came twice the last. Raises RemoteProtocolError, also for more
    fields than any of the messages has.
    """
    view, position = memoryview(message), 0
    found: dict[int, memoryview] = {}
    try:
        for _ in range(FIELDS):
            if position >= len(view):
                return found
            tag, position = _number(view, position)
            if tag & 7 == 2:
                size, position = _number(view, position)
                if size > len(view) - position:
                    raise ValueError(f"a field of {size} octets has {len(view) - position}")
                found[tag >> 3] = view[position : position + size]
                position += size
            elif tag & 7 == 0:
                _, position = _number(view, position)
            else:
                position += _FIXED[tag & 7]
        raise ValueError("too many fields")
    except (IndexError, KeyError, ValueError) as error:
        raise RemoteProtocolError(f"a message of {len(view)} octets is not protobuf: {error!r}") from None


def _number(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        octet = view[position]
        value |= (octet & 0x7F) << shift
        position += 1
        if octet < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten octets")
