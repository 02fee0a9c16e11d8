"""Who decides a prepared transaction: the user who named it, or an operator. One function for all listeners.

Not here: what a decision does (``commit.py``), and what a listener calls the words.
Invariant: a caller decides its own transaction, or one that it names by its user; a name alone never means
that of another user where the caller has one too. Its owner is asked again for its permissions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from broker_core.broker.access.rights import OWNER, Actor, Rights
from broker_core.broker.access.users import is_owned, keys_in, name_of, owner_of, user_of
from broker_core.broker.broker import BrokerState
from broker_core.broker.command_permissions import publish_again
from broker_core.core.change import Change
from broker_core.core.errors import AccessRefused, TransactionState, UnknownTransaction

Decision: TypeAlias = Literal["commit", "rollback", "forget"]


class Decided(NamedTuple):
    """``dropped``: messages and acks without effect, because their queue was deleted. ``user``: whose it was;
    "" for the owner of the data directory, None for nobody.
    """

    dropped: int
    user: str | None


def decide(
    verb: Decision,
    xid: str,
    state: BrokerState,
    change: Change,
    now_us: int,
    *,
    actor: Actor = OWNER,
    rights: Rights | None = None,
    of: str | None = None,
    vhost: str | None = None,
    by_hand: bool = False,
) -> Decided:
    """Commits, rolls back, or forgets that its outcome is heuristic. Idempotent. ``of``: whose it is, if not
    the caller's; ``vhost`` None: in any. ``by_hand``: the caller is not the program that prepared it.

    Raises UnknownTransaction, TransactionState, HeuristicOutcome, AccessRefused.
    """
    key = _key_of(xid, state, actor, of, state.virtual_hosts.by_name if vhost is None else [vhost])
    prepared = state.prepared.by_key.get(key)
    by_hand = _is_heuristic(state, key, actor, by_hand)
    dropped = 0
    if verb == "commit":
        if prepared is not None and rights is not None and not (actor.operates or rights.holds(None)):
            seen = state.of(state.prepared.vhosts[key])
            publish_again(rights, seen.topology, prepared, state.blocks)
        dropped = state.prepared.commit(change, key, now_us, by_hand).dropped
    elif verb == "rollback":
        state.prepared.rollback(change, key, now_us, by_hand)
    else:
        state.names.forget(change, key)
    return Decided(dropped, user_of(key))


def all_of(state: BrokerState, actor: Actor, of: str | None, vhost: str) -> list[str]:
    """Returns the keys of all that a user has prepared in a virtual host: the caller, or ``of`` another; with
    the tag of an operator also what a deleted user of this name has. Raises AccessRefused.
    """
    _require_operator(actor, of)
    user = state.names.user(actor.user if of is None else of)
    return state.prepared.all_of(vhost, user, disowned=actor.operates)


def rollback_all(
    keys: Sequence[str], actor: Actor, by_hand: bool, state: BrokerState, change: Change, now_us: int
) -> int:
    """Rolls back those that are still prepared, in one commit; returns how many. ``by_hand``: as in
    ``decide``.
    """
    found = [key for key in keys if key in state.prepared.by_key]
    for key in found:
        state.prepared.rollback(change, key, now_us, _is_heuristic(state, key, actor, by_hand))
    return len(found)


def _is_heuristic(state: BrokerState, key: str, actor: Actor, by_hand: bool) -> bool:
    """Returns whether who named it has to be told. What a deleted user has prepared has nobody."""
    return is_owned(key) and (by_hand or user_of(key) != state.names.user(actor.user))


def _require_operator(actor: Actor, of: str | None) -> None:
    if of is not None and of != actor.user and not actor.operates:
        raise AccessRefused(
            f"access to transactions of user '{of}' refused for user '{actor.user}': "
            "it needs the tag administrator or operator"
        )


def _key_of(xid: str, state: BrokerState, actor: Actor, of: str | None, vhosts: Collection[str]) -> str:
    """Returns the key of what the caller means: what is prepared comes before what has ended."""
    _require_operator(actor, of)
    keys = [state.names.key(vhost, xid, actor.user if of is None else of) for vhost in vhosts]
    found = [key for key in keys if key in state.prepared.by_key]
    ended = list(filter(state.names.has_outcome, keys))
    prepared = partial(_with_name, xid, state.prepared.by_key, of)
    if not found and actor.operates and (of is not None or not ended):
        found = prepared(vhosts) or ended[:1] or _with_name(xid, state.names.ended(), of, vhosts)
    if len(found) > 1:
        raise _several(xid, state, found)
    if not found and not ended and actor.operates and prepared(state.virtual_hosts.by_name):
        raise UnknownTransaction(
            f"no transaction of vhost '{next(iter(vhosts))}' has the xid '{xid}'",
            "connect to the virtual host where it was prepared",
        )
    return next(iter(found or ended or keys))


def _with_name(xid: str, keys: Iterable[str], of: str | None, vhosts: Iterable[str]) -> list[str]:
    """Returns those of users that have this name in these virtual hosts; ``of`` None: of all users."""
    owned = ((key, user_of(key)) for key in keys if name_of(key) == xid)
    found = [key for key, user in owned if user is not None and of in (None, user)]
    return [key for vhost in vhosts for key in keys_in(vhost, found)]


def _several(xid: str, state: BrokerState, found: list[str]) -> TransactionState:
    vhosts = sorted({state.prepared.vhosts.get(key, "") for key in found})
    if len(vhosts) > 1:
        text = f"transactions of the vhosts {', '.join(vhosts)} have the xid '{xid}'"
        return TransactionState(text, "name the virtual host")
    users = ", ".join(sorted(f"'{owner_of(key) or ''}'" for key in found))
    return TransactionState(f"transactions of the users {users} have the xid '{xid}'", "name the user: --of")
