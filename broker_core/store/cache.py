"""A cache of blocks that were read and verified, limited in bytes.

Not here: which blocks exist and where (``durable.py``).
Invariant: it keeps at most ``limit_bytes``, by the sizes passed to ``put``.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict

import pyarrow as pa

from broker_core.core.ids import BlockId


class BlockCache:
    """Verified blocks; the least recently used is removed first. A block that is still referenced elsewhere
    is found at no cost. Thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[BlockId, tuple[pa.RecordBatch, int]] = OrderedDict()
        self._held: weakref.WeakValueDictionary[BlockId, pa.RecordBatch] = weakref.WeakValueDictionary()
        self.size_bytes = 0

    def get(self, block_id: BlockId) -> pa.RecordBatch | None:
        with self._lock:
            if block_id in self._kept:
                self._kept.move_to_end(block_id)
                return self._kept[block_id][0]
            return self._held.get(block_id)

    def put(self, block_id: BlockId, block: pa.RecordBatch, size_bytes: int) -> None:
        with self._lock:
            self._drop(block_id)
            self._held[block_id] = block
            if size_bytes > self._limit_bytes:
                return
            self._kept[block_id] = (block, size_bytes)
            self.size_bytes += size_bytes
            while self.size_bytes > self._limit_bytes:
                self.size_bytes -= self._kept.popitem(last=False)[1][1]

    def drop(self, block_id: BlockId) -> None:
        with self._lock:
            self._drop(block_id)

    def _drop(self, block_id: BlockId) -> None:
        self._held.pop(block_id, None)
        if block_id in self._kept:
            self.size_bytes -= self._kept.pop(block_id)[1]
