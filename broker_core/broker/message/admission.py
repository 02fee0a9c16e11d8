"""Which of its queues take a message: not one that is full and refuses, nor one that has seen its id.

Every publish passes here, at its commit: of a channel, prepared, spilled, staged by Spark, of a batch write.
Dead letters do not, nor what ``txmq message move`` moves: the broker makes no duplicates, and a message that
comes back to a queue must not be lost.

Not here: what an id is (``message/deduplication.py``), and how ids are remembered
(``queue/message_ids.py``).
Invariant: a queue remembers the ids of what it takes, in the same change, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.removals import Removals
from broker_core.broker.queue import Queue, Queues
from broker_core.broker.queue.message_ids import MessageIds
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import Share
from broker_core.core.block import Blocks, NotLoaded, RowSelection, row_numbers, select_rows, together
from broker_core.core.change import Change, InboxRow
from broker_core.core.ids import NO_BLOCK, BlockId
from broker_core.core.undo import Tally
from broker_core.message.deduplication import ids_in

Ids = Mapping[Queue, bytes]
NO_IDS: Ids = {}


class Admission:
    """``duplicates``: dropped since the start."""

    def __init__(self, blocks: Blocks, overflow: Overflow, pending_checks: PendingChecks) -> None:
        self.blocks = blocks
        self._overflow = overflow
        self.pending_checks = pending_checks
        self.duplicates = Tally(blocks.undo)

    def admit(
        self,
        change: Change,
        publish: Publish,
        queues: Queues,
        now: int,
        rejected: list[int] | None,
        index: int,
        removals: Removals,
    ) -> tuple[Queues, Ids]:
        """Returns those of the ``queues`` that take a message, and its id for those that remember it.
        Dead-letters what reject-publish-dlx refuses. ``rejected`` gets ``index`` if a queue is full; None:
        the transaction is atomic, and was checked for room.
        """
        taken: list[Queue] = []
        ids: dict[Queue, bytes] = {}
        full: list[Queue] = []
        message = publish.message
        for queue in queues:
            seen = queue.log.ids
            if seen is not None and change.drops_duplicates:
                id_ = seen.rule.id_of(message.properties)
                if id_ and seen.has(id_, now):
                    self._drop(seen, 1)
                    continue
                if id_:
                    ids[queue] = id_
            if (
                rejected is not None
                and queue.arguments.refuses
                and self._overflow.would_overflow(queue, 1, len(message.body))
            ):
                full.append(queue)
            else:
                taken.append(queue)
        if full and rejected is not None:
            rejected.append(index)
        for queue in full:
            if queue.arguments.overflow == "reject-publish-dlx":
                body, routing_key, exchange, properties = message
                row = InboxRow(
                    NO_BLOCK, 0, change.sequence, now, exchange, routing_key, properties, body, b""
                )
                removals.add(queue, [row], "maxlen", whole=True)
        return tuple(taken), ids

    def _drop(self, seen: MessageIds, count: int) -> None:
        self.duplicates.add(count)
        seen.duplicates.add(count)

    def remember(
        self, queue: Queue, ids: Sequence[bytes], first: int, now: int, *, durable: bool = True
    ) -> None:
        """Remembers the ids of messages that the queue has taken, from offset ``first`` on."""
        seen = queue.log.ids
        assert seen is not None
        self.pending_checks.remembering[seen] = None
        seen.add(ids, first, now, durable=durable and queue.written)

    def record(self, change: Change, now: int) -> None:
        """At the end of a work: what its queues have to remember goes into its change."""
        remembering = self.pending_checks.remembering
        for seen in remembering:
            seen.record(change, now)
        remembering.clear()

    # -- messages that are stored before their commit --------------------------------------------------------
    def require_ids(self, stored: Iterable[tuple[BlockId, Queue]]) -> None:
        """Before anything is changed: the ids of stored messages are in memory. Raises NotLoaded."""
        missing: list[NotLoaded] = []
        for block_id, queue in stored:
            try:
                self._ids(block_id, queue)
            except NotLoaded as error:
                missing.append(error)
        if missing:
            raise together(missing)

    def _ids(self, block_id: BlockId, queue: Queue) -> list[bytes]:
        assert queue.log.ids is not None
        part = queue.log.ids.rule.ids_of_rows
        ids = ids_in(self.blocks.read(block_id, part))
        if ids is None:  # the whole block is in memory: the ids take too long for whoever has the lock
            raise NotLoaded([block_id], part=part)
        return ids

    def new_rows(
        self,
        block_id: BlockId,
        queue: Queue,
        selection: RowSelection,
        now: int,
        first: int,
        *,
        durable: bool = True,
    ) -> RowSelection | None:
        """Returns the rows of a stored block that the queue takes, from offset ``first`` on, and remembers
        their ids; None: it has seen all. Raises NotLoaded, CorruptSegment.
        """
        seen = queue.log.ids
        if seen is None:
            return selection
        ids = self._ids(block_id, queue)
        if selection.rows == len(ids) and seen.are_new(ids, now):
            self.remember(queue, ids, first, now, durable=durable)
            return selection
        rows: list[int] = []
        new: dict[bytes, int] = {}
        for row in row_numbers(selection).tolist():
            id_ = ids[row]
            if not id_ or not (id_ in new or seen.has(id_, now)):
                rows.append(row)
                new[id_] = row
        self._drop(seen, selection.rows - len(rows))
        if not rows:
            return None
        self.remember(queue, [ids[row] for row in rows], first, now, durable=durable)
        return selection if len(rows) == selection.rows else select_rows(np.array(rows, np.int64))

    def new_shares(self, block_id: BlockId, shares: Iterable[Share], now: int) -> list[Share]:
        """Returns the shares of a spilled block without what their queues have seen."""
        ends: dict[Queue, int] = {}
        found: list[Share] = []
        for share in shares:
            queue, selection, recorded = share
            first = ends.get(queue, queue.log.next_offset)
            new = self.new_rows(block_id, queue, selection, now, first, durable=recorded)
            if new is not None:
                ends[queue] = first + new.rows
                found.append(Share(queue, new, recorded))
        return found
