"""The blocks of a store: where each of them is, and those that are in memory.

Not here: when a commit changes them (``durable.py``), files (``segment.py``).
Invariant: a reader finds the bytes that the catalog names, until a commit has named others.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from broker_core.core.change import InboxRow
from broker_core.core.errors import DataLoss
from broker_core.core.ids import BlockId
from broker_core.store.catalog import Catalog
from broker_core.store.codec import merged_block
from broker_core.store.failure import corrupt_catalog
from broker_core.store.port import BlockInfo, BlockUsage, Location, SegmentUsage
from broker_core.store.segment import BlockPlace, Segments


class BlockCache:
    """Verified blocks, at most ``limit_bytes`` by the sizes passed to ``put``; the least recently used is
    removed first. A block that is still referenced elsewhere is found at no cost. Thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._recent: OrderedDict[BlockId, tuple[pa.RecordBatch, int]] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[BlockId, pa.RecordBatch] = weakref.WeakValueDictionary()
        self.size_bytes = 0

    def get(self, block_id: BlockId) -> pa.RecordBatch | None:
        with self._lock:
            if block_id in self._recent:
                self._recent.move_to_end(block_id)
                return self._recent[block_id][0]
            return self._alive.get(block_id)

    def put(self, block_id: BlockId, block: pa.RecordBatch, size_bytes: int) -> None:
        with self._lock:
            self._drop(block_id)
            self._alive[block_id] = block
            if size_bytes > self._limit_bytes:
                return
            self._recent[block_id] = (block, size_bytes)
            self.size_bytes += size_bytes
            while self.size_bytes > self._limit_bytes:
                self.size_bytes -= self._recent.popitem(last=False)[1][1]

    def drop(self, block_id: BlockId) -> None:
        with self._lock:
            self._drop(block_id)

    def _drop(self, block_id: BlockId) -> None:
        self._alive.pop(block_id, None)
        if block_id in self._recent:
            self.size_bytes -= self._recent.pop(block_id)[1]


class StoredBlocks:
    """Those of one data directory. Who writes ``inbox`` or calls ``show`` holds ``lock``; all else is
    thread-safe.
    """

    def __init__(
        self, path: Path, segments: Segments, places: dict[BlockId, BlockPlace], cache_bytes: int
    ) -> None:
        self._path, self._segments = path, segments
        self.lock = threading.Lock()
        self.places = places  # named by the catalog
        self.staged: dict[BlockId, BlockPlace] = {}  # appended, not named yet
        self.written: dict[BlockId, BlockPlace] = {}  # sealed or rewritten, not yet committed
        # the rows of the open blocks; the tuples are shared with the domain
        self.inbox: dict[BlockId, list[InboxRow]] = {}
        self.cache = BlockCache(cache_bytes)
        self._merged: tuple[BlockId, pa.RecordBatch] | None = None  # the last open block that was read

    def load(self, rows: Iterable[InboxRow]) -> list[BlockInfo]:
        """Takes in the rows of open blocks; returns the others. Raises CorruptCatalog."""
        for row in rows:
            found = self.inbox.setdefault(row.block_id, [])
            if row.row != len(found) or row.block_id in self.places:
                what = f"row {row.row} of open block {row.block_id} does not follow row {len(found) - 1}"
                raise corrupt_catalog(self._path / "catalog.db", what)
            found.append(row)
        return [place.info(block_id) for block_id, place in self.places.items()]

    # -- written ---------------------------------------------------------------------------------------------
    def stage(self, block_id: BlockId, place: BlockPlace) -> BlockInfo:
        """A block is appended."""
        with self.lock:
            self.staged[block_id] = place
        return place.info(block_id)

    def rewrite(self, block_id: BlockId, block: pa.RecordBatch) -> int:
        """Writes a block that is sealed, or compacted. Returns its segment, which is to be synced."""
        place = self._segments.append(block_id, block)
        with self.lock:
            before = self.written.get(block_id)
            self.written[block_id] = place
            in_use = {place.segment, self.places.get(block_id, place).segment}
        if before is not None and before.segment not in in_use:
            self._segments.release(before.segment, block_id)
        return place.segment

    def name(
        self,
        catalog: Catalog,
        put: Mapping[BlockId, BlockPlace],
        forgotten: Sequence[BlockId],
        emptied: Iterable[BlockId],
    ) -> None:
        """Writes into the catalog's transaction where blocks are from now on. ``emptied``: no longer open."""
        for block_id in emptied:
            catalog.drop_inbox(block_id)
        for block_id, place in put.items():
            segment = self._segments.info(place.segment)
            if not segment.in_catalog:
                segment.in_catalog = True
                catalog.put_segment(segment.number, segment.kind, segment.schema_bytes)
                if segment.descriptor < 0:
                    catalog.close_segment(segment.number)
            catalog.put_block(block_id, place)
            old = self.places.get(block_id)
            if old is not None and old.segment != place.segment:
                self._segments.release(old.segment, block_id)
        for block_id in forgotten:
            for source in (self.places, self.staged, self.written):
                if block_id in source:
                    self._segments.release(source[block_id].segment, block_id)
            if block_id in self.places or block_id in put:
                catalog.drop_block(block_id)

    def show(self, put: Mapping[BlockId, BlockPlace], forgotten: Sequence[BlockId]) -> None:
        """The transaction is committed: readers see it."""
        self.places.update(put)
        for block_id in (*put, *forgotten):
            for source in (self.staged, self.written, self.inbox):
                source.pop(block_id, None)
            self.cache.drop(block_id)
        for block_id in forgotten:
            self.places.pop(block_id, None)

    # -- read ------------------------------------------------------------------------------------------------
    def usage(self) -> list[SegmentUsage]:
        usage = []
        for number, kind, size_bytes, is_open, live in self._segments.usage():
            blocks = []
            for block_id in live:
                place = self.places.get(block_id)
                in_catalog = place is not None and place.segment == number
                place = place if in_catalog else self.staged.get(block_id) or self.written.get(block_id)
                length, size = (place.length, place.size_bytes) if place else (0, 0)
                blocks.append(BlockUsage(block_id, length, size, in_catalog))
            usage.append(SegmentUsage(number, kind, size_bytes, is_open, blocks))
        return usage

    def read(self, block_id: BlockId) -> pa.RecordBatch:
        # a move or forget may delete the file after its place is found and before it is opened
        for _ in range(3):
            rows = self.cache.get(block_id)
            if rows is None:
                rows = self.read_open(block_id)
            if rows is not None:
                return rows
            place = self._place(block_id)
            try:
                block, size_bytes = self._segments.read(block_id, place)
            except DataLoss:
                if self._find(block_id) == place:
                    raise
                continue
            with self.lock:
                if self._find(block_id) == place:
                    self.cache.put(block_id, block, size_bytes)
            return block
        raise DataLoss(f"block {block_id} moved again and again while it was read; read it again")

    def _find(self, block_id: BlockId) -> BlockPlace | None:
        """Finds also a block that is appended and not named yet, which the commit that names it may have to
        read.
        """
        return self.places.get(block_id) or self.staged.get(block_id)

    def _place(self, block_id: BlockId) -> BlockPlace:
        place = self._find(block_id)
        if place is None:
            raise DataLoss(
                f"block {block_id} is not in the catalog of {self._path}: its messages were "
                "forgotten or never committed"
            )
        return place

    def read_open(self, block_id: BlockId) -> pa.RecordBatch | None:
        """Returns the rows of an open block; None for any other."""
        with self.lock:
            rows = self.inbox.get(block_id)
            if rows is None:
                return None
            merged = self._merged
            if merged is not None and merged[0] == block_id and merged[1].num_rows == len(rows):
                return merged[1]
            rows = list(rows)
        block = merged_block(rows)
        self._merged = (block_id, block)
        return block

    def locate(self, block_id: BlockId) -> Location | None:
        with self.lock:
            if block_id in self.inbox:
                return None
            place = self._place(block_id)
        path = str(self._segments.path(place.segment))
        return Location(path, place.position, place.length, place.checksum, place.rows)
