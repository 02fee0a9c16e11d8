"""What the tasks of a micro-batch or of a batch write stage (C2), until it is decided or dropped.

Pure: each method that changes something fills the change of a commit.
Not here: the decision (``micro_batch.py``), what is staged (``branch.py``), whose it is (``owners.py``).
Invariant: rows of an attempt that has ended are refused, however late they come.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_core.arrow.parts import part_checksum, signed, stream_of
from broker_core.broker.access.rights import OWNER, Actor
from broker_core.broker.access.users import name_in, write_key
from broker_core.broker.batch.branch import Branches, Epoch, PartRows, Sums, attempt_of, cost
from broker_core.broker.batch.owners import AppOwners
from broker_core.broker.broker import BrokerState
from broker_core.core.change import Change
from broker_core.core.errors import BatchDecided, MissingBranch
from broker_core.core.ids import NO_BLOCK
from broker_core.core.records import OutcomeRecord, PartRecord
from broker_core.engine import BranchHeader
from broker_core.micro_batch.ledger import Ledger, MicroBatch


class Staging:
    def __init__(self, state: BrokerState, branches: Branches, ledger: Ledger, owners: AppOwners) -> None:
        self._state, self._branches, self._ledger, self._owners = state, branches, ledger, owners

    def stage(
        self,
        change: Change,
        header: BranchHeader,
        first: int,
        pieces: Sequence[PartRows],
        now_us: int,
        actor: Actor = OWNER,
        rights: Epoch = None,
    ) -> list[tuple[int, int]]:
        """Stages the parts from ``first`` on, all or none, and returns (rows, checksum) of each. Bytes of a
        part that is already staged are forgotten. ``rights``: those that permit the rows.

        An app over its limit of staged bytes loses older attempts first. Raises AccessRefused, BatchDecided,
        MissingBranch, ExchangeNotFound, TransactionTooLarge.
        """
        header = self._owners.own_header(actor, header)
        self._owners.require_attempt(change, actor, header)
        unkept = {each.stored.block_id for each in pieces if each.stored is not None}
        staged: list[PartRecord] = []
        new: list[PartRecord] = []
        for part, each in enumerate(pieces, first):
            record = self._branches.part(header.branch, part)
            if record is None:
                self._require_open(header)
                record = _record(header, part, each, self._state.vhost)
                new.append(record)
            elif record.rows != each.rows.num_rows:
                raise MissingBranch(
                    f"part {part} of branch {name_in(header.branch)} is staged with {record.rows} rows, "
                    f"not {each.rows.num_rows}"
                )
            staged.append(record)
        for superseded in self._branches.superseded(header, sum(map(cost, new)), actor.user):
            self.drop(change, superseded, now_us)
        if new:
            self._owners.take_token(change, actor, header)
        for record in new:
            self._branches.open(change, attempt_of(header, now_us, self._state.vhost), actor.user)
            self._branches.touch(change, header.token, now_us)
            self._branches.stage(self._state, change, record, rights)
            unkept.discard(record.block_id)
        change.forgets += sorted(unkept)
        return [(record.rows, record.checksum) for record in staged]

    def staged(self, header: BranchHeader, first: int, expected: Sums, actor: Actor) -> Sums:
        """Returns (rows, checksum) of the parts from ``first`` on if they are staged as ``expected``;
        otherwise nothing.
        """
        header = self._owners.own_header(actor, header)
        parts = [self._branches.part(header.branch, part) for part in range(first, first + len(expected))]
        found = [(part.rows, part.checksum) for part in parts if part and part.token == header.token]
        return found if found == expected else []

    def _require_open(self, header: BranchHeader) -> None:
        """Raises BatchDecided for a late task of a decided or dropped attempt."""
        name = write_key(self._state.vhost, header.token)
        if self._ledger.by_token(header.token) is not None or name in self._state.names.outcomes:
            raise BatchDecided(
                f"staged batch {name_in(header.token)} has ended; this task is late, and its rows are dropped"
            )
        batch = MicroBatch(header.app_id, header.query_id, header.batch_id)
        if header.app_id and self._ledger.entry(batch) is not None:
            raise BatchDecided(
                f"batch {header.batch_id} of app {header.app_id!r} is decided; the rows of "
                "this late task are dropped"
            )

    def roll_back(
        self, change: Change, token: str, now_us: int, actor: Actor = OWNER, of: str | None = None
    ) -> None:
        """Rolls back a micro-batch or a batch write, for an operator also that ``of`` another user. Raises
        AccessRefused, BatchDecided, TransactionState (several users have this token).
        """
        token = self._owners.of_attempt(actor, token, of)
        if not actor.operates:
            self._owners.require_tokens(actor, [token])
        entry = self._ledger.by_token(token)
        outcome = self._state.names.outcomes.get(write_key(self._state.vhost, token))
        if entry is not None or (outcome is not None and outcome.state == "committed"):
            batch = f"batch {entry.batch_id} of app {entry.app_id!r}" if entry is not None else ""
            what = batch or f"batch write {name_in(token)}"
            raise BatchDecided(
                f"{what} is committed and cannot be rolled back: only the reply to the commit was lost"
            )
        if self._branches.attempt(token) is not None:  # of a token that nobody has used, nothing is recorded
            self.drop(change, token, now_us)

    def drop_abandoned(self, change: Change, now_us: int) -> list[str]:
        """Rolls back attempts whose driver has ended; returns their tokens. A late commit is refused."""
        tokens = self._branches.abandoned(now_us)
        for token in tokens:
            self.drop(change, token, now_us)
        return tokens

    def drop(self, change: Change, token: str, now_us: int) -> None:
        self._branches.drop(self._state, change, token)
        self._state.users.disown_write(change, self._state.vhost, token)
        # from now on a late task or call of it is refused
        name, outcomes = write_key(self._state.vhost, token), self._state.names.outcomes
        if name not in outcomes:
            outcomes.remember(change, OutcomeRecord(name, "rolled_back", now_us))


def _record(header: BranchHeader, part: int, piece: PartRows, vhost: str) -> PartRecord:
    stored, rows, routing = piece
    return PartRecord(
        branch=header.branch,
        part=part,
        token=header.token,
        kind=header.kind,
        target=dict(header.target),
        partition=header.partition,
        attempt=header.attempt,
        rows=rows.num_rows,
        size_bytes=stored.size_bytes if stored else rows.nbytes,
        checksum=signed(stored.checksum) if stored else part_checksum(rows),
        block_id=stored.block_id if stored else NO_BLOCK,
        inline=b"" if stored else bytes(stream_of([rows], rows.schema)),
        routes={str(each): [row, count, bits.hex()] for each, (row, count, bits) in routing[0].items()},
        unroutable=routing.unroutable,
        examples=[list(example) for example in routing.examples],
        vhost=vhost,
        expiration_us=routing.expiration_us,
    )
