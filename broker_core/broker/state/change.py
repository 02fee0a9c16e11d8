"""A change: everything that one commit makes durable, as plain data. The domain fills it, the store writes
all of it or nothing.

Invariant: the journal is in the order of events, and the last entry of a key holds after the commit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from broker_core.broker.state.effects import Effects
from broker_core.broker.state.records import Record
from broker_core.ids import NO_SEQUENCE, BlockId, CommitSequence, QueueId


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


@dataclass(slots=True, init=False)
class Change:
    """What one commit writes. ``sequence`` NO_SEQUENCE: it is only bookkeeping.

    ``journal``: records that are put, and drops, in order. An appended block that nothing will name goes to
    ``forgets``. ``encoded`` belongs to the store (``Store.encode``). ``effects``: what the history keeps of
    it (``history/``). ``history``: of the group, to be kept beside its last row while that is in the inbox.
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
    history: bytes

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
        self.history = b""

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
    def puts(self) -> tuple[Record, ...]:
        """Returns the records that were put, even if they were dropped later."""
        return tuple(entry for entry in self.journal if not isinstance(entry, Drop))

    @property
    def drops(self) -> tuple[Drop, ...]:
        return tuple(entry for entry in self.journal if isinstance(entry, Drop))
