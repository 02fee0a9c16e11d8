"""A change: all that one commit makes durable, as plain data. The domain fills it, the store writes it, whole or not at all.

Invariant: the journal is in the order in which things happened, and the last entry of a key is what holds after the commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker_core.broker.records import Record


class InboxRow(NamedTuple):
    """A message of a small commit, on its way into the open batch. (batch_id, row) is its place there for good."""

    batch_id: int
    row: int
    sequence: int
    committed_at: int
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    routes: bytes  # pairs of little-endian int64: queue_id, offset


class Drop(NamedTuple):
    """The record of class ``kind`` with this key is gone."""

    kind: type[Record]
    key: tuple[Any, ...]


@dataclass(slots=True)
class Change:
    """What one commit writes. ``sequence`` 0: no commit sequence number is taken (bookkeeping only).

    ``journal``: records that are put, and drops, in the order in which they were made. An appended batch that nothing will name goes to
    ``forgets``. ``encoded`` belongs to the store (``Store.encode``).
    """

    sequence: int = 0
    rows: list[InboxRow] = field(default_factory=list)
    journal: list[Record | Drop] = field(default_factory=list)
    names: list[int] = field(default_factory=list)  # appended batches that exist from this commit on
    seals: list[int] = field(default_factory=list)  # open batches that move from the inbox into their segment
    moves: list[int] = field(default_factory=list)  # batches that a rewrite has put into another segment
    forgets: list[int] = field(default_factory=list)  # batches that no queue needs any more
    tidy: bool = False  # segments that nothing needs any more go, though there may be nothing to write
    encoded: object = None

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.rows or self.journal or self.names or self.forgets or self.seals or self.moves or self.tidy)

    def put(self, record: Record) -> None:
        """Write ``record`` in place of the one with the same key."""
        self.journal.append(record)

    def drop(self, kind: type[Record], key: tuple[Any, ...]) -> None:
        """Remove a record; one that is not there is no error."""
        self.journal.append(Drop(kind, key))

    @property
    def puts(self) -> tuple[Record, ...]:
        """The records that were put, whether or not they were dropped later."""
        return tuple(entry for entry in self.journal if not isinstance(entry, Drop))

    @property
    def drops(self) -> tuple[Drop, ...]:
        return tuple(entry for entry in self.journal if isinstance(entry, Drop))
