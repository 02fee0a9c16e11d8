"""The head of a Kafka record batch (magic 2), the integers of variable length in its records, and where these
begin.

Not here: the records inside (``decode.py``, ``encode.py``) and compression. The layout is that of "Record
Batch" in the Kafka protocol guide and of KIP-98; the checksum is CRC-32C from the attributes to the end.
A varint has seven bits a byte, least significant first; bit 7 says that another byte follows. Signed ones are
zigzag-encoded, as in Protocol Buffers ("Protocol Primitive Types": VARINT, VARLONG, UNSIGNED_VARINT).
Invariant: a head that :func:`read_head` returns lies whole in its data, its checksum is right, and its
numbers fit each other. Nothing is read beyond what is given; a varint that does not end is a ValueError.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from broker_core.core import errors

Integers = npt.NDArray[np.int64]

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


class Codec(enum.IntEnum):
    """Bits 0 to 2 of a batch's attributes (Kafka protocol guide, "Record Batch")."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


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
        "what is gone, start after it",
    )


# -- varints: one at a time, and a whole column of them ------------------------------------------------------

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


Bytes = npt.NDArray[np.uint8]

PADDING = 64  # bytes behind the content that may be looked at: eight windows
STRIDE = 16_384  # bytes between guesses
LARGE = 1024  # mean size of a record from which guesses are not worth their search
# candidates of one search, of which the true one is not told cheaply: bodies of zeros; a record has four or
# so
MANY = 32
FEW = 48  # walkers; fewer step faster one by one


# -- where records begin -------------------------------------------------------------------------------------
# A record begins with its length, so a walker goes from start to start. Each batch has a walker at its begin,
# which is known; inside a long batch more of them begin at guessed places. A guess counts only if the walker
# before it arrives exactly there: by induction from the begin of the batch, every start is then proven. A
# batch with a wrong guess is walked again from its begin alone.


class Section(NamedTuple):
    """The content of one batch: bytes ``begin`` to ``end`` of a buffer."""

    begin: int
    end: int
    records: int


def _jumps() -> Integers:
    """By the first two bytes of a record (little-endian): bytes to the next record; 0 where more bytes tell,
    or none can.
    """
    first, second = np.arange(1 << 16) & 0xFF, np.arange(1 << 16) >> 8
    one = (first >> 1) + 1
    two = (((first & 0x7F) | second << 7) >> 1) + 2
    jumps = np.where(first < 0x80, one, np.where(second < 0x80, two, 0))
    return np.where(first & 1, 0, jumps).astype(np.int64)


_JUMP = _jumps()
_JUMP_LIST: list[int] = _JUMP.tolist()


def find_starts(data: Bytes, words: Integers, sections: list[Section]) -> Integers:
    """Begins of all records, in order. Raises ValueError where the records of a section do not fill it, or
    are not ``records``.

    ``data`` has PADDING bytes behind its last section, and ``words`` are its windows.
    """
    if len(sections) < FEW and sum(section.records for section in sections) < 4 * FEW:
        return np.concatenate([_walk_whole(data, section) for section in sections])
    begins, owners = _walkers(data, words, sections)
    ends = np.array([section.end for section in sections], np.int64)[owners]
    inner = owners[1:] == owners[:-1]
    ends[:-1][inner] = begins[1:][inner]
    starts, counts, arrived = _walk_together(data, begins, ends)
    wrong = np.unique(owners[arrived != ends])
    found = np.bincount(owners, counts, len(sections)).astype(np.int64)
    if not len(wrong) and (found == [section.records for section in sections]).all():
        return starts
    # a guess or the data is wrong; what holds without guesses is decided section by section
    bounds = np.concatenate(([0], np.cumsum(found)))
    again = set(wrong.tolist())
    return np.concatenate(
        [
            _walk_whole(data, section)
            if number in again or section.records != found[number]
            else starts[bounds[number] : bounds[number + 1]]
            for number, section in enumerate(sections)
        ]
    )


def _walk_whole(data: Bytes, section: Section) -> Integers:
    starts: list[int] = []
    if (
        _walk_alone(data.data, section.begin, section.end, starts) != section.end
        or len(starts) != section.records
    ):
        raise ValueError("the records do not fill their batch")
    return np.array(starts, np.int64)


def _walk_alone(data: memoryview, position: int, end: int, starts: list[int]) -> int:
    """Appends the starts from ``position`` up to ``end``; the position where the walk ends: ``end``, or
    beyond it.
    """
    jump = _JUMP_LIST
    append = starts.append
    while position < end:
        append(position)
        position += jump[data[position] | data[position + 1] << 8] or _long_jump(data, position, end)
    return position


def _long_jump(data: memoryview, position: int, end: int) -> int:
    """Bytes to the next record where the length takes more than two bytes; beyond ``end`` where it is
    none.
    """
    try:
        length, behind = read_unsigned(data, position, end)
    except ValueError:
        length, behind = 1, position
    return (
        behind + (length >> 1) - position
        if not length & 1 and behind + (length >> 1) <= end
        else end + 1 - position
    )


def _walk_together(data: Bytes, begins: Integers, ends: Integers) -> tuple[Integers, Integers, Integers]:
    """Starts of all walkers, walker by walker; how many each found; where each arrived."""
    view = data.data
    pairs = np.ndarray((len(data) - 1,), np.dtype("<u2"), buffer=data, strides=(1,))
    arrived = np.empty(len(begins), np.int64)
    live, at, stop = np.arange(len(begins)), begins, ends
    steps: list[tuple[Integers, Integers]] = []
    while len(live) >= FEW:
        steps.append((live, at))
        jump = _JUMP[pairs[at]]
        if not jump.all():
            for walker in np.flatnonzero(jump == 0).tolist():
                jump[walker] = _long_jump(view, int(at[walker]), int(stop[walker]))
        at = at + jump
        going = at < stop
        if not going.all():
            arrived[live[~going]] = at[~going]
            live, at, stop = live[going], at[going], stop[going]
    rest: list[list[int]] = []
    for walker, position, end in zip(live.tolist(), at.tolist(), stop.tolist()):
        rest.append([])
        arrived[walker] = _walk_alone(view, position, end, rest[-1])

    counts = (
        np.bincount(np.concatenate([walkers for walkers, _ in steps]), minlength=len(begins))
        if steps
        else np.zeros_like(begins)
    )
    stepped = counts[live]
    counts[live] += np.array([len(found) for found in rest], np.int64)
    first = np.cumsum(counts) - counts
    starts = np.empty(int(counts.sum()), np.int64)
    for number, (walkers, positions) in enumerate(steps):
        starts[first[walkers] + number] = positions
    for walker, done, found in zip(live.tolist(), stepped.tolist(), rest):
        starts[first[walker] + done : first[walker] + done + len(found)] = found
    return starts, counts, arrived


# -- guesses -------------------------------------------------------------------------------------------------


def _walkers(data: Bytes, words: Integers, sections: list[Section]) -> tuple[Integers, Integers]:
    """Where walkers begin, in order, and the section of each."""
    begins = np.array([section.begin for section in sections], np.int64)
    owners = np.arange(len(sections))
    long = [number for number, section in enumerate(sections) if section.end - section.begin > 2 * STRIDE]
    size = sum(sections[number].end - sections[number].begin for number in long)
    count = sum(sections[number].records for number in long)
    if not long or size > LARGE * count:
        return begins, owners
    guesses, guessed = _guess(data, words, sections, long, width=min(int(1.6 * size / count) + 32, STRIDE))
    order = np.argsort(np.concatenate((begins, guesses)), kind="stable")
    return np.concatenate((begins, guesses))[order], np.concatenate((owners, guessed))[order]


def _guess(
    data: Bytes, words: Integers, sections: list[Section], long: list[int], width: int
) -> tuple[Integers, Integers]:
    """Places about STRIDE apart that look like starts, and the section of each.

    A candidate is two records in a row: each a length, zero attributes and an offset delta, and the second
    delta one above the first.
    """
    places = [
        np.arange(sections[number].begin + STRIDE, sections[number].end - width - WINDOW, STRIDE)
        for number in long
    ]
    owners = np.repeat(np.array(long), [len(each) for each in places])
    place = np.concatenate(places)
    if not len(place):
        return place, owners
    seen = sliding_window_view(data, width + 3)[place]
    more, zero = seen > 0x7F, seen == 0
    end1 = ~more[:, :width] & zero[:, 1 : width + 1]
    end2 = more[:, :width] & ~more[:, 1 : width + 1] & zero[:, 2 : width + 2]
    end3 = more[:, :width] & more[:, 1 : width + 1] & zero[:, 3:]
    likely = (end1 | end2 | end3) & (seen[:, :width] & 1 == 0)
    likely[likely.sum(axis=1) > MANY] = False
    search, column = np.nonzero(likely)
    at = place[search] + column
    end = np.array([section.end for section in sections])[owners[search]]
    fits, delta, following = _look(words, at, end)
    search, at, end, delta, following = search[fits], at[fits], end[fits], delta[fits], following[fits]
    fits, next_delta, _ = _look(words, following, end)
    fits &= next_delta == delta + 1
    search, first = np.unique(search[fits], return_index=True)
    return at[fits][first], owners[search]


def _look(words: Integers, at: Integers, end: Integers) -> tuple[npt.NDArray[np.bool_], Integers, Integers]:
    """Of possible starts: whether a record may begin there, its offset delta, and where the next one would
    begin.
    """
    fits = np.ones(len(at), bool)

    def number(position: Integers) -> tuple[Integers, Integers]:
        value, size, more = word_unsigned(words[position], 4)
        if more is not None:
            np.logical_and(fits, more == 0, out=fits)
        return value, position + size

    length, inside = number(at)
    following = inside + (length >> 1)
    fits &= (length & 1 == 0) & (words[inside] & 0xFF == 0) & (following < end)
    _, behind = number(inside + 1)
    delta, _ = number(behind)
    fits &= delta & 1 == 0
    return fits, delta >> 1, np.where(fits, following, at)
