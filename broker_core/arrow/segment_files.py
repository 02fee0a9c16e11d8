"""Reading stored blocks directly from their files, for a client on the broker's host.

Not here: whether the client is on that host (``client/broker.py``), and writing (``store/segment.py``).

Invariant: a block is returned only after its checksum was verified. For a faulty file the result is None; the
broker, which is asked instead, names the fault.
"""

from __future__ import annotations

import os
from collections import OrderedDict

import pyarrow as pa
import xxhash

from broker_core.message.message import Location

MAPPED_FILES = 2  # at a time: their pages count as memory of a Spark worker


class SegmentFiles:
    """Maps files and keeps the latest ones mapped; a removed file stays readable while it is mapped. Not
    thread-safe: one for each reader.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._mapped: OrderedDict[str, tuple[pa.MemoryMappedFile, pa.Schema]] = OrderedDict()

    def read(self, location: Location) -> pa.RecordBatch | None:
        try:
            file, schema = self._open(location)
            file.seek(location.position)
            message = file.read_buffer(location.length)
            if (
                len(message) != location.length
                or xxhash.xxh3_64_intdigest(memoryview(message)) != location.checksum
            ):
                return None
            block = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
        except (OSError, pa.ArrowException):
            return None
        return block if block.num_rows == location.rows else None

    def _open(self, location: Location) -> tuple[pa.MemoryMappedFile, pa.Schema]:
        path = os.path.join(self._directory, location.path)
        mapped = self._mapped.get(path)
        if mapped is not None and mapped[0].size() >= location.position + location.length:
            self._mapped.move_to_end(path)
            return mapped
        # a mapping keeps the original file size: a segment that grew is mapped again
        file = pa.memory_map(path)
        found = (file, pa.ipc.read_schema(file))
        self._mapped[path] = found
        if len(self._mapped) > MAPPED_FILES:
            self._mapped.popitem(last=False)
        return found
