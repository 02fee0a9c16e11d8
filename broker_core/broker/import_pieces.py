"""Definitions in pieces, so that an import of any size holds the lock for the time of a few rows.

1. check: each piece is carried out and taken back, with what its rows need of others
2. apply: each piece is a commit, in the order of what they need

Not here: what the definitions say, and how a piece is applied (``definitions.py``).
Invariant: what is wrong with the definitions is found before anything is changed. What comes in small
definitions comes in one piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from broker_core.admin import Imported
from broker_core.broker.access.administrators import is_administrator
from broker_core.broker.definitions import Definitions, Row
from broker_core.core.records import UserRecord

PIECE = 100  # rows


def pieces(found: Definitions, listed: Collection[str] = ()) -> Iterator[Definitions]:
    """In the order in which they are applied: administrators come before who is none any more. ``skipped`` is
    in none of them. ``listed``: users whose passwords the users file has.
    """
    kinds = ("permissions", "topic_permissions", "policies", "exchanges", "queues", "bindings")
    users = sorted(found.users, key=lambda user: not is_administrator(user, listed))
    rows: list[tuple[str, Any]] = [("vhosts", each) for each in found.vhosts.items()]
    rows += [("users", user) for user in users]
    rows += [(kind, each) for kind in kinds for each in getattr(found, kind)]
    remaining = iter(rows)
    while some := list(islice(remaining, PIECE)):
        piece = Definitions(vhosts=dict(each for kind, each in some if kind == "vhosts"))
        for kind, each in some:
            if kind != "vhosts":
                getattr(piece, kind).append(each)
        yield piece


class Prerequisites:
    """What the rows of a piece need that other pieces bring."""

    def __init__(self, found: Definitions) -> None:
        self._found = found
        self._users = {user.name: user for user in found.users}
        self._queues = {(row["vhost"], row["name"]): row for row in found.queues}
        self._exchanges = {(row["vhost"], row["name"]): row for row in found.exchanges}

    def with_needs(self, piece: Definitions) -> Definitions:
        """Returns what can be applied without any other piece."""
        users: dict[str, UserRecord] = {}
        exchanges: dict[tuple[str, str], Row] = {}
        queues: dict[tuple[str, str], Row] = {}
        for row in (*piece.permissions, *piece.topic_permissions):
            if row["user"] in self._users:
                users[row["user"]] = self._users[row["user"]]
        for row in piece.bindings:
            source, end = (row["vhost"], row["source"]), (row["vhost"], row["destination"])
            ready = self._queues if row["destination_type"] == "queue" else self._exchanges
            if source in self._exchanges:
                exchanges[source] = self._exchanges[source]
            if end in ready:
                (queues if ready is self._queues else exchanges)[end] = ready[end]
        used = {row["vhost"] for kind in (piece.permissions, piece.topic_permissions) for row in kind}
        used |= {row["vhost"] for kind in (piece.exchanges, piece.queues, piece.bindings) for row in kind}
        names = {policy.vhost for policy in piece.policies} | used
        vhosts = {name: self._found.vhosts[name] for name in sorted(names & self._found.vhosts.keys())}
        return Definitions(
            vhosts=vhosts | piece.vhosts,
            users=[*users.values(), *(user for user in piece.users if user.name not in users)],
            permissions=piece.permissions,
            topic_permissions=piece.topic_permissions,
            policies=piece.policies,
            exchanges=_joined(exchanges, piece.exchanges),
            queues=_joined(queues, piece.queues),
            bindings=piece.bindings,
        )


def _joined(needed: dict[tuple[str, str], Row], own: list[Row]) -> list[Row]:
    return [*needed.values(), *(row for row in own if (row["vhost"], row["name"]) not in needed)]


def together(found: Definitions, done: list[Imported]) -> Imported:
    """What was imported, of all pieces."""
    kinds = ["vhosts", "users", "permissions", "topic_permissions", "exchanges", "queues"]
    kinds += ["policies"] if found.policies else []
    left = dict.fromkeys(each for piece in done for each in piece.skipped)  # a piece has what others need too
    counts = {kind: len(getattr(found, kind)) for kind in kinds}
    for each in left:
        if f"{each.kind}s" in ("exchanges", "queues"):
            counts[f"{each.kind}s"] -= 1
    bindings = sum(piece.counts["bindings"] for piece in done)
    return Imported({**counts, "bindings": bindings}, (*found.skipped, *left))
