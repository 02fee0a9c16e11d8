"""What a DoGet reads, and what permits it: a stream lasts, so the permission is asked for again meanwhile.

Not here: the stream itself (``server.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from broker_core.arrow.parts import stream_of
from broker_core.core import errors
from broker_core.engine import ReadTicket
from broker_core.flight import contract
from broker_core.message.message import READ_SCHEMA, READ_WITH_TRANSACTION
from broker_core.node.engine import EmbeddedEngine
from broker_core.server.access.caller import Caller
from broker_core.server.flight.call_permissions import CallPermissions


class Stream(NamedTuple):
    """``permitted`` raises AccessRefused."""

    schema: pa.Schema
    rows: Iterator[pa.RecordBatch]
    permitted: Callable[[], None]


def opened(
    engine: EmbeddedEngine, call_permissions: CallPermissions, caller: Caller, request: contract.Ticket
) -> Stream:
    """Raises AccessRefused, RemoteProtocolError, and what the engine does."""
    if request.branches is not None:
        permitted = partial(call_permissions.read_branches, caller, request.branches)
        permitted()
        rows = engine.read_branches(request.branches)
        first = next(rows, None)
        schema = first.schema if first is not None else pa.schema([])
        return Stream(schema, _chain(first, rows), permitted)
    if request.browse is not None:
        permitted = partial(caller.read, {log for log, _, _ in request.browse})
        permitted()
        rows = engine.browse(request.browse, transaction=request.transaction)
        return Stream(_schema(request.transaction), rows, permitted)
    if request.read is not None:
        permitted = partial(call_permissions.read, caller, request.read)
        permitted()
        return Stream(_schema(request.read.transaction), engine.read(request.read), permitted)
    raise errors.RemoteProtocolError(
        "a ticket names nothing to read; client and broker are of different versions"
    )


def small(engine: EmbeddedEngine, ticket: ReadTicket) -> bytes:
    """The rows of a read, if they are few; else its plan, whose rows a DoGet reads."""
    plan = engine.open_read(ticket)
    batches: list[pa.RecordBatch] = []
    size = 0
    if plan.rows > contract.SMALL_READ_ROWS:
        return contract.encode_read(plan)
    for batch in engine.read_plan(plan, ticket):
        batches.append(batch)
        size += batch.nbytes
        if size > contract.SMALL_READ_BYTES:
            return contract.encode_read(plan)
    return contract.encode_read(None, stream_of(batches, _schema(ticket.transaction)))


def _schema(transaction: bool) -> pa.Schema:
    return READ_WITH_TRANSACTION if transaction else READ_SCHEMA


def _chain(first: pa.RecordBatch | None, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if first is not None:
        yield first
    yield from rest
