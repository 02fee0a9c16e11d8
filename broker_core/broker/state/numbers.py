"""Numbers that are given once: commit sequence numbers, and the queue ids that are taken from them.

Not here: block ids and segment numbers (``store/``), the sequence of an app's batches
(``micro_batch/ledger.py``), delivery tags (``channel.py``). Most numbers are given without a write of their
own: for an exclusive queue, a transient message, a row that contains its number. So a mark ahead of the last
given number is durable. The commit that passes the mark moves it, before any of its works is answered. The
commit sequence number of a transaction is odd, and of messages published or acknowledged outside a
transaction even.
Invariant: no number above the durable mark was ever returned or written, and after a restart numbers start
above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from broker_core.broker.state.change import Change
from broker_core.broker.state.records import (
    HistoryRecord,
    LedgerRecord,
    PartRecord,
    PreparedRecord,
    QueueRecord,
    Record,
    ReleaseRecord,
    RunRecord,
)
from broker_core.broker.state.undo import Undo
from broker_core.ids import NO_SEQUENCE, CommitSequence

AHEAD = 100_000  # how far the mark is moved at once


class Numbers:
    """``sequence`` is the last number given."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.sequence = NO_SEQUENCE
        self._mark = NO_SEQUENCE

    def restore(self, mark: CommitSequence, records: Iterable[Record]) -> None:
        """Restores the mark while loading. Records of older versions may name numbers above it."""
        self._mark = mark
        named = max((number for record in records for number in _named_by(record)), default=0)
        self.sequence = CommitSequence(max(mark, named))

    def next_sequence(self, *, transaction: bool = False) -> CommitSequence:
        """Returns the next commit sequence number, odd for a transaction, for the caller's change."""
        last = self.sequence
        self._undo.append((setattr, self, "sequence", last))
        self.sequence = following = CommitSequence((last + 1) | 1 if transaction else (last + 2) & ~1)
        return following

    def keep(self) -> Change | None:
        """Returns what must be written with the works of a commit before they are answered, or None."""
        if self.sequence <= self._mark:
            return None
        self._mark = CommitSequence(self.sequence + AHEAD)
        return Change(sequence=self._mark)


def _named_by(record: Record) -> Iterator[int]:
    if isinstance(record, QueueRecord):
        yield record.queue_id
    elif isinstance(record, RunRecord):
        yield record.sequence
    elif isinstance(record, (LedgerRecord, ReleaseRecord)):
        yield record.commit_sequence
    elif isinstance(record, HistoryRecord):
        yield record.last
    elif isinstance(record, PartRecord):
        yield from map(int, record.routes)
    elif isinstance(record, PreparedRecord):
        yield from (queue_id for queue_id, _, _ in record.settles)
        for route in record.routes:
            yield from map(int, route["queues"]) if isinstance(route, dict) else route
