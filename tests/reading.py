"""Reading blocks in tests: what a work does about a block that is not in memory, a store that keeps nothing
in memory, and the guard that no thread reads the disk while it has the lock of a broker's state.

Invariant: ``Guard`` is on in every test (``conftest.py``), so each of them proves it for what it does.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker.queue import Queue, ready
from broker_core.core.block import NotLoaded
from broker_core.core.change import InboxRow
from broker_core.core.errors import CorruptSegment
from broker_core.node.committer import Committer
from broker_core.node.loaded_blocks import NOTHING, Loaded
from broker_core.node.node import Node
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore


def unsettled(queue: Queue) -> list[int]:
    """The offsets of what is visible and not settled, in order."""
    spans = queue.progress.unsettled_within(0, queue.log.visible_end)
    return [offset for start, end in spans for offset in range(start, end)]


def bodies(node: Node, name: str) -> list[bytes]:
    """What stands in a queue, in order; nothing changes."""
    queue = node.state.topology.queue(name)
    return [fetched(node, queue, offset).body for offset in unsettled(queue)]


def fetched(node: Node, queue: Queue, offset: int) -> InboxRow:
    """The message of an entry that is not deleted."""
    loaded: Loaded = {}
    loaded_blocks = node.committer.loaded_blocks
    while True:
        try:
            with node.look as state:
                loaded_blocks.loaded = loaded
                try:
                    return state.messages.fetch(queue, offset)
                finally:
                    loaded_blocks.loaded = NOTHING
        except NotLoaded as missing:
            loaded_blocks.load(missing, loaded, node.look)


class NothingCached(MemoryStore):
    """Every block must be loaded, for each operation anew."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def peek(self, block_id: int) -> pa.RecordBatch | None:
        return None

    def read(self, block_id: int) -> pa.RecordBatch:
        self.reads += 1
        require_no_lock(f"block {block_id}")
        return super().read(block_id)

    def reopened(self) -> NothingCached:
        other = super().reopened()
        other.__class__ = NothingCached
        assert isinstance(other, NothingCached)
        other.reads = 0
        return other


class SlowDisk(NothingCached):
    """It reads only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.damaged: set[int] = set()

    def read(self, block_id: int) -> pa.RecordBatch:
        self.entered.set()
        assert self.gate.wait(600)
        if block_id in self.damaged:
            raise CorruptSegment(f"block {block_id} is damaged", "restore it")
        return super().read(block_id)

    def stop(self) -> None:
        """Reads wait from now on."""
        self.gate.clear()
        self.entered.clear()


# -- the guard -----------------------------------------------------------------------------------------------

_held = threading.local()  # how many locks of states this thread has
found: list[str] = []  # reads under a lock since the last check
reads = 0


class CountedLock:
    """The lock of a state, which knows its thread."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()

    def acquire(self, *arguments: Any) -> bool:
        taken = self._lock.acquire(*arguments)
        if taken:
            _held.count = getattr(_held, "count", 0) + 1
        return taken

    def release(self) -> None:
        _held.count -= 1
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._lock.locked()


def require_no_lock(what: str) -> None:
    global reads
    reads += 1
    if getattr(_held, "count", 0):
        found.append(what)
        raise AssertionError(f"{what} is read under the lock of the state")


def guard(patch: pytest.MonkeyPatch) -> None:
    """Watches all brokers of this process that are made from now on."""
    construct: Callable[..., None] = Committer.__init__
    read = DurableStore.read

    def constructed(self: Committer, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        self._lock = self.look._lock = CountedLock()  # type: ignore[assignment]

    def watched(self: DurableStore, block_id: int) -> pa.RecordBatch:
        require_no_lock(f"block {block_id} of {self.directory}")
        return read(self, block_id)

    patch.setattr(Committer, "__init__", constructed)
    patch.setattr(DurableStore, "read", watched)


def oldest(queue: Queue, most: int = 1 << 60, steps: int = 3) -> list[int]:
    """The entries that a purge would take, found piece by piece."""
    found: list[int] = []
    at: int | None = 0
    while at is not None:
        ranges, at = ready.oldest(queue.ready, at, most - len(found), steps)
        found += [offset for start, end in ranges for offset in range(start, end)]
    return found


def purgeable(queue: Queue) -> list[int]:
    end, start, found = queue.log.visible_end, 0, list[int]()
    while start < end:
        parts, start = ready.purgeable(queue.ready, start, end, 3)
        found += [offset for first, last in parts for offset in range(first, last)]
    return found
