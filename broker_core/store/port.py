"""The port between the broker and its storage: two stores implement it, and share one contract suite.

Not in the port: queues or transactions, rules of the domain, retries. After ``append``, ``sync`` or
``commit`` raised DiskFull, StoreFailed or OSError, nothing more can be written through the same store: open
it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from broker_core.core.change import Change, Damaged, HistoryBeside, InboxRow
from broker_core.core.ids import NO_SEQUENCE, BlockId, CommitSequence
from broker_core.core.records import Record
from broker_core.message.message import Location as Location


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block that the catalog names. ``rows`` never changes, and a row keeps its number while the block
    exists.
    """

    block_id: BlockId
    rows: int
    size_bytes: int  # of the bodies
    checksum: int  # xxh3_64 of its encapsulated IPC message


class BlockUsage(NamedTuple):
    """A block in a segment."""

    block_id: BlockId
    length: int  # in the file
    size_bytes: int  # of the bodies
    in_catalog: bool  # it exists, at this place; not only appended


class SegmentUsage(NamedTuple):
    """A segment file, and the part of it that is needed."""

    number: int
    kind: str  # message, merged, branch
    size_bytes: int
    open: bool
    blocks: list[BlockUsage]


@dataclass(slots=True)
class StoreImage:
    """Everything that was durable when the store was opened."""

    records: list[Record] = field(default_factory=list)
    inbox: list[InboxRow] = field(default_factory=list)  # in (block_id, row) order
    blocks: list[BlockInfo] = field(default_factory=list)
    sequence: CommitSequence = NO_SEQUENCE  # last commit sequence number used
    clean: bool = True  # the last owner closed the store
    history: list[HistoryBeside] = field(default_factory=list)  # in the order of the inbox
    damaged_history: list[Damaged] = field(default_factory=list)  # its records are not among ``records``


class Store(Protocol):
    def load(self) -> StoreImage:
        """Returns what is durable. Called once, before anything else."""

    def new_block_id(self) -> BlockId:
        """Returns a block id that nothing durable uses. Thread-safe."""

    def append(self, block: pa.RecordBatch) -> BlockInfo:
        """Writes ``block`` to a segment. It is durable after ``sync`` and exists once a commit names it.
        Thread-safe.

        Any schema is allowed: blocks of MESSAGE_SCHEMA share segments, any other schema gets its own.
        """

    def sync(self) -> None:
        """Makes all appended blocks durable (fdatasync). ``commit`` does it as well."""

    def encode(self, change: Change) -> None:
        """Computes what ``change`` writes, so that ``commit`` need not, and cannot fail in it. Pure except
        for ``change.encoded``.

        Raises OptionError for a value that cannot be stored and read back unchanged: a wrong type, text that
        is not UTF-8, an integer beyond 64 bits. Nothing of such a change may be committed. Nothing may be
        added to a change after it is encoded.
        """

    def commit(self, changes: Sequence[Change]) -> None:
        """Makes all ``changes`` durable, together or not at all, in their order. Encodes those not yet
        encoded. One caller at a time.

        1. sync the segments that hold a block named here; 2. one SQLite transaction; it is the commit point.
        """

    def seal(self, block_id: BlockId) -> None:
        """Writes the inbox rows of an open block to a segment as MERGED_SCHEMA and syncs it.

        It is readable from the inbox until a commit's ``seals`` names it. Thread-safe beside ``commit``.
        """

    def rewrite(self, block_id: BlockId, live: bytes | None, block: pa.RecordBatch | None = None) -> None:
        """Compaction: writes the block again with empty bodies in the rows whose bit in ``live`` is 0; rows
        keep their numbers.

        ``live`` None: unchanged. ``block``: what is written in its place. Raises CorruptSegment, DataLoss,
        with nothing written.

        Readers see the old bytes until a commit's ``moves`` names the block. Thread-safe beside ``commit``.
        """

    def segment_usage(self) -> list[SegmentUsage]:
        """Returns every segment file. Thread-safe."""

    def roll(self, number: int) -> None:
        """Closes an open segment, durably: the next block goes to another one. Thread-safe."""

    def read(self, block_id: BlockId) -> pa.RecordBatch:
        """Returns the whole block, its checksum verified before Arrow parses a byte. Thread-safe.

        An inbox block is returned as MERGED_SCHEMA. One that is appended and not named yet can be read too,
        until the store is closed. Raises CorruptSegment; DataLoss if the catalog does not name the block.
        """

    def peek(self, block_id: BlockId) -> pa.RecordBatch | None:
        """Returns a block if it is in memory; reads nothing from the disk. None also for an unknown block.
        Thread-safe.
        """

    def locate(self, block_id: BlockId) -> Location | None:
        """Returns the place of a block for a reader on this host; None for an inbox block or a store without
        files.
        """

    def close(self, *, clean: bool = True) -> None:
        """Releases files and the lock. ``clean`` False leaves everything as after a crash."""
