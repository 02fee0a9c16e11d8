"""Rows of the broker: of slices of its logs, and of staged branches.

Not here: which rows a batch may read (``micro_batch/claims/``).
Invariant: each row is delivered once, even if the connection breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.flight as arrow_flight

from broker_core.arrow.rows import ReadPlan, assemble
from broker_core.arrow.segment_files import SegmentFiles
from broker_core.client.connection import FAILED, FlightConnection, Live
from broker_core.core import errors
from broker_core.core.ids import NO_BLOCK, BlockId
from broker_core.engine import ReadTicket, Slice
from broker_core.flight.contract import Ticket, decode_read, decode_rows, encode

Rows = Iterator[pa.RecordBatch]


def read(connection: FlightConnection, ticket: ReadTicket, *, by_files: bool) -> Rows:
    """``by_files``: use mapped files if the broker is on this host."""
    plan, rows = decode_read(connection.call("read", encode(ticket)))
    if plan is None:
        return iter(decode_rows(rows))

    def serve(slices: Sequence[Slice]) -> Rows:
        of = partial(replace, ticket)
        return read_slices(connection, _joined(slices), lambda left: Ticket(read=of(slices=left)))

    directory = connection.live().local if by_files else ""
    return _read_mapped(plan, SegmentFiles(directory), serve) if directory else serve(ticket.slices)


def _read_mapped(plan: ReadPlan, files: SegmentFiles, serve: Callable[[Sequence[Slice]], Rows]) -> Rows:
    # the batch of the last piece: small runs share one
    block: tuple[BlockId, pa.RecordBatch | None] = (NO_BLOCK, None)
    served: list[Slice] = []
    for piece in plan.pieces:
        if piece.location is not None and (block[0] != piece.block_id or block[1] is None):
            block = (piece.block_id, files.read(piece.location))
        if piece.location is None or block[1] is None:
            served.append((piece.log, piece.first, piece.first + piece.count))
            continue
        yield from serve(served)
        served = []
        rows = assemble(piece, block[1], transaction=plan.transaction)
        if rows.num_rows:
            yield rows
    yield from serve(served)


def read_slices(
    connection: FlightConnection, left: tuple[Slice, ...], ticket_of: Callable[[tuple[Slice, ...]], Ticket]
) -> Rows:
    """After a broken connection it goes on at the first row that was not delivered."""
    patience = connection.patience()
    while left:
        live = connection.live(patience)
        try:
            for batch in _batches(live, ticket_of(left)):
                patience.renew()
                left = _after(left, batch)
                yield batch
            return
        except FAILED as error:
            connection.broken(live, error, patience)


def read_branches(connection: FlightConnection, ticket: Ticket) -> Rows:
    """After a broken connection delivered rows, which never change, are skipped."""
    delivered = 0
    patience = connection.patience()
    while True:
        live, passed = connection.live(patience), 0
        try:
            for batch in _batches(live, ticket):
                rows = batch.slice(min(max(delivered - passed, 0), batch.num_rows))
                passed += batch.num_rows
                if rows.num_rows:
                    patience.renew()
                    delivered = passed
                    yield rows
            return
        except FAILED as error:
            connection.broken(live, error, patience)


def _batches(live: Live, ticket: Ticket) -> Rows:
    reader = live.client.do_get(arrow_flight.Ticket(encode(ticket)))
    try:
        for chunk in reader:
            if chunk.data is not None and chunk.data.num_rows:
                yield chunk.data
    finally:
        reader.cancel()  # a reader that stops early must not leave the server waiting


def _after(slices: tuple[Slice, ...], batch: pa.RecordBatch) -> tuple[Slice, ...]:
    """Returns what of ``slices`` is left when ``batch`` was delivered."""
    log = batch.column("queue")[0].as_py()
    last = batch.column("offset")[batch.num_rows - 1].as_py()
    for index, (name, start, end) in enumerate(slices):
        if name == log and start <= last < end:
            rest = slices[index + 1 :]
            return ((name, last + 1, end), *rest) if last + 1 < end else rest
    raise errors.RemoteProtocolError(f"the broker sent offset {last} of {log!r}, which was not asked for")


def _joined(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    joined: list[Slice] = []
    for log, start, end in slices:
        if joined and joined[-1][0] == log and joined[-1][2] == start:
            joined[-1] = (log, joined[-1][1], end)
        else:
            joined.append((log, start, end))
    return tuple(joined)
