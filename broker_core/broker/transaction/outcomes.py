"""How named transactions ended, for later queries, and up to which time that has been forgotten.

An outcome is kept for ``age_s``, while there are no more than ``count``, and no more of its user
than its share of them (``access/shares.py``). Forgetting an outcome moves the horizon of its kind, or that of
its user alone, which is durable with the same commit. So an absent outcome means that no transaction of this
name has ended after the horizon; whether one ended before it is unknown.

A channel in another process numbers its calls. Its last commit is kept in one record per channel. Such
commits are not queried by name, so they do not count among the names.

Not here: prepared transactions, which have no outcome yet (``commit.py``).
Invariant: a forgotten outcome was decided at or before the horizon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from typing import TypeAlias, TypeVar
from urllib.parse import quote

from broker_core.broker.access.shares import Shares
from broker_core.broker.access.users import name_in, name_of, payer_of, user_in
from broker_core.core.change import Change
from broker_core.core.errors import OptionError, UnknownOutcome
from broker_core.core.records import ChannelCommitRecord, ForgottenRecord, OutcomeRecord, Record
from broker_core.core.undo import Undo

R = TypeVar("R", OutcomeRecord, ChannelCommitRecord)

# forgotten together, so that not every commit writes the horizon
BLOCK = 1_000
Payer: TypeAlias = tuple[str, str]  # the kind of a record, and its user
NAMES, CHANNELS = "outcome", "channel_commit"  # kinds, as the horizons have them


@dataclass(frozen=True, slots=True)
class OutcomeLimits:
    """How many outcomes are kept, and for how long."""

    count: int = 100_000
    age_s: float = 24 * 3600.0

    def __post_init__(self) -> None:
        if self.count < 1 or not self.age_s > 0:
            raise OptionError(
                "outcomes to keep must be at least 1 and for more than 0 seconds, not "
                f"{self.count} for {self.age_s} s"
            )


class Outcomes(OrderedDict[str, OutcomeRecord]):
    """Outcomes by xid or token, oldest first; ``channels`` by channel."""

    def __init__(self, undo: Undo, shares: Shares) -> None:
        super().__init__()
        self.limits = OutcomeLimits()
        self.channels: OrderedDict[str, ChannelCommitRecord] = OrderedDict()
        self.horizons: dict[str, int] = {}  # by kind, and by kind and user
        self.keys_of: dict[Payer, OrderedDict[str, None]] = {}  # keys, oldest first
        self._undo, self._shares = undo, shares

    def restore(
        self,
        outcomes: Iterable[OutcomeRecord],
        channels: Iterable[ChannelCommitRecord],
        horizons: Iterable[ForgottenRecord],
    ) -> None:
        self.update((record.xid, record) for record in sorted(outcomes, key=lambda record: record.decided_at))
        self.channels.update(
            (record.channel, record) for record in sorted(channels, key=lambda record: record.decided_at)
        )
        self.horizons.update((record.kind, record.decided_at) for record in horizons)
        self._index()

    def _index(self) -> None:
        self.keys_of.clear()
        for table in (self, self.channels):
            for key, record in table.items():
                self.keys_of.setdefault(_payer(record), OrderedDict())[key] = None

    def remember(self, change: Change, record: OutcomeRecord) -> None:
        """Records how a named transaction ended."""
        self._remember(change, self, record.xid, record)

    def remember_call(self, change: Change, channel: str, number: int, now: int) -> None:
        """Records that a channel in another process has committed or prepared by this call."""
        self._remember(change, self.channels, channel, ChannelCommitRecord(channel, number, now))

    def _remember(self, change: Change, table: OrderedDict[str, R], key: str, record: R) -> None:
        payer = kind, user = _payer(record)
        mine = self.keys_of.setdefault(payer, OrderedDict())
        self._undo.item(table, key)
        self._undo.item(mine, key)
        table[key], mine[key] = record, None
        table.move_to_end(key)
        mine.move_to_end(key)
        change.put(record)
        now, most = record.decided_at, self.limits.count
        surplus = len(table) - most
        aged = next(iter(table.values())).decided_at < self._oldest_us(now, spare=24)
        if surplus >= min(BLOCK, most) or aged:
            oldest_us = self._oldest_us(now)
            gone: list[R] = []
            for each in table.values():
                if len(gone) == BLOCK or (len(gone) >= surplus and each.decided_at >= oldest_us):
                    break
                gone.append(each)
            self._forget(change, kind, table, gone)
            self._forget_horizons(change, kind)
        surplus = self._shares.over(user, len(mine), most)
        if surplus >= min(BLOCK, len(mine) - surplus):
            oldest = [table[each] for each in islice(mine, min(surplus, BLOCK))]
            self._forget(change, _of(kind, user), table, oldest)

    def call_took_place(self, channel: str, number: int, since_us: int) -> bool:
        """Returns whether a channel opened at ``since_us`` committed by this call; ``channel``: with its user
        (``own_id``). Raises UnknownOutcome.
        """
        record = self.channels.get(channel)
        if record is None:
            horizon_us = self.horizon(CHANNELS, user_in(channel))
            _require_later(horizon_us, self.limits, since_us, f"call {number} of channel {name_in(channel)}")
        return record is not None and record.number == number

    def require_known(self, key: str, since_us: int) -> None:
        """Checks that ``key``, which is absent, has not ended since ``since_us``. Raises UnknownOutcome if it
        may have, and is forgotten.
        """
        horizon_us = self.horizon(NAMES, payer_of(key))
        _require_later(horizon_us, self.limits, since_us, f"transaction '{name_of(key)}'")

    def horizon(self, kind: str, user: str) -> int:
        """Returns up to which time outcomes of the user may be forgotten; 0: none."""
        return max(self.horizons.get(kind, 0), self.horizons.get(_of(kind, user), 0))

    def _oldest_us(self, now: int, spare: int = 0) -> int:
        """Returns when the oldest one that is kept ended; ``spare``: a part of the age to add."""
        age_us = int(self.limits.age_s * 1_000_000)
        return now - age_us - (age_us // spare if spare else 0)

    def drop(self, change: Change, keys: Iterable[str]) -> None:
        """Drops these. No horizon moves: what they are the outcomes of is gone too."""
        self._undo.append((self._index,))
        self._undo.order(self)
        for key in keys:
            change.drop(OutcomeRecord, self.pop(key).key)
        self._index()

    def _forget(self, change: Change, kind: str, table: OrderedDict[str, R], gone: list[R]) -> None:
        """Forgets these, which are the oldest, and moves the horizon of ``kind``."""
        self._undo.append((self._index,))
        self._undo.append((_put_first, table, gone))
        for record in gone:
            key, payer = _key(record), _payer(record)
            mine = self.keys_of[payer]
            del table[key], mine[key]
            if not mine:
                del self.keys_of[payer]
            change.drop(type(record), record.key)
        self._undo.item(self.horizons, kind)
        self.horizons[kind] = max(self.horizons.get(kind, 0), *(record.decided_at for record in gone))
        change.put(ForgottenRecord(kind, self.horizons[kind]))

    def _forget_horizons(self, change: Change, kind: str) -> None:
        """Forgets those of users that are below that of all."""
        for own in [own for own in self.horizons if own.startswith(_of(kind, ""))]:
            if self.horizons[own] <= self.horizons[kind]:
                self._undo.item(self.horizons, own)
                del self.horizons[own]
                change.drop(ForgottenRecord, (own,))


def _require_later(horizon_us: int, limits: OutcomeLimits, since_us: int, what: str) -> None:
    if horizon_us and since_us <= horizon_us:
        until = datetime.fromtimestamp(horizon_us / 1_000_000, timezone.utc).isoformat(timespec="seconds")
        raise UnknownOutcome(
            f"whether {what} was committed is not known: outcomes up to {until} are forgotten",
            "if it began later it was not committed: ask with `since`; otherwise look for its effect "
            f"({limits.count} of {limits.age_s / 3600:g} hours are kept, and a user's share of them)",
        )


def _of(kind: str, user: str) -> str:
    return f"{kind}@{quote(user, safe='')}"


def _payer(record: OutcomeRecord | ChannelCommitRecord) -> Payer:
    if isinstance(record, ChannelCommitRecord):
        return CHANNELS, user_in(record.channel)
    return NAMES, payer_of(record.xid)


def _key(record: Record) -> str:
    return str(record.key[0])


def _put_first(table: OrderedDict[str, R], records: list[R]) -> None:
    for record in reversed(records):
        table[_key(record)] = record
        table.move_to_end(_key(record), last=False)
