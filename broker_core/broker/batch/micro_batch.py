"""Micro-batches: opened, decided and applied. Batch writes, which have no app, share the decision.

Pure: each method that changes something fills the change of a commit.
Not here: what is staged until then (``staging.py``), the order of commits, and where bytes are written
(``node/``), claims and ledger entries (``micro_batch/``).

Invariant: a batch is decided once, in one change with everything that it publishes and consumes. A decision
checks everything before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from broker_core.broker.access.rights import OWNER, Actor
from broker_core.broker.access.users import name_in, write_key
from broker_core.broker.batch.branch import Branches
from broker_core.broker.batch.owners import AppOwners, StagedRights, public_entry
from broker_core.broker.batch.queue_logs import QueueLogs
from broker_core.broker.batch.staging import Staging
from broker_core.broker.broker import BrokerState
from broker_core.broker.topology.ownership import release
from broker_core.broker.transaction.transaction import Consumed, StagedTransaction
from broker_core.core.block import ReadBlock
from broker_core.core.change import Change
from broker_core.core.errors import PreconditionFailed, TransactionState
from broker_core.core.records import (
    AttemptRecord,
    ClaimRecord,
    LedgerRecord,
    LineageRecord,
    OriginRecord,
    PartRecord,
    ReadRecord,
    ReleaseNoteRecord,
    ReleaseRecord,
)
from broker_core.engine import REFUSED_ROWS, Committed, OnNewCheckpoint, Opened, StagedBranch
from broker_core.micro_batch.claims.claim import Claims, Kept
from broker_core.micro_batch.claims.reads import require_range
from broker_core.micro_batch.claims.releases import Release, require_idle
from broker_core.micro_batch.ledger import Ledger, MicroBatch, new_entry
from broker_core.micro_batch.opening import open_batch
from broker_core.micro_batch.unapplied import mark_applied, note, note_of, skip

OnUnroutable = Literal["fail", "drop"]


class MicroBatches:
    """Those of one virtual host. ``read`` returns the rows of a block, ``read_stamps`` at least their commit
    sequences and times, ``read_addresses`` at least each exchange, routing key and properties once.
    """

    def __init__(
        self, state: BrokerState, read: ReadBlock, read_stamps: ReadBlock, read_addresses: ReadBlock
    ) -> None:
        self.vhost = vhost = state.vhost
        take = state.loaded.take
        ledger = take(LedgerRecord, vhost)
        source: list[Kept] = [*take(ClaimRecord, vhost), *take(OriginRecord, vhost), *take(ReadRecord, vhost)]
        self.claims = Claims([*source, *take(ReleaseNoteRecord, vhost)], ledger, state.undo, vhost)
        self.ledger = Ledger(
            [*ledger, *take(LineageRecord, vhost), *take(ReleaseRecord, vhost)], state.undo, vhost
        )
        self.branches = Branches([*take(AttemptRecord, vhost), *take(PartRecord, vhost)], state.undo)
        self.owners = AppOwners(state, self.claims, self.ledger, self.branches)
        self.staging = Staging(state, self.branches, self.ledger, self.owners)
        self.branches.charge()
        self._rights = StagedRights(state, self.branches, read_addresses)
        self._state = state
        self._read, self._read_stamps = read, read_stamps

    def logs(self, change: Change, now_us: int) -> QueueLogs:
        """Returns the queues as the claims see them, for one change."""
        return QueueLogs(self._state, change, self._read_stamps, now_us)

    # -- C1 --------------------------------------------------------------------------------------------------
    def open(
        self,
        change: Change,
        batch: MicroBatch,
        on_new_checkpoint: OnNewCheckpoint,
        token: str,
        now_us: int,
        actor: Actor = OWNER,
        offset_log: str = "",
    ) -> Opened:
        """Opens an attempt named ``token``. Raises AccessRefused, CheckpointMismatch, BatchGap."""
        self.owners.take(change, actor, batch.app_id)
        own = self.owners.own(actor, token)
        self.owners.require_token(own, batch)
        entry = open_batch(self.ledger, change, batch, on_new_checkpoint, offset_log)
        if entry is not None:
            return Opened(entry.sequence, "", public_entry(entry))
        self.branches.open(change, AttemptRecord(own, *batch, now_us, self.vhost), actor.user)
        return Opened(self.ledger.next_sequence(batch.app_id), token)

    # -- C4 --------------------------------------------------------------------------------------------------
    def decide(
        self,
        change: Change,
        batch: MicroBatch,
        token: str,
        branches: Sequence[StagedBranch],
        now_us: int,
        actor: Actor = OWNER,
        *,
        on_unroutable: OnUnroutable,
        offset_log: str = "",
    ) -> Committed:
        """Decides a batch. Raises, with nothing changed, AccessRefused, CheckpointMismatch, BatchGap,
        MissingBranch, Unroutable, PreconditionFailed (a full queue), OptionError.

        It consumes what apps of its app's owner have read for (query, batch); what others have read under
        these ids is no part of it.
        """
        self.owners.require(actor, [batch.app_id])
        # 1. decided before? The range is the same: S4 lets a (query, batch) read one range only
        apps = {each.app_id for each in self.claims.reads.of_batch(batch.query_id, batch.batch_id)}
        require_range(offset_log, branches, reads=any(map(partial(self.owners.same, batch.app_id), apps)))
        entry = self.ledger.decided(batch, offset_log)
        if entry is not None:
            return Committed(public_entry(entry), already=True)
        # 2. every check, before anything changes
        token, branches = self.owners.own(actor, token), self.owners.own_branches(actor, branches)
        self.owners.require_token(token, batch)
        parts = self.branches.require(token, branches)
        ranges = self._ranges_read(batch)
        self._rights.require(actor.rights, token, parts, ranges)
        self.ledger.require_ranges(batch, ranges, self._settled)
        transaction, published = self._gather(name_in(token), parts, on_unroutable, now_us)
        transaction.decided = True
        transaction.consumed, messages = self._consumed(ranges)
        # 3. publish, consume, decide: one change
        sequence = self._state.transactions.commit(change, transaction, now_us).sequence
        self.branches.published(self._state, change, parts)
        decided = new_entry(
            self.ledger,
            batch,
            token,
            ranges,
            _to_apply(parts),
            messages=messages,
            published=published,
            committed_at=now_us,
            claim_position=self.claims.position(batch.app_id),
            commit_sequence=sequence,
            offset_log=offset_log,
        )
        self.ledger.decide(change, decided)
        # 4. drop attempts that can never be decided now
        self.branches.settle(self._state, change, token, {branch for _, _, branch, _ in decided.branches})
        for orphan in self.branches.orphans(*batch):
            self.branches.drop(self._state, change, orphan)
        return Committed(public_entry(decided), already=False)

    def _ranges_read(self, batch: MicroBatch) -> dict[str, list[int]]:
        """Returns what apps of the owner of its app have read for a batch. Raises CheckpointMismatch,
        QueueNotFound.
        """
        counts = partial(self.owners.same, batch.app_id)
        ranges = self.claims.ranges_read(batch.query_id, batch.batch_id, counts)
        for log in ranges:
            self._state.topology.queue(log)
        return ranges

    def _gather(
        self, name: str, parts: Sequence[PartRecord], on_unroutable: OnUnroutable, now_us: int
    ) -> tuple[StagedTransaction, int]:
        """Returns the transaction that publishes what was staged, and how many messages reach a queue. Raises
        Unroutable.
        """
        if on_unroutable == "fail":
            self.branches.require_routable(self._state, parts, self._read)
        transaction = StagedTransaction(name, now_us)
        return transaction, self.branches.gather(self._state, parts, transaction)

    def _settled(self, log: str, start: int | None, end: int) -> bool:
        """Returns whether everything between two offsets is settled; None: all that is claimed below."""
        progress = self._state.topology.queue(log).progress
        if start is None:
            return not progress.claimed_below(end)
        settled = progress.settled_within(start, end)
        return sum(last - first for first, last in settled) == end - start

    def _consumed(self, ranges: Mapping[str, Sequence[int]]) -> tuple[list[Consumed], int]:
        """Returns ranges of the ledger as offsets of queues, and how many messages they settle."""
        queue_of = self._state.topology.queue
        found = [Consumed(queue_of(log), start, end) for log, (start, end) in ranges.items()]
        settled = sum(
            last - first
            for queue, start, end in found
            for first, last in queue.progress.settled_within(start, end)
        )
        return found, sum(end - start for _, start, end in found) - settled

    # -- batch writes ----------------------------------------------------------------------------------------
    def commit_write(
        self,
        change: Change,
        token: str,
        branches: Sequence[StagedBranch],
        now_us: int,
        actor: Actor = OWNER,
        *,
        on_unroutable: OnUnroutable,
    ) -> int:
        """Commits a batch write and returns its rows; it may be repeated. Raises AccessRefused,
        TransactionState (rolled back), UnknownOutcome, MissingBranch, Unroutable.
        """
        token, branches = self.owners.own(actor, token), self.owners.own_branches(actor, branches)
        self.owners.require_tokens(actor, [token])
        state, name = self._state, write_key(self.vhost, token)
        outcome = state.names.outcomes.get(name)
        if outcome is not None:
            if outcome.state == "committed":
                return sum(branch.rows for branch in branches)
            raise TransactionState(f"batch write {name_in(token)} was rolled back; write the DataFrame again")
        if branches and self.branches.attempt(token) is None:
            state.names.outcomes.require_known(name, 0)
        parts = self.branches.require(token, branches)
        self._rights.require(actor.rights, token, parts)
        transaction, _ = self._gather(name, parts, on_unroutable, now_us)
        state.transactions.commit(change, transaction, now_us)
        self.branches.drop(state, change, token)
        state.users.disown_write(change, self.vhost, token)
        return sum(branch.rows for branch in branches)

    # -- C5 --------------------------------------------------------------------------------------------------
    def mark_applied(self, change: Change, app_id: str, sequence: int, versions: Mapping[str, int]) -> None:
        entry = mark_applied(self.ledger, change, app_id, sequence, versions)
        for _, _, branch, _ in entry.branches if entry is not None else ():
            self.branches.free(self._state, change, branch)

    def publish_refused(
        self,
        change: Change,
        app_id: str,
        sequence: int,
        branches: Sequence[str],
        rows: str,
        token: str,
        staged: Sequence[StagedBranch],
        now_us: int,
        actor: Actor = OWNER,
    ) -> str:
        """Commits a batch write in the place of rows of decided branches, and records which these are;
        returns what is recorded. Raises AccessRefused, UnknownTransaction, MissingBranch, Unroutable.
        """
        token, staged = self.owners.own(actor, token), self.owners.own_branches(actor, staged)
        batch = app_id, sequence, set(branches)
        recorded = note_of(self.ledger, *batch, REFUSED_ROWS)
        if recorded is None:
            parts = self.branches.require(token, staged)
            self._rights.require(actor.rights, token, parts)
            transaction, _ = self._gather(write_key(self.vhost, token), parts, "fail", now_us)
            self._state.transactions.commit(change, transaction, now_us)
            note(self.ledger, change, *batch, REFUSED_ROWS, now_us, rows)
        self.branches.drop(self._state, change, token)
        return rows if recorded is None else recorded

    def skip(self, change: Change, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        """Marks branches as skipped and frees them. Raises UnknownTransaction."""
        for branch in skip(self.ledger, change, app_id, sequence, set(branches), to):
            self.branches.free(self._state, change, branch)

    # -- the virtual host is deleted -------------------------------------------------------------------------
    def forget(self, change: Change) -> None:
        """Drops every record, and frees what is staged. This object is not used any more."""
        for record in (*self.claims.records(), *self.ledger.records()):
            change.drop(type(record), record.key)
        for attempt in self.branches.attempts():
            self.branches.drop(self._state, change, attempt.token)
        for branch in self.branches.names():
            self.branches.free(self._state, change, branch)

    # -- S6 --------------------------------------------------------------------------------------------------
    def release(self, change: Change, app_id: str, queue: str, now_us: int, *, force: bool, by: str) -> None:
        """Releases a queue from its app. Raises QueueNotFound, PreconditionFailed (another owner, or the app
        has not finished, and not ``force``).
        """
        found = self._state.topology.queue(queue)
        if found.owner != app_id:
            other = f"claimed by app {found.owner!r}, not by app {app_id!r}"
            owner = other if found.owner else "not claimed by any app"
            raise PreconditionFailed(f"queue {queue!r} is {owner}; `txmq app list` lists the claims")
        logs = self.logs(change, now_us)
        claimed = found.progress.frozen_below(found.log.next_offset)
        unapplied = [entry.sequence for entry in self.ledger.unapplied(app_id)]
        interrupted = require_idle(app_id, queue, claimed, unapplied, force=force)
        done = Release(app_id, queue, by, now_us, interrupted)
        consumed = self.ledger.consumed(self._state.topology.queues)
        self.claims.note_release(logs, change, done, [queue], consumed)
        release(change, found)
        self.claims.release(logs, change, app_id, queue, [queue])
        self.ledger.release(change, queue, self._state.numbers.sequence)


def _to_apply(parts: Sequence[PartRecord]) -> list[list[object]]:
    """Returns one row per branch that is applied after the decision, whatever the number of its parts."""
    rows: dict[str, int] = {}
    last: dict[str, PartRecord] = {}
    for part in parts:
        if part.kind != "publish":
            rows[part.branch] = rows.get(part.branch, 0) + part.rows
            last[part.branch] = part
    return [[part.kind, part.target, branch, rows[branch]] for branch, part in last.items()]
