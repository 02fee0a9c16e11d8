"""Messages in queues: enqueueing, overflow, dead-lettering, purging.

Pure. Not here: transactions (``broker.py``), topology (``topology.py``), the log of one queue (``queue.py``), expiry (``expiry.py``).
Invariant: whatever leaves a queue unasked (overflow, expiry) is settled, and dead-lettered where the queue says so, in one change. What
a message holds never makes that fail. A dead letter that drives another message out of a full queue makes the list of what is ``Dying``
longer, never the stack deeper; what is too much for one commit leaves its queue in a later one (``overfull``).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from broker_core.broker.block import Blocks
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.content import EXPIRATION, own_time_to_live_ms
from broker_core.broker.dead_letter import DeadLetters, Reason
from broker_core.broker.exchange import Queues
from broker_core.broker.queue import Queue, Run
from broker_core.broker.routing import Routed, Selection, selected_rows
from broker_core.broker.topology import Topology
from broker_core.broker.transaction import Publish
from broker_core.errors import PreconditionFailed, RemoteProtocolError, StoreError
from broker_core.message import Message
from broker_core.properties import delivery_mode

ROUTE = struct.Struct("<qq")  # queue_id, offset
NEVER = 1 << 62
_TRANSIENT = 1
_LIMITS = ("x-max-length", "x-max-length-bytes")
_STEP = 256  # messages that overflow takes out at once, where they are dead-lettered
_new = tuple.__new__  # a third of the time of a NamedTuple's own
_DRIVEN_OUT = 4096  # messages that overflow dead-letters in one commit; the rest waits for the next
_DRIVEN_OUT_BYTES = 16 * 1024 * 1024


class Died(NamedTuple):
    """Messages that have left ``queue`` in this change, in order, and have to be dead-lettered in it."""

    queue: Queue
    rows: Sequence[InboxRow]
    reason: Reason


class Dying(deque[Died]):
    """What has left queues in a change and is not dead-lettered yet; ``room`` and ``room_bytes`` are left for overflow."""

    room = _DRIVEN_OUT
    room_bytes = _DRIVEN_OUT_BYTES


class Messages(Topology):
    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.touched: set[Queue] = set()  # of the commits in hand
        self.runnable: dict[Queue, None] = {}  # for ``Dispatch.dispatch``
        self.next_deadline = NEVER  # when the head of some queue expires, in microseconds since the epoch
        self.overfull: dict[Queue, None] = {}  # longer than they may be: one commit could not take out enough

    def wake(self, queue: Queue) -> None:
        """Some consumer of it may be given something now, or what is too old at once has to go."""
        if queue.consumers or queue.hasty:
            self.runnable[queue] = None

    # -- enqueueing -----------------------------------------------------------------------------------------------------
    def enqueue_rows(
        self,
        change: Change,
        publishes: Iterable[Publish],
        now: int,
        *,
        atomic: bool = True,
        rejected: list[int] | None = None,
        connection: object = None,
    ) -> list[Message]:
        """Small commits: rows into the open block, transient ones into memory. Returns mandatory messages without a queue.

        Not ``atomic``: a full reject-publish queue does not get a message, the others do; the places in ``publishes`` of
        those that some queue refused go to ``rejected``. ``connection`` is whose they are.
        """
        dying = Dying()
        returned = self._enqueue(change, publishes, now, dying, atomic, rejected, connection)
        if dying:
            self._bury(change, dying, now)
        return returned

    def _enqueue(
        self,
        change: Change,
        publishes: Iterable[Publish],
        now: int,
        dying: Dying,
        atomic: bool = True,
        rejected: list[int] | None = None,
        connection: object = None,
    ) -> list[Message]:
        """The same; what it drives out is in ``dying`` then."""
        returned: list[Message] = []
        sequence = change.sequence
        if not sequence:
            sequence = change.sequence = self.next_sequence()
        touched = self.touched
        for index, (message, queues, mandatory) in enumerate(publishes):
            body, routing_key, exchange, properties = message
            for queue in queues:
                if queue.deleted:
                    queues = tuple(queue for queue in queues if not queue.deleted)
                    break
            if mandatory and all(queue.replies for queue in queues):  # as RabbitMQ: to reply directly is not to route
                returned.append(message)
            if not queues:
                continue
            if not atomic:
                for queue in queues:
                    if queue.refuses:
                        queues = self._accepting(change, message, queues, now, index, rejected, dying)
                        break
                if not queues:
                    continue
            written = queues[0].written or any(queue.written for queue in queues)
            if properties:
                try:
                    if delivery_mode(properties) == _TRANSIENT:
                        written = False
                except RemoteProtocolError:
                    pass  # damaged ones that were taken in as they are
                if properties[0] & EXPIRATION:
                    at_once = own_time_to_live_ms(properties) == 0
                    for queue in queues:
                        queue.timed = True
                        queue.hasty = queue.hasty or at_once
            block = self.blocks.open() if written else self.blocks.transient()
            row = block.rows
            routes = b""
            for queue in queues:
                offset = queue.append_row(block, row)
                if written and queue.written:
                    routes += ROUTE.pack(queue.queue_id, offset)
                if queue.sizes is not None:
                    queue.add_size(offset, len(body))
                if queue.publishers is not None and connection is not None:
                    self.undo.item(queue.publishers, offset)
                    queue.publishers[offset] = connection
                touched.add(queue)
            entry = _new(InboxRow, (block.block_id, row, sequence, now, exchange, routing_key, properties, body, routes))
            block.add(entry)
            if written:
                change.rows.append(entry)
            for queue in queues:
                if queue.limited:
                    self._overflow(change, queue, now, dying)
        return returned

    def _accepting(
        self, change: Change, message: Message, queues: Queues, now: int, index: int, rejected: list[int] | None, dying: Dying
    ) -> Queues:
        """Those of ``queues`` that are not full; what reject-publish-dlx refuses is dead-lettered."""
        full = [queue for queue in queues if queue.refuses and self.would_overflow(queue, 1, len(message.body))]
        if full and rejected is not None:
            rejected.append(index)
        for queue in full:
            if queue.arguments["x-overflow"] == "reject-publish-dlx":
                row = InboxRow(0, 0, change.sequence, now, message.exchange, message.routing_key, message.properties, message.body, b"")
                dying.append(Died(queue, [row], "maxlen"))
        return tuple(queue for queue in queues if queue not in full)

    def enqueue_block(
        self,
        change: Change,
        block_id: int,
        rows: int,
        size_bytes: int,
        routes: Mapping[int, tuple[int, int, bytes]],
        sequence: int,
        now: int,
        *,
        expiring: bool | None = None,
        connection: object = None,
        readable: bool = True,
    ) -> dict[int, int]:
        """A stored block becomes visible: one run per queue id of ``routes`` (row, count, bitmap). Queues that are deleted drop out.

        A block that nobody holds is named by ``change``. ``expiring``: whether a message has an expiration of its own; None: not
        known. Not ``readable``: it is not named yet, so a queue that gets too long is cut in a later commit. Returns the first offset per
        queue id. A transient message among the rows counts as written.
        """
        selections = {queue_id: selection for queue_id, selection in routes.items() if queue_id in self.queues_by_id}
        if block_id not in self.blocks.by_id:
            if not selections:
                change.forgets.append(block_id)
                return {}
            change.names.append(block_id)
        block = self.blocks.name(block_id, rows, size_bytes)
        if block.expiring is None:
            block.expiring = expiring
        firsts: dict[int, int] = {}
        dying = Dying()
        for queue_id, (row, count, bitmap) in selections.items():
            queue = self.queues_by_id[queue_id]
            first = firsts[queue_id] = queue.append(count, block_id, row, bitmap, sequence, now)
            if queue.written:
                change.put(queue.record_last_run())
            self.touched.add(queue)
            if queue.publishers is not None and connection is not None:
                self.undo.append((setattr, queue, "publishers", dict(queue.publishers)))
                queue.publishers.update(dict.fromkeys(range(first, first + count), connection))
            if expiring is not False:
                queue.timed = True
            if queue.limited and readable:
                self._measure(queue, first)
                self._overflow(change, queue, now, dying)
            elif queue.limited:
                for name in ("sizes", "sizes_sum", "held_bytes"):
                    self.undo.attribute(queue, name)
                queue.sizes = None
                self._cut_later(queue, now)
        if dying:
            self._bury(change, dying, now)
        return firsts

    def enqueue_inline(
        self, change: Change, block: pa.RecordBatch, routes: Mapping[int, tuple[int, int, bytes]], sequence: int, now: int
    ) -> None:
        """The few rows of a staged part become rows of the open block."""
        change.sequence = sequence
        targets: list[list[Queue]] = [[] for _ in range(block.num_rows)]
        for queue_id, selection in routes.items():
            queue = self.queues_by_id.get(queue_id)
            if queue is not None:
                for row in selected_rows(Selection(*selection)):
                    targets[row].append(queue)
        messages = (Message(row["body"], row["routing_key"], row["exchange"], row["properties"]) for row in block.to_pylist())
        self.enqueue_rows(change, [Publish(message, tuple(queues)) for message, queues in zip(messages, targets, strict=True)], now)

    def route_block(self, block: pa.RecordBatch) -> Routed:
        """The queues of every row of a block of MESSAGE_SCHEMA."""
        return self.route_column(block.column("exchange"), block.column("routing_key"), block.column("properties"))

    def hold(self, block_id: int, rows: int, size_bytes: int) -> None:
        """A staged part needs this block."""
        self.blocks.name(block_id, rows, size_bytes)
        self.blocks.pin(block_id)

    def unhold(self, change: Change, block_id: int) -> None:
        """It does not any more."""
        self.blocks.unpin(block_id)
        self.blocks.record(change)

    def persist(self, change: Change, queue: Queue, start: int, end: int) -> None:
        """Transient messages within [start, end) become rows of the open block: they must survive a restart now."""
        if not queue.written:
            return
        for recorded in queue.record_between(start, end):
            change.put(recorded)
        for run in queue.transient_runs(start, end):
            pieces: list[Run] = []
            for ahead, number in enumerate(run.rows()):
                row = self.blocks.row(run.block.block_id, int(number))
                block = self.blocks.open()
                routes = ROUTE.pack(queue.queue_id, run.first + ahead)
                entry = row._replace(block_id=block.block_id, row=block.rows, routes=routes)
                block.add(entry)
                change.rows.append(entry)
                if pieces and pieces[-1].block is block:
                    pieces[-1].extend(entry.row)
                else:
                    self.blocks.pin(block.block_id)
                    pieces.append(Run(run.first + ahead, 1, block, entry.row, b"", 0, 0))
            queue.replace_run(run, pieces)

    def publish(self) -> None:
        """The commits in hand are durable: show them. Called under the state lock by the committer."""
        for queue in self.touched:
            if queue.deleted:  # in one of these commits, behind what touched it
                continue
            queue.visible_end = queue.next_offset
            if queue.consumers or queue.hasty:
                self.runnable[queue] = None
            if queue.timed:
                self._plan(queue)
        self.touched.clear()

    def _plan(self, queue: Queue) -> None:
        """See when its head expires (``expiry.py``)."""
        raise NotImplementedError

    def fetch(self, queue: Queue, offset: int) -> InboxRow:
        """The message of an entry that is not deleted, with its commit sequence and time."""
        run, number = queue.locate(offset)
        row = self.blocks.row(run.block.block_id, number)
        return row._replace(sequence=run.sequence, committed_at=run.committed_at) if run.sequence else row

    # -- overflow, dead-lettering ---------------------------------------------------------------------------------------
    def check_overflow(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """Before anything is written: messages and bytes per queue. Raises PreconditionFailed for a full reject-publish queue."""
        for queue, (messages, size_bytes) in incoming.items():
            if not queue.deleted and queue.refuses and self.would_overflow(queue, messages, size_bytes):
                limits = " and ".join(f"{name} {queue.arguments[name]}" for name in _LIMITS if name in queue.arguments)
                kept = f" and {queue.kept} that prepared transactions will bring" if queue.kept else ""
                raise PreconditionFailed(
                    f"queue '{queue.name}' in vhost '/' is full: {messages} more messages of {size_bytes} bytes on {queue.ready}{kept} "
                    f"are over {limits}; nothing was enqueued"
                )

    def would_overflow(self, queue: Queue, messages: int, size_bytes: int) -> bool:
        """Whether so much more does not fit beside what is ready and not held, and what prepared transactions will bring."""
        length, total = queue.arguments.get("x-max-length"), queue.arguments.get("x-max-length-bytes")
        if length is not None and queue.ready + queue.kept + messages > length:
            return True
        return total is not None and self._ready_bytes(queue) + queue.kept_bytes + size_bytes > total

    def keep_room(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """A prepared transaction will bring so much: reject-publish queues take less of others until it is decided."""
        for queue, (messages, size_bytes) in incoming.items():
            self.undo.attribute(queue, "kept")
            self.undo.attribute(queue, "kept_bytes")
            queue.kept += messages
            queue.kept_bytes += size_bytes

    def give_room_back(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """It is decided."""
        self.keep_room({queue: (-messages, -size_bytes) for queue, (messages, size_bytes) in incoming.items()})

    def _measure(self, queue: Queue, start: int) -> None:
        """Body sizes of a queue that is limited in bytes, from offset ``start`` on."""
        if "x-max-length-bytes" not in queue.arguments:
            return
        initial = queue.sizes is None
        if initial:
            for name in ("sizes", "sizes_sum", "held_bytes", "claimed_bytes"):
                self.undo.attribute(queue, name)
            queue.sizes, queue.sizes_sum, start = {}, 0, queue.floor
        for first, end in queue.unsettled_within(start, queue.next_offset):
            for offset in range(first, end):
                queue.add_size(offset, len(self.fetch(queue, offset).body))
        if initial:
            queue.held_bytes = sum(queue.sizes.get(offset, 0) for offset in queue.held) if queue.sizes else 0
            queue.measure_claimed()

    def _ready_bytes(self, queue: Queue) -> int:
        if queue.sizes is None:
            self._measure(queue, queue.floor)
        return queue.sizes_sum - queue.held_bytes - queue.claimed_bytes

    def _overflow(self, change: Change, queue: Queue, now: int, dying: Dying) -> None:
        """Drop the oldest ready messages until the queue is within its limits (x-overflow drop-head).

        What its consumers take as soon as it is visible was never in the queue, as in RabbitMQ. What cannot be read, and so not be
        dead-lettered, stays for whoever repairs it, and does not count.
        """
        if queue.refuses:
            return  # checked before; what is dead-lettered into it is never lost
        if not self._too_much(queue, 0, 0) or (queue.consumers and queue.consumers.credit >= queue.ready):
            return
        spared = self._for_consumers(queue)
        spared_bytes = self._sizes(queue, spared)
        unreadable: list[int] = []
        dropped = one_by_one = False
        while self._too_much(queue, len(spared) + len(unreadable), spared_bytes):
            if queue.dead_letters and (dying.room <= 0 or dying.room_bytes <= 0):
                self._cut_later(queue, now)
                break
            head = queue.take_next(1 if one_by_one else self._excess(queue, len(spared), dying), queue.next_offset)
            if not head:
                break
            try:
                self._discard(queue, head, "maxlen", dying)
                dropped = True
            except StoreError:
                if len(head) > 1:
                    queue.untake(head)
                    one_by_one = True
                    continue
                unreadable.append(head[0])
                spared_bytes += self._sizes(queue, head)
        queue.untake(spared)
        queue.untake(unreadable)
        if dropped:
            queue.record(change)

    def _cut_later(self, queue: Queue, now: int) -> None:
        self.undo.item(self.overfull, queue)
        self.overfull[queue] = None
        self.next_deadline = min(self.next_deadline, now)

    def _excess(self, queue: Queue, spared: int, dying: Dying) -> int:
        """How many of the oldest may go in one step."""
        length = queue.arguments.get("x-max-length")
        if length is None or queue.sizes is not None or "x-max-length-bytes" in queue.arguments:
            return 1
        excess: int = queue.ready - spared - length
        return min(excess, dying.room, _STEP) if queue.dead_letters else excess

    @staticmethod
    def _sizes(queue: Queue, offsets: Iterable[int]) -> int:
        return sum(queue.sizes.get(offset, 0) for offset in offsets) if queue.sizes else 0

    def _too_much(self, queue: Queue, spared: int, spared_bytes: int) -> bool:
        length, total = queue.arguments.get("x-max-length"), queue.arguments.get("x-max-length-bytes")
        if length is not None and queue.ready - spared > length:
            return True
        return total is not None and self._ready_bytes(queue) - spared_bytes > total

    def _for_consumers(self, queue: Queue) -> list[int]:
        """The next entries that consumers have credit for, taken out."""
        spare = queue.consumers.credit if queue.consumers else 0
        end = queue.visible_end if queue.ranks is not None else queue.next_offset
        taken: list[int] = []
        while len(taken) < spare and (block := queue.take_next(spare - len(taken), end)):
            taken += block
        return taken

    def _discard(self, queue: Queue, offsets: Sequence[int], reason: Reason, dying: Dying) -> None:
        """Settle entries, and dead-letter them where the queue says so, in the same commit; what is settled already only ends to be held.

        Raises StoreError, with nothing changed.
        """
        self._leave(queue, offsets, self.messages_of(queue, offsets) if queue.dead_letters else [], reason, dying)

    def _leave(self, queue: Queue, offsets: Sequence[int], rows: Sequence[InboxRow], reason: Reason, dying: Dying) -> None:
        """The same for entries that were read already."""
        for start, end in ranges(offsets):
            queue.settle_range(start, end)
        if rows and queue.dead_letters:
            dying.append(Died(queue, rows, reason))
            if reason == "maxlen":
                dying.room -= len(rows)
                dying.room_bytes -= sum(len(row.body) for row in rows)

    def messages_of(self, queue: Queue, offsets: Sequence[int]) -> list[InboxRow]:
        """Messages of those entries that are not settled, with their commit sequence and time. Raises CorruptSegment, DataLoss."""
        rows: list[InboxRow] = []
        for first, last in ranges(offsets):
            for start, end in queue.unsettled_within(first, last):
                while start < end:
                    found = queue.rows(start, end)
                    rows += found
                    start += len(found)
        return rows

    def _bury(self, change: Change, dying: Dying, now: int) -> None:
        """Dead-letter all that is dying, and what that drives out of full queues, in order. Whatever the messages hold, it never raises."""
        while dying:
            queue, rows, reason = dying.popleft()
            source = self.exchanges.get(str(queue.arguments.get("x-dead-letter-exchange"))) if queue.dead_letters else None
            if source is None:
                continue  # as RabbitMQ: an exchange that does not exist takes nothing
            letters = DeadLetters(
                queue.name, reason, source.name, queue.arguments.get("x-dead-letter-routing-key"), now, self.transaction_of
            )
            publishes: list[Publish] = []
            for row in rows:
                message, keys, deaths = letters.copy(row)
                queues = source.route(message.routing_key, message.properties)
                for key in keys:
                    queues = tuple(dict.fromkeys((*queues, *source.route(key, message.properties))))
                queues = letters.allowed(queues, deaths)
                if queues:
                    publishes.append(_new(Publish, (message, queues, False)))
            if publishes:
                self._enqueue(change, publishes, now, dying)

    def transaction_of(self, row: InboxRow) -> str:
        """The id of the transaction that published a message (``broker.py``); "" for none."""
        raise NotImplementedError

    def purge(self, change: Change, name: str, connection: object = None) -> int:
        """Settle every visible message that nobody holds; how many. Of a queue that an app owns only what that app skipped.

        Raises QueueNotFound, ResourceLocked.
        """
        parts = self.queue(name).skipped()
        queue = self.queue(name) if parts else self.usable(name, connection)
        count = 0
        for start, end in parts or queue.ready_offsets():
            queue.settle(start, end)
            count += end - start
        queue.record(change)
        return count


def ranges(offsets: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Consecutive offsets of a block as [start, end), in its order."""
    if not offsets:
        return ()
    if isinstance(offsets, range) or len(offsets) == 1:
        return ((offsets[0], offsets[-1] + 1),)
    found: list[tuple[int, int]] = []
    start = end = offsets[0]
    for offset in offsets:
        if offset != end:
            found.append((start, end))
            start = offset
        end = offset + 1
    found.append((start, end))
    return found
