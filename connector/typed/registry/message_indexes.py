"""The message indexes of Confluent's wire format: which type of a Protobuf schema a body is.

They stand between the id and the message: zigzag varints, first how many follow, then the index of a
top-level message, of one that is nested in it, and so on. The one byte 0 stands for the first message.
Not here: the types themselves (``typed/protobuf/descriptors.py``).
"""

from __future__ import annotations

Indexes = tuple[int, ...]

FIRST: Indexes = (0,)
_MOST_BYTES = 5  # of a varint: an index is an int of Java
_DEEPEST = 100  # messages within each other, as the parser of Protobuf limits them


def read(body: bytes, at: int) -> tuple[Indexes, int]:
    """The indexes at ``at``, and where the message begins. Raises ValueError."""
    count, at = _varint(body, at)
    if count == 0:
        return FIRST, at
    if not 0 < count <= _DEEPEST:
        raise ValueError(f"there are {count}")
    found = []
    for _ in range(count):
        index, at = _varint(body, at)
        if index < 0:
            raise ValueError(f"one is {index}")
        found.append(index)
    return tuple(found), at


def written(indexes: Indexes) -> bytes:
    return b"\0" if indexes == FIRST else b"".join(map(_bytes, (len(indexes), *indexes)))


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint of an int of Java, and where it ends."""
    value = 0
    for number, byte in enumerate(body[at : at + _MOST_BYTES]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            if value >> 32:
                break
            return (value >> 1) ^ -(value & 1), at + number + 1
    raise ValueError("one has no end")


def _bytes(number: int) -> bytes:
    rest = number << 1  # none is negative
    made = bytearray()
    while rest > 0x7F:
        made.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*made, rest))
