"""The history of commits for callers: the broker's rows, the ledgers of its apps, and what a queue has now.

Not here: what a caller may see (``broker/history/lookup.py``), the listeners.
Invariant: reading the rows is not under the lock. What is told is durable if the reader ``waits``: its rows
are taken by a work, which comes after the commits before it. Otherwise the last ones may be about to be. A
call reads a bounded part of the history, and says where the next one goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from broker_core.admin import PAGE, HistoryPage, LedgerInfo, MessageLife, MessageStep, TransactionInfo
from broker_core.broker.broker import BrokerState
from broker_core.broker.history.lookup import Place, ReadBudget, Visibility, find, latest, steps
from broker_core.broker.queue import Queue
from broker_core.core.errors import NotAllowed, OptionError, QueueNotFound, StoreError, UnknownTransaction
from broker_core.core.records import HistoryRecord, LedgerRecord
from broker_core.micro_batch.ledger import MicroBatch
from broker_core.micro_batch.ledger_info import ledger_info, tables
from broker_core.node.node import Node
from broker_core.node.vhost_engines import VhostEngines

T = TypeVar("T")
_PLACE = re.compile(r"[0-9]{1,18}\.[0-9]{1,18}\.[01]", re.ASCII)


class HistoryReader:
    """``waits``: for the commits that are under way, as long as the disk takes."""

    def __init__(self, node: Node, engines: VhostEngines, *, waits: bool = True) -> None:
        self._node = node
        self._engines = engines
        self._waits = waits

    def transaction(self, sequence: int, sees: Visibility) -> TransactionInfo:
        """Returns what a commit did. Raises UnknownTransaction."""
        found = find(self._rows(), sequence, sees)
        if found is None:
            raise UnknownTransaction(
                f"no transaction {sequence} in the history of virtual host '{sees.vhost}'",
                "it may be older than the history (--history-bytes, --history-hours), have written nothing, "
                "or concern no queue that you may see",
            )
        return self._with_tables([found])[0]

    def ledger(self, sees: Visibility, app_id: str, sequence: int, limit: int) -> list[LedgerInfo]:
        """Returns decided batches that are kept and that come after this one, by app and sequence. Raises
        NotAllowed: there is no such virtual host.
        """
        ledger = self._engines.of(sees.vhost).batches.ledger

        def page(_state: BrokerState) -> list[LedgerRecord]:
            apps = [app for app in sorted(ledger.apps()) if app >= app_id and (sees.looks or sees.app(app))]
            after = (
                entry
                for app in apps
                for entry in ledger.entries(app)
                if (entry.app_id, entry.sequence) > (app_id, sequence)
            )
            return list(islice(after, max(0, min(limit, PAGE))))

        return [ledger_info(entry, entry.commit_sequence) for entry in self._look(page)]

    def page(self, sees: Visibility, limit: int = PAGE, before: int = 0) -> HistoryPage:
        """Returns the last transactions below a number, the newest first; 0: of all."""
        found, more = latest(self._rows(), sees, min(limit, PAGE), before, ReadBudget())
        return HistoryPage(tuple(self._with_tables(found)), more)

    def message(self, queue: str, offset: int, sees: Visibility, at: str = "") -> MessageLife:
        """Returns the life of a message, as far as one call looks. ``at``: where the call before has ended.
        Raises QueueNotFound: even if the caller may not see the queue.
        """
        if not (sees.looks or sees.queue(queue)):
            raise _unknown(queue, sees)
        rows, found = self._look(lambda state: _rows_and_queue(state, queue, sees.vhost))
        place, seen = _place(at)
        published = self._published(found, offset) if found is not None and not at else []
        if found is not None and not at:
            place = Place(found.queue_id, published[0].sequence - 1 if published else 0)
        life, more = steps(rows, queue, offset, sees, place, ReadBudget())
        if published and not (life and life[0].effect in ("published", "dead_lettered")):
            life = [*published, *life]
        with self._node.look:
            state = "unknown" if found is None or found.deleted else _state(found, offset)
        if state == "unknown" and more is None and not (life or seen):
            raise _unknown(queue, sees) if found is None else _no_message(found, offset)
        goes_on = "" if more is None else f"{more.queue_id}.{more.sequence}.{int(seen or bool(life))}"
        return MessageLife(queue, offset, state, tuple(life), rows[0].ended_at if rows else 0, goes_on)

    def _rows(self) -> list[HistoryRecord]:
        return self._look(lambda state: state.transactions.history.rows())

    def _look(self, take: Callable[[BrokerState], T]) -> T:
        if self._waits:
            return self._node.run(lambda state, _change, _now: take(state))
        with self._node.look as state:
            return take(state)

    def _published(self, queue: Queue, offset: int) -> list[MessageStep]:
        """Returns what the message itself says about its commit, if it is still stored."""

        def publish_step(state: BrokerState) -> list[MessageStep]:
            if queue.deleted or offset >= queue.log.visible_end:
                return []
            row = state.messages.fetch(queue, offset)
            return [MessageStep(row.sequence, row.committed_at, "published", True)]

        try:
            return self._node.committer.read(publish_step)
        except StoreError:
            return []

    def _with_tables(self, found: Iterable[TransactionInfo]) -> list[TransactionInfo]:
        """Adds the tables of micro-batches, while their ledger has the entry."""
        infos = list(found)
        try:
            ledgers = {
                vhost: self._engines.of(vhost).batches.ledger
                for vhost in {each.vhost for each in infos if each.app_id}
            }
        except NotAllowed:
            return infos
        with self._node.look:  # an entry does not change, another one takes its place
            entries = [
                ledgers[each.vhost].entry(MicroBatch(each.app_id, each.query_id, each.batch_id))
                if each.app_id
                else None
                for each in infos
            ]
        return [
            each
            if entry is None or entry.commit_sequence != each.sequence
            else replace(each, tables=tuple(tables(entry)))
            for each, entry in zip(infos, entries, strict=True)
        ]


def _place(at: str) -> tuple[Place, bool]:
    """Returns where a search goes on, and whether it has found something. Raises OptionError."""
    if not at:
        return Place(), False
    if not _PLACE.fullmatch(at):
        raise OptionError(f"{at[:40]!r} is no place in the history", "give the one of the call before")
    queue_id, sequence, seen = map(int, at.split("."))
    return Place(queue_id, sequence), bool(seen)


def _rows_and_queue(state: BrokerState, queue: str, vhost: str) -> tuple[list[HistoryRecord], Queue | None]:
    found = state.of(vhost).topology.queues.get(queue)
    return state.transactions.history.rows(), None if found is None or found.replies else found


def _state(queue: Queue, offset: int) -> str:
    """Called under the lock."""
    if offset >= queue.log.visible_end:
        return "unknown"
    if queue.progress.is_settled(offset):
        return "settled"
    if offset in queue.ready.unacked:
        return "held"
    return "claimed" if queue.owner and queue.progress.claimed.contains(offset) else "ready"


def _no_message(queue: Queue, offset: int) -> OptionError:
    return OptionError(
        f"queue '{queue.name}' has no message at offset {offset}",
        f"its next message gets offset {queue.log.visible_end}",
    )


def _unknown(queue: str, sees: Visibility) -> QueueNotFound:
    return QueueNotFound(
        f"no queue '{queue}' in vhost '{sees.vhost}', and the history shows none of this name"
    )
