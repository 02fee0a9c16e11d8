"""Fetched bytes of a partition as columns: which batches a reader sees, and the fields of their records.

Numpy finds the fields of all records at once, Arrow copies them out.
Not here: fetching; what a header or a key means.
Invariant: equal to :func:`plain_records`, batch by batch, on every input.
What the fast form does not handle (numbers longer than eight bytes) and everything damaged goes to the plain
one, which gives the rows or says what is wrong.
Memory: the data and a few times LIMIT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.core import errors
from broker_core.kafka.record.compression import TooLarge, inflate
from broker_core.kafka.record.record_batch import (
    CONTROL,
    LOG_APPEND_TIME,
    PADDING,
    SMALLEST_RECORD,
    TRANSACTIONAL,
    Bytes,
    Head,
    Integers,
    Section,
    column_unsigned,
    damaged,
    find_starts,
    is_abort_marker,
    read_head,
    read_signed,
    read_unsigned,
    unzigzag,
    windows,
)

LIMIT = 256 << 20  # bytes at once; Arrow's binary columns end at 2 GiB
# that the columns of a record take beside its content, so that many empty ones are no way around the limit
RECORD_BYTES = 100
CHUNK = 1 << 14  # rows whose temporary columns stay in the processor's cache
_SAFE_TIMESTAMP = 1 << 62  # a delta in a window does not overflow from below it

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Records:
    """Columns of equal length, in the order of the offsets.

    ``timestamps`` are milliseconds since the epoch. ``keys`` and ``headers`` are None where no record has
    one. ``headers`` is a dictionary array of blocks for
    :func:`header_pairs`, each checked. Keys and values may be null.
    """

    offsets: Integers
    timestamps: Integers
    values: pa.BinaryArray
    keys: pa.BinaryArray | None = None
    headers: pa.DictionaryArray | None = None

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True, slots=True)
class VisibleRecords:
    """The records that are visible, and the offset from which to fetch next."""

    records: Records
    position: int


_NO_RECORDS = Records(np.empty(0, np.int64), np.empty(0, np.int64), pa.array([], pa.binary()))


def decode(
    data: bytes | bytearray | memoryview,
    start: int,
    end: int,
    aborted: Iterable[tuple[int, int]] = (),
    *,
    log: str,
    limit: int = LIMIT,
) -> VisibleRecords:
    """The visible records with ``start <= offset < end`` in what one Fetch answered for one partition.

    ``data`` is a sequence of record batches; the last one may be cut short (KIP-74), the first may begin
    below ``start``. ``aborted`` is the answer's list of (producer id, first offset); without it every record
    is visible, as for an isolation level of read_uncommitted. ``log`` is for the texts of errors. Where all
    batches are larger than ``limit`` bytes, the later ones are left for the next fetch. Raises
    CorruptRecordBatch, and TransactionTooLarge where the first batch alone is larger than ``limit``.
    """
    view, position, room = memoryview(data).cast("B"), start, limit
    aborts = _Aborts(aborted)
    batches: list[tuple[Head, bytes | memoryview]] = []
    for head in _heads(view, log):
        if head.base_offset >= end:
            position = max(position, end)  # nothing is left between
            break
        if not aborts.hides(view, head, log) and head.records and head.last_offset >= start:
            try:
                content = _content(view, head, room, log)
            except TooLarge as error:
                if batches:
                    break
                raise errors.TransactionTooLarge(
                    f"the record batch at offset {head.base_offset} of {log} cannot be read: {error}, and "
                    f"the limit is {limit}",
                    "write smaller batches; to skip this one, start after it",
                ) from None
            room -= _weight(content, head)
            batches.append((head, content))
        position = max(position, head.last_offset + 1)
    return VisibleRecords(_records(batches, start, end, log) if batches else _NO_RECORDS, position)


def _content(view: memoryview, head: Head, room: int, log: str) -> bytes | memoryview:
    """The records, inflated. Raises TooLarge, CorruptRecordBatch."""
    try:
        content = inflate(head.codec, view[head.body], room)
    except TooLarge:
        raise
    except ValueError as error:
        raise damaged(log, head.base_offset, f"its content cannot be inflated: {error}") from None
    if len(content) < SMALLEST_RECORD * head.records:
        raise damaged(
            log, head.base_offset, f"its content of {len(content)} bytes cannot hold {head.records} records"
        )
    if _weight(content, head) > room:
        raise TooLarge(f"it holds {len(content)} bytes in {head.records} records")
    return content


def _weight(content: bytes | memoryview, head: Head) -> int:
    return len(content) + RECORD_BYTES * head.records


def _heads(view: memoryview, log: str) -> Iterator[Head]:
    """Heads of the batches that lie whole in ``view``. Raises CorruptRecordBatch."""
    at, lowest = 0, 0
    while (head := read_head(view, at, log)) is not None:
        if head.base_offset < lowest:
            raise damaged(log, head.base_offset, f"it stands behind offset {lowest - 1}")
        yield head
        at, lowest = head.stop, head.last_offset + 1
    if at == 0 and len(view):
        raise errors.CorruptRecordBatch(
            f"{len(view)} bytes of {log} are not a whole record batch",
            "fetch again; a broker sends the first one whole",
        )


class _Aborts:
    """Which batches an isolation level of read_committed hides (KIP-98; the Java consumer's
    ``CompletedFetch`` does the same).
    """

    def __init__(self, transactions: Iterable[tuple[int, int]]) -> None:
        """``transactions``: (producer id, first offset) of those that end with an abort."""
        self._later = sorted(transactions, key=lambda transaction: transaction[1], reverse=True)
        self._open: set[int] = set()

    def hides(self, view: memoryview, head: Head, log: str) -> bool:
        """Batches come in the order of their offsets. Control batches are never rows."""
        while self._later and self._later[-1][1] <= head.last_offset:
            self._open.add(self._later.pop()[0])
        if head.attributes & CONTROL:
            if head.producer_id in self._open and is_abort_marker(view, head, log):
                self._open.discard(head.producer_id)
            return True
        return bool(head.attributes & TRANSACTIONAL) and head.producer_id in self._open


# -- columns -------------------------------------------------------------------------------------------------


class _Fields:
    """Where the fields of each record lie: positions in the buffer, lengths (-1: null) and the two deltas."""

    def __init__(self, rows: int) -> None:
        self.time, self.offset = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self.key, self.key_length = np.empty(rows, np.int32), np.empty(rows, np.int32)
        self.value, self.value_length = np.empty(rows, np.int32), np.empty(rows, np.int32)
        self.headers, self.headers_length = np.empty(rows, np.int32), np.empty(rows, np.int32)

    def fill(self, rows: slice, data: Bytes, words: Integers, starts: Integers, ends: Integers) -> None:
        """Raises ValueError where a record is damaged, or has numbers that the windows do not show.

        No read leaves the data: each number moves at most a window, and before there were eight of them the
        place is compared with the end of the record.
        """
        length, at = column_unsigned(words, starts)
        _require((at + unzigzag(length) == ends) & (data[at] == 0))
        delta, at = column_unsigned(words, at + 1)
        self.time[rows] = unzigzag(delta)
        delta, at = column_unsigned(words, at)
        self.offset[rows] = unzigzag(delta)
        self.key[rows], self.key_length[rows], at = _nullable(data, words, at, ends)
        self.value[rows], self.value_length[rows], at = _nullable(data, words, at, ends)
        self.headers[rows], self.headers_length[rows] = at, ends - at
        _require(at < ends)
        # without headers only their count, zero, is left
        _require((ends - at > 1) | (data[at] == 0))


def _nullable(
    data: Bytes, words: Integers, at: Integers, ends: Integers
) -> tuple[Integers, Integers, Integers]:
    """First bytes of a nullable field, its lengths, and the bytes behind it."""
    if (data[at] == 1).all():
        return at, np.full(len(at), -1), at + 1
    length, first = column_unsigned(words, at)
    length = unzigzag(length)
    behind = first + np.maximum(length, 0)
    _require((length >= -1) & (behind < ends))
    return first, length, behind


def _require(holds: npt.NDArray[np.bool_]) -> None:
    if not holds.all():
        raise ValueError("a record is damaged")


def _records(batches: list[tuple[Head, bytes | memoryview]], start: int, end: int, log: str) -> Records:
    try:
        return _fast(batches, start, end)
    except ValueError:
        return _plain(batches, start, end, log)


def _fast(batches: list[tuple[Head, bytes | memoryview]], start: int, end: int) -> Records:
    """Raises ValueError where the plain form must look."""
    raw = b"".join([*(content for _, content in batches), bytes(PADDING)])
    data = np.frombuffer(raw, np.uint8)
    words = windows(data)
    bounds = np.cumsum([0, *(len(content) for _, content in batches)])
    counts = np.array([head.records for head, _ in batches], np.int64)
    sections = [Section(*each) for each in zip(bounds[:-1].tolist(), bounds[1:].tolist(), counts.tolist())]
    starts = find_starts(data, words, sections)
    ends = np.append(starts[1:], bounds[-1])
    fields = _Fields(len(starts))
    for first in range(0, len(starts), CHUNK):
        rows = slice(first, first + CHUNK)
        fields.fill(rows, data, words, starts[rows], ends[rows])
    offsets, timestamps = _numbers([head for head, _ in batches], counts, fields)

    part = slice(int(np.searchsorted(offsets, start)), int(np.searchsorted(offsets, end)))
    buffer = pa.py_buffer(raw)
    return Records(
        offsets[part],
        timestamps[part],
        values=_column(buffer, fields.value[part], fields.value_length[part]),
        keys=_column(buffer, fields.key[part], fields.key_length[part])
        if (fields.key_length[part] >= 0).any()
        else None,
        headers=_headers(buffer, fields, part),
    )


def _numbers(heads: list[Head], counts: Integers, fields: _Fields) -> tuple[Integers, Integers]:
    """Offsets and timestamps. Raises ValueError where offsets do not rise within their batch."""
    base = np.array([head.base_offset for head in heads], np.int64)
    offsets = np.repeat(base, counts) + fields.offset
    last = np.cumsum(counts) - 1
    _require(offsets[1:] > offsets[:-1])
    _require(
        (fields.offset[last - counts + 1] >= 0) & (offsets[last] <= [head.last_offset for head in heads])
    )

    append = np.array([bool(head.attributes & LOG_APPEND_TIME) for head in heads])
    time = np.where(append, [head.max_timestamp for head in heads], [head.base_timestamp for head in heads])
    if append.any():
        fields.time[np.repeat(append, counts)] = 0
    _require((time > -_SAFE_TIMESTAMP) & (time < _SAFE_TIMESTAMP))
    return offsets, np.repeat(time, counts) + fields.time


def _column(buffer: pa.Buffer, first: Positions, length: Positions) -> pa.BinaryArray:
    """Copies of the fields: they are every other element of an array over the buffer."""
    rows = len(first)
    null = length < 0
    bounds = np.empty(2 * rows + 2, np.int32)
    bounds[0] = 0
    bounds[1:-1:2] = first
    bounds[2::2] = first + np.maximum(length, 0)
    bounds[-1] = bounds[-2]
    spans = pa.Array.from_buffers(pa.binary(), 2 * rows + 1, [None, pa.py_buffer(bounds), buffer])
    odd = np.arange(1, 2 * rows + 1, 2)
    return spans.take(pa.array(odd, mask=null) if null.any() else pa.array(odd))


def _headers(buffer: pa.Buffer, fields: _Fields, rows: slice) -> pa.DictionaryArray | None:
    if (fields.headers_length <= 1).all():
        return None
    # all of them are checked, also those out of range, as the plain form does
    blocks = _column(buffer, fields.headers, fields.headers_length).dictionary_encode()
    for block in blocks.dictionary.to_pylist():
        check_headers(block)
    return _without_empty(blocks[rows])


def _without_empty(blocks: pa.DictionaryArray) -> pa.DictionaryArray | None:
    """None where no record has headers."""
    used = blocks.dictionary.take(blocks.indices.unique())
    return None if used.to_pylist() in ([], [NO_HEADERS]) else blocks


def _plain(batches: list[tuple[Head, bytes | memoryview]], start: int, end: int, log: str) -> Records:
    found = [
        record
        for head, content in batches
        for record in plain_records(head, bytes(content), log)
        if start <= record.offset < end
    ]
    return Records(
        np.array([record.offset for record in found], np.int64),
        np.array([record.timestamp for record in found], np.int64),
        values=pa.array([record.value for record in found], pa.binary()),
        keys=pa.array([record.key for record in found], pa.binary())
        if any(record.key is not None for record in found)
        else None,
        headers=_without_empty(
            pa.array([record.headers for record in found], pa.binary()).dictionary_encode()
        ),
    )


NO_HEADERS = b"\0"


# -- the plain form, beside the fast one: it says which record is damaged, and what is wrong with it --
class PlainRecord(NamedTuple):
    """One record. ``timestamp`` in milliseconds; ``value``: a part of the content, not a copy; ``headers`` as
    they are stored, their count in front.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | memoryview | None
    headers: bytes


def plain_records(head: Head, content: bytes | memoryview, log: str) -> Iterator[PlainRecord]:
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
    key, position = _field(content, position, end)
    value, position = _field(content, position, end)
    headers = bytes(content[position:end])
    check_headers(headers)
    key = None if key is None else bytes(key)
    return PlainRecord(head.base_offset + delta, timestamp, key, value, headers), end


def _field(content: bytes | memoryview, position: int, end: int) -> tuple[bytes | memoryview | None, int]:
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
