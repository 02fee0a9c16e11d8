"""The head of a Kafka record batch (magic 2), and what every reader of one agrees on.

Not here: the records inside (``decode.py``, ``encode.py``) and compression. The layout is that of "Record
Batch" in the Kafka protocol guide and of KIP-98; the checksum is CRC-32C from the attributes to the end.
Invariant: a head that :func:`read_head` returns lies whole in its data, its checksum is right, and its
numbers fit each other.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import crc32c

from broker_core import errors
from broker_core.kafka.record.compression import Codec
from broker_core.kafka.record.varint import read_signed

# base offset, length behind itself, leader epoch, magic, crc | attributes, last offset delta, base and max
# timestamp, producer id, producer epoch, base sequence, count of records
HEAD = struct.Struct(">qiibIhiqqqhii")
MAGIC = 2
NOTHING = -1  # no producer, no sequence, no leader epoch

CODEC_MASK, LOG_APPEND_TIME, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20
SMALLEST_RECORD = 7  # length, attributes, two deltas, two lengths and the count of headers, one byte each

CRC_AT, ATTRIBUTES_AT, TIMESTAMPS_AT, PRODUCER_AT = 17, 21, 27, 43
_LENGTH_AT = 12  # what "length" counts begins here
PRODUCER = struct.Struct(">qhi")  # id, epoch, first sequence
_ABORT, _CONTROL_KEY = 0, struct.Struct(">hh")  # version, type


class Head(NamedTuple):
    """The head of the batch at byte ``at`` of fetched data, which ends before byte ``stop``. Timestamps in
    milliseconds.
    """

    at: int
    stop: int
    base_offset: int
    last_offset: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    records: int

    @property
    def codec(self) -> Codec:
        return Codec(self.attributes & CODEC_MASK)

    @property
    def body(self) -> slice:
        """The bytes of its records, as they are stored."""
        return slice(self.at + HEAD.size, self.stop)


def read_head(data: memoryview, at: int, log: str) -> Head | None:
    """The head at byte ``at``; None where the batch does not lie whole in ``data``, as the last one of a
    fetch may not.

    ``log`` is for the text of the error. Raises CorruptRecordBatch.
    """
    if len(data) - at < HEAD.size:
        return None
    base, length, _, magic, crc, attributes, last, first_time, max_time, producer, _, _, count = (
        HEAD.unpack_from(data, at)
    )
    if magic != MAGIC:
        raise damaged(log, base, f"its format is {magic}; only 2, which Kafka writes since 0.11, is read")
    stop = at + _LENGTH_AT + length
    if stop < at + HEAD.size:
        raise damaged(log, base, f"its length is {length}")
    if stop > len(data):
        return None
    if crc32c.crc32c(data[at + ATTRIBUTES_AT : stop]) != crc:
        raise damaged(log, base, "its checksum is wrong")
    if attributes & CODEC_MASK not in Codec._value2member_map_:
        raise damaged(log, base, f"its codec is {attributes & CODEC_MASK}, which is none")
    # deltas of a batch rise, so there are no more records than offsets
    if base < 0 or last < 0 or base + last >= 2**63 - 1 or not 0 <= count <= last + 1:
        raise damaged(log, base, f"it says {count} records with offsets {base} to {base + last}")
    if not count and stop > at + HEAD.size:
        raise damaged(log, base, f"it says 0 records in {stop - at - HEAD.size} bytes")
    return Head(at, stop, base, base + last, attributes, first_time, max_time, producer, count)


def is_abort_marker(data: memoryview, head: Head, log: str) -> bool:
    """Whether a control batch ends a transaction by aborting it. Raises CorruptRecordBatch.

    A marker is one record that is never compressed; its key is a version and a type (protocol guide, "Control
    Batch").
    """
    body = data[head.body]
    try:
        position = 0
        length, position = read_signed(body, position, len(body))
        position += 1  # attributes
        for _ in range(2):  # deltas of timestamp and offset
            _, position = read_signed(body, position, len(body))
        size, position = read_signed(body, position, len(body))
        if head.codec or head.records != 1 or length < 0 or size < _CONTROL_KEY.size:
            raise ValueError("it is not a single marker")
        _, kind = _CONTROL_KEY.unpack_from(body, position)
    except (ValueError, struct.error) as error:
        raise damaged(log, head.base_offset, f"its control record: {error}") from None
    return bool(kind == _ABORT)


def damaged(log: str, base_offset: int, reason: str) -> errors.CorruptRecordBatch:
    return errors.CorruptRecordBatch(
        f"the record batch at offset {base_offset} of {log} is damaged: {reason}",
        "look at it with kafka-dump-log.sh, and let a sound replica replace the partition; to skip "
        "what is gone, start behind it",
    )
