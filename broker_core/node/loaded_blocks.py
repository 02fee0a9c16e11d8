"""Blocks for code that has the lock of the state: it reads memory, never the disk.

Code under the lock reads a block that is in the cache of the store, or that was loaded for it. For any other
block it raises NotLoaded. Then its caller loads the block, in a thread of its own and without the lock, and
calls again: the committer runs the work again, the event loop dispatches the queue again.
Not here: what is done between the two calls (``committer.py``, ``server/commit_queue.py``).

Invariant: what was loaded for a caller stays in memory until its call has succeeded or failed, so that no
other caller can push it out, and each call gets further than the one before. A block that was moved or
forgotten meanwhile does no harm: rows keep their numbers, and bytes are removed only of rows that nothing
needs. A block that cannot be read gives its error to the code that reads it, in its place.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

import pyarrow as pa

from broker_core.broker.broker import BrokerState
from broker_core.broker.transaction.transaction import LettersNotAhead, Transaction
from broker_core.core import failpoint
from broker_core.core.block import Blocks, NotLoaded, Part
from broker_core.core.change import InboxRow
from broker_core.core.ids import BlockId
from broker_core.store.port import Store

# what was loaded for one caller: blocks or parts of them, or why they cannot be read
Loaded = dict[tuple[BlockId, Part | None], "pa.RecordBatch | Exception"]
NOTHING: Loaded = {}


class Look:
    """Access to the state without a commit: ``with look as state``. The state does not change meanwhile.

    Only memory may be changed under it: consumers, what a channel holds, what is ready again. ``turn``: of
    a commit, from before it waits for the lock. Without it, who looks in a loop has the lock again before the
    commit is awake, hundreds of times.
    """

    __slots__ = ("_lock", "_state", "turn")

    def __init__(self, state: BrokerState, lock: _thread.LockType) -> None:
        self._state = state
        self._lock = lock
        self.turn = _thread.allocate_lock()

    def __enter__(self) -> BrokerState:
        with self.turn:
            pass
        self._lock.acquire()
        return self._state

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class LoadedBlocks:
    """``loaded``: what was loaded for the caller that has the lock. ``write_ahead``: what the node does for
    ``LettersNotAhead`` (``letters_ahead.py``).
    """

    __slots__ = ("_store", "loaded", "write_ahead")

    def __init__(self, store: Store) -> None:
        self._store = store
        self.loaded = NOTHING
        self.write_ahead: Callable[[Transaction], None]

    def get(self, block_id: BlockId, part: Part | None = None) -> pa.RecordBatch:
        """Returns a block, or the ``part`` of it that is needed, under the lock. Raises NotLoaded, and what
        loading it raised.
        """
        if self.loaded:
            found = self.loaded.get((block_id, part))
            if isinstance(found, Exception):
                raise found
            if found is not None:
                return found
        block = self._store.peek(block_id)
        if block is None:
            raise NotLoaded([block_id], part=part)
        return block

    def load(self, missing: NotLoaded, loaded: Loaded, look: Look) -> None:
        """Loads blocks into ``loaded``, without the lock. Raises nothing that reading a block raises."""
        if isinstance(missing, LettersNotAhead):
            self.write_ahead(missing.transaction)
            return
        prepare = missing.prepare
        while True:
            found = loaded if prepare is None else {}
            whole = True
            for block_id in missing.block_ids:
                try:
                    failpoint.here("shelf.load")
                    block = self._store.read(block_id)
                    found[block_id, missing.part] = block if missing.part is None else missing.part(block)
                except Exception as error:
                    loaded[block_id, missing.part] = error
                    whole = False
            if prepare is None or not whole:
                return
            with look:
                self.loaded = found
                try:
                    prepare()
                    return
                except NotLoaded as more:
                    missing = more
                except Exception:
                    return  # the operation raises it again
                finally:
                    self.loaded = NOTHING


def open_rows(blocks: Blocks, block_id: BlockId) -> list[InboxRow] | None:
    """Returns the rows of a block that is in memory row by row; None for a stored one."""
    blocks.require(block_id)
    block = blocks.by_id.get(block_id)
    return block.inbox if block is not None else None


def addresses(block: pa.RecordBatch) -> pa.RecordBatch:
    """Returns what messages are permitted by, each once: exchange, routing key and properties."""
    names = COLUMNS[addresses]
    distinct = pa.Table.from_batches([block.select(names)]).group_by(names, use_threads=False).aggregate([])
    return pa.RecordBatch.from_arrays([distinct.column(name).combine_chunks() for name in names], names)


def stamps(block: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the commit sequence and time of each message of a sealed block, without the memory of the
    rest.
    """
    names = COLUMNS[stamps]
    columns = [pa.array(block.column(name).to_numpy().copy()) for name in names]
    return pa.RecordBatch.from_arrays(columns, names)


# of an open block, which is in memory row by row, no other column is made for them
COLUMNS: dict[Part, list[str]] = {
    addresses: ["exchange", "routing_key", "properties"],
    stamps: ["commit_sequence", "committed_at"],
}


class OrderedWork(Protocol):
    """A caller with its work, as far as works of one ``origin`` stay in order."""

    origin: object
    missing: NotLoaded | None


H = TypeVar("H", bound=OrderedWork)


class HeldUp(dict[object, deque[H]]):
    """Per origin: the work that waits for blocks, then the works behind it."""

    def begin(self, waiting: H) -> None:
        """Begins a line behind a work that must load blocks, unless there is one."""
        if waiting.origin is not None and waiting.origin not in self:
            self[waiting.origin] = deque([waiting])

    def take(self, waiting: H) -> bool:
        """Puts a work behind an earlier one of its origin, and returns whether there is one."""
        line = self.get(waiting.origin)
        if line is None or line[0] is waiting:
            return False
        line.append(waiting)
        return True

    def next_after(self, waiting: H) -> H | None:
        """Returns the work that ``waiting``, which is done, has held up."""
        line = self.get(waiting.origin)
        if line is None:
            return None
        line.popleft()
        if not line:
            del self[waiting.origin]
            return None
        return line[0]

    def fail(self, group: list[H]) -> list[H]:
        """Returns the callers of a group that fails, and those that their works have held up."""
        found = dict.fromkeys(group)
        for waiting in group:
            found.update(dict.fromkeys(self.pop(waiting.origin, ())))
            waiting.missing = None
        return list(found)
