"""Messages whose bytes are stored before they become visible: spilled, staged by Spark's tasks, or dead
letters written ahead ahead of their commit.

Pure.
Not here: messages of small commits (``messages.py``). Invariant: a queue gets one run for each piece,
whatever its length. A block that no queue needs is forgotten by the same change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.broker.message.messages import Messages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.removals import Removals
from broker_core.broker.queue import Queue
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.routing.routing import RowSelection, route_rows, selected_rows
from broker_core.broker.state.block import Blocks
from broker_core.broker.state.change import PUBLISHED, Change, Numbers
from broker_core.broker.topology.virtual_hosts import VirtualHosts
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import Share, Spilled
from broker_core.broker.transaction.transaction import DeadLetterBlock, StagedMessages
from broker_core.ids import BlockId, QueueId
from broker_core.message.message import Message


class StoredMessages:
    def __init__(
        self,
        virtual_hosts: VirtualHosts,
        numbers: Numbers,
        blocks: Blocks,
        overflow: Overflow,
        messages: Messages,
        pending_checks: PendingChecks,
    ) -> None:
        self._undo = blocks.undo
        self._virtual_hosts = virtual_hosts
        self._queues = virtual_hosts.registry.by_id
        self._numbers = numbers
        self._blocks = blocks
        self._overflow = overflow
        self._messages = messages
        self._pending_checks = pending_checks
        self._touched = pending_checks.touched

    def enqueue_block(
        self,
        change: Change,
        block_id: BlockId,
        rows: int,
        size_bytes: int,
        routes: Mapping[QueueId, RowSelection],
        now: int,
        *,
        expiring: bool | None = None,
        connection: object = None,
        readable: bool = True,
    ) -> dict[QueueId, int]:
        """Makes a stored block visible: one run per queue id of ``routes``. Deleted
        queues are left out. Returns the first offset per queue id.

        A block that is not known yet is named by ``change``. ``expiring``: whether a message has its own
        expiration; None: not known. Not ``readable``: it is not named yet, so a queue that becomes too long
        is cut in a later commit. A transient message among the rows counts as written.
        """
        selections = {
            queue_id: selection for queue_id, selection in routes.items() if queue_id in self._queues
        }
        if block_id not in self._blocks.by_id:
            if not selections:
                change.forgets.append(block_id)
                return {}
            change.names.append(block_id)
        block = self._blocks.name(block_id, rows, size_bytes)
        if block.expiring is None:
            block.expiring = expiring
        firsts: dict[QueueId, int] = {}
        removals = Removals()
        removals.effects = change.effects
        for queue_id, (row, count, bitmap) in selections.items():
            queue = self._queues[queue_id]
            first = firsts[queue_id] = queue.log.append(count, block_id, row, bitmap, change.sequence, now)
            change.effects.note(PUBLISHED, queue, first, first + count)
            if queue.written:
                change.put(queue.log.record_last_run())
            self._touched.add(queue)
            if queue.consumers.publishers is not None and connection is not None:
                self._undo.append((setattr, queue.consumers, "publishers", dict(queue.consumers.publishers)))
                queue.consumers.publishers.update(dict.fromkeys(range(first, first + count), connection))
            if expiring is not False:
                queue.marks.timed = True
            if queue.arguments.limited and readable:
                self._overflow.measure(queue, first)
                self._overflow.cut(change, queue, now, removals)
            elif queue.arguments.limited:
                queue.room.forget()
                self._pending_checks.cut_later(queue, now)
        if removals:
            self._messages.dead_letter_all(change, removals, now)
        return firsts

    def enqueue_staged(self, change: Change, staged: StagedMessages, now: int) -> None:
        """Makes rows visible that Spark's tasks staged."""
        if staged.inline is not None:
            self._enqueue_inline(change, staged.inline, staged.routes, now)
        elif staged.rows:
            self.enqueue_block(change, staged.block_id, staged.rows, staged.size_bytes, staged.routes, now)

    def _enqueue_inline(
        self,
        change: Change,
        block: pa.RecordBatch,
        routes: Mapping[QueueId, RowSelection],
        now: int,
    ) -> None:
        """Makes a few rows part of the open block."""
        targets: list[list[Queue]] = [[] for _ in range(block.num_rows)]
        for queue_id, selection in routes.items():
            queue = self._queues.get(queue_id)
            if queue is not None:
                for row in selected_rows(selection):
                    targets[row].append(queue)
        messages = (
            Message(row["body"], row["routing_key"], row["exchange"], row["properties"])
            for row in block.to_pylist()
        )
        self._messages.enqueue_rows(
            change,
            [Publish(message, tuple(queues)) for message, queues in zip(messages, targets, strict=True)],
            now,
        )

    def enqueue_spilled(self, change: Change, spilled: Spilled, now: int, connection: object) -> None:
        """Makes a spilled piece of a transaction visible. Raises nothing."""
        change.sequence = change.sequence or self._numbers.next_sequence()
        shares = list(spilled.shares())
        if spilled.block_id not in self._blocks.by_id:  # otherwise it belongs to a prepared transaction
            if not shares:
                change.forgets.append(spilled.block_id)
                return
            change.names.append(spilled.block_id)
        block = self._blocks.name(spilled.block_id, spilled.rows, spilled.size_bytes)
        if block.expiring is None:
            block.expiring = spilled.expiring
        limited: dict[Queue, None] = {}
        for share in shares:
            self._enqueue_share(change, spilled, share, now, connection)
            if share.queue.arguments.limited:
                limited[share.queue] = None
        removals = Removals()
        removals.effects = change.effects
        for queue in limited:
            self._overflow.cut(change, queue, now, removals)
        if removals:
            self._messages.dead_letter_all(change, removals, now)

    def _enqueue_share(
        self, change: Change, spilled: Spilled, share: Share, now: int, connection: object
    ) -> None:
        queue, (row, count, bitmap), recorded = share
        sizes: npt.NDArray[Any] | None = None
        if queue.arguments.max_bytes is not None:
            if queue.room.sizes is None:
                self._overflow.measure(queue, queue.progress.floor)  # before new entries are added
            sizes = spilled.sizes if spilled.sizes is not None else self._blocks.body_sizes(spilled.block_id)
        first = queue.log.append(count, spilled.block_id, row, bitmap, change.sequence, now)
        change.effects.note(PUBLISHED, queue, first, first + count)
        if recorded:
            change.put(queue.log.record_last_run())
        self._touched.add(queue)
        if queue.consumers.publishers is not None and connection is not None:
            self._undo.append((setattr, queue.consumers, "publishers", dict(queue.consumers.publishers)))
            queue.consumers.publishers.update(dict.fromkeys(range(first, first + count), connection))
        if spilled.expiring:
            queue.marks.timed = True
        if sizes is not None:
            rows = selected_rows(share.selection)
            for offset, size in enumerate(sizes[np.asarray(rows)].tolist(), first):
                queue.room.add(offset, size)

    def enqueue_dead_letters(self, change: Change, dead_letter_block: DeadLetterBlock, now: int) -> None:
        """Enqueues dead letters whose bytes are in a segment. Raises nothing."""
        topology = self._virtual_hosts.by_name.get(dead_letter_block.queue.vhost)
        source = topology.exchanges.get(dead_letter_block.exchange) if topology is not None else None
        routes: dict[QueueId, RowSelection] = {}
        if source is not None and not dead_letter_block.queue.deleted:
            routes = route_rows(
                source,
                dead_letter_block.keys.column("routing_key"),
                dead_letter_block.keys.column("properties"),
            )
        change.sequence = change.sequence or self._numbers.next_sequence()
        change.effects.source = dead_letter_block.queue
        self.enqueue_block(
            change,
            dead_letter_block.block_id,
            dead_letter_block.rows,
            dead_letter_block.size_bytes,
            routes,
            now,
            expiring=False,
            readable=False,
        )
        change.effects.source = None
