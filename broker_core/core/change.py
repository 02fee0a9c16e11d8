"""A change: everything that one commit makes durable, as plain data. The domain fills it, the store writes
all of it or nothing. Beside it: what it did to the entries of queues (:class:`Effects`), and the numbers that
commits are given (:class:`Numbers`).

Most numbers are given without a write of their own: for an exclusive queue, a transient message, a row that
contains its number. So a mark ahead of the last given number is durable. The commit that passes the mark
moves it, before any of its works is answered. The commit sequence number of a transaction is odd, and of
messages published or acknowledged outside a transaction even.

Not here: how effects are kept (``history/``); block ids and segment numbers (``store/``), the sequence of an
app's batches (``micro_batch/ledger.py``), delivery tags (``channel.py``).
Invariant: the journal is in the order of events, and the last entry of a key holds after the commit.
Invariant: the size of effects is bounded, whatever the commit does: ranges of one kind and queue up to
``RANGES``, then their number, the first and the last; queues up to ``QUEUES``, then none.
Invariant: no number above the durable mark was ever returned or written, and after a restart numbers start
above it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from broker_core.core.ids import NO_SEQUENCE, BlockId, CommitSequence, QueueId
from broker_core.core.records import (
    HistoryRecord,
    LedgerRecord,
    PartRecord,
    PreparedRecord,
    QueueRecord,
    Record,
    ReleaseRecord,
    RunRecord,
    VhostRecord,
)
from broker_core.core.undo import Undo

AHEAD = 100_000  # how far the mark is moved at once

RANGES = 32  # of one kind and queue
QUEUES = 128  # of one commit, counted once for each kind

PUBLISHED, DEAD_LETTERED, ACKNOWLEDGED, REJECTED, RETURNED, EXPIRED = 0, 1, 2, 3, 4, 5
OVERFLOWED, DELIVERY_LIMIT, PURGED, CONSUMED, DELETED = 6, 7, 8, 9, 10
KINDS = (
    "published", "dead_lettered", "acknowledged", "rejected", "returned", "expired",
    "overflowed", "delivery_limit", "purged", "consumed", "deleted",
)  # fmt: skip
REASONS = {"rejected": REJECTED, "expired": EXPIRED, "maxlen": OVERFLOWED, "delivery_limit": DELIVERY_LIMIT}


class InboxRow(NamedTuple):
    """A message of a small commit, for the open block. (block_id, row) is its permanent place there."""

    block_id: BlockId
    row: int
    sequence: CommitSequence
    committed_at: int
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    routes: bytes  # pairs of little-endian int64: queue_id, offset


class HistoryBeside(NamedTuple):
    """The history of a group commit, as it is beside the last of its rows in the inbox. ``messages``: of the
    row of the catalog that it is a part of, at least the last of the group.
    """

    block_id: BlockId
    text: bytes
    messages: list[InboxRow]


class Damaged(NamedTuple):
    """A row of the history of commits that cannot be read. ``number``: of its record, 0 for one that is
    beside messages.
    """

    number: int
    why: str


ROUTE = struct.Struct("<qq")


def routes_of(row: InboxRow) -> Iterator[tuple[QueueId, int]]:
    """Returns queue ids and offsets. Bytes after the last whole pair are left out."""
    return ROUTE.iter_unpack(row.routes[: len(row.routes) // ROUTE.size * ROUTE.size])


ANY = None  # in the key of a ``Drop``


class Drop(NamedTuple):
    """The record of class ``kind`` with this key is removed; where the key has ``ANY``, all that have the
    rest of it.
    """

    kind: type[Record]
    key: tuple[object, ...]


class Named(Protocol):
    """A queue, as far as the history shows it."""

    @property
    def queue_id(self) -> QueueId: ...

    @property
    def name(self) -> str: ...

    @property
    def vhost(self) -> str: ...

    @property
    def replies(self) -> bool:
        """Whether it is of direct replies, and not shown."""


class Author(NamedTuple):
    """Who commits. ``listener``: amqp, flight, process, spark, or "" for the broker itself. ``client``: what
    the client calls itself. ``address``: of its connection.
    """

    listener: str = ""
    vhost: str = ""
    user: str = ""
    client: str = ""
    address: str = ""


BROKER = Author()
Key = tuple[int, Named, Named | None]  # kind, queue, and the queue where a dead letter comes from


class Effects(dict[Key, list[int]]):
    """Per kind and queue: how many entries, then the starts and ends of their ranges in the order of the
    commit. If the ranges hold more entries than that number, they are only the first and the last.

    ``letters``: dead letters are being published, of ``source`` if that is one queue. ``xid``: the name of a
    named transaction. ``batch``: app, query, batch and number in the ledger of a micro-batch. ``left_out``:
    entries of more queues than are kept.
    """

    # of the class, because each work makes one of these and few set more than ``who``
    who = BROKER
    letters = False
    source: Named | None = None
    xid = ""
    batch: tuple[str, str, int, int] | None = None
    left_out = 0
    is_plain = True  # without ``xid``, ``batch`` and ``left_out``

    def note(self, kind: int, queue: Named, start: int, end: int, count: int = -1) -> None:
        """Adds [start, end) of a queue; ``count`` of its entries, if not all."""
        if count < 0:
            count = end - start
        key: Key = (kind, queue, None)
        if self.letters and kind == PUBLISHED:
            key = (DEAD_LETTERED, queue, self.source)
        found = self.get(key)
        if found is None:
            if len(self) < QUEUES:
                self[key] = [count, start, end]
            else:
                self.left_out += count
                self.is_plain = False
            return
        found[0] += count
        if found[-1] == start:
            found[-1] = end
        elif len(found) <= 2 * RANGES:
            found += (start, end)
        else:
            found[1:] = [min(start, *found[1::2]), max(end, *found[2::2])]


@dataclass(slots=True, init=False)
class Change:
    """What one commit writes. ``sequence`` NO_SEQUENCE: it is only bookkeeping.

    ``journal``: records that are put, and drops, in order. An appended block that nothing will name goes to
    ``forgets``. ``encoded`` belongs to the store (``Store.encode``). ``effects``: what the history keeps of
    it (``history/``). ``history``: of the group, to be kept beside its last row while that is in the inbox;
    in full, and in fewer bytes (b"" for none) for a store that keeps all rows of the group together.
    ``repeats``: queues take its messages even if they have seen them.
    """

    sequence: CommitSequence
    rows: list[InboxRow]
    journal: list[Record | Drop]
    names: list[BlockId]  # appended blocks that exist from this commit on
    seals: list[BlockId]  # open blocks that move from the inbox into their segment
    moves: list[BlockId]  # blocks that a rewrite has put into another segment
    forgets: list[BlockId]  # blocks that no queue needs
    tidy: bool  # unneeded segments are removed even if there is nothing to write
    encoded: object
    effects: Effects
    history: tuple[bytes, bytes] | None
    repeats: bool

    def __init__(  # written by hand: each work makes one, in half the time of the generated one
        self,
        sequence: CommitSequence = NO_SEQUENCE,
        rows: list[InboxRow] | None = None,
        journal: list[Record | Drop] | None = None,
        names: list[BlockId] | None = None,
        seals: list[BlockId] | None = None,
        moves: list[BlockId] | None = None,
        forgets: list[BlockId] | None = None,
        tidy: bool = False,
    ) -> None:
        self.sequence = sequence
        self.rows = [] if rows is None else rows
        self.journal = [] if journal is None else journal
        self.names = [] if names is None else names
        self.seals = [] if seals is None else seals
        self.moves = [] if moves is None else moves
        self.forgets = [] if forgets is None else forgets
        self.tidy = tidy
        self.encoded = None
        self.effects = Effects()
        self.history = None
        self.repeats = False

    def __bool__(self) -> bool:
        """Returns whether there is anything to write."""
        return bool(
            self.rows or self.journal or self.names or self.forgets or self.seals or self.moves or self.tidy
        )

    def put(self, record: Record) -> None:
        """Writes ``record`` in place of the one with the same key."""
        self.journal.append(record)

    def drop(self, kind: type[Record], key: tuple[object, ...]) -> None:
        """Removes a record, if it exists; with ``ANY`` in the key, all records with the rest of it."""
        self.journal.append(Drop(kind, key))

    @property
    def drops_duplicates(self) -> bool:
        """Returns whether its messages come from outside, and may have come before."""
        return not (self.repeats or self.effects.letters)

    @property
    def puts(self) -> tuple[Record, ...]:
        """Returns the records that were put, even if they were dropped later."""
        return tuple(entry for entry in self.journal if not isinstance(entry, Drop))

    @property
    def drops(self) -> tuple[Drop, ...]:
        return tuple(entry for entry in self.journal if isinstance(entry, Drop))


class Numbers:
    """``sequence`` is the last number given."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.sequence = NO_SEQUENCE
        self._mark = NO_SEQUENCE

    def restore(self, mark: CommitSequence, records: Iterable[Record]) -> None:
        """Restores the mark while loading; a salvaged catalog has records that name numbers above it."""
        self._mark = mark
        last = max((number for record in records for number in _named_by(record)), default=0)
        self.sequence = CommitSequence(max(mark, last))

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
    elif isinstance(record, VhostRecord):
        yield record.vhost_id
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
