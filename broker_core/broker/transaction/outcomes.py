"""How named transactions ended, for later queries, and up to which time that has been forgotten.

An outcome is kept for ``Kept.age_s`` and while there are no more than ``Kept.count``. Forgetting an outcome
moves the horizon of its kind, which is durable with the same commit. So an absent outcome means that no
transaction of this name has ended after the horizon; whether one ended before it is unknown.

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
from typing import TypeVar

from broker_core.broker.access.users import name_in
from broker_core.broker.state.change import Change
from broker_core.broker.state.records import ChannelCommitRecord, ForgottenRecord, OutcomeRecord, Record
from broker_core.broker.state.undo import Undo
from broker_core.errors import OptionError, UnknownOutcome

R = TypeVar("R", OutcomeRecord, ChannelCommitRecord)

# forgotten together, so that not every commit writes the horizon
BLOCK = 1_000
NAMES, CHANNELS = "outcome", "channel_commit"  # kinds, as the horizons have them


@dataclass(frozen=True, slots=True)
class Kept:
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

    def __init__(self, undo: Undo) -> None:
        super().__init__()
        self.kept = Kept()
        self.channels: OrderedDict[str, ChannelCommitRecord] = OrderedDict()
        self.horizons: dict[str, int] = {}
        self._undo = undo

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

    def remember(self, change: Change, record: OutcomeRecord) -> None:
        """Records how a named transaction ended."""
        self._undo.item(self, record.xid)
        self[record.xid] = record
        change.put(record)
        self._forget(change, NAMES, self, record.decided_at)

    def remember_call(self, change: Change, channel: str, number: int, now: int) -> None:
        """Records that a channel in another process has committed or prepared by this call."""
        record = ChannelCommitRecord(channel, number, now)
        self._undo.item(self.channels, channel)
        self.channels[channel] = record
        self.channels.move_to_end(channel)
        change.put(record)
        self._forget(change, CHANNELS, self.channels, now)

    def call_took_place(self, channel: str, number: int, since_us: int) -> bool:
        """Returns whether a channel opened at ``since_us`` committed by this call. Raises UnknownOutcome.

        ``channel``: with its user (``own_id``); versions before kept none.
        """
        record = self.channels.get(channel) or self.channels.get(name_in(channel))
        if record is None:
            self._require_later(CHANNELS, since_us, f"call {number} of channel {name_in(channel)}")
        return record is not None and record.number == number

    def require_known(self, xid: str, since_us: int) -> None:
        """Checks that ``xid``, which is absent, has not ended since ``since_us``. Raises UnknownOutcome if it
        may have, and is forgotten.
        """
        self._require_later(NAMES, since_us, f"transaction '{xid}'")

    def _require_later(self, kind: str, since_us: int, what: str) -> None:
        horizon = self.horizons.get(kind, 0)
        if horizon and since_us <= horizon:
            raise UnknownOutcome(
                f"whether {what} was committed is not known: outcomes up to {_text(horizon)} are forgotten",
                "if it began later it was not committed, ask with `since`; else look for what it was to do "
                f"({self.kept.count} of {self.kept.age_s / 3600:g} hours are kept)",
            )

    def _forget(self, change: Change, kind: str, table: OrderedDict[str, R], now: int) -> None:
        """Forgets the oldest, a block at a time: surplus ones, and those that are past their age."""
        count, age_us = self.kept.count, int(self.kept.age_s * 1_000_000)
        oldest = next(iter(table.values()))
        surplus = len(table) - count
        if surplus < min(BLOCK, count) and oldest.decided_at >= now - age_us - age_us // 24:
            return
        gone: list[R] = []
        for record in table.values():
            if len(gone) == BLOCK or (len(gone) >= surplus and record.decided_at >= now - age_us):
                break
            gone.append(record)
        self._undo.append((_put_first, table, gone))
        for record in gone:
            del table[_key(record)]
            change.drop(type(record), record.key)
        self._undo.item(self.horizons, kind)
        self.horizons[kind] = max(self.horizons.get(kind, 0), *(record.decided_at for record in gone))
        change.put(ForgottenRecord(kind, self.horizons[kind]))


def _key(record: Record) -> str:
    return str(record.key[0])


def _put_first(table: OrderedDict[str, R], records: list[R]) -> None:
    for record in reversed(records):
        table[_key(record)] = record
        table.move_to_end(_key(record), last=False)


def _text(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1_000_000, timezone.utc).isoformat(timespec="seconds")
