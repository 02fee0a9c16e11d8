"""How the rows of a branch are cut into parts, identified and written; the same in process and over Flight.

Not here: where parts are stored, and how they are routed.

Invariant: a part has at most PART_ROWS rows and PART_BYTES bytes, except a single row that alone is larger. A
branch without rows has no parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import pyarrow as pa
import xxhash

from broker_core.arrow.outside import require_valid
from broker_core.core.errors import OptionError, TransactionTooLarge
from broker_core.engine import BranchHeader
from broker_core.message.message import MAX_BODY_BYTES, MESSAGE_SCHEMA

PART_ROWS = 65_536
PART_BYTES = 8 * 1024 * 1024
MAX_PART_BYTES = PART_BYTES + MAX_BODY_BYTES  # of rows that come compressed
MAX_PART_ROWS = 16 * PART_ROWS  # that a broker accepts

_SIGNED = 0x7FFF_FFFF_FFFF_FFFF  # checksums fit a bigint of Spark and an INTEGER of SQLite


def part_checksum(batch: pa.RecordBatch) -> int:
    """Returns xxh3_64 of the batch's IPC message, without its highest bit."""
    return signed(xxhash.xxh3_64_intdigest(batch.serialize()))


def signed(checksum: int) -> int:
    """Returns a 64-bit checksum without its highest bit."""
    return checksum & _SIGNED


def branch_checksum(parts: Iterable[int]) -> int:
    """Returns xxh3_64 over the parts' little-endian 8-byte checksums, without its highest bit."""
    return xxhash.xxh3_64_intdigest(b"".join(part.to_bytes(8, "little") for part in parts)) & _SIGNED


def stream_of(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, compression: Literal["lz4"] | None = None
) -> pa.Buffer:
    """Returns the batches as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def parts(
    rows: Iterable[pa.RecordBatch], header: BranchHeader, *, null_bodies: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a branch, cut into parts; publish rows as MESSAGE_SCHEMA. ``null_bodies``: a message
    may have no body, as a record of Kafka.

    Raises OptionError (missing or wrong column, null body: names the row, counted over the branch from 0) and
    TransactionTooLarge (a body over MAX_BODY_BYTES).
    """
    if header.kind == "publish":
        yield from _cut(_normalised(rows, header.target, null_bodies=null_bodies))
    else:
        yield from _cut(rows)


def check_part(header: BranchHeader, part: int, batch: pa.RecordBatch) -> None:
    """Checks the number and the rows of a part, and that Arrow can read it. Raises OptionError.

    Rows of messages are checked as messages (``routing/content.py``).
    """
    if part < 0 or batch.num_rows > MAX_PART_ROWS:
        raise OptionError(
            f"part {part} of branch {header.branch!a} has {batch.num_rows} rows; a part has at "
            f"most {MAX_PART_ROWS}"
        )
    if header.kind != "publish":
        try:
            require_valid(batch)
        except ValueError as error:
            raise OptionError(f"part {part} of branch {header.branch!a} is damaged: {error}") from error


def _cut(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Splits large batches, and joins small ones."""
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for batch in rows:
        for piece in _split(batch):
            piece_size = _size_bytes(piece)
            if waiting and (count + piece.num_rows > PART_ROWS or size + piece_size > PART_BYTES):
                yield _joined(waiting)
                waiting, count, size = [], 0, 0
            waiting.append(piece)
            count += piece.num_rows
            size += piece_size
    if waiting:
        yield _joined(waiting)


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields the batch in order, in pieces that obey the invariant, without a copy."""
    stack = [batch]
    while stack:
        piece = stack.pop()
        if piece.num_rows > PART_ROWS or (piece.num_rows > 1 and _size_bytes(piece) > PART_BYTES):
            middle = PART_ROWS if piece.num_rows > PART_ROWS else piece.num_rows // 2
            stack += [piece.slice(middle), piece.slice(0, middle)]
        elif piece.num_rows:
            yield piece


def _size_bytes(batch: pa.RecordBatch) -> int:
    return int(batch.nbytes)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches)


def _normalised(
    rows: Iterable[pa.RecordBatch], target: Mapping[str, object], *, null_bodies: bool
) -> Iterator[pa.RecordBatch]:
    seen = 0
    exchange, routing_key = str(target.get("exchange", "")), str(target.get("routing_key", ""))
    for batch in rows:
        yield normalise(batch, exchange, routing_key, seen, null_bodies=null_bodies)
        seen += batch.num_rows


def normalise(
    batch: pa.RecordBatch, exchange: str, routing_key: str, first_row: int = 0, *, null_bodies: bool = False
) -> pa.RecordBatch:
    """Returns ``batch`` as MESSAGE_SCHEMA: defaults for a missing or null exchange and routing key, empty
    properties if there are none.
    """
    names = batch.schema.names
    for name in names:
        if name not in MESSAGE_SCHEMA.names:
            raise OptionError(
                f"column {name!r} is not part of a message; publish takes the columns "
                f"{', '.join(MESSAGE_SCHEMA.names)}"
            )
    if "body" not in names:
        raise OptionError("the rows to publish have no column 'body'; give one of type binary or string")
    columns = [
        _text(batch, "exchange", exchange),
        _text(batch, "routing_key", routing_key),
        _body(batch.column("body"), first_row, null_bodies=null_bodies),
        _properties(batch),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def _text(batch: pa.RecordBatch, name: str, default: str) -> pa.Array:
    if name not in batch.schema.names:
        return pa.repeat(pa.scalar(default, pa.string()), batch.num_rows)
    column = batch.column(name)
    if pa.types.is_null(column.type):
        return pa.repeat(pa.scalar(default, pa.string()), batch.num_rows)
    if not (
        pa.types.is_string(column.type)
        or pa.types.is_large_string(column.type)
        or pa.types.is_string_view(column.type)
    ):
        raise OptionError(f"column {name!r} has type {column.type}; it must be a string")
    column = column.cast(pa.string())
    return column.fill_null(default) if column.null_count else column


def _properties(batch: pa.RecordBatch) -> pa.Array:
    if "properties" not in batch.schema.names or pa.types.is_null(batch.column("properties").type):
        return pa.repeat(pa.scalar(b"", pa.binary()), batch.num_rows)
    column = batch.column("properties")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise OptionError(
            f"column 'properties' has type {column.type}; here it must be binary (AMQP-encoded)"
        )
    column = column.cast(pa.binary())
    return column.fill_null(b"") if column.null_count else column


_BODY_TYPES = (
    pa.binary(),
    pa.large_binary(),
    pa.string(),
    pa.large_string(),
    pa.binary_view(),
    pa.string_view(),
)


def _body(column: pa.Array, first_row: int, *, null_bodies: bool) -> pa.Array:
    if column.type not in _BODY_TYPES and not pa.types.is_null(column.type):
        raise OptionError(f"column 'body' has type {column.type}; it must be binary or string")
    if column.null_count and not null_bodies:
        row = first_row + column.is_null().index(True).as_py()
        raise OptionError(
            f"row {row} has no body (null); it may be empty but not null: filter such rows or "
            "use coalesce(body, '')"
        )
    if len(column) and column.nbytes > MAX_BODY_BYTES:
        import pyarrow.compute as pc  # slow to import, and only needed for this error

        sizes = pc.binary_length(column)
        largest = pc.max(sizes).as_py()
        if largest > MAX_BODY_BYTES:
            row = first_row + sizes.index(largest).as_py()
            raise TransactionTooLarge(
                f"the body of row {row} has {largest} bytes; the limit is {MAX_BODY_BYTES}. Store it "
                "elsewhere and publish a reference"
            )
    return column.cast(pa.binary())
