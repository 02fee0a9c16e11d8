"""Variable-length integers of record batches: one at a time, and a whole column of them.

Seven bits a byte, least significant first; bit 7 says that another byte follows. Signed ones are
zigzag-encoded, as in Protocol Buffers. (Kafka protocol guide, "Protocol Primitive Types": VARINT, VARLONG,
UNSIGNED_VARINT.)
Invariant: nothing here reads beyond what it is given; a varint that does not end is a ValueError.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MAX_BYTES = 10  # of 64 bits
WINDOW = 8  # bytes that a column looks at; longer varints are read one at a time


def read_unsigned(data: bytes | memoryview, position: int, end: int) -> tuple[int, int]:
    """The varint at ``position``, and the position behind it, at most ``end``. Raises ValueError."""
    value = shift = 0
    while position < end and shift < 7 * MAX_BYTES:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError(f"a number at byte {position} does not end")


def read_signed(data: bytes | memoryview, position: int, end: int) -> tuple[int, int]:
    """As :func:`read_unsigned`, zigzag-decoded."""
    value, position = read_unsigned(data, position, end)
    return (value >> 1) ^ -(value & 1), position


def encode_unsigned(value: int) -> bytes:
    """``value`` from 0 up."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_signed(value: int) -> bytes:
    """``value`` of at most 64 bits, zigzag-encoded."""
    return encode_unsigned((value << 1) ^ (value >> 63))


# -- columns -------------------------------------------------------------------------------------------------


def windows(data: npt.NDArray[np.uint8]) -> Integers:
    """The eight bytes from each position of ``data`` on, as one integer; the last seven positions have none.
    Copies nothing.
    """
    words: Integers = np.ndarray((len(data) - WINDOW + 1,), np.dtype("<i8"), buffer=data, strides=(1,))
    return words


def column_unsigned(words: Integers, positions: Integers) -> tuple[Integers, Integers]:
    """The varints at ``positions``, and the positions behind them. Raises ValueError where one is longer than
    a window.
    """
    value, size, more = word_unsigned(words[positions], WINDOW)
    if more is not None and more.any():
        raise ValueError("a number is longer than a window")
    return value, positions + size


def word_unsigned(word: Integers, longest: int) -> tuple[Integers, Integers | int, Integers | None]:
    """The varints in the low bytes of each word, their sizes, and where one does not end after ``longest``
    bytes (None: nowhere).

    The usual column has one or two bytes in each row, so a further byte costs only where a row has it.
    """
    value = word & 0x7F
    more = (word >> 7) & 1
    size: Integers | int = 1
    for byte in range(1, longest):
        if not more.any():
            return value, size, None
        size = size + more
        following = word >> (8 * byte)
        value |= ((following & 0x7F) * more) << (7 * byte)
        more = more & (following >> 7)
    return value, size, more


def unzigzag(values: Integers) -> Integers:
    return (values >> 1) ^ -(values & 1)


def column_encoded(values: Integers) -> tuple[Integers, Integers]:
    """Varints of ``values`` (0 to 2^28 - 1): the bytes of each as a little-endian word, and their number."""
    top = int(values.max(initial=0))
    if top >= 1 << 28:
        raise ValueError(f"{top} takes more than four bytes")
    word = values & 0x7F
    size = np.ones(len(values), np.int64)
    for byte in range(1, 4):
        if top < 1 << (7 * byte):
            break
        more = (values >= 1 << (7 * byte)).astype(np.int64)
        size += more
        word |= more << (8 * byte - 1)
        word |= ((values >> (7 * byte)) & 0x7F) << (8 * byte)
    return word, size
