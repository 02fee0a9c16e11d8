"""What the history answers: a transaction, the last ones, and the life of a message, for one caller.

Pure: it reads rows, which do not change, so nothing is locked meanwhile.
Not here: the rows (``rows.py``), tables of a micro-batch (its ledger has them).
Invariant: a caller learns of a queue only what ``Sees.queue`` permits, and about others' connections, apps
and names of transactions only if it looks at all. What it may not see is left out, and a transaction of which
nothing is left is not there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from broker_core.admin import EffectInfo, MessageStep, TransactionInfo
from broker_core.broker.history.rows import Effect, PastCommit, commits
from broker_core.broker.state.change import KINDS, PUBLISHED, RETURNED
from broker_core.broker.state.records import HistoryRecord

_BEGINS = (KINDS[PUBLISHED], "dead_lettered")
_STAYS = KINDS[RETURNED]


@dataclass(frozen=True, slots=True)
class Sees:
    """What a caller sees of a virtual host. ``looks``: all of it. ``hidden``: up to these times, by virtual
    host, it was another one of this name.
    """

    vhost: str
    looks: bool
    user: str
    queue: Callable[[str], bool]
    app: Callable[[str], bool]
    hidden: Mapping[str, int]

    def shown(self, commit: PastCommit) -> TransactionInfo | None:
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
            door=who.door if own else "",
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


def find(rows: Sequence[HistoryRecord], sequence: int, sees: Sees) -> TransactionInfo | None:
    """Returns the transaction with this number. Raises ValueError for a row that cannot be read."""
    at = bisect_left(rows, sequence, key=attrgetter("last"))
    if at == len(rows):
        return None
    for commit in commits(rows[at]):
        if commit.sequence == sequence:
            return sees.shown(commit)
    return None


def latest(rows: Sequence[HistoryRecord], sees: Sees, limit: int) -> Iterator[TransactionInfo]:
    """Yields the last transactions, the newest first."""
    for row in reversed(rows):
        for commit in reversed(list(commits(row))):
            if limit <= 0:
                return
            shown = sees.shown(commit)
            if shown is not None:
                limit -= 1
                yield shown


def steps(
    rows: Sequence[HistoryRecord], queue: str, queue_id: int, offset: int, sees: Sees
) -> list[MessageStep]:
    """Returns what happened to a message, oldest first, up to what settled it. ``queue_id`` 0: of the last
    queue of this name that the history has.
    """
    if not queue_id:
        queue_id = _last_of(rows, queue, sees)
    found: list[MessageStep] = []
    settled = not queue_id
    for row in rows:
        if settled:
            break
        for commit in commits(row, b'"%d":' % queue_id):
            for effect in commit.effects:
                if effect.queue == queue_id and effect.may_concern(offset):
                    shown = sees.shown(commit)
                    if shown is None or sees.effect(commit, effect) is None:
                        continue
                    found.append(_step(shown, commit, effect, sees))
                    settled = settled or (
                        effect.exact and effect.kind != _STAYS and effect.kind not in _BEGINS
                    )
            if settled:
                break
    return found


def _last_of(rows: Sequence[HistoryRecord], queue: str, sees: Sees) -> int:
    for row in reversed(rows):
        ids = [
            queue_id
            for commit in commits(row)
            if commit.committed_at > sees.hidden.get(sees.vhost, 0)
            for queue_id, (vhost, name) in commit.queues.items()
            if (vhost, name) == (sees.vhost, queue)
        ]
        if ids:
            return max(ids)
    return 0


def _step(shown: TransactionInfo, commit: PastCommit, effect: Effect, sees: Sees) -> MessageStep:
    gone_to = tuple(
        info
        for other in commit.effects
        if other.source == effect.queue and effect.kind not in _BEGINS
        if (info := sees.effect(commit, other)) is not None
    )
    return MessageStep(
        sequence=shown.sequence,
        committed_at_us=shown.committed_at_us,
        effect=effect.kind,
        certain=effect.exact,
        door=shown.door,
        user=shown.user,
        client=shown.client,
        app_id=shown.app_id,
        batch_id=shown.batch_id,
        to=gone_to,
    )
