"""What a DoGet reads, and what permits it: a stream lasts, so the permission is asked for again meanwhile.

Not here: the stream itself (``server.py``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from broker_core.arrow.parts import stream_of
from broker_core.arrow.rows import ReadPlan
from broker_core.core import errors
from broker_core.engine import ReadTicket
from broker_core.flight import contract
from broker_core.message.message import READ_SCHEMA, READ_WITH_TRANSACTION
from broker_core.node.engine import EmbeddedEngine
from broker_core.server.access.caller import Caller
from broker_core.server.flight.call_permissions import CallPermissions

Most = Callable[[pa.RecordBatch], int]  # how many of these rows are sent now, one at least


class Stream(NamedTuple):
    """``permitted`` raises AccessRefused. ``reading``: while the next batch is read and encoded."""

    schema: pa.Schema
    rows: Iterator[pa.RecordBatch]
    permitted: Callable[[], None]
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def opened(
    engine: EmbeddedEngine,
    call_permissions: CallPermissions,
    caller: Caller,
    request: contract.Ticket,
    most: Most,
) -> Stream:
    """``most``: of a batch now. Raises AccessRefused, RemoteProtocolError, and what the engine does."""
    if request.branches is not None:
        permitted = partial(call_permissions.read_branches, caller, request.branches)
        permitted()
        rows = _of_branches(engine, request.branches, most)
        first = list(itertools.islice(rows, 1))
        schema, taken = (first[0].schema, [first]) if first else (pa.schema([]), [])
        return Stream(schema, itertools.chain(map(list.pop, taken), rows), permitted)
    if request.browse is not None:
        permitted = partial(caller.read, {log for log, _, _ in request.browse})
        permitted()
        plan = engine.plan_browse(request.browse, transaction=request.transaction)
        return Stream(_schema(request.transaction), _of_plan(engine, plan, None, most), permitted)
    if request.read is not None:
        permitted = partial(call_permissions.read, caller, request.read)
        permitted()
        plan = engine.open_read(request.read)
        return Stream(_schema(plan.transaction), _of_plan(engine, plan, request.read, most), permitted)
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


def _of_plan(
    engine: EmbeddedEngine, plan: ReadPlan, ticket: ReadTicket | None, most: Most
) -> Iterator[pa.RecordBatch]:
    """While a client takes what it has got, nothing of a block is held: the rest is read again."""
    for piece in plan.pieces:
        at, end = piece.first, piece.first + piece.count
        while at < end:
            rest = replace(piece, first=at, count=end - at, before=piece.before + at - piece.first)
            found = itertools.islice(engine.read_plan(replace(plan, pieces=(rest,)), ticket), 1)
            taken = [rows.slice(0, most(rows)) for rows in found]
            if not taken:
                break
            del found
            at = taken[0].column("offset")[-1].as_py() + 1
            yield taken.pop()


def _of_branches(engine: EmbeddedEngine, branches: Sequence[str], most: Most) -> Iterator[pa.RecordBatch]:
    """The same."""
    for branch in branches:
        rows, part, at = engine.read_branches((branch,)), 0, 0
        while found := [batch.slice(at) for batch in itertools.islice(rows, 1)]:
            left, count = found[0].num_rows, most(found[0])
            taken = [found.pop().slice(0, count)]
            if count < left:
                rows, at = engine.read_branches((branch,), part), at + count
            else:
                part, at = part + 1, 0
            yield taken.pop()
