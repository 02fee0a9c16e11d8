"""The embedded engine: the port of ``engine.py`` in process, over a LocalBroker.

Every method is one work of the committer, or a look at what is committed. Not here: sockets (``server``), threads and clocks
(``local.py``), the rules themselves (``micro_batch/``).

Invariant: an answer leaves only when the commit that it depends on is durable.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa

from broker_core.arrow.part_file import PartFile
from broker_core.arrow.parts import branch_checksum, check_part, part_checksum, parts, signed
from broker_core.arrow.rows import ReadPlan
from broker_core.broker.broker import BrokerState
from broker_core.broker.change import Change
from broker_core.broker.content import check_rows
from broker_core.broker.queue import Queue
from broker_core.broker.records import AttemptRecord, LedgerRecord, OutcomeRecord, PartRecord
from broker_core.broker.routing import Routed
from broker_core.checks import checked_calls
from broker_core.engine import (
    AppInfo,
    AttemptInfo,
    Available,
    BranchHeader,
    Committed,
    LedgerEntry,
    Limit,
    OnNewCheckpoint,
    Opened,
    Origin,
    Ranges,
    ReadTicket,
    StagedBranch,
    Vector,
)
from broker_core.errors import (
    BatchDecided,
    DataLoss,
    LineageConflict,
    MissingBranch,
    PreconditionFailed,
    StoreFailed,
    TransactionState,
    TxmqError,
)
from broker_core.failpoint import here
from broker_core.micro_batch.branch import ABANDONED_S, Branches
from broker_core.micro_batch.claim import Claims, offsets
from broker_core.micro_batch.ledger import Ledger, public
from broker_core.node.local import LocalBroker
from broker_core.node.reader import Reader
from broker_core.node.shield import uninterrupted
from broker_core.store.port import BatchInfo

logger = logging.getLogger("txmq.broker")

INLINE_ROWS = 1_000
INLINE_BYTES = 64 * 1024  # a part below both stays in the catalog, and its messages become rows of the open batch


@checked_calls(but=("read_plan",))
class EmbeddedEngine:
    """Implements :class:`broker_core.engine.Engine`; thread-safe. ``adopt`` takes a writer's file into the store, where the store can."""

    def __init__(
        self,
        local: LocalBroker,
        adopt: Callable[[PartFile], list[tuple[BatchInfo, pa.RecordBatch]]] | None = None,
        *,
        identity: str = "",
    ) -> None:
        self._local = local
        self._adopt = adopt
        self._identity = identity or uuid.uuid4().hex  # a broker that keeps nothing is another one each time
        state = local.state
        self._claims = Claims([*state.claims.values(), *state.origins.values(), *state.reads.values()], state.ledger.values(), state.undo)
        self._ledger = Ledger([*state.ledger.values(), *state.lineages.values(), *state.releases.values()], state.undo)
        self._reader = Reader(local)
        self._branches = Branches([*state.attempts.values(), *state.parts.values()], state.undo)
        local.upkeep.chores.append(self.drop_abandoned)

    def identity(self) -> str:
        return self._identity

    # -- logs -----------------------------------------------------------------------------------------------------------------
    def logs(self, queues: Sequence[str]) -> list[str]:
        return [self._local.state.queue(name).name for name in queues]

    def available(self, logs: Sequence[str], starts: Mapping[str, int] | None = None) -> dict[str, Available]:
        def look(state: BrokerState, _change: Change, _now_us: int) -> dict[str, Available]:
            found = {}
            for log in logs:
                queue = state.queue(log)
                start = (starts or {}).get(log, queue.first_unsettled())
                found[log] = self._available(
                    state, log, start, max(start, queue.visible_end), queue.settled_within(start, queue.visible_end)
                )
            return found

        return self._local.run(look)

    def _available(self, state: BrokerState, log: str, start: int, end: int, skipped: Iterable[Sequence[int]]) -> Available:
        rows = end - start - sum(min(last, end) - max(first, start) for first, last in skipped if first < end and last > start)
        size = sum(run.size_bytes for run in state.queue(log).runs_between(start, end))
        return Available(start, end, rows, size)

    def offsets(self, logs: Sequence[str], origin: Origin) -> dict[str, int]:
        return self._local.run(lambda state, _change, _now_us: offsets(state, logs, origin, self._local.read_batch))

    def wait(self, logs: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        return self._local.wait(lambda state: any(state.queue(log).visible_end > ends.get(log, 0) for log in logs), timeout_s)

    # -- source ---------------------------------------------------------------------------------------------------------------
    def claim(self, app_id: str, start: Vector, limit: Limit, origin: Origin, on_new_checkpoint: OnNewCheckpoint) -> Vector:
        def work(state: BrokerState, change: Change, now_us: int) -> Vector:
            consumed, read_batch = self._ledger.consumed(start), self._local.read_batch
            return self._claims.claim(state, change, app_id, start, limit, origin, on_new_checkpoint, consumed, read_batch, now_us=now_us)

        return self._local.run(work)

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        claim = self._local.run(lambda _state, _change, _now_us: self._claims.resolve(app_id, start, end))
        return {} if claim is None else {log: (first, last) for log, (first, last) in claim.ranges.items()}

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        def look(state: BrokerState, _change: Change, _now_us: int) -> dict[str, Available]:
            if not ranges:
                return {}
            claim = self._claims.by_ranges(app_id, ranges)
            return {log: self._available(state, log, first, last, claim.skipped.get(log, ())) for log, (first, last) in ranges.items()}

        return self._local.run(look)

    def open_read(self, ticket: ReadTicket) -> ReadPlan:
        """S4: record what (query, batch) reads, then say where its rows are. Raises LineageConflict, DataLoss."""

        def work(state: BrokerState, change: Change, _now_us: int) -> ReadPlan:
            claim = self._claims.by_ranges(ticket.app_id, ticket.ranges)
            plan = self._reader.plan(state, ticket.slices, claim, fail_on_data_loss=ticket.fail_on_data_loss)
            if not self._claims.already_read(ticket.app_id, ticket.query_id, ticket.batch_id, ticket.ranges):
                self._ledger.require_undecided(ticket.query_id, ticket.batch_id, ticket.ranges)
            self._claims.record_read(change, ticket.app_id, ticket.query_id, ticket.batch_id, ticket.ranges)
            return plan

        plan = self._local.run(work)
        here("engine.read.recorded")
        return plan

    def plan_browse(self, slices: Sequence[tuple[str, int, int]]) -> ReadPlan:
        return self._local.run(lambda state, _change, _now_us: self._reader.plan(state, slices, None, fail_on_data_loss=False))

    def read_plan(self, plan: ReadPlan, ticket: ReadTicket | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a plan, batch by batch, as READ_SCHEMA. ``ticket``: of a claimed range; without one it is a browser's plan."""

        def again(log: str, start: int, end: int) -> ReadPlan:
            slices = ((log, start, end),)
            return self.plan_browse(slices) if ticket is None else self.open_read(replace(ticket, slices=slices))

        return self._reader.rows(plan, again)

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        return self.read_plan(self.open_read(ticket), ticket)

    def browse(self, slices: Sequence[tuple[str, int, int]]) -> Iterator[pa.RecordBatch]:
        return self.read_plan(self.plan_browse(slices))

    def ack(self, app_id: str, end: Vector) -> None:
        def work(state: BrokerState, change: Change, _now_us: int) -> None:
            self._claims.ack(state, change, app_id, end)

        self._local.run(work)

    # -- sink -----------------------------------------------------------------------------------------------------------------
    def open_batch(
        self, app_id: str, query_id: str, batch_id: int, on_new_checkpoint: OnNewCheckpoint, *, token: str = "", consumes: bool = True
    ) -> Opened:
        chosen = token or uuid.uuid4().hex

        def work(_state: BrokerState, change: Change, now_us: int) -> Opened:
            entry = self._ledger.open(
                change, app_id, query_id, batch_id, on_new_checkpoint, consumes=consumes, claim_position=self._claims.position(app_id)
            )
            if entry is not None:
                return Opened(entry.sequence, "", public(entry))
            self._branches.open(change, AttemptRecord(chosen, app_id, query_id, batch_id, now_us))
            return Opened(self._ledger.next_sequence(app_id), chosen)

        opened = self._local.run(work)
        here("engine.open.durable")
        return opened

    @uninterrupted
    def stage_part(self, header: BranchHeader, part: int, batch: pa.RecordBatch) -> tuple[int, int]:
        """One part, durable when this returns: (rows, checksum). The same (branch, part) twice is staged once.

        Raises, as a publish does, RemoteProtocolError, PreconditionFailed, OptionError for a message that cannot be taken in.
        """
        check_part(header, part, batch)
        if header.kind == "publish":
            check_rows(batch)
        inline = batch.num_rows <= INLINE_ROWS and batch.nbytes <= INLINE_BYTES
        info = None if inline else self._local.append(batch)  # 1. the bytes, off the commit path
        here("engine.stage.appended")
        (staged,) = self._stage(header, part, [(info, batch)])  # 2. the commit that names them
        return staged

    @uninterrupted
    def stage_file(self, header: BranchHeader, first: int, file: PartFile) -> list[tuple[int, int]]:
        """As ``stage_part``, for parts ``first`` and on in the file of a writer; one commit. Empty where the file cannot be taken."""
        staged = self._local.run(lambda _state, _change, _now_us: self._staged_file(header, first, file))
        if staged:  # asked again: the file has a name by now and is taken once
            return staged
        with self._local.writing():
            adopted = self._adopt(file) if self._adopt is not None and header.kind == "publish" else []
        here("engine.stage.appended")
        try:
            for part, (_, batch) in enumerate(adopted, first):
                check_part(header, part, batch)
                check_rows(batch)
        except TxmqError:
            taken = [info.batch_id for info, _ in adopted]
            self._local.run(lambda _state, change, _now_us: change.forgets.extend(taken))
            raise
        return self._stage(header, first, adopted) if adopted else []

    def _staged_file(self, header: BranchHeader, first: int, file: PartFile) -> list[tuple[int, int]]:
        """The parts of the file where all are staged; otherwise none."""
        staged = [self._branches.part(header.branch, part) for part in range(first, first + len(file.parts))]
        found = [(part.rows, part.checksum) for part in staged if part is not None]
        return found if found == [(part.rows, signed(part.checksum)) for part in file.parts] else []

    def _stage(self, header: BranchHeader, first: int, given: Sequence[tuple[BatchInfo | None, pa.RecordBatch]]) -> list[tuple[int, int]]:
        """Name the parts ``first`` and on, all or none; what a part's bytes are appended for but is not kept is forgotten."""

        appended = [info.batch_id for info, _ in given if info is not None]

        def work(state: BrokerState, change: Change, now_us: int) -> list[tuple[int, int]]:
            unkept = set(appended)
            known = [self._known(header, part, batch) for part, (_, batch) in enumerate(given, first)]
            staged = [
                self._part(state, header, part, batch, info) if before is None else before
                for part, ((info, batch), before) in enumerate(zip(given, known, strict=True), first)
            ]
            for record, before in zip(staged, known, strict=True):
                if before is None:
                    self._branches.open(change, AttemptRecord(header.token, header.app_id, header.query_id, header.batch_id, now_us))
                    self._branches.touch(change, header.token, now_us)
                    self._branches.stage(state, change, record)
                    unkept.discard(record.batch_id)
            change.forgets += sorted(unkept)
            return [(record.rows, record.checksum) for record in staged]

        try:
            staged = self._local.run(work)
        except StoreFailed:
            raise
        except TxmqError:
            self._local.run(lambda _state, change, _now_us: change.forgets.extend(appended))
            raise
        here("engine.stage.durable")
        return staged

    def _known(self, header: BranchHeader, part: int, batch: pa.RecordBatch) -> PartRecord | None:
        """The part where it is staged already. Raises MissingBranch where that is another one."""
        staged = self._branches.part(header.branch, part)
        if staged is not None and staged.rows != batch.num_rows:
            raise MissingBranch(f"part {part} of branch {header.branch} is staged with {staged.rows} rows, not {batch.num_rows}")
        return staged

    def _part(self, state: BrokerState, header: BranchHeader, part: int, batch: pa.RecordBatch, info: BatchInfo | None) -> PartRecord:
        """Raises BatchDecided for a late task, ExchangeNotFound, AccessRefused."""
        self._require_open(state, header)
        routing = state.route_batch(batch) if header.kind == "publish" else Routed({}, 0, [])
        return PartRecord(
            branch=header.branch,
            part=part,
            token=header.token,
            kind=header.kind,
            target=dict(header.target),
            partition=header.partition,
            attempt=header.attempt,
            rows=batch.num_rows,
            size_bytes=info.size_bytes if info else batch.nbytes,
            checksum=signed(info.checksum) if info else part_checksum(batch),
            batch_id=info.batch_id if info else 0,
            inline=b"" if info else _stream(batch),
            routes={str(queue): [row, count, bitmap.hex()] for queue, (row, count, bitmap) in routing.selections.items()},
            unroutable=routing.unroutable,
            examples=[list(example) for example in routing.examples],
        )

    def _require_open(self, state: BrokerState, header: BranchHeader) -> None:
        """A late task of a decided or dropped attempt stages nothing."""
        if self._ledger.by_token(header.token) is not None or f"batch:{header.token}" in state.outcomes:
            raise BatchDecided(f"attempt {header.token} is over; this task woke up too late and its rows are dropped")
        if header.app_id and self._ledger.entry(header.app_id, header.query_id, header.batch_id) is not None:
            raise BatchDecided(f"batch {header.batch_id} of app {header.app_id!r} is decided; the rows of this late attempt are dropped")

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        checksums: list[int] = []
        count = 0
        for number, batch in enumerate(parts(rows, header)):
            staged, checksum = self.stage_part(header, number, batch)
            checksums.append(checksum)
            count += staged
        return StagedBranch(header.branch, header.partition, header.attempt, count, branch_checksum(checksums))

    def commit_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        token: str,
        branches: Sequence[StagedBranch],
        *,
        on_unroutable: Literal["fail", "drop"] = "fail",
        consumes: bool = True,
    ) -> Committed:
        here("engine.commit.received")

        def work(state: BrokerState, change: Change, now_us: int) -> Committed:
            # 1. decided before? The range is the same: S4 lets a (query, batch) read one range only
            entry = self._ledger.entry(app_id, query_id, batch_id)
            if entry is not None:
                return Committed(public(entry), already=True)
            # 2. every check, before anything changes
            self._ledger.require_next(app_id, query_id, batch_id)
            attempt = self._branches.attempt(token)
            if attempt is not None and (attempt.app_id, attempt.query_id, attempt.batch_id) != (app_id, query_id, batch_id):
                raise LineageConflict(
                    f"token {token} was opened for batch {attempt.batch_id} of app {attempt.app_id!r}, not for batch {batch_id} "
                    f"of {app_id!r}"
                )
            named = self._branches.require(token, branches)
            ranges = self._claims.ranges_read(query_id, batch_id) if consumes and query_id else {}
            for log in ranges:
                state.queue(log)
            self._ledger.require_ranges(app_id, ranges, query_id, batch_id, lambda log, start, end: _settled(state.queue(log), start, end))
            if on_unroutable == "fail":
                self._branches.require_routable(state, named, self._local.read_batch)
            self._require_room(state, named)
            # 3. publish, consume, decide: one change
            sequence = state.next_sequence(transaction=True)
            state.name_transaction(token, now_us)
            change.sequence = sequence
            to_apply: list[list[Any]] = [[part.kind, part.target, part.branch, part.rows] for part in named if part.kind != "publish"]
            published = self._branches.publish(state, change, named, sequence, now_us)
            decided = LedgerRecord(
                app_id=app_id,
                sequence=self._ledger.next_sequence(app_id),
                query_id=query_id,
                batch_id=batch_id,
                token=token,
                ranges=ranges,
                messages=self._settle(state, change, ranges),
                published=published,
                committed_at=now_us,
                commit_sequence=sequence,
                branches=_merged(to_apply),
                claim_position=self._claims.position(app_id),
                applied=not to_apply,
                mirrored=False,
            )
            self._ledger.decide(change, decided)
            # 4. what can never be decided any more goes with it
            self._branches.settle(state, change, token, {branch for _, _, branch, _ in decided.branches})
            for orphan in self._branches.orphans(app_id, query_id, batch_id):
                self._branches.drop(state, change, orphan)
            return Committed(public(decided), already=False)

        committed = self._local.run(work)
        here("engine.commit.decided")
        return committed

    def _require_room(self, state: BrokerState, named: Sequence[PartRecord]) -> None:
        incoming: dict[Queue, tuple[int, int]] = {}
        for part in named:
            for queue_id, (_row, count, _bitmap) in part.routes.items():
                queue = state.queues_by_id.get(int(queue_id))
                if queue is not None:
                    rows, size = incoming.get(queue, (0, 0))
                    incoming[queue] = (rows + count, size + part.size_bytes * count // max(1, part.rows))
        state.check_overflow(incoming)

    def _settle(self, state: BrokerState, change: Change, ranges: Mapping[str, Sequence[int]]) -> int:
        """Logical settlement: gone from depth and for others; the rows stay for Spark's replay until the source acks."""
        messages = 0
        for log, (start, end) in ranges.items():
            queue = state.queue(log)
            messages += end - start - sum(last - first for first, last in queue.settled_within(start, end))
            queue.settle(start, end)
            queue.record(change)
        return messages

    def commit_branches(self, token: str, branches: Sequence[StagedBranch], *, on_unroutable: Literal["fail", "drop"] = "fail") -> int:
        def work(state: BrokerState, change: Change, now_us: int) -> int:
            outcome = state.outcomes.get(f"batch:{token}")
            if outcome is not None:
                if outcome.state == "committed":
                    return sum(branch.rows for branch in branches)
                raise TransactionState(f"batch write {token} was rolled back; write the DataFrame again")
            if branches and self._branches.attempt(token) is None:
                state.outcomes.require_known(f"batch:{token}", 0)
            named = self._branches.require(token, branches)
            if on_unroutable == "fail":
                self._branches.require_routable(state, named, self._local.read_batch)
            self._require_room(state, named)
            sequence = state.next_sequence(transaction=True)
            state.name_transaction(f"batch:{token}", now_us)
            change.sequence = sequence
            self._branches.publish(state, change, named, sequence, now_us)
            self._branches.drop(state, change, token)
            state.remember(change, OutcomeRecord(f"batch:{token}", "committed", now_us))
            return sum(branch.rows for branch in branches)

        return self._local.run(work)

    def rollback_batch(self, token: str) -> None:
        def work(state: BrokerState, change: Change, now_us: int) -> None:
            entry = self._ledger.by_token(token)
            outcome = state.outcomes.get(f"batch:{token}")
            if entry is not None or (outcome is not None and outcome.state == "committed"):
                what = f"batch {entry.batch_id} of app {entry.app_id!r}" if entry is not None else f"batch write {token}"
                raise BatchDecided(f"{what} is committed and cannot be rolled back; an answer was lost on the way, nothing else")
            self._branches.drop(state, change, token)
            if outcome is None:  # a late task of it, or a late call, is refused from now on
                state.remember(change, OutcomeRecord(f"batch:{token}", "rolled_back", now_us))

        self._local.run(work)

    # -- apply, mirror ----------------------------------------------------------------------------------------------------------
    def unapplied(self, app_id: str) -> list[LedgerEntry]:
        return self._local.run(lambda _state, _change, _now_us: [public(entry) for entry in self._ledger.unapplied(app_id)])

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for branch in branches:
            parts = self._local.run(lambda _state, _change, _now_us, branch=branch: self._branches.parts(branch))  # type: ignore[misc]
            if not parts:  # only branches with rows are named in an entry
                raise MissingBranch(
                    f"the rows of branch {branch} are gone: another driver of this query has applied them; start the query again"
                )
            for part in parts:
                if part.batch_id:
                    try:
                        batch = self._local.read_batch(part.batch_id)
                    except DataLoss as error:
                        if self._branches.part(branch, part.part) is not None:
                            raise
                        raise MissingBranch(
                            f"the rows of branch {branch} were applied by another driver of this query while they were read; start it again"
                        ) from error
                    yield batch
                elif part.rows:
                    with pa.ipc.open_stream(part.inline) as stream:
                        yield stream.read_next_batch()

    def mark_applied(self, app_id: str, sequence: int) -> None:
        def work(state: BrokerState, change: Change, _now_us: int) -> None:
            entry = self._ledger.mark_applied(change, app_id, sequence)
            if entry is not None:
                for _, _, branch, _ in entry.branches:
                    self._branches.free(state, change, branch)

        self._local.run(work)

    def skip(self, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        def work(state: BrokerState, change: Change, _now_us: int) -> None:
            for branch in self._ledger.skip(change, app_id, sequence, set(branches), to):
                self._branches.free(state, change, branch)

        self._local.run(work)

    def unmirrored(self, app_id: str, limit: int = 1000) -> list[LedgerEntry]:
        return self._local.run(lambda _state, _change, _now_us: [public(entry) for entry in self._ledger.unmirrored(app_id, limit)])

    def mark_mirrored(self, app_id: str, sequence: int) -> None:
        self._local.run(lambda _state, change, _now_us: self._ledger.mark_mirrored(change, app_id, sequence))

    def last_entry(self, app_id: str) -> LedgerEntry | None:
        def look(_state: BrokerState, _change: Change, _now_us: int) -> LedgerEntry | None:
            last = self._ledger.last(app_id)
            return public(last) if last is not None else None

        return self._local.run(look)

    def apps(self) -> list[AppInfo]:
        def look(state: BrokerState, _change: Change, _now_us: int) -> list[AppInfo]:
            owners = {queue.owner for queue in state.queues.values() if queue.owner}
            found = []
            for app_id in sorted(owners | self._ledger.apps() | self._claims.apps()):
                queues = sorted(queue.name for queue in state.queues.values() if queue.owner == app_id)
                last = self._ledger.last(app_id)
                unapplied, unmirrored = self._ledger.waiting(app_id)
                found.append(
                    AppInfo(
                        app_id=app_id,
                        queues=tuple(queues),
                        sequence=last.sequence if last else 0,
                        query_id=last.query_id if last else "",
                        batch_id=last.batch_id if last else -1,
                        lag=sum(state.queue(name).to_read for name in queues),
                        unapplied=unapplied,
                        unmirrored=unmirrored,
                    )
                )
            return found

        return self._local.run(look)

    def attempts(self) -> list[AttemptInfo]:
        def look(_state: BrokerState, _change: Change, now_us: int) -> list[AttemptInfo]:
            found = []
            for attempt in self._branches.attempts():
                parts = self._branches.of_token(attempt.token)
                found.append(
                    AttemptInfo(
                        token=attempt.token,
                        app_id=attempt.app_id,
                        query_id=attempt.query_id,
                        batch_id=attempt.batch_id,
                        idle_s=max(0, now_us - attempt.opened_at) / 1e6,
                        branches=len({part.branch for part in parts}),
                        rows=sum(part.rows for part in parts),
                        size_bytes=sum(part.size_bytes for part in parts),
                    )
                )
            return found

        return self._local.run(look)

    def drop_abandoned(self) -> None:
        """Batch writes whose driver is gone: nothing can replay them, they have no checkpoint. A late task or commit is refused."""
        if not self._branches.abandoned(self._local.clock()):
            return

        def work(state: BrokerState, change: Change, now_us: int) -> list[str]:
            tokens = self._branches.abandoned(now_us)
            for token in tokens:
                self._branches.drop(state, change, token)
                state.remember(change, OutcomeRecord(f"batch:{token}", "rolled_back", now_us))
            return tokens

        for token in self._local.run(work):
            logger.warning(
                "batch write %s staged nothing for %d hours and was not committed: it is rolled back", token, ABANDONED_S // 3600
            )

    def release(self, app_id: str, queue: str) -> None:
        def work(state: BrokerState, change: Change, _now_us: int) -> None:
            found = state.queue(queue)
            if found.owner != app_id:
                owner = f"app {found.owner!r}" if found.owner else "nobody"
                raise PreconditionFailed(f"queue {queue!r} is claimed by {owner}, not by app {app_id!r}; `txmq apps` lists the claims")
            state.release(change, found)
            self._claims.release(state, change, app_id, queue)
            self._ledger.release(change, queue, state.sequence)

        self._local.run(work)

    def close(self) -> None:
        """The LocalBroker is closed by whoever opened it."""


def _merged(to_apply: list[list[Any]]) -> list[list[Any]]:
    """One row per branch, whatever the number of its parts."""
    merged: dict[str, list[Any]] = {}
    for kind, target, branch, rows in to_apply:
        known = merged.get(str(branch))
        merged[str(branch)] = [kind, target, branch, rows if known is None else known[3] + rows]
    return list(merged.values())


def _settled(queue: Queue, start: int, end: int) -> bool:
    """Whether nothing unsettled lies between two offsets."""
    return sum(last - first for first, last in queue.settled_within(start, end)) == end - start


def _stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
