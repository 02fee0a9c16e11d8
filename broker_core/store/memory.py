"""MemoryStore: the port over plain dicts, for tests and for a broker that need not outlive its process.

It is not durable. Committed data is separate from data that is only appended or sealed, so ``reopened`` shows
the state after a crash.

Invariant: only ``commit`` changes ``content``, and only as a whole.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import xxhash

from broker_core.core import failpoint
from broker_core.core.change import Change, HistoryBeside, InboxRow
from broker_core.core.errors import DataLoss, StoreFailed
from broker_core.core.ids import NO_SEQUENCE, BlockId, CommitSequence
from broker_core.core.records import Record
from broker_core.store.codec import (
    Value,
    blank_bodies,
    body_bytes,
    decode,
    encode_change,
    is_covered,
    is_wide,
    merged,
    merged_block,
)
from broker_core.store.port import BlockInfo, Location, SegmentUsage, StoreImage

Rows = dict[tuple[Value, ...], tuple[Value, ...]]


@dataclass(slots=True)
class _Content:
    """All committed data."""

    records: dict[type[Record], Rows] = field(default_factory=dict)
    inbox: dict[BlockId, list[InboxRow]] = field(default_factory=dict)
    blocks: dict[BlockId, pa.RecordBatch] = field(default_factory=dict)
    history: list[HistoryBeside] = field(default_factory=list)
    sequence: CommitSequence = NO_SEQUENCE
    last_block_id: int = 0
    clean: bool = True

    def branch(self) -> _Content:
        return _Content(
            {cls: dict(rows) for cls, rows in self.records.items()},
            {block_id: list(rows) for block_id, rows in self.inbox.items()},
            dict(self.blocks),
            list(self.history),
            self.sequence,
            self.last_block_id,
            self.clean,
        )


class MemoryStore:
    """A :class:`broker_core.store.port.Store` whose data ends with its process."""

    def __init__(self) -> None:
        self.content = _Content()
        self.staged: dict[BlockId, pa.RecordBatch] = {}  # appended, not named yet
        # sealed or rewritten, not yet committed
        self._written: dict[BlockId, pa.RecordBatch] = {}
        self._last_block_id = 0
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._closed = False

    def reopened(self) -> MemoryStore:
        """Returns a new store with what this one had committed, as after a crash or a close."""
        other = MemoryStore()
        with self._lock:
            other.content = self.content.branch()
        other._last_block_id = other.content.last_block_id
        return other

    def load(self) -> StoreImage:
        content = self.content
        records = [decode(cls, row) for cls, rows in content.records.items() for row in rows.values()]
        inbox = [row for block_id in sorted(content.inbox) for row in content.inbox[block_id]]
        blocks = [_info(block_id, block) for block_id, block in sorted(content.blocks.items())]
        image = StoreImage(records, inbox, blocks, content.sequence, content.clean, list(content.history))
        content.clean = False
        return image

    def new_block_id(self) -> BlockId:
        with self._lock:
            self._last_block_id += 1
            return BlockId(self._last_block_id)

    def append(self, block: pa.RecordBatch) -> BlockInfo:
        self._check_writable()
        block_id = self.new_block_id()
        with self._lock:
            self.staged[block_id] = block
        failpoint.here("store.append.written")
        return _info(block_id, block)

    def sync(self) -> None:
        self._check_writable()

    def encode(self, change: Change) -> None:
        encode_change(change)

    def commit(self, changes: Sequence[Change]) -> None:
        self._check_writable()
        encoded = [encode_change(change) for change in changes]
        try:
            failpoint.here("store.commit.begin")  # 1.
            failpoint.here("store.commit.synced")  # 2. nothing to sync
            self._check(changes)
            records = merged(encoded)
            failpoint.here("store.commit.executed")  # 3. everything that can fail is done
            with self._lock:
                group = [row for change in changes for row in change.rows]
                for change in changes:
                    self._apply(change)
                    if change.history and group:
                        full, own = change.history
                        self.content.history.append(HistoryBeside(group[-1].block_id, own or full, group))
                for cls, rows in records.items():
                    table = self.content.records.setdefault(cls, {})
                    for key, values in rows.items():
                        if values is not None:
                            table[key] = values
                        elif is_wide(key):
                            for covered in [each for each in table if is_covered(key, each)]:
                                del table[covered]
                        else:
                            table.pop(key, None)
            failpoint.here("store.commit.committed")  # 4.
        except Exception as error:
            self._failure = error
            raise StoreFailed(f"the commit failed: {error}; open the store again") from error

    def _check(self, changes: Sequence[Change]) -> None:
        lengths: dict[BlockId, int] = {}
        for change in changes:
            for row in change.rows:
                block_id = row[0]
                expected = lengths.get(block_id)
                if expected is None:
                    expected = len(self.content.inbox.get(block_id, ()))
                if row[1] != expected:
                    raise ValueError(f"row {row[1]} of block {block_id} is not the next one, {expected}")
                lengths[block_id] = expected + 1
            for block_id in change.names:
                if block_id not in self.staged:
                    raise ValueError(f"block {block_id} was not appended")
            for block_ids in (change.seals, change.moves):
                for block_id in block_ids:
                    if block_id not in self._written:
                        raise ValueError(f"block {block_id} was neither sealed nor rewritten")

    def _apply(self, change: Change) -> None:
        content = self.content
        if change.sequence > content.sequence:
            content.sequence = change.sequence
        for row in change.rows:
            block_id, sequence = row[0], row[2]
            rows = content.inbox.get(block_id)
            if rows is None:
                rows = content.inbox[block_id] = []
            rows.append(row)
            if sequence > content.sequence:
                content.sequence = sequence
            if block_id > content.last_block_id:
                content.last_block_id = block_id
        for block_id in change.names:
            content.blocks[block_id] = self.staged.pop(block_id)
            content.last_block_id = max(content.last_block_id, block_id)
        for block_ids in (change.seals, change.moves):
            for block_id in block_ids:
                content.blocks[block_id] = self._written.pop(block_id)
                content.inbox.pop(block_id, None)
        if content.history and (gone := {*change.seals, *change.forgets}):
            content.history = [each for each in content.history if each.block_id not in gone]
        for block_id in change.forgets:
            for place in (content.blocks, content.inbox, self.staged, self._written):
                place.pop(block_id, None)

    def seal(self, block_id: BlockId) -> None:
        self._check_writable()
        with self._lock:
            self._written[block_id] = merged_block(self._inbox_rows(block_id))
        failpoint.here("store.seal.written")
        failpoint.here("store.seal.synced")

    def rewrite(self, block_id: BlockId, live: bytes | None, block: pa.RecordBatch | None = None) -> None:
        self._check_writable()
        block = self.read(block_id) if block is None else block
        if live is not None:
            block = blank_bodies(block, live)
        with self._lock:
            self._written[block_id] = block
        failpoint.here("store.rewrite.synced")

    def segment_usage(self) -> list[SegmentUsage]:
        return []

    def roll(self, number: int) -> None:
        """Does nothing: there are no files."""

    def read(self, block_id: BlockId) -> pa.RecordBatch:
        with self._lock:
            block = self.content.blocks.get(block_id)
            block = self.staged.get(block_id) if block is None else block
            return block if block is not None else merged_block(self._inbox_rows(block_id))

    def peek(self, block_id: BlockId) -> pa.RecordBatch | None:
        try:
            return self.read(block_id)
        except DataLoss:
            return None

    def locate(self, block_id: BlockId) -> Location | None:
        return None

    def close(self, *, clean: bool = True) -> None:
        with self._lock:
            self.content = copy.copy(self.content)
            self.content.clean = clean
            self._closed = True

    def _inbox_rows(self, block_id: BlockId) -> list[InboxRow]:
        rows = self.content.inbox.get(block_id)
        if rows is None:
            raise DataLoss(
                f"block {block_id} is not in the store: its messages were forgotten or never committed"
            )
        return rows

    def _check_writable(self) -> None:
        if self._closed:
            raise StoreFailed("the store is closed; open it again")
        if self._failure is not None:
            raise StoreFailed(f"an earlier write failed: {self._failure}; open the store again")


def _info(block_id: BlockId, block: pa.RecordBatch) -> BlockInfo:
    return BlockInfo(block_id, block.num_rows, body_bytes(block), xxhash.xxh3_64_intdigest(block.serialize()))
