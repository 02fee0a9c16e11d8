"""What the history answers: a transaction, the last ones, and the life of a message, for one caller.

Pure: it reads rows, which do not change, so nothing is locked meanwhile.
Not here: the rows (``rows.py``), tables of a micro-batch (its ledger has them).
Invariant: a caller learns of a queue only what ``Visibility.queue`` permits, and about others' connections,
apps and names of transactions only if it looks at all. What it may not see is left out, and a transaction
of which nothing is left is not there. A call reads BUDGET_BYTES and one row more, whatever it finds, and
says where the next one goes on.
"""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from broker_core.admin import EffectInfo, MessageStep, TransactionInfo
from broker_core.broker.history.rows import Effect, PastCommit, commits
from broker_core.core.change import KINDS, PUBLISHED, RETURNED
from broker_core.core.records import HistoryRecord

_BEGINS = (KINDS[PUBLISHED], "dead_lettered")
_STAYS = KINDS[RETURNED]
BUDGET_BYTES = 1024 * 1024  # of rows, that one call reads
ROW_BYTES = 4 * 1024  # for a row, whatever is read of it


class ReadBudget:
    """How much of the history one call has read, and whether that is enough for one."""

    def __init__(self, most_bytes: int = BUDGET_BYTES) -> None:
        self._left = most_bytes

    def spend(self, size_bytes: int) -> None:
        self._left -= size_bytes

    @property
    def enough(self) -> bool:
        return self._left <= 0


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a caller sees of a virtual host. ``looks``: all of it. ``hidden``: up to these times, by virtual
    host, it was another one of this name.
    """

    vhost: str
    looks: bool
    user: str
    queue: Callable[[str], bool]
    app: Callable[[str], bool]
    hidden: Mapping[str, int]

    def view(self, commit: PastCommit) -> TransactionInfo | None:
        """Returns what the caller sees of a commit; None: nothing."""
        if commit.committed_at <= self.hidden.get(self.vhost, 0):
            return None
        effects = tuple(
            info for effect in commit.effects if (info := self.effect(commit, effect)) is not None
        )
        if not effects and not (self.looks and commit.who.vhost == self.vhost):
            return None
        who, own = commit.who, self.looks or (bool(self.user) and commit.who.user == self.user)
        batch = commit.batch if commit.batch and (self.looks or self.app(commit.batch[0])) else None
        app_id, query_id, batch_id, number = batch or ("", "", -1, 0)
        return TransactionInfo(
            sequence=commit.sequence,
            committed_at_us=commit.committed_at,
            vhost=self.vhost,
            listener=who.listener if own else "",
            user=who.user if own else "",
            client=who.client if self.looks else "",
            address=who.address if self.looks else "",
            effects=effects,
            xid=commit.xid if self.looks else "",
            app_id=app_id,
            query_id=query_id,
            batch_id=batch_id,
            ledger_sequence=number,
            left_out=commit.left_out if self.looks else 0,
        )

    def effect(self, commit: PastCommit, effect: Effect) -> EffectInfo | None:
        name = self._name(commit, effect.queue)
        if name is None:
            return None
        source = self._name(commit, effect.source) if effect.source else None
        return EffectInfo(effect.kind, name, effect.entries, effect.ranges, effect.exact, source or "")

    def _name(self, commit: PastCommit, queue: int) -> str | None:
        vhost, name = commit.queues[queue]
        return name if vhost == self.vhost and (self.looks or self.queue(name)) else None


def _readable(
    row: HistoryRecord, mark: bytes = b"", spend: Callable[[int], None] = lambda size_bytes: None
) -> Iterator[PastCommit]:
    """Yields the commits of a row, up to what cannot be read: others are told all the same, and `txmq broker
    verify` names the row.
    """
    with contextlib.suppress(ValueError):
        yield from commits(row, mark, spend)


def find(rows: Sequence[HistoryRecord], sequence: int, sees: Visibility) -> TransactionInfo | None:
    """Returns the transaction with this number."""
    at = bisect_left(rows, sequence, key=attrgetter("last"))
    if at == len(rows):
        return None
    for commit in _readable(rows[at]):
        if commit.sequence == sequence:
            return sees.view(commit)
    return None


def latest(
    rows: Sequence[HistoryRecord], sees: Visibility, limit: int, before: int, budget: ReadBudget
) -> tuple[list[TransactionInfo], int]:
    """Returns the last transactions, the newest first, and the number below which there may be more; 0: there
    are none. ``before``: only those below this number; 0: all.
    """
    found: list[TransactionInfo] = []
    end = bisect_left(rows, before, key=attrgetter("first")) if before else len(rows)
    for row in reversed(rows[:end]):
        if budget.enough:
            return found, row.last + 1
        budget.spend(ROW_BYTES)
        for commit in reversed(list(_readable(row, spend=budget.spend))):
            if before and commit.sequence >= before:
                continue
            if len(found) >= limit:
                return found, commit.sequence + 1
            info = sees.view(commit)
            if info is not None:
                found.append(info)
    return found, 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the search for the steps of a message goes on: behind commit ``sequence``. ``queue_id`` 0: the
    queue is not found yet, and the search for it goes on before that commit; 0: at the newest one.
    """

    queue_id: int = 0
    sequence: int = 0


def steps(
    rows: Sequence[HistoryRecord], queue: str, offset: int, sees: Visibility, place: Place, budget: ReadBudget
) -> tuple[list[MessageStep], Place | None]:
    """Returns what happened to a message, oldest first, up to what settled it, and where the search goes on;
    None: it has ended. Without a queue id, it is one of the last queue of this name that the history has.
    """
    if not place.queue_id:
        found_place = _last_of(rows, queue, sees, place, budget)
        if found_place is None or not found_place.queue_id:
            return [], found_place
        place = found_place
    found: list[MessageStep] = []
    queue_id, last = place.queue_id, place.sequence
    for row in rows[bisect_right(rows, last, key=attrgetter("last")) :]:
        if budget.enough:
            return found, Place(queue_id, last)
        budget.spend(ROW_BYTES)
        for commit in _readable(row, b'"%d":' % queue_id, budget.spend):
            if commit.sequence <= place.sequence or commit.queues.get(queue_id) != (sees.vhost, queue):
                continue
            of_commit, settles = _steps_of(commit, queue_id, offset, sees)
            found += of_commit
            if settles:
                return found, None
        last = row.last
    return found, None


def _steps_of(
    commit: PastCommit, queue_id: int, offset: int, sees: Visibility
) -> tuple[list[MessageStep], bool]:
    """Returns the steps of one commit, and whether it settled the message."""
    found, settles = [], False
    for effect in commit.effects:
        if effect.queue == queue_id and effect.may_concern(offset):
            info = sees.view(commit)
            if info is None or sees.effect(commit, effect) is None:
                continue
            found.append(_step(info, commit, effect, sees))
            settles = settles or (effect.exact and effect.kind != _STAYS and effect.kind not in _BEGINS)
    return found, settles


def _last_of(
    rows: Sequence[HistoryRecord], queue: str, sees: Visibility, place: Place, budget: ReadBudget
) -> Place | None:
    """Returns the place at the beginning of the history of the last queue of this name, or where the search
    for it goes on; None: there is none.
    """
    end = bisect_left(rows, place.sequence, key=attrgetter("last")) if place.sequence else len(rows)
    mark = json.dumps(queue).encode()
    for row in reversed(rows[:end]):
        if budget.enough:
            return Place(0, row.last + 1)
        budget.spend(ROW_BYTES)
        ids = [
            queue_id
            for commit in _readable(row, mark, budget.spend)
            if commit.committed_at > sees.hidden.get(sees.vhost, 0)
            for queue_id, (vhost, name) in commit.queues.items()
            if (vhost, name) == (sees.vhost, queue)
        ]
        if ids:
            return Place(max(ids))
    return None


def _step(past: TransactionInfo, commit: PastCommit, effect: Effect, sees: Visibility) -> MessageStep:
    gone_to = tuple(
        info
        for other in commit.effects
        if other.source == effect.queue and effect.kind not in _BEGINS
        if (info := sees.effect(commit, other)) is not None
    )
    return MessageStep(
        sequence=past.sequence,
        committed_at_us=past.committed_at_us,
        effect=effect.kind,
        certain=effect.exact,
        listener=past.listener,
        user=past.user,
        client=past.client,
        app_id=past.app_id,
        batch_id=past.batch_id,
        to=gone_to,
    )
