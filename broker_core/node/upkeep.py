"""Background work of a broker in one thread: sealing full open blocks, expiring, forgetting, compacting.

Not here: the effects on the state (``broker/``) and on files (``store/``).
Invariant: nothing here changes what a reader gets. Every step is a work of the committer, and may be
interrupted by a crash at any point. A queue or a block that a step cannot handle is left unchanged and logged
once; later steps and all other queues continue. What fails for want of files or memory is tried again at the
next tick. The thread ends only with the broker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from broker_core.broker.broker import BrokerState
from broker_core.broker.history.history import Pack
from broker_core.broker.history.rows import compressed
from broker_core.broker.queue import Queue
from broker_core.broker.topology.topology import Topology
from broker_core.broker.transaction.transaction import to_rows
from broker_core.core import failpoint
from broker_core.core.block import NotLoaded
from broker_core.core.change import Change
from broker_core.core.errors import (
    CorruptCatalog,
    CorruptSegment,
    DataLoss,
    ResourceShortage,
    StoreError,
    StoreFailed,
)
from broker_core.core.ids import BlockId
from broker_core.node.commit_listeners import WAITING
from broker_core.node.committer import Committer, changes
from broker_core.store.port import BlockUsage, SegmentUsage, Store

ALIVE = 0.3  # a segment with a smaller share of living bytes is compacted
OPEN_BYTES = 64 * 1024  # a smaller open segment is not compacted
# an open segment that is mostly dead is closed at once with so many dead bytes, else when it is idle
ROLL_BYTES = 16 * 1024 * 1024
RUNS = 1_024  # that a look under the lock goes through


class Compaction:
    """Rewrites segments that are mostly dead bytes, so that disk usage follows what queues need.

    The file is measured, not its remaining blocks, because forgotten and rolled back bytes are dead too. An
    open segment that is mostly dead is closed first, if nothing was written to it since the last check, or if
    much of it is dead. A block keeps its rows and their numbers; only bodies that no queue needs are blanked.
    A block that cannot be read stays where it is, and does not prevent the compaction of others.
    """

    def __init__(self, committer: Committer, state: BrokerState, store: Store) -> None:
        self._committer = committer
        self._state = state
        self._store = store
        # block -> rows whose bodies were alive when it was last written
        self._written: dict[BlockId, int] = {}
        self._sizes: dict[int, int] = {}  # of open segments at the last check

    def run(self) -> None:
        """Checks every segment once."""
        usage = self._store.segment_usage()
        for segment in usage:
            self._look_at(segment)
        blocks = self._state.blocks.by_id
        self._written = {block_id: count for block_id, count in self._written.items() if block_id in blocks}
        self._sizes = {segment.number: segment.size_bytes for segment in usage if segment.open}

    def _look_at(self, segment: SegmentUsage) -> None:
        if segment.open and segment.size_bytes < OPEN_BYTES:
            return
        living = self._living(segment)
        if living is None:
            return
        alive = sum(self._alive(block, living[block.block_id][1]) for block in segment.blocks)
        if alive >= ALIVE * segment.size_bytes:
            return
        if segment.open:
            idle = self._sizes.get(segment.number) == segment.size_bytes
            if not idle and segment.size_bytes - alive < ROLL_BYTES:
                return
            self._store.roll(segment.number)
            failpoint.here("upkeep.compact.rolled")
        for block_id, (live, count) in living.items():
            self._rewrite(block_id, live, count)
        self._committer.run(_tidy)  # removes the file, which nothing needs now

    def _living(self, segment: SegmentUsage) -> dict[BlockId, tuple[bytes | None, int]] | None:
        """Returns per block the needed rows (None: all) and their number; None if some block of the segment
        cannot be moved.
        """
        if not all(block.in_catalog for block in segment.blocks):
            return None  # an open transaction, or a commit in progress
        ids = [block.block_id for block in segment.blocks]

        def look(
            state: BrokerState, _change: Change, _now: int, some: Sequence[BlockId]
        ) -> dict[BlockId, tuple[bytes | None, int]]:
            there = [block_id for block_id in some if block_id in state.blocks.by_id]
            needed: dict[BlockId, tuple[bytes | None, int]] = {
                block_id: (None, state.blocks.rows(block_id)) for block_id in there
            }
            if segment.kind != "branch":
                needed.update(state.living_rows(there))
            return needed

        found: dict[BlockId, tuple[bytes | None, int]] = {}
        for some in self._few_runs(ids):
            found.update(self._committer.run(partial(look, some=some)))
        # otherwise a coming commit forgets one
        return found if all(block_id in found for block_id in ids) else None

    def _few_runs(self, ids: list[BlockId]) -> Iterator[list[BlockId]]:
        """Yields blocks that together are in some runs, each of which costs a look, or one block."""
        with self._committer.look as state:
            runs = [state.blocks.by_id[each].pins if each in state.blocks.by_id else 0 for each in ids]
        some: list[BlockId] = []
        looked_at = 0
        for block_id, count in zip(ids, runs, strict=True):
            if some and looked_at + count > RUNS:
                yield some
                some, looked_at = [], 0
            some.append(block_id)
            looked_at += count
        if some:
            yield some

    def _alive(self, block: BlockUsage, count: int) -> int:
        """Returns about how many bytes the rewritten block has: bodies are removed, other columns stay."""
        rows = self._written.get(block.block_id, self._state.blocks.rows(block.block_id))
        bodies = min(block.size_bytes, block.length)
        return block.length - bodies + bodies * min(count, rows) // max(1, rows)

    def _rewrite(self, block_id: BlockId, live: bytes | None, count: int) -> None:
        try:
            self._store.rewrite(block_id, live)
        except (DataLoss, CorruptSegment, CorruptCatalog):
            return  # forgotten meanwhile, or reading it raises the error
        failpoint.here("upkeep.compact.written")
        if self._committer.run(changes(self._state.blocks.moved, block_id)):
            self._written[block_id] = count


def _tidy(_state: BrokerState, change: Change, _now: int) -> None:
    change.tidy = True


def compact_history(committer: Committer, now_us: int) -> None:
    """Packs the rows of the history of commits, and drops what is too old."""
    while True:
        with committer.look as state:
            history = state.transactions.history
            packs, due = history.to_pack(), history.is_due(now_us)
        if packs:
            packs = [Pack(first, compressed(rows)) for first, rows in packs]  # without the lock
            failpoint.here("upkeep.history.packed")
            committer.run(changes(history.pack, packs))
        if due:
            committer.run(lambda state, change, now: state.transactions.history.trim(change, now))
            failpoint.here("upkeep.history.trimmed")
        if not packs and not due:
            return


logger = logging.getLogger("txmq.upkeep")

TICK_S = 1.0
IDLE_TICKS = 5  # an open block without writes for so long is sealed, if it is worth a segment block
IDLE_ROWS = 1_000
COMPACT_TICKS = 30
UNHURRIED = 8  # with more full blocks in memory, seals follow each other without a pause
PAUSE_S = 0.1  # at most, between two seals
LOOKED_AT = 256  # queues, under the lock at once
STALE_BINDINGS = 1_000  # bindings, the same
LOGGED = 1_000  # errors, which may name queues; then each is logged again


class Upkeep:
    """After something has expired, consumers are told: their queue may be gone, or they may get something."""

    def __init__(
        self, committer: Committer, state: BrokerState, store: Store, clock: Callable[[], int]
    ) -> None:
        self._committer = committer
        self._state = state
        self._store = store
        self._clock = clock
        self._ending = False
        self._thread: threading.Thread | None = None
        self._seen = (0, 0)  # rows of the open block, and for how many ticks it had as many
        self._ticks = 0
        self._compaction = Compaction(committer, state, store)
        self._aside: dict[Queue, int | None] = {}  # not expirable: the offset of their head then
        self._logged: set[str] = set()  # what was logged already
        self.chores: list[Callable[[], None]] = []  # of others, as often as compaction

    def start(self) -> None:
        thread = threading.Thread(target=self._loop, name="txmq-upkeep", daemon=True)
        thread.start()
        self._thread = thread  # one that did not start is not joined

    def stop(self) -> None:
        self._ending = True
        self._committer.listeners.upkeep.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        # the first conversion makes pyarrow import pandas (not under ``serve``): half a second for which no
        # client should wait
        self._carry_out(_convert)
        next_tick = 0.0  # monotonic: the time of day may be changed
        while not self._ending:
            try:
                self._await(next_tick)
                if self._ending or self._committer.failure is not None:
                    return
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_S
                    for step in (*self._steps(), self.seal):
                        self._carry_out(step)
                elif self._clock() >= self._state.pending_checks.next_deadline:
                    self._carry_out(self.expire_due)
                if len(self._state.blocks.full) > WAITING:
                    self._carry_out(self.seal)
            except StoreFailed:
                return  # every caller gets it from the committer
            except StoreError as error:
                self._committer.stop(error)
                return
            except Exception as error:
                self._log_once("a turn of the upkeep failed", error)
                next_tick = time.monotonic() + TICK_S

    def _await(self, next_tick: float) -> None:
        """Waits for the next tick, the next message that expires, or a commit that needs it."""
        now = self._clock()
        wait_us = min(
            int((next_tick - time.monotonic()) * 1_000_000), self._state.pending_checks.next_deadline - now
        )
        listeners = self._committer.listeners
        listeners.upkeep_us = now + wait_us
        listeners.upkeep.wait(max(0, wait_us) / 1_000_000)
        listeners.upkeep.clear()

    def _carry_out(self, step: Callable[[], None]) -> None:
        """Runs a step. Raises StoreFailed, and the errors of a failing disk."""
        try:
            step()
        except (CorruptSegment, CorruptCatalog, DataLoss):
            return  # reading the block raises the error; other blocks are not affected
        except ResourceShortage as error:
            self._log_once("the upkeep tries again", error)
        except StoreError:
            raise
        except Exception as error:
            self._log_once(f"a step of the upkeep failed ({step.__name__.lstrip('_')})", error)

    def _log_once(self, what: str, error: Exception) -> None:
        """Logs each distinct error once."""
        text = f"{what}: {type(error).__name__}: {error}"
        if text not in self._logged and self._committer.failure is None:
            if len(self._logged) >= LOGGED:
                self._logged.clear()
            self._logged.add(text)
            logger.error(text, exc_info=None if isinstance(error, ResourceShortage) else error)

    def expire(self) -> None:
        """Expires messages past their time to live, and unused queues, in pieces, so that other work runs in
        between. Looks at all queues.
        """
        with self._committer.look as state:
            now = self._clock()
            pending_checks, queues = state.pending_checks, list(state.queues)
            pending_checks.overfull = {queue: None for queue in pending_checks.overfull if not queue.deleted}
            topologies = list(state.virtual_hosts.by_name.values())
            unused = [(topology, found) for topology in topologies if (found := topology.leases.unused(now))]
        for topology, found in unused:
            self._committer.run(partial(_delete_unused, topology, found))
            self._committer.listeners.tell_consumers()
        due: list[Queue] = []
        for start in range(0, len(queues), LOOKED_AT):
            with self._committer.look as state:
                due += state.expiry.due_of(queues[start : start + LOOKED_AT], now)
        self._expire_all(due)
        self.expire_due()

    def expire_due(self) -> None:
        """Expires what is known to be past its time to live. Looks at no other queue."""
        with self._committer.look as state:
            due = state.expiry.due(self._clock())
        self._expire_all(due)

    def _expire_all(self, due: list[Queue]) -> None:
        """Also what is due meanwhile: it does not wait for the end of a queue with a hundred thousand."""
        with self._committer.look:
            due = [queue for queue in due if not self._is_aside(queue)]
        while due and not self._ending:
            due = self._expire_some(due)
            self._committer.listeners.tell_consumers()
            if due:
                with self._committer.look as state:
                    found = dict.fromkeys([*due, *state.expiry.due(self._clock())])
                    due = [queue for queue in found if not self._is_aside(queue)]
            if len(self._state.blocks.full) > WAITING:
                self.seal()

    def _expire_some(self, due: list[Queue]) -> list[Queue]:
        """Returns what is left. A queue that makes it fail is skipped until its head is another message, or
        the next compaction.
        """
        try:
            return self._committer.run(lambda state, change, now: state.expiry.expire(change, now, due))
        except StoreError:
            raise
        except Exception as error:
            if len(due) > 1:
                return [left for queue in due for left in self._expire_some([queue])]
            if isinstance(error, ResourceShortage):
                self._log_once("the upkeep tries again", error)
                return []  # not aside: the next tick looks again
            with self._committer.look:
                self._aside[due[0]] = _head(due[0])
            self._log_once(
                f"messages of queue '{due[0].name}' cannot be expired, they stay where they are", error
            )
            return []

    def _is_aside(self, queue: Queue) -> bool:
        if queue not in self._aside:
            return False
        if self._aside[queue] == _head(queue):
            return True
        del self._aside[queue]
        return False

    def tick(self) -> None:
        """Once a second: expires, closes an idle open block, forgets, and sometimes compacts."""
        for step in self._steps():
            step()

    def _steps(self) -> list[Callable[[], None]]:
        self._ticks += 1
        steps = [self.expire, self._close_idle, self._forget, self._sever, self.end_queues]
        if self._ticks % COMPACT_TICKS:
            return steps
        self._aside.clear()
        return [*steps, *self.chores, self.compact]

    def _forget(self) -> None:
        self._aside = {queue: head for queue, head in self._aside.items() if not queue.deleted}
        self._committer.run(changes(self._state.blocks.record))
        compact_history(self._committer, self._clock())

    def _sever(self) -> None:
        """Takes the bindings of what was deleted out of the indexes."""
        left = True
        while left and not self._ending:
            with self._committer.look as state:
                left = state.virtual_hosts.registry.stale_bindings.remove(STALE_BINDINGS)

    def end_queues(self) -> None:
        """Forgets the messages of deleted virtual hosts."""
        registry = self._state.virtual_hosts.registry
        while registry.ending:
            self._committer.run(lambda _state, change, _now: registry.end_some(change, LOOKED_AT))

    def _close_idle(self) -> None:
        rows, ticks = self._seen
        blocks = self._state.blocks
        self._seen = (blocks.open_rows, ticks + 1 if rows == blocks.open_rows else 0)
        if (
            blocks.open_rows
            and self._seen[1] >= IDLE_TICKS
            and (blocks.open_rows >= IDLE_ROWS or not blocks.open_pins)
        ):
            self.close_open()

    def close_open(self) -> None:
        """Closes the open block, whatever its size: it waits for its seal, or is forgotten."""

        def work(state: BrokerState, change: Change, _now: int) -> None:
            state.blocks.close_open()
            state.blocks.record(change)

        self._committer.run(work)

    def seal(self) -> None:
        """Moves full open blocks to segments. 1. writes durable bytes; 2. commits the seal; 3. drops the rows
        from memory.

        Each leaves clients as much time as it took, unless blocks fill faster than that.
        """
        # a work, so that all rows of these blocks are durable when it returns
        for block_id in self._committer.run(lambda state, _change, _now: list(state.blocks.full)):
            began = time.monotonic()
            try:
                self._store.seal(block_id)  # 1.
            except DataLoss:
                if block_id in self._state.blocks.by_id:
                    raise
                continue  # forgotten meanwhile
            failpoint.here("upkeep.seal.written")

            def work(state: BrokerState, change: Change, _now: int, block_id: BlockId = block_id) -> bool:
                there = block_id in state.blocks.by_id
                if not there:
                    change.forgets.append(block_id)
                if not there or block_id not in state.blocks.full:  # another caller has sealed it
                    return False
                change.seals.append(block_id)
                change.journal.extend(state.sealing(block_id))
                return True

            if self._committer.run(work):  # 2.
                failpoint.here("upkeep.seal.committed")
                with self._committer.look as state:  # 3.
                    state.blocks.sealed(block_id)
                    waiting = len(state.blocks.full)
                if 0 < waiting <= UNHURRIED and not self._ending:
                    time.sleep(min(time.monotonic() - began, PAUSE_S))

    def compact(self) -> None:
        """Rewrites mostly-dead segments without the bodies of dead rows."""
        self._compaction.run()


def _delete_unused(
    topology: Topology, queues: list[Queue], _state: BrokerState, change: Change, _now: int
) -> None:
    topology.delete_unused(change, queues)


def _convert() -> None:
    to_rows([])


def _head(queue: Queue) -> int | None:
    try:
        return queue.ready.head(queue.log.visible_end)
    except (StoreError, NotLoaded):
        return None
