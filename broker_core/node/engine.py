"""The embedded engine: the port of ``engine.py`` in process, over a LocalBroker.

Every method is one work of the committer, or a read of committed data.
Not here: sockets (``server``), threads and clocks (``local.py``), the rules (``micro_batch/``).

Invariant: an answer is returned only when the commit that it depends on is durable.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import pyarrow as pa

from broker_core.arrow.part_file import PartFile
from broker_core.arrow.parts import branch_checksum, check_part, parts, signed
from broker_core.arrow.rows import ReadPlan
from broker_core.broker.access.rights import OWNER, Actor
from broker_core.broker.batch import overview
from broker_core.broker.batch.branch import NOWHERE, Epoch, PartRows, StagedLimits
from broker_core.broker.batch.extent import offsets
from broker_core.broker.batch.micro_batch import MicroBatches
from broker_core.broker.batch.owners import public_entry
from broker_core.broker.batch.resume import resume
from broker_core.broker.broker import BrokerState
from broker_core.broker.command_permissions import entering_rows
from broker_core.broker.topology.ownership import QueueHeld
from broker_core.core.address import VHOST
from broker_core.core.change import Author, Change
from broker_core.core.checks import checked_calls
from broker_core.core.errors import StoreFailed, TxmqError
from broker_core.core.failpoint import here
from broker_core.core.ids import BlockId
from broker_core.engine import (
    AppInfo,
    Available,
    BranchHeader,
    Committed,
    DeadLetterRoute,
    LedgerEntry,
    Limit,
    Note,
    OnNewCheckpoint,
    Opened,
    Origin,
    Ranges,
    ReadTicket,
    Slice,
    StagedBatch,
    StagedBranch,
    Vector,
)
from broker_core.micro_batch.claims.finished import CommittedBelow
from broker_core.micro_batch.claims.next_range import next_range
from broker_core.micro_batch.ledger import MicroBatch
from broker_core.micro_batch.opening import record_read
from broker_core.micro_batch.unapplied import mark_mirrored, note
from broker_core.node.committer import Work, changes
from broker_core.node.deferred_signals import uninterrupted
from broker_core.node.loaded_blocks import addresses, stamps
from broker_core.node.local import LocalBroker
from broker_core.node.open_channels import explain
from broker_core.node.reader import Reader, in_groups
from broker_core.routing.column import Routed
from broker_core.store.port import BlockInfo

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("txmq.broker")

Adopt: TypeAlias = list[tuple[BlockInfo, pa.RecordBatch]]

INLINE_ROWS = 1_000
# a part below both is stored in the catalog, and its messages become rows of the open block
INLINE_BYTES = 64 * 1024


@checked_calls(but=("read_plan",))
class EmbeddedEngine:
    """Implements :class:`broker_core.engine.Engine` for one virtual host; thread-safe. ``adopt`` makes a
    writer's file part of the store, if the store supports it.
    """

    def __init__(
        self,
        local: LocalBroker,
        adopt: Callable[[PartFile], Adopt] | None = None,
        *,
        identity: str = "",
        staged: StagedLimits | None = None,
        vhost: str = VHOST,
    ) -> None:
        self.local = local
        self._state = state = local.state.of(vhost)
        self._adopt = adopt
        self._identity = identity or uuid.uuid4().hex  # a broker without a directory is a new one each time
        self._stamps = partial(local.loaded_block, part=stamps)
        self.batches = batches = MicroBatches(
            state, local.loaded_block, self._stamps, partial(local.loaded_block, part=addresses)
        )
        self._claims, self._ledger, self._branches = batches.claims, batches.ledger, batches.branches
        self._branches.room.limits = staged or StagedLimits()
        self._reader = Reader(local, state)
        self._actor, self._who = OWNER, Author("spark", vhost)
        local.upkeep.chores.append(self.drop_abandoned)

    @property
    def state(self) -> BrokerState:
        """Returns the state as this virtual host sees it."""
        return self._state

    def acting(self, actor: Actor) -> EmbeddedEngine:
        """Returns this engine for the calls of ``actor``."""
        seen = copy.copy(self)
        seen._actor, seen._who = actor, self._who._replace(user=actor.user)
        return seen

    def _run(self, work: Work[T]) -> T:
        """Runs a work with the state of this virtual host. Raises NotAllowed once that is deleted."""
        seen = self._state

        def there(_state: BrokerState, change: Change, now_us: int) -> T:
            seen.topology.require_there()
            change.effects.who = self._who
            return work(seen, change, now_us)

        try:
            return self.local.committer.run(there)
        except QueueHeld as refused:
            raise explain(refused, self.local.open_channels, seen.prepared.by_key) from None

    def _look(self, question: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Runs what only asks."""
        return self._run(lambda _state, _change, _now_us: question(*args, **keywords))

    def _do(self, work: Callable[Concatenate[Change, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        """Runs a work of the rules that needs nothing but the change."""
        return self._run(changes(work, *args, **keywords))

    def identity(self, app_id: str = "") -> str:
        return self._identity  # the ledgers of all apps are in the data directory

    # -- logs ------------------------------------------------------------------------------------------------
    def logs(self, queues: Sequence[str]) -> list[str]:
        return [self._state.topology.shared(name).name for name in queues]

    def log_ids(self, logs: Sequence[str]) -> dict[str, str]:
        queues, own = self._state.topology.queues, self._identity
        return self._look(lambda: {log: f"{own}/{queues[log].queue_id}" for log in logs if log in queues})

    def available(self, logs: Sequence[str], starts: Mapping[str, int] | None = None) -> dict[str, Available]:
        def look() -> dict[str, Available]:
            found = {}
            for log in logs:
                queue = self._state.topology.shared(log)
                start = (starts or {}).get(log, queue.progress.floor)
                end = queue.log.visible_end
                settled = queue.progress.settled_within(start, end)
                found[log] = self._reader.available(log, start, max(start, end), settled)
            return found

        return self._look(look)

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        origin.check({queue: [queue] for queue in queues})
        return self._look(offsets, self._state, queues, origin, self._stamps)

    def wait(self, queues: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        shared = self._state.topology.shared
        return self.local.wait(lambda _: {shared(name): ends.get(name, 0) for name in queues}, timeout_s)

    # -- source ----------------------------------------------------------------------------------------------
    def claim(
        self,
        app_id: str,
        queues: Sequence[str],
        start: Vector,
        limit: Limit,
        origin: Origin,
        on_new_checkpoint: OnNewCheckpoint,
        acks: bool = True,
        ran: bool = False,
    ) -> Vector:
        question = app_id, queues, start, limit, origin, on_new_checkpoint

        def work(_state: BrokerState, change: Change, now_us: int) -> Vector:
            self.batches.owners.take(change, self._actor, app_id)
            logs = self.batches.logs(change, now_us)
            committed = CommittedBelow(self._ledger, acks, ran, partial(self.batches.owners.same, app_id))
            return next_range(self._claims, logs, change, *question, committed)

        return self._run(work)

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        claim = self._look(self._claims.resolve, app_id, start, end)
        return {} if claim is None else {log: (first, last) for log, (first, last) in claim.ranges.items()}

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        def look() -> dict[str, Available]:
            if not ranges:
                return {}
            claim = self._claims.by_ranges(app_id, ranges)
            return {
                log: self._reader.available(log, first, last, claim.skipped.get(log, ()))
                for log, (first, last) in ranges.items()
            }

        return self._look(look)

    def open_read(self, ticket: ReadTicket) -> ReadPlan:
        """Records what (query, batch) reads, then finds its rows (S4).

        Raises CheckpointMismatch, DataLoss.
        """

        def work(slices: Sequence[Slice], _state: BrokerState, change: Change, _now_us: int) -> ReadPlan:
            claim = self._claims.by_ranges(ticket.app_id, ticket.ranges)
            fails, transaction = ticket.fail_on_data_loss, ticket.transaction
            plan = self._reader.plan(slices, claim, fail_on_data_loss=fails, transaction=transaction)
            batch = MicroBatch(ticket.app_id, ticket.query_id, ticket.batch_id)
            counts = partial(self.batches.owners.same, ticket.app_id)
            record_read(self._claims, self._ledger, change, batch, ticket.ranges, counts)
            return plan

        plan = in_groups(ticket.slices, lambda slices: self._run(partial(work, slices)))
        here("engine.read.recorded")
        return plan

    def plan_browse(self, slices: Sequence[Slice], *, transaction: bool = False) -> ReadPlan:
        def look(group: Sequence[Slice]) -> ReadPlan:
            plan = self._reader.plan
            return self._look(plan, group, None, fail_on_data_loss=False, transaction=transaction)

        return in_groups(slices, look)

    def read_plan(self, plan: ReadPlan, ticket: ReadTicket | None = None) -> Iterator[pa.RecordBatch]:
        """Returns the rows of a plan, block by block, as READ_SCHEMA. ``ticket``: of a claimed range; None
        for a browser's plan.
        """

        def again(log: str, start: int, end: int) -> ReadPlan:
            slices = ((log, start, end),)
            if ticket is None:
                return self.plan_browse(slices, transaction=plan.transaction)
            return self.open_read(replace(ticket, slices=slices))

        return self._reader.rows(plan, again)

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        return self.read_plan(self.open_read(ticket), ticket)

    def browse(
        self, slices: Sequence[Slice], *, transaction: bool = False, record: bool = False
    ) -> Iterator[pa.RecordBatch]:
        return self.read_plan(self.plan_browse(slices, transaction=transaction))

    def dead_letter_route(self, queue: str) -> DeadLetterRoute | None:
        topology = self._state.topology
        arguments = self._look(topology.shared, queue).arguments
        exchange, routing_key = arguments.dead_letter_exchange, arguments.dead_letter_routing_key
        later = self._look(topology.later, queue)
        return DeadLetterRoute(exchange, routing_key, later) if arguments.dead_letters else None

    def ack(self, app_id: str, end: Vector, ran: bool = False) -> None:
        def work(_state: BrokerState, change: Change, now_us: int) -> None:
            committed = CommittedBelow(self._ledger, True, ran, partial(self.batches.owners.same, app_id))
            self._claims.ack(self.batches.logs(change, now_us), change, app_id, end, committed)

        self._run(work)

    # -- sink ------------------------------------------------------------------------------------------------
    def open_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        on_new_checkpoint: OnNewCheckpoint,
        *,
        token: str = "",
        offset_log: str = "",
    ) -> Opened:
        batch, chosen, by = MicroBatch(app_id, query_id, batch_id), token or uuid.uuid4().hex, self._actor

        def work(_state: BrokerState, change: Change, now_us: int) -> Opened:
            return self.batches.open(change, batch, on_new_checkpoint, chosen, now_us, by, offset_log)

        opened = replace(self._run(work), identity=self._identity)
        here("engine.open.durable")
        return opened

    @uninterrupted
    def stage_part(self, header: BranchHeader, part: int, rows: pa.RecordBatch) -> tuple[int, int]:
        """Stages one part and returns (rows, checksum); it is durable then. The same (branch, part) is staged
        only once.

        Raises, like a publish, AccessRefused, RemoteProtocolError, PreconditionFailed, OptionError for an
        invalid message.
        """
        rights, routed = self._rights(), NOWHERE
        check_part(header, part, rows)
        if header.kind == "publish":
            routed, rows = self._checked(rows)
        inline = rows.num_rows <= INLINE_ROWS and rows.nbytes <= INLINE_BYTES
        info = None if inline else self.local.append(rows)  # 1. the bytes, outside the commit
        here("engine.stage.appended")
        piece = PartRows(info, rows, routed)
        (staged,) = self._stage(header, part, [piece], rights)  # 2. the commit that names them
        return staged

    @uninterrupted
    def stage_file(self, header: BranchHeader, first: int, file: PartFile) -> list[tuple[int, int]]:
        """Like ``stage_part``, for parts from ``first`` on in a writer's file; one commit. Empty if the file
        cannot be used.
        """
        expected = [(part.rows, signed(part.checksum)) for part in file.parts]
        staged = self._run(lambda *_: self.batches.staging.staged(header, first, expected, self._actor))
        if staged:  # repeated: the file has a name already and is adopted once
            return staged
        rights = self._rights()
        with self.local.writing():
            adopted = self._adopt(file) if self._adopt is not None and header.kind == "publish" else []
        here("engine.stage.appended")
        pieces, unkept = [], [info.block_id for info, _ in adopted]
        try:
            for part, (info, rows) in enumerate(adopted, first):
                check_part(header, part, rows)
                routed, final = self._checked(rows)
                if final is rows:
                    unkept.remove(info.block_id)
                pieces.append(PartRows(info if final is rows else self.local.append(final), final, routed))
        except TxmqError:
            self._forget([*unkept, *(each.stored.block_id for each in pieces if each.stored is not None)])
            raise
        if unkept:  # the file has BCC
            self._forget(unkept)
        return self._stage(header, first, pieces, rights) if pieces else []

    def _rights(self) -> Epoch:
        """Returns the rights that are asked next: from before the question, so never of a later epoch."""
        rights = self._actor.rights
        return None if rights is None else rights.now

    def _forget(self, blocks: Sequence[BlockId]) -> None:
        """They are appended, and nothing will name them."""
        self.local.run(lambda _state, change, _now_us: change.forgets.extend(blocks))

    def _checked(self, rows: pa.RecordBatch) -> tuple[Routed, pa.RecordBatch]:
        most, look = self.local.limits.body_bytes, self.local.look
        return entering_rows(self._actor.rights, self._state.topology, rows, most, look)

    def _stage(
        self, header: BranchHeader, first: int, pieces: Sequence[PartRows], rights: Epoch
    ) -> list[tuple[int, int]]:
        stage = self.batches.staging.stage
        appended = [each.stored.block_id for each in pieces if each.stored is not None]
        try:
            staged = self._run(
                lambda _, change, now: stage(change, header, first, pieces, now, self._actor, rights)
            )
        except StoreFailed:
            raise
        except TxmqError:
            self._forget(appended)
            raise
        here("engine.stage.durable")
        return staged

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        staged = [self.stage_part(header, number, part) for number, part in enumerate(parts(rows, header))]
        count, checksum = sum(rows for rows, _ in staged), branch_checksum(each for _, each in staged)
        return StagedBranch(header.branch, header.partition, header.attempt, count, checksum)

    def commit_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        token: str,
        branches: Sequence[StagedBranch],
        *,
        on_unroutable: Literal["fail", "drop"] = "fail",
        opens: OnNewCheckpoint | None = None,
        offset_log: str = "",
    ) -> Committed:
        here("engine.commit.received")
        batch, by = MicroBatch(app_id, query_id, batch_id), self._actor

        def work(_state: BrokerState, change: Change, now_us: int) -> Committed:
            if opens is not None:  # in one commit with the decision
                self.batches.open(change, batch, opens, token, now_us, by, offset_log)
            return self.batches.decide(
                change, batch, token, branches, now_us, by, on_unroutable=on_unroutable, offset_log=offset_log
            )

        committed = self._run(work)
        here("engine.commit.decided")
        return committed

    def commit_branches(
        self, token: str, branches: Sequence[StagedBranch], *, on_unroutable: Literal["fail", "drop"] = "fail"
    ) -> int:
        commit = partial(self.batches.commit_write, on_unroutable=on_unroutable)
        return self._run(lambda _state, change, now_us: commit(change, token, branches, now_us, self._actor))

    def rollback_batch(self, token: str, *, of: str | None = None) -> None:
        self._run(lambda _, change, now: self.batches.staging.roll_back(change, token, now, self._actor, of))

    # -- apply, mirror ---------------------------------------------------------------------------------------
    def unapplied(self, app_id: str) -> list[LedgerEntry]:
        return self._look(lambda: [public_entry(entry) for entry in self._ledger.unapplied(app_id)])

    def read_branches(self, branches: Sequence[str], skip: int = 0) -> Iterator[pa.RecordBatch]:
        """``skip``: so many parts of each branch are left out."""
        return self._reader.branches(branches, skip, lambda name: self._look(self._branches.parts, name))

    def mark_applied(self, app_id: str, sequence: int, versions: Mapping[str, int] | None = None) -> None:
        self._do(self.batches.mark_applied, app_id, sequence, versions or {})

    def skip(self, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        self._do(self.batches.skip, app_id, sequence, branches, to)

    def note(self, app_id: str, sequence: int, branches: Sequence[str], name: Note, text: str) -> None:
        add, names = partial(note, self._ledger), set(branches)
        self._run(lambda _, change, now_us: add(change, app_id, sequence, names, name, now_us, text))

    def publish_refused(
        self, app_id: str, sequence: int, branches: Sequence[str], rows: str, token: str,
        staged: Sequence[StagedBranch],
    ) -> str:  # fmt: skip
        here("engine.refused.received")

        def work(_state: BrokerState, change: Change, now_us: int) -> str:
            found = self.batches.publish_refused(
                change, app_id, sequence, branches, rows, token, staged, now_us, self._actor
            )
            here("engine.refused.planned")
            return found

        recorded = self._run(work)
        here("engine.refused.published")
        return recorded

    def entries(self, app_id: str) -> list[LedgerEntry]:
        return self._look(lambda: [public_entry(entry) for entry in self._ledger.entries(app_id)])

    def unmirrored(self, app_id: str, limit: int = 1000) -> list[LedgerEntry]:
        return self._look(lambda: [public_entry(entry) for entry in self._ledger.unmirrored(app_id, limit)])

    def mark_mirrored(self, app_id: str, sequence: int) -> None:
        self._do(partial(mark_mirrored, self._ledger), app_id, sequence)

    def last_entry(self, app_id: str) -> LedgerEntry | None:
        last = self._look(self._ledger.last, app_id)
        return None if last is None else public_entry(last)

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> bool:
        batches, by = self.batches, self._actor
        return self._run(lambda state, change, now: resume(state, batches, change, app_id, entries, now, by))

    def app(self, app_id: str) -> AppInfo | None:
        return next((app for app in self.apps() if app.app_id == app_id), None)

    def apps(self) -> list[AppInfo]:
        return self._run(lambda state, _change, now: overview.apps(state, self.batches, now, self._stamps))

    def staged_batches(self) -> list[StagedBatch]:
        return self._run(lambda _state, _change, now_us: overview.staged_batches(self.batches, now_us))

    def drop_abandoned(self) -> None:
        """Rolls back attempts whose driver has ended. A late task or commit is refused."""
        if not self._branches.abandoned(self.local.clock()):
            return
        drop = self.batches.staging.drop_abandoned
        for token in self._run(lambda _state, change, now_us: drop(change, now_us)):
            logger.warning(
                "batch %s staged nothing for %g hours and was not committed: it is rolled back",
                token,
                self._branches.room.limits.idle_s / 3600,
            )

    def retire(self) -> None:
        """The virtual host is deleted."""
        self.local.upkeep.chores.remove(self.drop_abandoned)

    def release(self, app_id: str, queue: str, *, force: bool = False, by: str = "") -> None:
        release = partial(self.batches.release, force=force, by=by)
        self._run(lambda _state, change, now_us: release(change, app_id, queue, now_us))

    def close(self) -> None:
        """Does nothing: the opener of the LocalBroker closes it."""
