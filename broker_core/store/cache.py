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
