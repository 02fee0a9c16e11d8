"""How a piece of a log becomes rows: a stored block, plus what the log knows about it, as READ_SCHEMA.

Server and client share it, so a reader that maps a segment itself and one that uses Flight get the same
bytes.
Not here: where blocks are stored, and how a plan is made.

Invariant: ``assemble`` is a pure function of (piece, block); exchange, routing key and body are never copied
if the rows of a piece are adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.core.ids import NO_QUEUE, BlockId, CommitSequence, QueueId
from broker_core.message.message import READ_SCHEMA, READ_WITH_TRANSACTION, TIMESTAMP, Location

Interval = tuple[int, int]  # offsets, end-exclusive


@dataclass(frozen=True, slots=True)
class Piece:
    """The offsets ``first .. first+count`` of a log, which are rows of one block, in the same order.

    The rows are ``row .. row+count``, or, if ``bitmap`` is not empty, its set bits (bit i of byte i//8, least
    significant first, counted from row ``row``). ``before`` of these selected rows precede ``first`` (a slice
    that begins inside a run). ``sequence`` NO_SEQUENCE: each row of the block has its own commit time.
    ``location`` None: no file holds the block yet.
    """

    log: str
    first: int
    count: int
    block_id: BlockId
    row: int
    bitmap: bytes
    sequence: CommitSequence
    committed_at: int  # microseconds since the epoch
    skipped: tuple[Interval, ...] = ()  # offsets settled before the claim: not delivered
    redelivered: tuple[Interval, ...] = ()
    location: Location | None = None
    before: int = 0
    queue_id: QueueId = NO_QUEUE  # of the log: a queue that is declared again under the same name has another


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a read returns, in reading order. Pieces that are skipped as a whole return no rows."""

    pieces: tuple[Piece, ...] = ()
    transaction: bool = False  # the rows say which commit published them

    @property
    def rows(self) -> int:
        """Returns the maximum number of rows: skipped ones are counted."""
        return sum(piece.count for piece in self.pieces)


def assemble(piece: Piece, block: pa.RecordBatch, *, transaction: bool = False) -> pa.RecordBatch:
    """Returns the rows of ``piece`` as READ_SCHEMA, or READ_WITH_TRANSACTION; ``block`` is the whole stored
    block (MESSAGE_SCHEMA or MERGED_SCHEMA).
    """
    first, count = piece.first, piece.count
    skipped = _within(piece.skipped, first, first + count)
    if not piece.bitmap and not skipped:
        rows = block.slice(piece.row + piece.before, count)
        offsets = np.arange(first, first + count, dtype=np.int64)
    else:
        stays = ~_marks(skipped, first, count)
        rows = block.take(_column(_row_numbers(piece)[stays]))
        offsets = np.arange(first, first + count, dtype=np.int64)[stays]
    size = len(offsets)
    if piece.sequence:
        timestamps = _constants.timestamps(piece.committed_at, size)
    else:
        timestamps = rows.column("committed_at").cast(TIMESTAMP)
    redelivered = _redelivered(_within(piece.redelivered, first, first + count), first, count, offsets)
    columns = [
        _constants.queues(piece.log, size),
        _constants.partitions(size),
        _column(offsets),
        rows.column("exchange"),
        rows.column("routing_key"),
        rows.column("body"),
        timestamps,
        redelivered,
        rows.column("properties"),
    ]
    if not transaction:
        return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)
    if piece.sequence:
        sequences = _constants.sequences(piece.sequence, size)
    else:
        sequences = rows.column("commit_sequence")
    return pa.RecordBatch.from_arrays([*columns, sequences], schema=READ_WITH_TRANSACTION)


def span(piece: Piece) -> Interval:
    """Returns the rows of the block between which all of a piece are."""
    if not piece.bitmap:
        return piece.row + piece.before, piece.row + piece.before + piece.count
    numbers = _row_numbers(piece)
    return int(numbers[0]), int(numbers[-1]) + 1


def _row_numbers(piece: Piece) -> npt.NDArray[np.int64]:
    start = piece.before
    if not piece.bitmap:
        return np.arange(piece.row + start, piece.row + start + piece.count, dtype=np.int64)
    bits = np.unpackbits(np.frombuffer(piece.bitmap, dtype=np.uint8), bitorder="little")
    return np.flatnonzero(bits)[start : start + piece.count].astype(np.int64) + piece.row


def _within(intervals: Sequence[Interval], first: int, end: int) -> list[Interval]:
    return [(start, stop) for start, stop in intervals if start < end and stop > first]


def _marks(intervals: Sequence[Interval], first: int, count: int) -> npt.NDArray[np.bool_]:
    marks = np.zeros(count, dtype=np.bool_)
    for start, end in intervals:
        marks[max(start - first, 0) : max(end - first, 0)] = True
    return marks


def _redelivered(
    intervals: Sequence[Interval], first: int, count: int, offsets: npt.NDArray[np.int64]
) -> pa.Array:
    size = len(offsets)
    if not intervals:
        return _constants.booleans(False, size)
    if len(intervals) == 1 and intervals[0][0] <= first and intervals[0][1] >= first + count:
        return _constants.booleans(True, size)
    bits = np.packbits(_marks(intervals, first, count)[offsets - first], bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), size, [None, pa.py_buffer(bits)])


def _column(numbers: npt.NDArray[np.int64]) -> pa.Array:
    """Makes no copy, and avoids pa.array, which imports pandas (half a second in every worker)."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])


_Repeated = tuple[int, pa.Array]  # a value, and a column of it


class _Constants:
    """Constant columns, made once per size and sliced. A race between threads only makes one twice."""

    LOGS = 256

    def __init__(self) -> None:
        self._logs: dict[str, pa.Array] = {}
        self._flags: dict[bool, pa.Array] = {}
        self._partitions: pa.Array | None = None
        self._time: _Repeated | None = None  # of the last commit that was read
        self._sequence: _Repeated | None = None

    def queues(self, log: str, size: int) -> pa.Array:
        column = self._logs.get(log)
        if column is None or len(column) < size:
            column = _repeat(pa.scalar(log, pa.string()), size)
            if len(self._logs) >= self.LOGS:
                self._logs.clear()
            self._logs[log] = column
        return column.slice(0, size)

    def partitions(self, size: int) -> pa.Array:
        """Returns zeros: a queue has no partitions."""
        column = self._partitions
        if column is None or len(column) < size:
            column = self._partitions = _repeat(pa.scalar(0, pa.int32()), size)
        return column.slice(0, size)

    def timestamps(self, committed_at: int, size: int) -> pa.Array:
        column = self._time = _reuse(self._time, committed_at, TIMESTAMP, size)
        return column[1].slice(0, size)

    def sequences(self, sequence: int, size: int) -> pa.Array:
        column = self._sequence = _reuse(self._sequence, sequence, pa.int64(), size)
        return column[1].slice(0, size)

    def booleans(self, value: bool, size: int) -> pa.Array:
        column = self._flags.get(value)
        if column is None or len(column) < size:
            column = self._flags[value] = _repeat(pa.scalar(value, pa.bool_()), size)
        return column.slice(0, size)


def _reuse(before: _Repeated | None, value: int, kind: pa.DataType, size: int) -> _Repeated:
    """Returns what is known of this value if it is long enough, or a new column."""
    if before is not None and before[0] == value and len(before[1]) >= size:
        return before
    return value, _repeat(pa.scalar(value, kind), size)


def _repeat(value: pa.Scalar, size: int) -> pa.Array:
    return pa.repeat(value, 1 << max(size - 1, 0).bit_length())


_constants = _Constants()
