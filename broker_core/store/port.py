"""The port between the broker and what keeps it: two stores behind it, one contract suite over both.

What the port does not promise: it knows nothing of queues or transactions, checks no rule of the domain, and
never retries. After a method raised DiskFull, StoreFailed or OSError from ``append``, ``sync`` or ``commit``,
nothing more can be written through the same store: open it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from broker_core.broker.change import Change, InboxRow
from broker_core.broker.records import Record
from broker_core.message import Location as Location


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block that the catalog names. ``rows`` never changes and a row keeps its number for the block's whole
    life.
    """

    block_id: int
    rows: int
    size_bytes: int  # of the bodies
    checksum: int  # xxh3_64 of its encapsulated IPC message


class BlockUsage(NamedTuple):
    """A block that lies in a segment."""

    block_id: int
    length: int  # in the file
    size_bytes: int  # of the bodies
    named: bool  # it exists, and there; not only appended


class SegmentUsage(NamedTuple):
    """A segment file and what of it is needed."""

    number: int
    kind: str  # message, merged, branch
    size_bytes: int
    open: bool
    blocks: list[BlockUsage]


@dataclass(slots=True)
class StoreImage:
    """All that was durable when the store was opened."""

    records: list[Record] = field(default_factory=list)
    inbox: list[InboxRow] = field(default_factory=list)  # in (block_id, row) order
    blocks: list[BlockInfo] = field(default_factory=list)
    sequence: int = 0  # last commit sequence number taken
    clean: bool = True  # the last owner closed the store


class Store(Protocol):
    def load(self) -> StoreImage:
        """What is durable. Called once, before anything else."""

    def new_block_id(self) -> int:
        """A block id that nothing durable uses. Thread-safe."""

    def append(self, block: pa.RecordBatch) -> BlockInfo:
        """Write ``block`` to a segment. It is durable after ``sync`` and exists once a commit names it.
        Thread-safe.

        Any schema: blocks of MESSAGE_SCHEMA share segments, any other schema gets segments of its own.
        """

    def sync(self) -> None:
        """Make all appended blocks durable (fdatasync). ``commit`` does it as well."""

    def encode(self, change: Change) -> None:
        """Work out what ``change`` writes, so that ``commit`` need not, and cannot fail at it. Pure but for
        ``change.encoded``.

        Raises OptionError for a value that cannot be stored and read back as it is: a wrong type, a text that
        is no UTF-8, an integer beyond 64 bits. Nothing of such a change may be committed. Nothing may be
        added to a change once it is encoded.
        """

    def commit(self, changes: Sequence[Change]) -> None:
        """Make all of ``changes`` durable, together or not at all, in their order. Encodes what is not
        encoded. One caller at a time.

        1. sync the segments that hold a block named here; 2. one SQLite transaction; it is the commit point.
        """

    def seal(self, block_id: int) -> None:
        """Write the inbox rows of an open block to a segment as MERGED_SCHEMA and sync it.

        It stays readable from the inbox until a commit's ``seals`` names it. Thread-safe beside ``commit``.
        """

    def rewrite(self, block_id: int, live: bytes | None) -> None:
        """Compaction: write the block again with empty bodies in the rows whose bit in ``live`` is 0; rows
        keep their numbers.

        ``live`` None: as it is. Raises CorruptSegment, DataLoss, with nothing written.

        Readers see the old bytes until a commit's ``moves`` names the block. Thread-safe beside ``commit``.
        """

    def segment_usage(self) -> list[SegmentUsage]:
        """Every segment file. Thread-safe."""

    def roll(self, number: int) -> None:
        """Close an open segment, durably: the next block goes to another one. Thread-safe."""

    def read(self, block_id: int) -> pa.RecordBatch:
        """The whole block, its checksum verified before Arrow parses a byte. Thread-safe.

        An inbox block is answered as MERGED_SCHEMA. One that is appended and not named yet can be read too,
        until the store is closed. Raises CorruptSegment; DataLoss where the catalog does not name the block.
        """

    def locate(self, block_id: int) -> Location | None:
        """The place of a block for a reader on this host; None for an inbox block or a store without
        files.
        """

    def close(self, *, clean: bool = True) -> None:
        """Release files and the lock. ``clean`` False leaves everything as a crash would."""
