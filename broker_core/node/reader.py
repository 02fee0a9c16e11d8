"""Reading ranges of queues: a plan lists where the rows are, then they are read block by block.

Not here: who may read which range (``micro_batch/claims/claim.py``), how a piece becomes rows
(``arrow/rows.py``), and how a client on the broker's host reads the files itself (``client/read.py``): the
bytes at a place in a segment never change, so a valid place stays valid.

Invariant: no reader gets a row whose bytes were removed. Bytes may be removed once no queue needs their row;
a row that is not needed is never needed again. So the bytes read are valid if the queue still needs their
rows afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from broker_core.arrow.rows import Piece, ReadPlan, assemble, span
from broker_core.broker.batch.branch import inline_rows
from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queue
from broker_core.broker.queue.progress import IntervalSet
from broker_core.core.errors import DataLoss, MissingBranch, QueueNotFound
from broker_core.core.records import ClaimRecord, PartRecord
from broker_core.engine import Available, Slice
from broker_core.node.loaded_blocks import open_rows
from broker_core.node.local import LocalBroker
from broker_core.store.codec import merged_block

PartsOf = Callable[[str], list[PartRecord]]  # those of a branch that are staged, as of now
PlanAgain = Callable[[str, int, int], ReadPlan]  # the same read of one slice, as of now
GROUP = 64  # slices of one work: a request has thousands, and the others wait for the lock


class Reader:
    """Of the virtual host that ``state`` sees."""

    def __init__(self, local: LocalBroker, state: BrokerState) -> None:
        self._local = local
        self._topology = state.topology

    def plan(
        self,
        slices: Sequence[Slice],
        claim: ClaimRecord | None,
        *,
        fail_on_data_loss: bool,
        transaction: bool,
    ) -> ReadPlan:
        """Makes a plan, within a work. A claimed range is read as it was at the claim; without a claim, what
        is unsettled now is read.

        Raises QueueNotFound, ResourceLocked (exclusive); if it is to fail, DataLoss for lost rows of a claim.
        """
        pieces: list[Piece] = []
        for log, start, end in slices:
            queue = self._topology.shared(log)
            found = queue.log.runs_between(start, end)
            if claim is None:
                there = IntervalSet(queue.progress.unsettled_within(start, end))
                skipped, redelivered = there.outside(start, end), queue.ready.redelivered_within(start, end)
            else:
                there = IntervalSet(queue.progress.needed_within(start, end))
                settled, redelivered = claim.skipped.get(log, []), claim.redelivered.get(log, [])
                if fail_on_data_loss:
                    rows = [
                        (first, last) for run in found for first, last in there.within(run.first, run.end)
                    ]
                    _require_all(log, start, end, rows, settled)
                skipped = [
                    [first, last] for first, last in IntervalSet([*there.outside(start, end), *settled])
                ]
            for run in found:
                pieces.append(
                    Piece(
                        log=log,
                        first=run.first,
                        count=run.count,
                        block_id=run.block_id,
                        row=run.row,
                        bitmap=bytes(run.bitmap),
                        sequence=run.sequence,
                        committed_at=run.committed_at,
                        skipped=_clip(skipped, run.first, run.end),
                        redelivered=_clip(redelivered, run.first, run.end),
                        location=self._local.locate(run.block_id),
                        before=run.skip,
                        queue_id=queue.queue_id,
                    )
                )
        return ReadPlan(tuple(pieces), transaction)

    def available(self, log: str, start: int, end: int, skipped: Iterable[Sequence[int]]) -> Available:
        """Returns what a reader of a range gets, which does not read what is ``skipped``."""
        inside = ((max(first, start), min(last, end)) for first, last in skipped)
        rows = end - start - sum(max(0, last - first) for first, last in inside)
        size = sum(run.size_bytes for run in self._topology.queue(log).log.runs_between(start, end))
        return Available(start, end, rows, size)

    def branches(self, branches: Sequence[str], skip: int, parts_of: PartsOf) -> Iterator[pa.RecordBatch]:
        """Yields the rows of staged branches, but not of the first ``skip`` parts of each. Raises
        MissingBranch.
        """
        for branch in branches:
            parts = parts_of(branch)
            if not parts:  # an entry names only branches with rows
                raise MissingBranch(
                    f"the rows of branch {branch} are gone: another driver of this query has applied them; "
                    "start the query again"
                )
            for part in [part for part in parts if part.rows][skip:]:
                try:
                    rows = self._local.read_block(part.block_id) if part.block_id else inline_rows(part)
                except DataLoss as error:
                    if part.part in [each.part for each in parts_of(branch)]:
                        raise
                    raise MissingBranch(
                        f"another driver of this query applied the rows of branch {branch} while they "
                        "were read; start the query again"
                    ) from error
                yield rows

    def rows(self, plan: ReadPlan, again: PlanAgain) -> Iterator[pa.RecordBatch]:
        """Yields the rows. Raises DataLoss, CorruptSegment; QueueNotFound for a deleted queue."""
        for piece in plan.pieces:
            if IntervalSet(piece.skipped).covers(*_span(piece)):
                continue
            rows = self._rows(piece, plan.transaction)
            if rows is None:
                yield from self.rows(again(piece.log, piece.first, piece.first + piece.count), again)
            elif rows.num_rows:
                yield rows

    def _rows(self, piece: Piece, transaction: bool) -> pa.RecordBatch | None:
        """Returns the rows of a piece; None if the plan is outdated."""
        try:
            rows = self._bytes(piece, transaction)  # 1. the bytes
        except DataLoss:
            with self._local.look:
                queue = self._queue(piece)
                if _needs(queue, piece) and all(
                    run.block_id == piece.block_id for run in queue.log.runs_between(*_span(piece))
                ):
                    raise  # it should exist
            return None
        with self._local.look:  # 2. were they complete?
            if not _needs(self._queue(piece), piece):
                return None
        return rows

    def _bytes(self, piece: Piece, transaction: bool) -> pa.RecordBatch:
        """Of an open block, which is in memory row by row, no other rows are looked at."""
        inbox = open_rows(self._local.state.blocks, piece.block_id)
        if inbox is None:
            return assemble(piece, self._local.read_block(piece.block_id), transaction=transaction)
        first, end = span(piece)
        rows = merged_block(inbox[first:end])
        return assemble(replace(piece, row=piece.row - first), rows, transaction=transaction)

    def _queue(self, piece: Piece) -> Queue:
        queue = self._topology.queues.get(piece.log)
        if queue is None or queue.queue_id != piece.queue_id:
            raise QueueNotFound(
                f"queue '{piece.log}' in vhost '{self._topology.vhost}' was deleted while it was read",
                "read it again",
            )
        return queue


def in_groups(slices: Sequence[Slice], plan: Callable[[Sequence[Slice]], ReadPlan]) -> ReadPlan:
    plans = [plan(slices[first : first + GROUP]) for first in range(0, max(1, len(slices)), GROUP)]
    return replace(plans[0], pieces=tuple(piece for each in plans for piece in each.pieces))


def _span(piece: Piece) -> tuple[int, int]:
    return piece.first, piece.first + piece.count


def _needs(queue: Queue, piece: Piece) -> bool:
    """Returns whether all rows of a piece that are to be read are needed."""
    return IntervalSet([*queue.progress.needed_within(*_span(piece)), *piece.skipped]).covers(*_span(piece))


def _clip(intervals: Iterable[Sequence[int]], first: int, last: int) -> tuple[tuple[int, int], ...]:
    return tuple(
        (max(start, first), min(end, last)) for start, end in intervals if start < last and end > first
    )


def _require_all(
    log: str, start: int, end: int, found: Sequence[tuple[int, int]], skipped: Iterable[Sequence[int]]
) -> None:
    """Raises DataLoss unless every offset exists or was settled before the claim."""
    at = start
    for first, last in sorted([*found, *_clip(skipped, start, end)]):
        if first > at:
            break
        at = max(at, last)
    if at < end:
        raise DataLoss(
            f"messages of {log!r} from offset {at} on are gone, and the range {start} to {end} names them: "
            "they were acknowledged by a newer checkpoint or lost with an older data directory. Use the "
            "newest checkpoint, or set failOnDataLoss=false to continue without them"
        )
