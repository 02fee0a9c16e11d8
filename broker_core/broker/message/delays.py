"""Messages that wait in an exchange until they are due, and then are routed.

They are entries of a queue without a name, one for each such exchange. So what holds for messages in a queue
holds for them: they are part of the commit that publishes them, on the disk, sealed and compacted. When they
are due, one commit settles them there and enqueues them where they are routed to then.

Pure. Not here: which messages wait (``routing/exchange_types.py``), and when this is called
(``expiry.py``).
Invariant: a message leaves at its time, not before, as the broker's clock shows it. One that cannot be read
stays, and holds up no other. A commit delivers a bounded number of bytes, messages and entries.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.broker.message.messages import Messages
from broker_core.broker.message.removals import Removals, ranges
from broker_core.broker.queue import Queue, Run
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.parts import settle_parts
from broker_core.broker.transaction.publish import Publish
from broker_core.core.block import Blocks, NotLoaded, together
from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import ResourceShortage, StoreError
from broker_core.core.ids import BlockId
from broker_core.core.undo import Tally
from broker_core.message.message import Message
from broker_core.routing.exchange_types import WaitingExchange, delay_ms

PIECE = 256  # messages that are read at a time
LOADED_BYTES = 64 * 1024 * 1024  # of bodies in the blocks that are loaded for one commit
_LOOKED_AT = 2_048  # entries of the open block at a time
_AT_ONCE = 0
Places = dict[int, tuple[Run, int]]  # run and row of each offset
_DEATH = b"\x07x-death"  # in a dead letter, which is no duplicate


class Delays:
    """``unroutable``: messages since the start that reached no queue when they were due."""

    def __init__(self, blocks: Blocks, messages: Messages) -> None:
        self._blocks = blocks
        self._messages = messages
        self.unroutable = Tally(blocks.undo)

    def deadline(self, queue: Queue) -> int | None:
        """Returns when to call ``deliver``; None: nothing waits."""
        index = _index(queue)
        try:
            return index.next_us() if self._look(queue, index) else _AT_ONCE
        except (NotLoaded, StoreError, ResourceShortage):
            return _AT_ONCE

    def deliver(
        self, change: Change, queue: Queue, now: int, room: int, room_bytes: int, removals: Removals
    ) -> tuple[int, int, bool]:
        """Delivers the next messages that are due. Returns what it used of ``room`` and ``room_bytes``, and
        whether the next one is not due yet. Raises NotLoaded.
        """
        index, complete = _index(queue), False
        try:
            complete = self._look(queue, index)
        except NotLoaded:  # what is due goes before it: after a restart the blocks are many
            if not index.due(now, 1).size:
                raise
        due = index.due(now, min(room, PIECE))
        offsets: list[int] = due[1].tolist()
        places = _places(queue, sorted(offsets))
        # each once: an exception in the index may have left one there twice
        waiting = [*dict.fromkeys(offset for offset in offsets if offset in places)]
        fitting = waiting[: self._fitting(places, waiting, room_bytes)]
        whole, waiting = len(fitting) == len(waiting), fitting
        left: list[int] = []
        new: list[Publish] = []
        letters: list[Publish] = []
        size_bytes, last = 0, -1
        rows = self._read(places, waiting)
        for offset in waiting:
            if removals.entries <= 0:
                break
            row, last = rows[offset], offset
            if row is None:
                continue
            left.append(offset)
            publish = _publish(index.exchange, row)
            removals.entries -= max(1, len(publish.queues))
            size_bytes += len(row.body)
            if publish.queues:
                (letters if _DEATH in row.properties else new).append(publish)
            else:
                self.unroutable.add(1)
        count = offsets.index(last) + 1 if waiting else len(offsets)
        index.drop(due[:, :count])
        if left:
            settle_parts(queue, list(ranges(sorted(left))))
        for publishes in (new, letters):
            if publishes:
                change.repeats = publishes is letters
                self._messages.enqueue(change, publishes, now, removals=removals)
        change.repeats = False
        if not (whole and complete):
            return room, size_bytes, False  # others commit in between
        return count, size_bytes, not index.due(now, 1).shape[1]

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

    def _read(self, places: Places, offsets: list[int]) -> dict[int, InboxRow | None]:
        """Returns the messages; None for one that cannot be read. Raises NotLoaded, ResourceShortage."""
        found: dict[int, InboxRow | None] = dict.fromkeys(offsets)
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
            except NotLoaded as wanted:
                missing.append(wanted)
            except StoreError:
                continue
            else:
                found.update(zip(some, rows, strict=True))
        if missing:
            raise together(missing)
        return found

    # -- the index -------------------------------------------------------------------------------------------
    def _look(self, queue: Queue, index: DueIndex[Queue]) -> bool:
        """Takes entries into the index that became visible, those since the first look before the others.
        Returns whether none is left. Raises NotLoaded, StoreError.
        """
        log, left = queue.log, _LOOKED_AT
        new, old = index.unread
        if not new[1]:
            new[0] = old[1] = log.visible_end
        new[1] = log.visible_end
        for part in index.unread:
            while part[0] < part[1] and left > 0:
                start = queue.progress.first_unsettled(part[0])
                if start > part[0]:
                    part[0] = min(start, part[1])
                    continue
                left -= 1
                try:
                    run, number = log.locate(start)
                except StoreError:  # it stays
                    part[0] = start + 1
                    continue
                if index.exchange.drops_duplicates:  # all are due: those that were dropped are not here
                    stop = min(run.end, part[1], start + left)
                    index.add_all(np.stack([np.zeros(stop - start, np.int64), np.arange(start, stop)]))
                    part[0], left = stop, left - (stop - start) // 64
                elif run.block.inbox is not None:
                    row = run.block.inbox[number]
                    index.add(row.committed_at + delay_ms(row.properties) * 1000, start)
                    part[0] = start + 1
                else:
                    stored = run.clip(start, min(run.end, part[1]))
                    with suppress(StoreError):  # they stay: reading them raises the error
                        self._look_at(queue, index, stored)
                    part[0], left = stored.end, left - stored.count // 64
        return all(start >= end for start, end in index.unread)

    def _look_at(self, queue: Queue, index: DueIndex[Queue], run: Run) -> None:
        """Takes entries of a stored block into the index."""
        found = self._blocks.read(run.block_id, delays_of_rows)
        if found.schema.names != _DELAYS:  # the whole block is in memory: that takes too long under the lock
            raise NotLoaded([run.block_id], part=delays_of_rows)
        rows = run.rows()
        at_us, committed_at = (column.to_numpy()[rows] for column in found.columns)
        at_us = at_us + (run.committed_at if run.sequence else committed_at)
        waits: npt.NDArray[np.bool_] = np.ones(run.count, np.bool_)
        for start, end in queue.progress.settled_within(run.first, run.end):
            waits[start - run.first : end - run.first] = False
        index.add_all(np.stack([at_us, np.arange(run.first, run.end)])[:, waits])


_DELAYS = ["delay_us", "committed_at"]


def delays_of_rows(block: pa.RecordBatch) -> pa.RecordBatch:
    """Returns how long the messages of a block wait, and when each was committed, if the block has that."""
    distinct = block.column("properties").dictionary_encode()
    delays = np.array([delay_ms(each) * 1000 for each in distinct.dictionary.to_pylist()], np.int64)
    at = "committed_at"
    times = block.column(at) if at in block.schema.names else pa.array(np.zeros(block.num_rows, np.int64))
    of_rows = delays[distinct.indices.to_numpy()] if len(delays) else np.empty(0, np.int64)
    return pa.RecordBatch.from_arrays([pa.array(of_rows), pa.array(times.to_numpy().copy())], _DELAYS)


def _publish(exchange: WaitingExchange[Queue], row: InboxRow) -> Publish:
    """Returns a message that has waited, and the queues that it reaches now."""
    queues, properties = exchange.release(row.routing_key, row.properties)
    return Publish(Message(row.body, row.routing_key, row.exchange, properties), queues, False)


def _places(queue: Queue, offsets: list[int]) -> Places:
    """Of what is not settled, and can be found."""
    places: Places = {}
    for offset in offsets:
        if not queue.progress.is_settled(offset):
            with suppress(StoreError):
                places[offset] = queue.log.locate(offset)
    return places


def _index(queue: Queue) -> DueIndex[Queue]:
    assert queue.marks.waits is not None
    return queue.marks.waits
