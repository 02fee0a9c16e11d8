"""Whose an app is, and who may act for it: its claims, reads, attempts, branches and ledger entries. Pure.

The user who first claims or opens it owns an app, whoever that is: the administrator, the default user and
the owner of the data directory ("") too. The app of a deleted user has no owner;
only an administrator may use it, and becomes its owner with the next claim or open.

Not here: what a permission allows (``broker/access/rights.py``, ``broker/command_permissions.py``), and which
call needs what (the listeners).
Invariant: what is decided is permitted to who decides it, by the rights of that moment.
Invariant: asking takes nothing. Ids are no secrets: who knows a query, batch, token or branch of another
owner's app can neither change nor use it, nor take it first: tokens and branches are those of their user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from broker_core.broker import command_permissions
from broker_core.broker.access.rights import Actor, Rights
from broker_core.broker.access.users import ADMINISTRATOR, name_in, user_in
from broker_core.broker.batch.branch import Branches, inline_rows, whose
from broker_core.broker.broker import BrokerState
from broker_core.core.block import NotLoaded, ReadBlock, together
from broker_core.core.change import Change
from broker_core.core.errors import (
    AccessRefused,
    CheckpointMismatch,
    MissingBranch,
    NotAllowed,
    TransactionState,
)
from broker_core.core.records import LedgerRecord, PartRecord
from broker_core.engine import BranchHeader, LedgerEntry, StagedBranch
from broker_core.micro_batch.claims.claim import Claims
from broker_core.micro_batch.ledger import Ledger, MicroBatch, public
from broker_core.routing.content import check_user_id

USER_APPS = 10_000  # of one user: what an app has decided is kept as long as the app


class AppOwners:
    """Those of one virtual host."""

    def __init__(self, state: BrokerState, claims: Claims, ledger: Ledger, branches: Branches) -> None:
        self._state = state
        self._vhost = state.vhost
        self._claims, self._ledger, self._branches = claims, ledger, branches

    def of(self, app_id: str) -> str | None:
        """Returns the owner; None: it has none, or there is no such app."""
        return self._state.users.apps.get((self._vhost, app_id))

    def own(self, actor: Actor, name: str) -> str:
        """Returns how a token or branch of ``actor`` is kept."""
        return self._state.users.own_id(actor.user, name)

    def own_header(self, actor: Actor, header: BranchHeader) -> BranchHeader:
        return replace(header, token=self.own(actor, header.token), branch=self.own(actor, header.branch))

    def own_branches(self, actor: Actor, branches: Iterable[StagedBranch]) -> list[StagedBranch]:
        return [replace(each, branch=self.own(actor, each.branch)) for each in branches]

    def of_attempt(self, actor: Actor, token: str, of: str | None) -> str:
        """Returns how the token that is to be rolled back is kept: that ``of`` a user; of the actor; for an
        operator, of the only user who has it. Raises TransactionState (several have).
        """
        own = self._state.users.own_id(actor.user if of is None else of, token)
        if not actor.operates or of is not None or self._branches.attempt(own) is not None:
            return own
        found = [each.token for each in self._branches.attempts() if name_in(each.token) == token]
        if len(found) > 1:
            users = ", ".join(sorted(f"'{user_in(each)}'" for each in found))
            text = f"staged batches of the users {users} have the token {token}"
            raise TransactionState(text, "name the user: --of")
        return found[0] if found else own

    def _exists(self, app_id: str) -> bool:
        rules = (self._claims, self._ledger, self._branches)
        owners = (queue.owner for queue in self._state.topology.queues.values())
        return any(each.knows(app_id) for each in rules) or app_id in owners

    def same(self, app_id: str, other: str) -> bool:
        """Returns whether a batch of ``app_id`` may consume what ``other`` has read: one owner has both, or
        the owner of each may use every app.
        """
        owner, of_other = self.of(app_id), self.of(other)
        return app_id == other or owner == of_other or (self._trusts(owner) and self._trusts(of_other))

    def _trusts(self, owner: str | None) -> bool:
        return not owner or ADMINISTRATOR in self._state.users.tags(owner)

    def require(self, actor: Actor, apps: Iterable[str]) -> None:
        """Raises AccessRefused unless ``actor`` may act for each of these apps, or there is no such app.

        "" is the app of a batch write: see ``require_tokens``.
        """
        for app_id in apps:
            if not app_id or actor.administers:
                continue
            owner = self.of(app_id)
            if owner != actor.user and (owner is not None or self._exists(app_id)):
                raise AccessRefused(
                    f"access to app '{app_id}' in vhost '{self._vhost}' refused for user '{actor.user}'",
                    "an app belongs to the user who first claimed or opened it; an administrator gives it to "
                    "another one with `txmq app chown`",
                )

    def require_tokens(self, actor: Actor, tokens: Iterable[str]) -> None:
        """Raises AccessRefused unless ``actor`` may act for each attempt, open or decided, or there is
        none."""
        for token in tokens:
            attempt, entry = self._branches.attempt(token), self._ledger.by_token(token)
            if entry is not None:
                self.require(actor, [entry.app_id])
            if attempt is None or actor.administers:
                continue
            self.require(actor, [attempt.app_id])
            if not attempt.app_id and self._state.users.writes.get((self._vhost, token)) != actor.user:
                raise AccessRefused(
                    f"access to batch write {name_in(token)} in vhost '{self._vhost}' refused for user "
                    f"'{actor.user}'",
                    "a batch write belongs to the user who staged its first rows",
                )

    def take_token(self, change: Change, actor: Actor, header: BranchHeader) -> None:
        """A batch write begins: it has an owner until it ends."""
        if not header.app_id and self._branches.attempt(header.token) is None:
            self._state.users.own_write(change, self._vhost, header.token, actor.user)

    def take(self, change: Change, actor: Actor, app_id: str) -> None:
        """For a call that makes something of the app: ``require``, and it has an owner from now on. Raises
        NotAllowed: the user has too many.
        """
        self.require(actor, [app_id])
        if app_id and self.of(app_id) is None:
            users = self._state.users
            if len(users.apps_of.get(actor.user, ())) >= USER_APPS:
                raise NotAllowed(
                    f"{whose(actor.user)} has {USER_APPS} apps, which is the limit",
                    "use the existing app ids; an administrator gives apps to another user with `txmq "
                    "app chown`",
                )
            users.own_app(change, app_id, actor.user, self._vhost)

    def require_token(self, token: str, batch: MicroBatch) -> None:
        """Raises CheckpointMismatch if the token is that of another batch, open or decided."""
        for other in (self._branches.attempt(token), self._ledger.by_token(token)):
            if other is not None and (other.app_id, other.query_id, other.batch_id) != batch:
                raise CheckpointMismatch(
                    f"token {name_in(token)} was opened for batch {other.batch_id} of app {other.app_id!r}, "
                    f"not for batch {batch.batch_id} of {batch.app_id!r}"
                )

    def require_attempt(self, change: Change, actor: Actor, header: BranchHeader) -> None:
        """For rows that are staged. Raises AccessRefused (an attempt of another owner), CheckpointMismatch,
        MissingBranch (a branch of another attempt).
        """
        attempt = self._branches.attempt(header.token)
        if attempt is None:
            self.take(change, actor, header.app_id)
        else:
            self.require_tokens(actor, [header.token])
            if header.app_id:
                batch = MicroBatch(header.app_id, header.query_id, header.batch_id)
                self.require_token(header.token, batch)
        if any(part.token != header.token for part in self._branches.parts(header.branch)):
            raise MissingBranch(
                f"branch {name_in(header.branch)} belongs to another staged batch than "
                f"{name_in(header.token)}; give each branch an id of its own"
            )


def public_entry(entry: LedgerRecord) -> LedgerEntry:
    """Returns a decided batch for the connector."""
    return public(entry, name_in(entry.token))


class StagedRights:
    """Asks the rights that permit what is staged again when it is decided.

    ``read_addresses`` returns at least each exchange, routing key and properties of a block once. Parts that
    were asked with these rights are not read again; after a restart all are. Keys under BCC are not kept, and
    not asked.
    """

    def __init__(self, state: BrokerState, branches: Branches, read_addresses: ReadBlock) -> None:
        self._topology = state.topology
        self._branches = branches
        self._read = read_addresses

    def require(
        self, rights: Rights | None, token: str, parts: Iterable[PartRecord], queues: Iterable[str] = ()
    ) -> None:
        """``queues``: that the decision consumes. Raises AccessRefused, PreconditionFailed (user_id),
        NotLoaded.
        """
        if rights is None:
            return
        for queue in queues:
            command_permissions.read_queue(rights, queue)
        if self._branches.epochs.get(token) == rights.now:
            return
        missing: list[NotLoaded] = []
        for part in parts:
            if part.kind == "publish" and part.rows:
                try:
                    rows = self._read(part.block_id) if part.block_id else inline_rows(part)
                except NotLoaded as error:
                    missing.append(error)
                    continue
                command_permissions.publish_rows(rights, self._topology, rows)
                if not rights.impersonates:
                    for properties in rows.column("properties").unique().to_pylist():
                        check_user_id(properties, rights.user)
        if missing:
            raise together(missing)
