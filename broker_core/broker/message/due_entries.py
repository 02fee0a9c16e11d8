"""Entries of a queue that are due at times of their own, wherever they stand: finding and settling them.

Pure. Not here: what becomes of them (``delays.py``, ``expiry.py``), and the order of their times
(``queue/due_index.py``).
Invariant: one that cannot be read stays, and holds up no other. A call takes a bounded number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pyarrow as pa

from broker_core.broker.message.removals import Removals, ranges
from broker_core.broker.queue import Queue, Run
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.parts import settle_parts
from broker_core.core.block import Blocks, NotLoaded, together
from broker_core.core.change import EXPIRED, Change, InboxRow
from broker_core.core.errors import StoreError
from broker_core.core.ids import NO_BLOCK, NO_SEQUENCE, BlockId
from broker_core.core.records import NEVER

PIECE = 256  # messages that are read at a time
LOADED_BYTES = 64 * 1024 * 1024  # of bodies in the blocks that are loaded for one commit
LOOKED_AT = 2_048  # entries of the open block at a time
TIMES = ["due_us", "committed_at"]
Rows = list[InboxRow]
Places = dict[int, tuple[Run, int]]  # run and row of each offset
_UNREAD = InboxRow(NO_BLOCK, 0, NO_SEQUENCE, 0, "", "", b"", b"", b"")  # instead of what nobody has to read


class DueEntries:
    """``after_us``: how long after its commit an entry is due, by its properties; NEVER: at no time.
    ``cost``: what the release of one takes of the room of a commit.
    """

    def __init__(self, blocks: Blocks, after_us: Callable[[bytes], int], cost: int = 1) -> None:
        self._blocks, self._after_us, self._cost = blocks, after_us, cost
        self._times = partial(times_of_rows, after_us)

    def index(self, queue: Queue) -> DueIndex[Queue] | None:
        raise NotImplementedError

    def release(self, change: Change, queue: Queue, rows: Rows, now: int, removals: Removals) -> int:
        """Does what is to be done with messages that are due, and returns for how many there was room."""
        raise NotImplementedError

    def deadline(self, queue: Queue) -> int:
        """Returns when to call ``leave``, or an earlier time; NEVER: nothing is due at any time."""
        index = self.index(queue)
        return NEVER if index is None else index.next_us

    def leave(
        self, change: Change, queue: Queue, now: int, room: int, room_bytes: int, removals: Removals
    ) -> tuple[int, int, bool]:
        """Releases and settles the next messages that are due. Returns what it used of ``room`` and
        ``room_bytes``, and whether the next one is not due yet. Raises NotLoaded.
        """
        index = self.index(queue)
        if index is None or index.next_us > now:
            return 0, 0, True
        try:
            self._look(queue, index, now)
        except NotLoaded:  # what is due goes before it: after a restart the blocks are many
            if not index.due(now, 1).size:
                raise
        due = index.due(now, min(-(-room // self._cost), PIECE))
        offsets: list[int] = due[1].tolist()
        places = _places(queue, sorted(offsets))
        # each once: an exception in the index may have left one there twice
        ready = [*dict.fromkeys(offset for offset in offsets if offset in places)]
        fitting, rows = ready, dict.fromkeys(ready, _UNREAD)
        if queue.arguments.dead_letters or index.exchange is not None:
            fitting = ready[: self._fitting(places, ready, room_bytes)]
            rows = self._read(places, fitting)
        readable = [offset for offset in fitting if offset in rows]
        count = self.release(change, queue, [rows[offset] for offset in readable], now, removals)
        behind, released = readable[count:] or ready[len(fitting) :], readable[:count]
        used = offsets.index(behind[0]) if behind else len(offsets)
        for offset in set(offsets[:used]).difference(released):
            if not queue.progress.is_settled(offset):
                index.set_aside(offset)
        index.drop(due[:, :used])
        parts = list(ranges(sorted(released)))
        settle_parts(queue, parts)
        for start, end in parts if index.exchange is None else ():
            removals.effects.note(EXPIRED, queue, start, end)
        size_bytes = sum(len(rows[offset].body) for offset in released)
        if behind or index.unread_us <= now:
            return room, size_bytes, False  # others commit in between
        return used * self._cost, size_bytes, index.next_us > now

    def _look(self, queue: Queue, index: DueIndex[Queue], now: int) -> None:
        """Reads spans that may be due, the newest first: after a restart the others are many. Raises
        NotLoaded, StoreError.
        """
        if index.unread_us > now:
            return
        log, left = queue.log, LOOKED_AT
        try:
            for span in reversed(index.spans):
                end = min(span[1], log.visible_end)
                while span[2] <= now and left > 0 and span[0] < end:
                    span[0], looked = self._read_times(queue, index, span[0], end, left)
                    left -= looked
        finally:
            index.tidy(queue.progress.floor, log.next_offset, queue.depth)

    def _read_times(
        self, queue: Queue, index: DueIndex[Queue], start: int, end: int, most: int
    ) -> tuple[int, int]:
        """Takes the first of these entries into the index. Returns the next one, and how many were looked at,
        of which those of a stored block are cheap.
        """
        first = queue.progress.first_unsettled(start)
        if first > start:
            self._blocks.undo.append((index.expect_again, start, first))
            return first, 0
        try:
            run, number = queue.log.locate(start)
        except StoreError:  # it stays
            return start + 1, 1
        end = min(end, run.end)
        if index.exchange is not None and index.exchange.drops_duplicates:  # all are due
            end = min(end, start + most)
            index.add_all(np.stack([np.zeros(end - start, np.int64), np.arange(start, end)]))
        elif run.block.inbox is not None:
            row, end = run.block.inbox[number], start + 1
            if (after_us := self._after_us(row.properties)) < NEVER:
                index.add(row.committed_at + after_us, start)
        elif index.exchange is not None or run.block.expires_us < NEVER:
            with suppress(StoreError):  # they stay: reading them raises the error
                self._read_stored_times(queue, index, run.clip(start, end))
        return end, 1 + (end - start) // 64

    def _read_stored_times(self, queue: Queue, index: DueIndex[Queue], run: Run) -> None:
        found = self._blocks.read(run.block_id, self._times)
        if found.schema.names != TIMES:  # the whole block is in memory: that takes too long under the lock
            raise NotLoaded([run.block_id], part=self._times)
        rows = run.rows()
        at_us, committed_at = (column.to_numpy()[rows] for column in found.columns)
        at_us = at_us + (run.committed_at if run.sequence else committed_at)
        waits = at_us < NEVER
        for start, end in queue.progress.settled_within(run.first, run.end):
            self._blocks.undo.append((index.expect_again, start, end))
            waits[start - run.first : end - run.first] = False
        index.add_all(np.stack([at_us, np.arange(run.first, run.end)])[:, waits])

    def _fitting(self, places: Places, offsets: list[int], room_bytes: int) -> int:
        """Returns how many of the first messages to read together, at least one. Messages that are due one
        after the other may be in very different blocks.
        """
        loaded: set[BlockId] = set()
        loaded_bytes = 0
        for count, offset in enumerate(offsets):
            block = places[offset][0].block
            room_bytes -= block.size_bytes // max(1, block.rows)
            if block.inbox is None and block.block_id not in loaded:
                loaded.add(block.block_id)
                loaded_bytes += block.size_bytes
            if room_bytes < 0 or loaded_bytes > LOADED_BYTES:
                return count + 1
        return len(offsets)

    def _read(self, places: Places, offsets: list[int]) -> dict[int, InboxRow]:
        """Returns the messages without those that cannot be read. Raises NotLoaded, ResourceShortage."""
        found: dict[int, InboxRow] = {}
        stored: dict[int, list[int]] = {}  # by the first offset of their run
        for offset in sorted(offsets):
            run, number = places[offset]
            if run.block.inbox is not None:
                found[offset] = run.block.inbox[number]
            else:
                stored.setdefault(run.first, []).append(offset)
        missing: list[NotLoaded] = []
        for some in stored.values():
            run, numbers = places[some[0]][0], np.array([places[offset][1] for offset in some], np.int64)
            try:
                rows = self._blocks.decode(run.block_id, numbers, run.sequence, run.committed_at)
                found.update(zip(some, rows, strict=True))
            except NotLoaded as error:
                missing.append(error)
            except StoreError:
                continue
        if missing:
            raise together(missing)
        return found


def _places(queue: Queue, offsets: list[int]) -> Places:
    places: Places = {}  # of what is ready, and can be found
    for offset in offsets:
        if queue.ready.first_ready(offset, offset + 1) is not None:
            with suppress(StoreError):
                places[offset] = queue.log.locate(offset)
    return places


def times_of_rows(after_us: Callable[[bytes], int], block: pa.RecordBatch) -> pa.RecordBatch:
    """Returns ``TIMES`` of a block. The first count from the second, which are 0 if the run has them."""
    distinct = block.column("properties").dictionary_encode()
    after = np.array(list(map(after_us, distinct.dictionary.to_pylist())), np.int64)
    at = "committed_at"
    times = block.column(at) if at in block.schema.names else pa.array(np.zeros(block.num_rows, np.int64))
    of_rows = after[distinct.indices.to_numpy()] if len(after) else np.empty(0, np.int64)
    return pa.RecordBatch.from_arrays([pa.array(of_rows), pa.array(times.to_numpy().copy())], TIMES)
