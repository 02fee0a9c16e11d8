"""Rows as one Kafka record batch (magic 2), and the stamp that puts it into a transaction.

The heads of all records are computed as columns, and Arrow joins them with keys, values and headers.
Not here: how many rows go into one batch, and where it is sent.
Invariant: what :func:`encode` returns, :func:`broker_core.kafka.record.decode.decode` reads as the same rows,
and so does every client.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from broker_core.core import errors
from broker_core.kafka.record.compression import deflate
from broker_core.kafka.record.record_batch import (
    ATTRIBUTES_AT,
    CRC_AT,
    HEAD,
    MAGIC,
    NOTHING,
    PRODUCER,
    PRODUCER_AT,
    TIMESTAMPS_AT,
    TRANSACTIONAL,
    Codec,
    Integers,
    column_encoded,
    encode_signed,
)

MAX_ROWS = 1 << 20  # of a batch: an offset delta takes at most three bytes
MAX_RECORD = 1 << 27  # bytes of a record; its length takes at most four bytes then
_MAX_CONTENT = 2**31 - 64
_NULL = 1  # the length -1
_MOST_BESIDE = 16  # bytes of a record beside its value, without key and headers


def encode(
    values: pa.BinaryArray,
    *,
    timestamp: int,
    keys: pa.BinaryArray | None = None,
    headers: pa.BinaryArray | None = None,
    codec: Codec = Codec.NONE,
    transactional: bool = False,
) -> bytes:
    """One batch of all rows, at offset 0, with one ``timestamp`` in milliseconds, of no producer.

    Values and keys may be null. ``headers`` are blocks of :func:`encode_headers`, one for each row. There are
    1 to MAX_ROWS rows; the sizes a topic takes (``max.message.bytes``) are the caller's business. Raises
    TransactionTooLarge for a record of MAX_RECORD bytes.
    """
    body = deflate(codec, _content(values, keys, headers))
    return _batch([body], len(values), timestamp, codec | (TRANSACTIONAL if transactional else 0))


def encode_large(records: Sequence[tuple[bytes, bytes, bytes]], *, timestamp: int) -> bytes:
    """As :func:`encode`, for a few large records (key, value, block of headers): their bytes are copied
    once.
    """
    pieces: list[bytes] = []
    for number, (key, value, headers) in enumerate(records):
        before = b"".join(
            (b"\0\0", encode_signed(number), encode_signed(len(key)), key, encode_signed(len(value)))
        )
        pieces += [encode_signed(len(before) + len(value) + len(headers)), before, value, headers]
    return _batch(pieces, len(records), timestamp, 0)


def _batch(body: Sequence[bytes | memoryview], rows: int, timestamp: int, attributes: int) -> bytes:
    tail = _TAIL.pack(attributes, rows - 1, timestamp, timestamp, NOTHING, NOTHING, NOTHING, rows)
    checksum = reduce(lambda found, piece: crc32c.crc32c(piece, found), body, crc32c.crc32c(tail))
    length = HEAD.size - 12 + sum(map(len, body))
    return b"".join((_FRONT.pack(0, length, NOTHING, MAGIC, checksum), tail, *body))


def stamp(
    batch: bytearray | memoryview, *, producer_id: int, epoch: int, sequence: int, timestamp: int
) -> None:
    """Makes an encoded batch the producer's own, in place. ``sequence`` is that of its first record
    (KIP-98).
    """
    _TIMESTAMPS.pack_into(batch, TIMESTAMPS_AT, timestamp, timestamp)
    PRODUCER.pack_into(batch, PRODUCER_AT, producer_id, epoch, sequence)
    _CRC.pack_into(batch, CRC_AT, crc32c.crc32c(memoryview(batch)[ATTRIBUTES_AT:]))


def encode_headers(pairs: Iterable[tuple[str, bytes | None]]) -> bytes:
    """Headers as the block that stands in a record, their count in front. A name may repeat; a value may be
    null.
    """
    parts: list[bytes] = []
    count = 0
    for name, value in pairs:
        encoded = name.encode()
        parts += [encode_signed(len(encoded)), encoded]
        parts += [encode_signed(-1)] if value is None else [encode_signed(len(value)), value]
        count += 1
    return encode_signed(count) + b"".join(parts)


_FRONT, _TAIL = struct.Struct(">qiibI"), struct.Struct(">hiqqqhii")
_TIMESTAMPS, _CRC = struct.Struct(">qq"), struct.Struct(">I")


def _content(
    values: pa.BinaryArray, keys: pa.BinaryArray | None, headers: pa.BinaryArray | None
) -> memoryview:
    """The records, one behind the other."""
    rows = len(values)
    if not 0 < rows <= MAX_ROWS:
        raise errors.LocalProtocolError(f"a record batch of {rows} rows", f"it takes 1 to {MAX_ROWS}")
    if keys is None and headers is None:
        width = _width(values)
        if 0 < width < MAX_RECORD - _MOST_BESIDE and (width + _MOST_BESIDE) * rows < _MAX_CONTENT:
            return _even(values, width)
    value_size, value_zigzag = _lengths(values)
    value_word, value_bytes = column_encoded(value_zigzag)
    offset_word, offset_bytes = column_encoded(np.arange(0, 2 * rows, 2))
    size = 2 + offset_bytes + value_bytes + value_size  # attributes, timestamp delta
    if keys is None:
        # offset delta, null key, length of the value: at most 3 + 1 + 4 bytes
        second = offset_word | _NULL << 8 * offset_bytes | value_word << 8 * (offset_bytes + 1)
        second_bytes = offset_bytes + 1 + value_bytes
        size += 1
    else:
        key_size, key_zigzag = _lengths(keys)
        key_word, key_bytes = column_encoded(key_zigzag)
        second = offset_word | key_word << 8 * offset_bytes
        second_bytes = offset_bytes + key_bytes
        size += key_bytes + key_size
    size += 1 if headers is None else _lengths(headers)[0]
    if int(size.max()) >= MAX_RECORD or int(size.sum()) + 4 * rows > _MAX_CONTENT:
        raise errors.TransactionTooLarge(
            f"records of {int(size.sum())} bytes, the largest of {int(size.max())}, do not go into one "
            "record batch",
            f"a record takes less than {MAX_RECORD} bytes",
        )
    first, first_bytes = column_encoded(2 * size)
    first_bytes = first_bytes + 2
    if headers is None:
        # the count of headers, zero, of the record before: so it needs no piece of its own
        first, first_bytes = first << 8, first_bytes + 1
    fronts = _packed(first, first_bytes, second, second_bytes)
    pieces = (
        [fronts, _whole(values)]
        if keys is None
        else [fronts, _whole(keys), _slotted(value_word, value_bytes), _whole(values)]
    )
    if headers is None:
        return _joined(pieces, b"\0")[1:]
    return _joined([*pieces, _whole(headers)], b"")


def _width(values: pa.BinaryArray) -> int:
    """The bytes of each value where all have as many, else -1."""
    if values.null_count:
        return -1
    bounds = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    width = int(bounds[1]) - int(bounds[0])
    even = int(bounds[-1]) - int(bounds[0]) == width * len(values) and bool((np.diff(bounds) == width).all())
    return width if even else -1


def _even(values: pa.BinaryArray, width: int) -> memoryview:
    """The records of values of one width, with nothing else in them: rows of a table, but for the size of
    their offsets.
    """
    rows = len(values)
    _, offsets, data = values.buffers()
    begin = int(np.frombuffer(offsets, np.int32)[values.offset])
    source = np.frombuffer(data, f"V{width}", rows, begin)
    behind = bytes([_NULL]) + encode_signed(width)
    runs = []
    for size, (first, end) in enumerate(itertools.pairwise((0, 1 << 6, 1 << 13, MAX_ROWS)), 1):
        if first < rows:
            length = encode_signed(2 + size + len(behind) + width + 1)
            runs.append((first, min(end, rows), size, length + b"\0\0"))
    content = bytearray(sum((end - first) * (len(front) + size) for first, end, size, front in runs))
    content += bytes((len(behind) + width + 1) * rows)
    at = 0
    for first, end, size, front in runs:
        kind = np.dtype(
            [
                ("front", f"V{len(front)}"),
                ("delta", np.uint8, (size,)),
                ("behind", f"V{len(behind)}"),
                ("value", f"V{width}"),
                ("headers", np.uint8),
            ]
        )
        table = np.ndarray(end - first, kind, content, at)
        table["front"] = np.void(front)
        zigzag = np.arange(2 * first, 2 * end, 2)
        for byte in range(size):
            more = 0x80 if byte + 1 < size else 0
            table["delta"][:, byte] = (zigzag >> 7 * byte) & 0x7F | more
        table["behind"] = np.void(behind)
        table["value"] = source[first:end]
        at += table.nbytes
    return memoryview(content)


def _lengths(column: pa.BinaryArray) -> tuple[Integers, Integers]:
    """Bytes of each row, and its length as it is encoded before the varint: zigzag, null is -1."""
    length = pc.binary_length(column)
    size = length.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    zigzag = 2 * size
    if column.null_count:
        zigzag[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return size, zigzag


class _Piece(NamedTuple):
    """What each record has in one place: the elements ``first``, ``first + step`` and so on of
    ``elements``.
    """

    elements: pa.BinaryArray
    first: int
    step: int


def _whole(column: pa.BinaryArray) -> _Piece:
    return _Piece(column, 0, 1)


def _slotted(words: Integers | npt.NDArray[np.uint64], size: Integers) -> _Piece:
    """The first ``size`` bytes of each row of ``words``: every other element of an array over them."""
    rows, width = len(words), words.strides[0]
    bounds = np.empty(2 * rows + 2, np.int32)
    bounds[0] = 0
    bounds[1:-1:2] = np.arange(0, rows * width, width)
    bounds[2::2] = bounds[1:-1:2] + size
    bounds[-1] = bounds[-2]
    spans = pa.Array.from_buffers(
        pa.binary(), 2 * rows + 1, [None, pa.py_buffer(bounds), pa.py_buffer(words)]
    )
    return _Piece(spans, 1, 2)


def _packed(first: Integers, first_bytes: Integers, second: Integers, second_bytes: Integers) -> _Piece:
    """Two words of 1 to 7 and of 1 to 8 bytes, one behind the other, in slots of 16 bytes."""
    slots = np.empty((len(first), 2), np.uint64)
    low, bits = second.view(np.uint64), (8 * first_bytes).view(np.uint64)
    slots[:, 0] = first.view(np.uint64) | low << bits
    slots[:, 1] = low >> (np.uint64(64) - bits)
    return _slotted(slots, first_bytes + second_bytes)


def _joined(pieces: list[_Piece], last: bytes) -> memoryview:
    """The pieces of each record in turn, then ``last``."""
    rows = len(pieces[-1].elements)
    index = np.empty(rows * len(pieces) + 1, np.int64)
    base = 0
    for number, (elements, first, step) in enumerate(pieces):
        index[number : -1 : len(pieces)] = np.arange(base + first, base + first + step * rows, step)
        base += len(elements)
    index[-1] = base
    elements = pa.concat_arrays([*(piece.elements for piece in pieces), pa.array([last], pa.binary())])
    joined = elements.take(pa.array(index))
    _, bounds, content = joined.buffers()
    ends = np.frombuffer(bounds, np.int32)
    return memoryview(content)[int(ends[joined.offset]) : int(ends[joined.offset + len(joined)])]
