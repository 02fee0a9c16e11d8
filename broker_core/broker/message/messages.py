"""Messages in queues: enqueueing and dead-lettering; of small commits, and of blocks that
are stored before they become visible.

Pure.
Not here: transactions (``commit.py``), topology (``topology/topology.py``), the log of one queue
(``queue.py``), expiry (``expiry.py``).
Invariant: a message that the broker removes from a queue (overflow, expiry) is settled, and dead-lettered if
the queue has a dead-letter exchange, in one change. This does not fail because of a message's content. A dead
letter that drops another message from a full queue extends the ``Removals`` list, not the stack. What is too
much for one commit leaves its queue in a later one (``PendingChecks.overfull``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from broker_core.broker.message.admission import NO_IDS, Admission, Ids
from broker_core.broker.message.append_many import append_many
from broker_core.broker.message.dead_letter import DeadLetters, Reason
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.removals import Removals
from broker_core.broker.queue import Queue, Queues, Run
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.topology.virtual_hosts import VirtualHosts
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import Share, Spilled, SpilledLetters
from broker_core.broker.transaction.transaction import MessageTransactions
from broker_core.core.block import Blocks, selected_rows
from broker_core.core.change import PUBLISHED, ROUTE, Change, InboxRow, Numbers
from broker_core.core.errors import RemoteProtocolError
from broker_core.core.ids import NO_SEQUENCE
from broker_core.core.records import NEVER
from broker_core.message.message import Message
from broker_core.message.properties import TRANSIENT, delivery_mode
from broker_core.routing.content import EXPIRATION, own_expiration_us

_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


class Messages:
    def __init__(
        self,
        virtual_hosts: VirtualHosts,
        numbers: Numbers,
        blocks: Blocks,
        transactions: MessageTransactions,
        overflow: Overflow,
        pending_checks: PendingChecks,
    ) -> None:
        self._undo = blocks.undo
        self._virtual_hosts = virtual_hosts
        self._numbers = numbers
        self._blocks = blocks
        self._transactions = transactions
        self._overflow = overflow
        self._pending_checks = pending_checks
        self._touched = pending_checks.touched
        self.admission = Admission(blocks, overflow, pending_checks)
        self._ordinary = b""  # the last properties of a persistent message without an expiration

    # -- enqueueing ------------------------------------------------------------------------------------------
    def enqueue(
        self,
        change: Change,
        publishes: Sequence[Publish],
        now: int,
        atomic: bool = True,
        rejected: list[int] | None = None,
        connection: object = None,
        removals: Removals | None = None,
    ) -> list[Message]:
        """Enqueues small commits: rows of the open block, transient rows in memory. Returns unrouted
        mandatory messages. What must be dead-lettered is added to ``removals``, or done if that is None.

        If not ``atomic``, a full reject-publish queue does not get a message, the other queues do; indexes in
        ``publishes`` of messages that some queue refused go to ``rejected``. ``connection`` published them.
        """
        returned: list[Message] = []
        change.sequence = change.sequence or self._numbers.next_sequence()
        admission = self.admission
        if len(publishes) > 1 and append_many(admission, change, publishes, now):
            return returned
        caller_removals = removals
        for index, publish in enumerate(publishes):
            message, queues, mandatory = publish
            for queue in queues:
                if queue.deleted:
                    queues = tuple(queue for queue in queues if not queue.deleted)
                    break
            # as in RabbitMQ: a direct reply does not count as routed
            if mandatory and all(queue.replies for queue in queues):
                returned.append(message)
            ids = NO_IDS
            for queue in queues:
                if queue.log.ids is not None or (queue.arguments.refuses and not atomic):
                    removals = self.removals(change, now) if removals is None else removals
                    full = None if atomic else rejected
                    queues, ids = admission.admit(change, publish, queues, now, full, index, removals)
                    break
            if not queues:
                continue
            self._append(change, message, queues, ids, now, connection)
            for queue in queues:
                if queue.arguments.limited:
                    removals = self.removals(change, now) if removals is None else removals
                    self._overflow.cut(change, queue, now, removals)
        if caller_removals is None and removals:
            self.dead_letter_all(change, removals, now)
        return returned

    def _append(
        self, change: Change, message: Message, queues: Queues, ids: Ids, now: int, connection: object
    ) -> None:
        """Appends a message to its queues: a row of the open block, or of memory."""
        body, routing_key, exchange, properties = message
        written, expires_us = queues[0].written or any(queue.written for queue in queues), NEVER
        if properties and properties != self._ordinary:
            try:
                if delivery_mode(properties) == TRANSIENT:
                    written = False
                elif not properties[0] & EXPIRATION:
                    self._ordinary = properties
            except RemoteProtocolError:
                pass  # damaged properties are accepted as they are
            if properties[0] & EXPIRATION:
                expires_us = _mark_timed(queues, properties, now)
        block = self._blocks.open() if written else self._blocks.transient()
        row, note, touched = block.rows, change.effects.note, self._touched
        routes: list[bytes] = []  # put together once: they may be thousands
        for queue in queues:
            offset = queue.log.append_row(block, row)
            note(PUBLISHED, queue, offset, offset + 1)
            if ids and queue in ids:
                self.admission.remember(queue, (ids[queue],), offset, now, durable=written)
            if written and queue.written:
                routes.append(ROUTE.pack(queue.queue_id, offset))
            if queue.room.sizes is not None:
                queue.room.add(offset, len(body))
            if queue.consumers.publishers is not None and connection is not None:
                self._undo.item(queue.consumers.publishers, offset)
                queue.consumers.publishers[offset] = connection
            touched.add(queue)
        place = block.block_id, row, change.sequence, now
        entry = _new(InboxRow, (*place, exchange, routing_key, properties, body, b"".join(routes)))
        block.add(entry, expires_us)
        if written:
            change.rows.append(entry)

    # -- others ----------------------------------------------------------------------------------------------
    def persist(self, change: Change, queue: Queue, start: int, end: int) -> None:
        """Makes transient messages within [start, end) rows of the open block, because they must survive a
        restart from now on.
        """
        if not queue.written:
            return
        for recorded in queue.log.record_between(start, end):
            change.put(recorded)
        in_memory = [run for run in queue.log.runs if run.block.block_id < 0]
        for run in [run for run in in_memory if run.first < end and run.end > start]:
            pieces: list[Run] = []
            for ahead, number in enumerate(run.rows()):
                row = self._blocks.row(run.block.block_id, int(number))
                block = self._blocks.open()
                routes = ROUTE.pack(queue.queue_id, run.first + ahead)
                entry = row._replace(block_id=block.block_id, row=block.rows, routes=routes)
                block.add(entry, run.block.expires_us)
                change.rows.append(entry)
                if pieces and pieces[-1].block is block:
                    pieces[-1].extend(entry.row)
                else:
                    self._blocks.pin(block.block_id)
                    pieces.append(Run(run.first + ahead, 1, block, entry.row, b"", NO_SEQUENCE, 0))
            queue.log.replace_run(run, pieces)

    def fetch(self, queue: Queue, offset: int) -> InboxRow:
        """Returns the message of an entry that is not deleted, with its commit sequence and time."""
        run, number = queue.log.locate(offset)
        row = self._blocks.row(run.block.block_id, number)
        return row._replace(sequence=run.sequence, committed_at=run.committed_at) if run.sequence else row

    def removals(self, change: Change, now: int) -> Removals:
        """Returns an empty one; ``dead_letter_all`` must follow in the same change."""
        return Removals(change.effects, partial(self.letters, now))

    def letters(self, now: int, queue: Queue, reason: Reason) -> DeadLetters | None:
        """Returns what makes the dead letters of a queue; None, as in RabbitMQ: its exchange does not exist
        and gets nothing.
        """
        topology, arguments = self._virtual_hosts.by_name.get(queue.vhost), queue.arguments
        source = topology.exchanges.get(arguments.dead_letter_exchange) if topology is not None else None
        if source is None:
            return None
        key = arguments.dead_letter_routing_key
        return DeadLetters(queue.name, reason, source, key, now, self._transactions.of)

    def widest(self, queue: Queue) -> int:
        """Returns how many queues a dead letter of ``queue`` may reach at most."""
        letters = self.letters(0, queue, "rejected")
        return 0 if letters is None else letters.widest

    def dead_letter_all(self, change: Change, removals: Removals, now: int) -> None:
        """Enqueues the dead letters in ``removals``, and those of what is dropped from full queues by that,
        in order. It never raises, whatever the messages contain.
        """
        effects = change.effects
        while removals:
            effects.source, publishes = removals.popleft()
            effects.letters = True
            self.enqueue(change, publishes, now, removals=removals)
            effects.letters, effects.source = False, None


def _mark_timed(queues: Queues, properties: bytes, now: int) -> int:
    """They get a message that has an expiration of its own. Returns when it expires."""
    own_us = own_expiration_us(properties)
    for queue in queues:
        queue.marks.expire_at(queue.log.next_offset, 1, now + own_us)
        queue.marks.hasty = queue.marks.hasty or own_us == 0
    return now + own_us


class StoredMessages:
    """Messages whose bytes are stored before their commit: spilled, staged by Spark's tasks, or dead letters
    written ahead. A queue gets one run for each piece, whatever its length. A block that no queue needs is
    forgotten by the same change.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._blocks, self._numbers, self._overflow = messages._blocks, messages._numbers, messages._overflow
        self._undo = self._blocks.undo
        self._touched, self._admission = messages._pending_checks.touched, messages.admission

    def enqueue_staged(self, change: Change, staged: Spilled | list[Publish], now: int) -> None:
        if isinstance(staged, Spilled):
            self.enqueue_spilled(change, staged, now, None)
        else:
            self._messages.enqueue(change, staged, now)

    def enqueue_spilled(self, change: Change, spilled: Spilled, now: int, connection: object) -> None:
        """Makes a stored piece of a transaction visible. Raises NotLoaded, of what is staged alone."""
        change.sequence = change.sequence or self._numbers.next_sequence()
        shares = list(spilled.shares())
        if change.drops_duplicates and any(share.queue.log.ids is not None for share in shares):
            shares = self._admission.new_shares(spilled.block_id, shares, now)
        if spilled.block_id not in self._blocks.by_id:  # otherwise it belongs to a prepared transaction
            if not shares:
                change.forgets.append(spilled.block_id)
                return
            change.names.append(spilled.block_id)
        block = self._blocks.name(spilled.block_id, spilled.rows, spilled.size_bytes)
        block.expires_us = min(block.expires_us, now + spilled.expiration_us)
        limited: dict[Queue, None] = {}
        for share in shares:
            self._enqueue_share(change, spilled, share, now, connection)
            if share.queue.arguments.limited:
                limited[share.queue] = None
        removals = self._messages.removals(change, now)
        for queue in limited:
            self._overflow.cut(change, queue, now, removals)
        if removals:
            self._messages.dead_letter_all(change, removals, now)

    def enqueue_letters(self, change: Change, letters: SpilledLetters, now: int) -> None:
        """Makes dead letters visible that were written ahead. Raises nothing."""
        effects = change.effects
        sources, spilled = letters
        effects.letters, effects.source = True, sources[0] if len(sources) == 1 else None
        self.enqueue_spilled(change, spilled, now, None)
        effects.letters, effects.source = False, None

    def _enqueue_share(
        self, change: Change, spilled: Spilled, share: Share, now: int, connection: object
    ) -> None:
        queue, (row, count, bitmap), recorded = share
        sizes: npt.NDArray[Any] | None = None
        if queue.arguments.max_bytes is not None:
            if queue.room.sizes is None:
                self._overflow.measure(queue)  # before new entries are added
            sizes = spilled.sizes if spilled.sizes is not None else self._blocks.body_sizes(spilled.block_id)
        first = queue.log.append(count, spilled.block_id, row, bitmap, change.sequence, now)
        change.effects.note(PUBLISHED, queue, first, first + count)
        if recorded:
            change.put(queue.log.record_last_run())
        self._touched.add(queue)
        if queue.consumers.publishers is not None and connection is not None:
            self._undo.append((setattr, queue.consumers, "publishers", dict(queue.consumers.publishers)))
            queue.consumers.publishers.update(dict.fromkeys(range(first, first + count), connection))
        if spilled.expiration_us < NEVER:
            queue.marks.expire_at(first, count, now + spilled.expiration_us)
        if sizes is not None:
            rows = selected_rows(share.selection)
            for offset, size in enumerate(sizes[np.asarray(rows)].tolist(), first):
                queue.room.add(offset, size)
