"""The codecs of record batches: none, gzip, snappy, lz4 and zstd.

Not here: record batches. Snappy is written in the blocks of xerial's Java library and read with or without
them, because librdkafka writes it without. LZ4 is written here frame by frame: Kafka's Java reader refuses
blocks that depend on each other (KIP-57, ``Lz4BlockInputStream``), which is how Arrow writes more than one.
Invariant: ``inflate`` never holds more than its limit and what one more piece adds; whatever else is wrong
with its input is a ValueError.
"""

from __future__ import annotations

import struct

import pyarrow as pa
import xxhash

from broker_core.kafka.record.record_batch import Codec, read_unsigned


class TooLarge(ValueError):
    """The content is larger than the limit."""


PIECE = 1 << 16
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEAD = _XERIAL + struct.pack(">ii", 1, 1)  # version, oldest version that can read it
_XERIAL_BLOCK = 1 << 15
_LZ4_BLOCK = 1 << 16
_LZ4_DESCRIPTOR = b"\x60\x40"  # version 1, blocks that stand alone, no checksums; blocks of 64 KiB
_LZ4_HEAD = (
    b"\x04\x22\x4d\x18" + _LZ4_DESCRIPTOR + bytes([xxhash.xxh32_intdigest(_LZ4_DESCRIPTOR) >> 8 & 0xFF])
)
_LZ4_STORED = 1 << 31
_U32_BE = struct.Struct(">I")
_U32_LE = struct.Struct("<I")


def inflate(codec: Codec, data: memoryview, limit: int) -> bytes | memoryview:
    """The content of ``data``, at most ``limit`` bytes. Raises ValueError; TooLarge where there is more."""
    try:
        if codec is Codec.NONE:
            return _bounded(data, limit)
        if codec is Codec.SNAPPY:
            return _unsnap(data, limit)
        return _stream(codec, data, limit)
    except (OSError, struct.error) as error:  # Arrow raises OSErrors
        raise ValueError(f"{codec.name.lower()}: {str(error).splitlines()[0]}") from None


def _bounded(data: memoryview, limit: int) -> memoryview:
    if len(data) > limit:
        raise TooLarge(f"it holds {len(data)} bytes")
    return data


def _stream(codec: Codec, data: memoryview, limit: int) -> bytes:
    pieces: list[bytes] = []
    total, step = 0, max(PIECE, 4 * len(data))
    with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), codec.name.lower()) as stream:
        while piece := stream.read(min(step, limit - total + 1)):
            total += len(piece)
            if total > limit:
                raise TooLarge(f"it inflates to more than {limit} bytes")
            pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unsnap(data: memoryview, limit: int) -> bytes:
    if data[:8] != _XERIAL:
        return _unsnap_block(data, limit)
    position, total, pieces = len(_XERIAL_HEAD), 0, []
    while position < len(data):
        (length,) = _U32_BE.unpack_from(data, position)
        position += 4
        if length > len(data) - position:
            raise ValueError("snappy: a block is cut short")
        pieces.append(_unsnap_block(data[position : position + length], limit - total))
        total += len(pieces[-1])
        position += length
    return b"".join(pieces)


def _unsnap_block(data: memoryview, limit: int) -> bytes:
    size, _ = read_unsigned(data, 0, len(data))
    if size > limit:
        raise TooLarge(f"it inflates to {size} bytes")
    inflated: bytes = pa.Codec("snappy").decompress(data, decompressed_size=size, asbytes=True)
    return inflated


def deflate(codec: Codec, data: memoryview) -> bytes | memoryview:
    """``data`` compressed, as every Kafka client reads it."""
    if codec is Codec.NONE:
        return data
    if codec is Codec.LZ4:
        return _lz4(data)
    if codec is Codec.SNAPPY:
        blocks = (
            _deflated("snappy", data[at : at + _XERIAL_BLOCK]) for at in range(0, len(data), _XERIAL_BLOCK)
        )
        return _XERIAL_HEAD + b"".join(part for block in blocks for part in (_U32_BE.pack(len(block)), block))
    return _deflated(codec.name.lower(), data)


def _lz4(data: memoryview) -> bytes:
    parts = [_LZ4_HEAD]
    for at in range(0, len(data), _LZ4_BLOCK):
        plain = data[at : at + _LZ4_BLOCK]
        block = _deflated("lz4_raw", plain)
        stored = len(block) >= len(plain)
        parts += (
            [_U32_LE.pack(len(plain) | _LZ4_STORED), bytes(plain)]
            if stored
            else [_U32_LE.pack(len(block)), block]
        )
    parts.append(_U32_LE.pack(0))
    return b"".join(parts)


def _deflated(name: str, data: memoryview) -> bytes:
    block: bytes = pa.Codec(name).compress(data, asbytes=True)
    return block
