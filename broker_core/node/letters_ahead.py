"""Dead letters that are too many for the commit that rejects, or reach too many queues for it: they are
written to segments before.

A commit blocks all others, so it must not make fifty thousand copies. They are made and routed before, a few
at a time under the lock. The commit asks for it (``LettersNotAhead``), behind whatever listener; then it is
tried again.
Not here: when they are too many (``settlement.py``).
Invariant: what is written belongs to nothing until it is added to the transaction, once, while that is not
decided. Otherwise it is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa

from broker_core.broker.broker import BrokerState
from broker_core.broker.message.removals import rows_of
from broker_core.broker.message.settlement import rejects_of
from broker_core.broker.queue import Queue
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import SpilledLetters, spill
from broker_core.broker.transaction.transaction import State, Transaction, to_rows
from broker_core.core.change import Change
from broker_core.core.ids import BlockId
from broker_core.node.committer import Committer
from broker_core.store.port import BlockInfo

_STEP = 256  # messages that are read and routed under the lock at a time, at most
_BLOCK_ROWS = 16_384
_BLOCK_BYTES = 4 * 1024 * 1024
_OWN = 4_096  # so many of one queue have a block of their own: the history says where they come from
_UNDECIDED = (State.ACTIVE, State.PREPARED)


class LettersAhead:
    """``append`` writes bytes to a segment, outside a commit; ``discard`` forgets them."""

    def __init__(
        self,
        committer: Committer,
        append: Callable[[pa.RecordBatch], BlockInfo],
        discard: Callable[[list[BlockId]], None],
        clock: Callable[[], int],
    ) -> None:
        self._committer = committer
        self._append = append
        self._discard = discard
        self._clock = clock

    def write(self, transaction: Transaction) -> None:
        """In a thread that may wait; the settles must not change meanwhile. If this fails, the next commit of
        the transaction raises why.
        """
        found = _Ahead(self._append)
        letters = transaction.letters
        assert letters is not None
        before = letters.ahead  # of a queue that was deleted since then
        try:
            for queue, offsets in rejects_of(transaction.settles).items():
                self._copy(queue, offsets, found)
            found.write()
        except BaseException as error:
            if isinstance(error, Exception):
                letters.failure = error
            if self._committer.failure is None:
                self._discard(found.block_ids)
            if not isinstance(error, Exception):
                raise
            return
        useless = found.block_ids
        with self._committer.look:
            # another caller may have decided it meanwhile, or have written them too
            if letters.ahead is before and transaction.state in _UNDECIDED:
                useless = [spilled.block_id for _, spilled in before or ()]
                letters.ahead = found.written
        self._discard(useless)

    def _copy(self, queue: Queue, offsets: list[int], found: _Ahead) -> None:
        """Adds the dead letters of one queue. Raises CorruptSegment, DataLoss."""
        start = 0
        while start < len(offsets):
            step = offsets[start : start + _STEP]
            publishes, count = self._committer.read(partial(_some, queue, step, self._clock()))
            found.add(queue, publishes)
            start += count


class _Ahead:
    """The blocks that are written, and what the next one will have."""

    def __init__(self, append: Callable[[pa.RecordBatch], BlockInfo]) -> None:
        self._append = append
        self.written: list[SpilledLetters] = []
        self.block_ids: list[BlockId] = []
        self._publishes: list[Publish] = []
        self._size_bytes = 0
        self._sources: dict[Queue, None] = {}

    def add(self, source: Queue, publishes: list[Publish]) -> None:
        if source not in self._sources and len(self._publishes) >= _OWN:
            self.write()
        if publishes:
            self._sources[source] = None
        self._publishes += publishes
        self._size_bytes += sum(len(message.body) + len(message.properties) for message, _, _ in publishes)
        if len(self._publishes) >= _BLOCK_ROWS or self._size_bytes >= _BLOCK_BYTES:
            self.write()

    def write(self) -> None:
        publishes, sources = self._publishes, tuple(self._sources)
        self._publishes, self._size_bytes, self._sources = [], 0, {}
        if publishes:
            info = self._append(to_rows([publish.message for publish in publishes]))
            self.block_ids.append(info.block_id)
            self.written.append(SpilledLetters(sources, spill(info.block_id, info.size_bytes, publishes)))


def _some(queue: Queue, offsets: list[int], now_us: int, state: BrokerState) -> tuple[list[Publish], int]:
    """Returns the dead letters of the first of these rejects, as many as one commit has room for, and how
    many of ``offsets`` those are. One that is settled, or whose exchange does not exist now, has none.
    """
    unsettled = [
        (number, offset)
        for number, offset in enumerate(offsets)
        if not (queue.deleted or queue.progress.is_settled(offset))
    ]
    removals = state.messages.removals(Change(), now_us)
    rows = rows_of(queue, [offset for _, offset in unsettled])
    count = removals.add(queue, rows, "rejected")
    publishes = [publish for removed in removals for publish in removed.publishes]
    return publishes, unsettled[count][0] if count < len(unsettled) else len(offsets)
