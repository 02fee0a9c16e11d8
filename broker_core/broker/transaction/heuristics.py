"""Heuristic outcomes (XA): of transactions that somebody else than who named them has decided, told apart
until they are forgotten. Pure.

Of a user no more are there than its share of MOST_HEURISTIC. Above it the oldest is forgotten.

Not here: what is forgotten, which is an outcome as any other (``transaction.py``, ``outcomes.py``).
Invariant: an outcome is here or there, and not both.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker_core.broker.access.shares import Shares
from broker_core.broker.access.users import payer_of
from broker_core.core.change import Change
from broker_core.core.records import HEURISTICALLY, OutcomeRecord
from broker_core.core.undo import Undo

MOST_HEURISTIC = 10_000


class Heuristics:
    """``by_key``, and the keys of each user: both oldest first."""

    def __init__(self, undo: Undo, shares: Shares) -> None:
        self.by_key: dict[str, OutcomeRecord] = {}
        self.keys_of: dict[str, dict[str, None]] = {}
        self._undo, self._shares = undo, shares

    def restore(self, outcomes: Iterable[OutcomeRecord]) -> None:
        for record in sorted(outcomes, key=lambda record: record.decided_at):
            self.by_key[record.xid] = record
            self.keys_of.setdefault(payer_of(record.xid), {})[record.xid] = None

    def add(self, change: Change, key: str, state: str, now: int) -> str | None:
        """``state``: committed or rolled_back. Returns the key of what is to be forgotten for it."""
        self._undo.item(self.by_key, key)
        record = self.by_key[key] = OutcomeRecord(key, HEURISTICALLY + state, now)
        user = payer_of(key)
        self._undo.enter(self.keys_of, user, key)
        change.put(record)
        if self._shares.over(user, len(self.keys_of[user]), MOST_HEURISTIC) > 0:
            return next(iter(self.keys_of[user]))
        return next(iter(self.by_key)) if len(self.by_key) > MOST_HEURISTIC else None

    def remove(self, key: str) -> OutcomeRecord:
        user = payer_of(key)
        self._undo.order(self.by_key)
        self._undo.order(self.keys_of[user])
        self._undo.leave(self.keys_of, user, key)
        return self.by_key.pop(key)
