"""Checksums of a few rows each, for every segment of messages: they show the intact rows of a damaged block.

    DIR/sums/NNNNNNNN   of segment NNNNNNNN: for each block its position, and 8 bytes for every 256 rows

Only ``salvage`` reads them. They are written with the block, and never synced: without them a damaged block
is lost as a whole.
Invariant: a row that ``whole_rows`` reports as intact has the values that were written, whatever bytes around
it are damaged; nothing outside the buffers of the block is read.
"""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from broker_core.store.failure import passing

CHUNK_ROWS = 256
# exceptions of Arrow for damaged bytes
NOT_READABLE = (OSError, EOFError, ValueError, LookupError, ArithmeticError, pa.ArrowException)
# position of the block, its rows, bytes of sums that follow, and the checksum of these three and the sums
_ENTRY = struct.Struct("<QIIQ")
_CHECKED = struct.Struct("<QII")


def sums_path(directory: Path, number: int) -> Path:
    return directory / "sums" / f"{number:08d}"


class _Columns:
    """The buffers of a block: where the values of each column start and end, and their bytes."""

    def __init__(self, block: pa.RecordBatch) -> None:
        self.rows = block.num_rows
        self.ends: list[npt.NDArray[np.int64]] = []
        self.data: list[memoryview] = []
        for column in block.columns:
            buffers = column.buffers()
            if len(buffers) == 3:  # text or bytes
                offsets = np.frombuffer(buffers[1] or bytes(4), np.int32)
                ends = offsets[column.offset : column.offset + self.rows + 1].astype(np.int64)
            else:
                ends = (np.arange(self.rows + 1) + column.offset) * (column.type.bit_width // 8)
            self.ends.append(ends)
            self.data.append(memoryview(buffers[-1] or b"").cast("B"))
        self.starts = [*range(0, self.rows, CHUNK_ROWS), self.rows]
        lengths = np.empty((self.rows, len(self.ends)), np.int32)
        for index, ends in enumerate(self.ends):
            np.subtract(ends[1:], ends[:-1], out=lengths[:, index], casting="unsafe")
        self.lengths = memoryview(lengths.tobytes())
        self.width = 4 * len(self.ends)  # bytes of ``lengths`` for each row
        self.bounds = [ends[self.starts].tolist() for ends in self.ends]  # of the chunks

    def sum(self, chunk: int) -> int:
        """Returns the checksum of the lengths of the values of a chunk, then the values."""
        found = xxhash.xxh3_64_intdigest(
            self.lengths[self.starts[chunk] * self.width : self.starts[chunk + 1] * self.width]
        )
        for bounds, data in zip(self.bounds, self.data, strict=True):
            found = xxhash.xxh3_64_intdigest(data[bounds[chunk] : bounds[chunk + 1]], found)
        return found

    def is_possible(self, chunk: int) -> bool:
        """Returns whether the ends of its values increase and are within the bytes."""
        start, end = self.starts[chunk], self.starts[chunk + 1]
        return all(
            ends[start] >= 0 and ends[end] <= len(data) and bool((np.diff(ends[start : end + 1]) >= 0).all())
            for ends, data in zip(self.ends, self.data, strict=True)
        )


def block_sums(block: pa.RecordBatch) -> bytes:
    """Returns eight bytes for every ``CHUNK_ROWS`` rows. Columns must be text, bytes, or numbers, without
    nulls.
    """
    columns = _Columns(block)
    return struct.pack(f"<{len(columns.starts) - 1}Q", *map(columns.sum, range(len(columns.starts) - 1)))


def write_sums(directory: Path, number: int, position: int, block: pa.RecordBatch) -> None:
    """Adds the sums of a block. A disk error is ignored."""
    sums = block_sums(block)
    entry = (position, block.num_rows, len(sums))
    with contextlib.suppress(OSError):
        path = sums_path(directory, number)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(_ENTRY.pack(*entry, xxhash.xxh3_64_intdigest(_CHECKED.pack(*entry) + sums)) + sums)


def read_sums(directory: Path, number: int) -> dict[int, tuple[int, bytes]]:
    """Returns the intact rows and sums by position of the block. Raises ResourceShortage."""
    found: dict[int, tuple[int, bytes]] = {}
    path = sums_path(directory, number)
    try:
        with passing(path):
            content = path.read_bytes()
    except OSError:
        return found
    at = 0
    while at + _ENTRY.size <= len(content):
        *entry, checksum = _ENTRY.unpack_from(content, at)
        sums = content[at + _ENTRY.size : at + _ENTRY.size + entry[2]]
        if xxhash.xxh3_64_intdigest(_CHECKED.pack(*entry) + sums) != checksum:
            break
        found[entry[0]] = (entry[1], sums)
        at += _ENTRY.size + entry[2]
    return found


def kept_sums(directory: Path) -> list[int]:
    """Returns the segments that have sums."""
    try:
        return [int(path.name) for path in (directory / "sums").iterdir() if path.name.isdecimal()]
    except OSError:
        return []


def drop_sums(directory: Path, number: int) -> None:
    with contextlib.suppress(OSError):
        sums_path(directory, number).unlink()


def whole_rows(
    buffer: pa.Buffer, schema: pa.Schema, rows: int, sums: bytes
) -> tuple[npt.NDArray[np.bool_], pa.RecordBatch] | None:
    """Returns which rows of a possibly damaged block are intact, and the block, with empty values in the
    other rows. None: no row is intact.

    Raises one of ``NOT_READABLE`` if Arrow cannot parse it.
    """
    # text as bytes, so that a damaged one is no error
    kinds = [(field.name, pa.binary() if _is_text(field.type) else field.type) for field in schema]
    plain = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds])
    block = pa.ipc.read_record_batch(buffer, plain)
    chunks = np.frombuffer(sums, "<u8")
    if block.num_rows != rows or len(chunks) != -(-rows // CHUNK_ROWS):
        return None
    columns = _Columns(block)
    whole = np.zeros(rows, np.bool_)
    for chunk, expected in enumerate(chunks.tolist()):
        if columns.is_possible(chunk):
            whole[columns.starts[chunk] : columns.starts[chunk + 1]] = columns.sum(chunk) == expected
    if not whole.any():
        return None
    arrays = [
        _cleared(field.type, ends, data, whole)
        for field, ends, data in zip(schema, columns.ends, columns.data, strict=True)
    ]
    return whole, pa.RecordBatch.from_arrays(arrays, schema=schema)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind))


def _cleared(
    kind: pa.DataType, ends: npt.NDArray[np.int64], data: memoryview, whole: npt.NDArray[np.bool_]
) -> pa.Array:
    """Returns a column with the values of the intact rows; empty, or 0, in the others."""
    values = [
        bytes(data[start:end]) if is_whole else None
        for start, end, is_whole in zip(ends[:-1], ends[1:], whole, strict=True)
    ]
    if _is_text(kind) or pa.types.is_binary(kind):
        return pa.array([value or b"" for value in values], pa.binary()).cast(kind)
    return pa.array([int.from_bytes(value or b"", "little", signed=True) for value in values], kind)
