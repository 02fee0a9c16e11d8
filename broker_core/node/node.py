"""Node: the domain over a store, thread-safe, in this process.

Not here: the calls for users (``local.py``, ``channel.py``), the rules (``broker/``), commits
(``channel_commit.py``, ``committer.py``), sealing and compaction (``upkeep.py``), sockets.

Invariant: every answer is durable. The state is accessed in two ways: ``run`` a work, which may change what
is durable, or ``look``. Meanwhile no other thread changes it. Code that reads the state in another way
documents why it may.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import pyarrow as pa

from broker_core.broker.broker import BrokerState
from broker_core.broker.load import load
from broker_core.broker.queue.queue import Queue
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.broker.transaction.transaction import Limits
from broker_core.core.block import Part
from broker_core.core.change import Change
from broker_core.core.errors import StoreError, StoreFailed
from broker_core.core.ids import BlockId
from broker_core.message.message import MERGED_SCHEMA
from broker_core.node.channel_commit import ChannelCommits
from broker_core.node.committer import Committer, SteadyClock, Work, changes, now_us
from broker_core.node.deferred_signals import uninterrupted
from broker_core.node.letters_ahead import LettersAhead
from broker_core.node.loaded_blocks import COLUMNS, LoadedBlocks, Look, open_rows
from broker_core.node.open_channels import OpenChannels
from broker_core.node.upkeep import Upkeep
from broker_core.store.codec import merged_block
from broker_core.store.port import BlockInfo, Location, SegmentUsage, Store

T = TypeVar("T")

logger = logging.getLogger("txmq.broker")

CLOSED = "the broker is closed; open it again"


class Node:
    """Owns ``store`` and closes it. ``clock`` returns microseconds since the epoch, ``monotonic`` nanoseconds
    of time that passed, ``ids`` unique names.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], int] = now_us,
        ids: Callable[[], str] = lambda: uuid.uuid4().hex,
        *,
        monotonic: Callable[[], int] = time.monotonic_ns,
        limits: Limits | None = None,
        outcomes: OutcomeLimits | None = None,
        upkeep: bool = True,
        identity: str = "",
    ) -> None:
        self._store = store
        self._ids = ids
        self.limits = limits or Limits()
        try:
            loaded_blocks = LoadedBlocks(store)
            self.state = load(store.load(), new_block_id=store.new_block_id, read=loaded_blocks.get)
            self.state.names.of_messages.identity = identity or uuid.uuid4().hex
            self._write_repairs()
            self.state.names.outcomes.limits = outcomes or OutcomeLimits()
        except BaseException:
            store.close(clean=False)
            raise
        self.clock = clock = SteadyClock(clock, monotonic=monotonic, latest_us=self.state.loaded.latest_us)
        self._mutex = _thread.allocate_lock()  # guards the next one
        self._writing = 0  # blocks that are being written to a segment
        self._written = threading.Event()  # set if there is none; checked when the broker closes
        self._closed = False
        self.open_channels = OpenChannels()
        self.committer = Committer(self.state, store, loaded_blocks, clock)
        self.channel_commits = ChannelCommits(self.state, self.committer, self.append, clock)
        loaded_blocks.write_ahead = LettersAhead(
            self.committer, self.append, self.channel_commits.discard, clock
        ).write
        self.upkeep = Upkeep(self.committer, self.state, store, clock)
        if upkeep:
            self.upkeep.start()

    def _write_repairs(self) -> None:
        found = self.state.loaded.repaired
        for text in found.done:
            logger.warning("the catalog was repaired: %s", text)
        for text in found.problems:
            logger.error(
                "the catalog contradicts itself; the affected data cannot be read, the rest is served: %s",
                text,
            )
        if found.journal:
            self._store.commit([Change(journal=list(found.journal))])
        _report(self.state)

    @property
    def look(self) -> Look:
        """Returns a context manager to read shared state, or to change state that is not durable."""
        return self.committer.look

    # -- what the engine builds on ---------------------------------------------------------------------------
    def run(self, work: Work[T]) -> T:
        """Runs ``work(state, change, now_us)`` in commit order. Returns its answer when all its changes are
        durable.
        """
        return self.committer.run(work)

    def append(self, block: pa.RecordBatch) -> BlockInfo:
        """Writes bytes to a segment, outside a commit; a work must name them."""
        with self.writing():
            return self._store.append(block)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Brackets writes to the open store outside a commit; a failure stops the broker."""
        with self.open_store():
            try:
                yield
            except StoreError as error:
                self.committer.stop(error)
                raise

    @contextlib.contextmanager
    def open_store(self) -> Iterator[Store]:
        """The store, which is not closed until then."""
        self._count_writing(1)
        try:
            yield self._store
        finally:
            self._count_writing(-1)

    def _count_writing(self, step: int) -> None:
        with self._mutex:
            if self._closed and step > 0:
                raise StoreFailed(CLOSED)
            self._writing += step
            if self._closed and not self._writing:
                self._written.set()

    def transaction_bytes(self) -> int:
        """Returns about how much memory open and prepared transactions use. For any thread."""
        opened = (each.transaction for each in self.open_channels.channels())  # of which few hold something
        return sum([transaction.memory_bytes for transaction in opened if transaction.publishes]) + sum(
            transaction.memory_bytes for transaction in list(self.state.prepared.by_key.values())
        )

    def read_block(self, block_id: BlockId) -> pa.RecordBatch:
        """Returns a whole block, from the disk too: not within a work. Raises CorruptSegment, DataLoss."""
        inbox = open_rows(self.state.blocks, block_id)
        return self._store.read(block_id) if inbox is None else merged_block(inbox[:])

    def loaded_block(self, block_id: BlockId, part: Part | None = None) -> pa.RecordBatch:
        """Like ``read_block``, within a work. Raises NotLoaded for a block, or a ``part``, on the disk."""
        inbox = open_rows(self.state.blocks, block_id)
        if inbox is None:
            return self.committer.loaded_blocks.get(block_id, part=part)
        return merged_block(inbox[:], MERGED_SCHEMA.names if part is None else COLUMNS[part])

    def segments(self) -> list[SegmentUsage]:
        """Returns the segment files and what of them is needed. For any thread."""
        return self._store.segment_usage()

    def locate(self, block_id: BlockId) -> Location | None:
        """Returns where a reader on this host finds a block; None if it must be read through the broker.
        Raises CorruptCatalog.
        """
        self.state.blocks.require(block_id)
        block = self.state.blocks.by_id.get(block_id)
        return None if block is None or block.inbox is not None else self._store.locate(block_id)

    def wait(self, ends: Callable[[BrokerState], Mapping[Queue, int]], timeout_s: float) -> bool:
        """Waits until one of the queues is longer than its end; ``ends`` is called again after each commit
        that made messages of them visible. Raises StoreFailed.
        """
        deadline = time.monotonic() + timeout_s
        listeners = self.committer.listeners
        while True:
            self.committer.check()
            with self.look as state:
                waiting = ends(state)
                if any(queue.log.visible_end > end for queue, end in waiting.items()):
                    return True
                gate = listeners.gate(waiting)  # under the lock: each later commit opens it
            try:
                self.committer.check()  # again: a failure before the gate was there does not open it
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                gate.acquire(True, min(left_s, threading.TIMEOUT_MAX))
            finally:
                listeners.leave(gate, waiting)

    def new_name(self) -> str:
        return f"amq.gen-{self._ids()}"

    @uninterrupted
    def close(self) -> None:
        """Closes the node; it may be repeated. Messages held by channels are delivered again after the next
        start. Other threads finish their current commit.
        """
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if not self._writing:
                self._written.set()
        self.upkeep.stop()
        self._written.wait()  # 1. no writes outside commits
        clean = self.committer.failure is None
        try:
            if clean:
                self.run(changes(self.state.closing))
        except StoreFailed:
            clean = False
        finally:
            self.committer.end(StoreFailed(CLOSED))  # 2. no commits
            self._store.close(clean=clean)


def _report(state: BrokerState) -> None:
    queues = [each for host in state.virtual_hosts.by_name.values() for each in host.queues.values()]
    logger.info(
        "recovered %d queues with %d messages and %d prepared transactions",
        len(queues),
        sum(queue.messages for queue in queues),
        len(state.prepared.by_key),
    )
