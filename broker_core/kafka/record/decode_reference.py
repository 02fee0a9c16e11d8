"""Records of a batch, one at a time: the plain form beside the fast one in ``decode.py``.

The fast form hands over what it does not handle, and everything damaged, because this one can say which
record and what is wrong with it. Tests compare both.
Invariant: the records of a batch fill its bytes exactly, their offsets rise within those of the head, and
nothing beyond the bytes is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from broker_core.kafka.record.record_batch import LOG_APPEND_TIME, Head, damaged, read_signed, read_unsigned

NO_HEADERS = b"\0"


class PlainRecord(NamedTuple):
    """One record. ``timestamp`` in milliseconds; ``value``: a part of the content, not a copy; ``headers`` as
    they are stored, their count in front.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | memoryview | None
    headers: bytes


def records(head: Head, content: bytes | memoryview, log: str) -> Iterator[PlainRecord]:
    """The records of one batch from its inflated ``content``. Raises CorruptRecordBatch."""
    position, previous = 0, head.base_offset - 1
    for number in range(head.records):
        try:
            record, position = _record(head, content, position)
            if not previous < record.offset <= head.last_offset:
                raise ValueError(f"its offset is {record.offset}, behind {previous}")
        except ValueError as error:
            raise damaged(log, head.base_offset, f"record {number} of {head.records}: {error}") from None
        previous = record.offset
        yield record
    if position != len(content):
        raise damaged(
            log, head.base_offset, f"{len(content) - position} bytes follow its {head.records} records"
        )


def _record(head: Head, content: bytes | memoryview, position: int) -> tuple[PlainRecord, int]:
    length, position = read_signed(content, position, len(content))
    end = position + length
    if length < 1 or end > len(content):
        raise ValueError(f"its length is {length}, and {len(content) - position} bytes are left")
    if content[position]:
        raise ValueError(f"its attributes are {content[position]:#04x}; no version of the format has any")
    delta, position = read_signed(content, position + 1, end)
    timestamp = head.max_timestamp if head.attributes & LOG_APPEND_TIME else head.base_timestamp + delta
    if not -(2**63) <= timestamp < 2**63:
        raise ValueError(f"its timestamp is {timestamp}")
    delta, position = read_signed(content, position, end)
    key, position = _nullable(content, position, end)
    value, position = _nullable(content, position, end)
    headers = bytes(content[position:end])
    check_headers(headers)
    key = None if key is None else bytes(key)
    return PlainRecord(head.base_offset + delta, timestamp, key, value, headers), end


def _nullable(content: bytes | memoryview, position: int, end: int) -> tuple[bytes | memoryview | None, int]:
    size, position = read_signed(content, position, end)
    if size == -1:
        return None, position
    if not 0 <= size <= end - position:
        raise ValueError(f"a field of {size} bytes, and {end - position} are left")
    return content[position : position + size], position + size


# -- headers -------------------------------------------------------------------------------------------------


def check_headers(block: bytes) -> None:
    """Raises ValueError where ``block`` is not exactly a count and so many headers."""
    count, position = read_signed(block, 0, len(block))
    if count < 0:
        raise ValueError(f"its count of headers is {count}")
    while count and position < len(block):
        for smallest in (0, -1):  # a value may be null, a name may not
            size, position = read_signed(block, position, len(block))
            if not smallest <= size <= len(block) - position:
                raise ValueError(f"a header of {size} bytes, and {len(block) - position} are left")
            position += max(size, 0)
        count -= 1
    if count or position != len(block):
        raise ValueError(
            f"its headers end {len(block) - position} bytes before the record, and {count} of them are "
            "missing"
        )


def header_pairs(block: bytes) -> list[tuple[str, bytes | None]]:
    """Names and values of a block that was checked. A name that is no UTF-8 is read as Java reads it, with
    U+FFFD.
    """
    count, position = read_unsigned(block, 0, len(block))
    pairs: list[tuple[str, bytes | None]] = []
    for _ in range(count >> 1):
        size, position = read_signed(block, position, len(block))
        name = block[position : position + size].decode(errors="replace")
        size, position = read_signed(block, position + size, len(block))
        pairs.append((name, None if size < 0 else block[position : position + size]))
        position += max(size, 0)
    return pairs
