"""Branches: what Spark tasks have staged for a batch attempt, durable and invisible until a commit names them
(C2).

A branch is staged in parts. Each part is durable before it is acknowledged, so that neither side ever holds a
whole branch. Pure.

What each user has staged is counted (:class:`StagedRoom`); parts that are on their way are counted elsewhere
(``server/quotas.py``).
Invariant: an attempt is paid for by the user who opened it, whatever its app is called, until its last part
is gone, also after a restart.
Invariant: a part without an open attempt or a ledger entry does not exist; dropping an attempt drops its
parts and frees their blocks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.arrow.parts import branch_checksum
from broker_core.broker.access.users import name_in, user_in
from broker_core.broker.broker import BrokerState
from broker_core.broker.transaction.spilled import Spilled
from broker_core.broker.transaction.transaction import StagedTransaction
from broker_core.core.block import ReadBlock, RowSelection, selected_rows
from broker_core.core.change import Change
from broker_core.core.errors import MissingBranch, NotAllowed, TransactionTooLarge, Unroutable
from broker_core.core.ids import BlockId, QueueId
from broker_core.core.records import AttemptRecord, PartRecord
from broker_core.core.undo import Undo
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.routing.column import Routed

_EXAMPLES = 3
_RECORD_BYTES = 256  # of a part, about
_TOUCHED_S = 3600  # the first part that arrives so much later updates the attempt's time

Sums: TypeAlias = list[tuple[int, int]]  # rows and checksum of each part
Epoch: TypeAlias = tuple[str, object] | None  # ``Rights.now`` that permitted rows; None: unknown
NOWHERE = Routed({}, 0, [])


class StoredBytes(Protocol):
    """The bytes of a part that are in a segment already (``store.port.BlockInfo``)."""

    @property
    def block_id(self) -> BlockId: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def checksum(self) -> int: ...


class PartRows(NamedTuple):
    """Rows to stage as one part, in a segment already or few. ``routed``: of messages."""

    stored: StoredBytes | None
    rows: pa.RecordBatch
    routed: Routed = NOWHERE


@dataclass(frozen=True, slots=True)
class StagedLimits:
    """``user_bytes``: of what one user has staged and is not published or applied. None: no limit.
    ``user_attempts``: open attempts of one user. ``idle_s``: an attempt that staged nothing for so long, and
    was not decided, has lost its driver; at least an hour, because times of attempts are that coarse.
    """

    user_bytes: int | None = None
    user_attempts: int = 10_000
    idle_s: float = 24 * 3600


class StagedRoom:
    """Open attempts of each user, and the bytes of its parts until they are published or applied."""

    def __init__(self, undo: Undo) -> None:
        self.limits = StagedLimits()  # the engine may set others
        self._undo = undo
        self._payer: dict[str, str] = {}  # token -> user
        self._open: dict[str, dict[str, None]] = {}  # user -> tokens of open attempts
        self._bytes: dict[str, int] = {}  # token -> of its parts
        self._of_user: dict[str, int] = {}

    def open(self, token: str, user: str) -> None:
        """Counts an attempt against ``user``. Raises NotAllowed."""
        if len(self._open.get(user, ())) >= self.limits.user_attempts:
            raise NotAllowed(
                f"{whose(user)} has {self.limits.user_attempts} staged batches, which is the limit",
                "`txmq app staged` lists them, and `txmq app discard` drops one; or raise --staged-batches",
            )
        self.restore(token, user, is_open=True)

    def restore(self, token: str, user: str, *, is_open: bool) -> None:
        """``user`` pays for a token from now on."""
        self._undo.item(self._payer, token)
        self._payer[token] = user
        if is_open:
            self._undo.enter(self._open, user, token)

    def close(self, token: str) -> None:
        """The attempt is over; its parts may stay until they are applied."""
        user = self._payer.get(token, "")
        if token in self._open.get(user, ()):
            self._undo.leave(self._open, user, token)
        self._forget_payer(token)

    def count(self, token: str, size_bytes: int) -> None:
        """Adds a part, or takes it away."""
        user = self._payer.get(token, "")
        for table, key in ((self._bytes, token), (self._of_user, user)):
            self._undo.item(table, key)
            total = table.pop(key, 0) + size_bytes
            if total:
                table[key] = total
        self._forget_payer(token)

    def _forget_payer(self, token: str) -> None:
        user = self._payer.get(token, "")
        if token not in self._bytes and token not in self._open.get(user, ()):
            self._undo.item(self._payer, token)
            self._payer.pop(token, None)

    @property
    def total(self) -> int:
        """Returns the bytes of all parts."""
        return sum(self._of_user.values())

    def bytes_of(self, token: str) -> int:
        return self._bytes.get(token, 0)

    def payer(self, token: str, user: str) -> str:
        """Returns who pays for a token; ``user`` if nobody does yet."""
        return self._payer.get(token, user)

    def over(self, user: str, more: int) -> int:
        """Returns how many bytes ``more`` would be over the limit; 0 or less if they fit."""
        limit = self.limits.user_bytes
        return 0 if limit is None else self._of_user.get(user, 0) + more - limit

    def refusal(self, user: str, more: int) -> TransactionTooLarge:
        return TransactionTooLarge(
            f"{whose(user)} has staged {self._of_user.get(user, 0)} bytes and would stage {more} more; the "
            f"limit is {self.limits.user_bytes}",
            "raise --staged-bytes, or drop what is left of others: `txmq app staged` lists it, `txmq app "
            "discard` drops it; a smaller maxOffsetsPerTrigger counts for the batches behind this one",
        )


def whose(user: str) -> str:
    """Returns how a refusal calls a user."""
    return f"user '{user}'" if user else "the owner of the data directory"


class Branches:
    """Open attempts and staged parts of every app, in memory; ``Change`` makes each durable."""

    def __init__(self, records: Iterable[AttemptRecord | PartRecord] = (), undo: Undo | None = None) -> None:
        self._undo = Undo() if undo is None else undo
        self.room = StagedRoom(self._undo)
        self._attempts: dict[str, AttemptRecord] = {}
        self._of_app: dict[str, dict[str, None]] = {}  # tokens of open attempts
        self._parts: dict[str, dict[int, PartRecord]] = {}  # branch -> part number -> part
        self._by_token: dict[str, set[str]] = {}
        self.epochs: dict[str, Epoch] = {}  # token -> which rights permitted all of its parts
        for record in records:
            if isinstance(record, AttemptRecord):
                self._attempts[record.token] = record
                self._of_app.setdefault(record.app_id, {})[record.token] = None
            elif isinstance(record, PartRecord):
                self._keep(record)

    def _keep(self, part: PartRecord) -> None:
        self._undo.append((self._unkeep, part))
        self._parts.setdefault(part.branch, {})[part.part] = part
        self._by_token.setdefault(part.token, set()).add(part.branch)

    def _unkeep(self, part: PartRecord) -> None:
        parts = self._parts.get(part.branch, {})
        parts.pop(part.part, None)
        if not parts:
            self._parts.pop(part.branch, None)
            branches = self._by_token.get(part.token, set())
            branches.discard(part.branch)
            if not branches:
                self._by_token.pop(part.token, None)

    def charge(self) -> None:
        """Once, after loading: the user of a token pays for what is staged under it."""
        for token in {*self._attempts, *self._by_token}:
            self.room.restore(token, user_in(token), is_open=token in self._attempts)
            for part in self.of_token(token):
                self.room.count(token, cost(part))

    def knows(self, app_id: str) -> bool:
        return bool(self._of_app.get(app_id))

    def size(self) -> int:
        """Returns how many attempts and branches there are."""
        return len(self._attempts) + len(self._parts)

    def attempt(self, token: str) -> AttemptRecord | None:
        return self._attempts.get(token)

    def open(self, change: Change, attempt: AttemptRecord, user: str) -> None:
        """``user`` pays for what is staged under its token. Raises NotAllowed: it has too many attempts."""
        if self._attempts.get(attempt.token) is None:
            self.room.open(attempt.token, user)
            self._undo.item(self._attempts, attempt.token)
            self._attempts[attempt.token] = attempt
            self._undo.enter(self._of_app, attempt.app_id, attempt.token)
            change.put(attempt)

    def _close(self, change: Change, token: str) -> None:
        self._undo.item(self._attempts, token)
        attempt = self._attempts.pop(token, None)
        if attempt is not None:
            self._undo.item(self.epochs, token)
            self.epochs.pop(token, None)
            self._undo.leave(self._of_app, attempt.app_id, token)
            self.room.close(token)
            change.drop(AttemptRecord, (token, attempt.vhost))

    def superseded(self, header: BranchHeader, more: int, user: str) -> list[str]:
        """Returns which attempts are to be dropped before ``user`` stages ``more`` bytes: older ones of the
        app, oldest first, whose drivers this one has replaced. Raises TransactionTooLarge.
        """
        token, attempt, room = header.token, self._attempts.get(header.token), self.room
        payer = room.payer(token, user)
        over = room.over(payer, more)
        if over <= 0 or not more:
            return []
        app_id = header.app_id if attempt is None else attempt.app_id
        others = [self._attempts[each] for each in self._of_app.get(app_id, ()) if app_id and each != token]
        found = []
        for other in sorted(others, key=lambda other: other.opened_at):
            if over > 0 and (attempt is None or other.opened_at <= attempt.opened_at):
                found.append(other.token)
                over -= room.bytes_of(other.token) if room.payer(other.token, user) == payer else 0
        if over > 0:
            raise room.refusal(payer, more)
        return found

    def touch(self, change: Change, token: str, now_us: int) -> None:
        """Updates the time of an attempt when a part arrives."""
        attempt = self._attempts.get(token)
        if attempt is not None and now_us - attempt.opened_at >= _TOUCHED_S * 1_000_000:
            self._undo.item(self._attempts, token)
            self._attempts[token] = touched = replace(attempt, opened_at=now_us)
            change.put(touched)

    def names(self) -> list[str]:
        """Returns the branches that have parts."""
        return list(self._parts)

    def attempts(self) -> list[AttemptRecord]:
        """Returns the attempts, oldest first."""
        return sorted(self._attempts.values(), key=lambda attempt: attempt.opened_at)

    def abandoned(self, now_us: int) -> list[str]:
        """Returns tokens of abandoned attempts."""
        before = now_us - int(max(self.room.limits.idle_s, _TOUCHED_S) * 1_000_000)
        return [token for token, attempt in self._attempts.items() if attempt.opened_at < before]

    def of_token(self, token: str) -> list[PartRecord]:
        """Returns all parts staged under a token."""
        return [part for branch in self._by_token.get(token, ()) for part in self.parts(branch)]

    def part(self, branch: str, part: int) -> PartRecord | None:
        return self._parts.get(branch, {}).get(part)

    def parts(self, branch: str) -> list[PartRecord]:
        """Returns all parts of a branch, in order."""
        found = self._parts.get(branch, {})
        return [found[number] for number in sorted(found)]

    def stage(self, state: BrokerState, change: Change, part: PartRecord, rights: Epoch = None) -> None:
        """Adds a part, which ``rights`` permit. Staging the same (branch, part) again changes nothing."""
        if self.part(part.branch, part.part) is not None:
            return
        before = self.epochs.get(part.token) if part.token in self._by_token else rights
        self._undo.item(self.epochs, part.token)
        self.epochs[part.token] = rights if rights == before else None
        self._keep(part)
        self.room.count(part.token, cost(part))
        change.put(part)
        if part.block_id:
            change.names.append(part.block_id)
            state.blocks.hold(part.block_id, part.rows, part.size_bytes)

    def require(self, token: str, branches: Sequence[StagedBranch]) -> list[PartRecord]:
        """Returns the parts of the named branches, each complete and named once. Raises MissingBranch."""
        for name, times in Counter(each.branch for each in branches).items():
            if times > 1:
                raise MissingBranch(
                    f"branch {name_in(name)} is named {times} times in one commit, which would publish its "
                    f"rows {times} times. Nothing was done; name the branch of each task once"
                )
        parts: list[PartRecord] = []
        for each in branches:
            found = self.parts(each.branch)
            rows = sum(part.rows for part in found)
            if each.rows == rows == 0 and not found:
                continue  # an empty task stages nothing
            if (
                any(part.token != token for part in found)
                or [part.part for part in found] != list(range(len(found)))
                or rows != each.rows
                or branch_checksum(part.checksum for part in found) != each.checksum
            ):
                raise MissingBranch(
                    f"branch {name_in(each.branch)} of partition {each.partition} should have "
                    f"{each.rows} rows under token {name_in(token)}, but {rows} are staged; "
                    "the batch was dropped, or the token belongs to another one. Let Spark run it again"
                )
            parts += found
        return parts

    @staticmethod
    def require_routable(state: BrokerState, parts: Iterable[PartRecord], read_block: ReadBlock) -> None:
        """Raises Unroutable with a count and three examples: of messages without a queue when they were
        staged, and of those that lost their queues since then.
        """
        count = 0
        examples: list[Sequence[str]] = []
        for part in parts:
            rows = _orphaned(state, part)
            count += part.unroutable + len(rows)
            examples += part.examples
            if len(rows) and len(examples) < _EXAMPLES:
                block = inline_rows(part) if not part.block_id else read_block(part.block_id)
                found = block.select(["exchange", "routing_key"]).take(pa.array(rows[:_EXAMPLES])).to_pylist()
                examples += [(row["exchange"], row["routing_key"]) for row in found]
        if count:
            names = [f"exchange {exchange!r} routing key {key!r}" for exchange, key in examples[:_EXAMPLES]]
            raise Unroutable(
                f"{count} messages of the transaction reach no queue ({', '.join(names)}); nothing was "
                "published. Bind a queue, or set onUnroutable=drop"
            )

    @staticmethod
    def gather(state: BrokerState, parts: Iterable[PartRecord], transaction: StagedTransaction) -> int:
        """Adds staged messages to ``transaction`` and returns how many of them reach a queue."""
        published = 0
        for part in parts:
            if part.kind != "publish":
                continue
            published += part.rows - part.unroutable - len(_orphaned(state, part))
            queues = state.topology.queues_by_id
            shares = [
                (queues[QueueId(int(each))], RowSelection(row, count, bytes.fromhex(bits)))
                for each, (row, count, bits) in part.routes.items()
                if int(each) in queues
            ]
            piece = Spilled(part.block_id, part.rows, part.size_bytes, shares, part.expiration_us)
            transaction.stage(piece, inline_rows(part).to_pylist() if part.rows and not part.block_id else [])
        return published

    def published(self, state: BrokerState, change: Change, parts: Iterable[PartRecord]) -> None:
        """Drops the parts of messages that are in queues now."""
        for part in parts:
            if part.kind == "publish":
                self._forget(state, change, part)

    def drop(self, state: BrokerState, change: Change, token: str) -> None:
        """Ends an attempt: drops its staged parts, except those in a ledger entry."""
        self._close(change, token)
        for branch in list(self._by_token.get(token, ())):
            self.free(state, change, branch)

    def settle(self, state: BrokerState, change: Change, token: str, staying: set[str]) -> None:
        """Ends a decided attempt: its branches in ``kept`` stay until they are applied; those of failed and
        speculative tasks are dropped.
        """
        self._close(change, token)
        for branch in self._by_token.get(token, set()) - staying:
            self.free(state, change, branch)

    def free(self, state: BrokerState, change: Change, branch: str) -> None:
        for part in self.parts(branch):
            self._forget(state, change, part)

    def _forget(self, state: BrokerState, change: Change, part: PartRecord) -> None:
        if part.part not in self._parts.get(part.branch, {}):
            return
        self._undo.append((self._keep, part))
        self._unkeep(part)
        self.room.count(part.token, -cost(part))
        change.drop(PartRecord, (part.branch, part.part, part.vhost))
        if part.block_id:
            state.blocks.unhold(change, part.block_id)

    def orphans(self, app_id: str, query_id: str, batch_id: int) -> list[str]:
        """Returns tokens of the app's other attempts that can never be decided after this batch."""
        return [
            attempt.token
            for attempt in self._attempts.values()
            if attempt.app_id == app_id and (attempt.query_id != query_id or attempt.batch_id <= batch_id)
        ]


def attempt_of(header: BranchHeader, now_us: int, vhost: str) -> AttemptRecord:
    """Returns the attempt that a task opens by staging."""
    return AttemptRecord(header.token, header.app_id, header.query_id, header.batch_id, now_us, vhost)


def cost(part: PartRecord) -> int:
    """Returns the bytes that a part takes: its rows, and its record, which names a target."""
    return part.size_bytes + _RECORD_BYTES + len(json.dumps(part.target))


def inline_rows(part: PartRecord) -> pa.RecordBatch:
    """Returns the rows of a part that is in no block."""
    with pa.ipc.open_stream(part.inline) as stream:
        return stream.read_next_batch()


def _orphaned(state: BrokerState, part: PartRecord) -> npt.NDArray[np.int64]:
    """Returns the rows of a part that had a queue when they were staged, and whose queues have all been
    deleted since then.
    """
    if all(int(queue_id) in state.topology.queues_by_id for queue_id in part.routes):
        return np.empty(0, dtype=np.int64)
    reached = {alive: np.zeros(part.rows, dtype=np.bool_) for alive in (True, False)}
    for queue_id, (row, count, bitmap) in part.routes.items():
        selection = selected_rows(RowSelection(row, count, bytes.fromhex(bitmap)))
        reached[int(queue_id) in state.topology.queues_by_id][np.asarray(selection)] = True
    return np.flatnonzero(reached[False] & ~reached[True]).astype(np.int64)
