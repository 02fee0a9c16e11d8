"""Messages in queues: enqueueing, overflow, expiry, dead-lettering, purging.

Pure. Not here: transactions (``broker.py``), topology (``topology.py``), the log of one queue (``queue.py``).
Invariant: whatever leaves a queue unasked (overflow, expiry) is settled, and dead-lettered where the queue says so, in one change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import pyarrow as pa

from broker_core.broker.batch import Batches
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.dead_letter import Reason, dead_letter_copy, without_cycles
from broker_core.broker.queue import Queue, Run
from broker_core.broker.routing import Routed, Selection, selected_rows
from broker_core.broker.topology import Topology
from broker_core.broker.transaction import Publish
from broker_core.errors import PreconditionFailed, StoreError
from broker_core.message import Message
from broker_core.properties import delivery_mode, expiration

ROUTE = struct.Struct("<qq")  # queue_id, offset
_TRANSIENT = 1


class Messages(Topology):
    def __init__(self, batches: Batches) -> None:
        super().__init__(batches)
        self.touched: set[Queue] = set()  # of the commits in hand

    # -- enqueueing -----------------------------------------------------------------------------------------------------
    def enqueue_rows(self, change: Change, publishes: Iterable[Publish], now: int) -> list[Message]:
        """Small commits: rows into the open batch, transient ones into memory. Returns mandatory messages without a queue."""
        returned: list[Message] = []
        sequence = change.sequence
        if not sequence:
            sequence = change.sequence = self.next_sequence()
        for message, queues, mandatory in publishes:
            body, routing_key, exchange, properties = message
            for queue in queues:
                if queue.deleted:
                    queues = tuple(queue for queue in queues if not queue.deleted)
                    break
            if not queues:
                if mandatory:
                    returned.append(message)
                continue
            written = queues[0].written or any(queue.written for queue in queues)
            if properties and delivery_mode(properties) == _TRANSIENT:
                written = False
            batch = self.batches.open() if written else self.batches.transient()
            row = batch.rows
            routes = b""
            for queue in queues:
                offset = queue.append_row(batch, row)
                if written and queue.written:
                    routes += ROUTE.pack(queue.queue_id, offset)
                if queue.sizes is not None:
                    queue.add_size(offset, len(body))
                self.touched.add(queue)
            entry = InboxRow(batch.batch_id, row, sequence, now, exchange, routing_key, properties, body, routes)
            batch.add(entry)
            if written:
                change.rows.append(entry)
            for queue in queues:
                if queue.limited:
                    self._overflow(change, queue, now)
        return returned

    def enqueue_batch(
        self,
        change: Change,
        batch_id: int,
        rows: int,
        size_bytes: int,
        routes: Mapping[int, tuple[int, int, bytes]],
        sequence: int,
        now: int,
        *,
        expiring: bool | None = None,
    ) -> dict[int, int]:
        """A stored batch becomes visible: one run per queue id of ``routes`` (row, count, bitmap). Queues that are deleted drop out.

        A batch that nobody holds is named by ``change``. ``expiring``: whether a message has an expiration of its own; None: not
        known. Returns the first offset per queue id. A transient message among the rows counts as written.
        """
        selections = {queue_id: selection for queue_id, selection in routes.items() if queue_id in self.queues_by_id}
        if batch_id not in self.batches.by_id:
            if not selections:
                change.forgets.append(batch_id)
                return {}
            change.names.append(batch_id)
        batch = self.batches.name(batch_id, rows, size_bytes)
        if batch.expiring is None:
            batch.expiring = expiring
        firsts: dict[int, int] = {}
        for queue_id, (row, count, bitmap) in selections.items():
            queue = self.queues_by_id[queue_id]
            first = firsts[queue_id] = queue.append(count, batch_id, row, bitmap, sequence, now)
            if queue.written:
                change.puts.append(queue.record_last_run())
            self.touched.add(queue)
            if queue.limited:
                self._measure(queue, first)
                self._overflow(change, queue, now)
        return firsts

    def enqueue_inline(
        self, change: Change, batch: pa.RecordBatch, routes: Mapping[int, tuple[int, int, bytes]], sequence: int, now: int
    ) -> None:
        """The few rows of a staged part become rows of the open batch."""
        change.sequence = sequence
        targets: list[list[Queue]] = [[] for _ in range(batch.num_rows)]
        for queue_id, selection in routes.items():
            queue = self.queues_by_id.get(queue_id)
            if queue is not None:
                for row in selected_rows(Selection(*selection)):
                    targets[row].append(queue)
        messages = (Message(row["body"], row["routing_key"], row["exchange"], row["properties"]) for row in batch.to_pylist())
        self.enqueue_rows(change, [Publish(message, tuple(queues)) for message, queues in zip(messages, targets, strict=True)], now)

    def route_batch(self, batch: pa.RecordBatch) -> Routed:
        """The queues of every row of a batch of MESSAGE_SCHEMA."""
        return self.route_column(batch.column("exchange"), batch.column("routing_key"), batch.column("properties"))

    def hold(self, batch_id: int, rows: int, size_bytes: int) -> None:
        """A staged part needs this batch."""
        self.batches.name(batch_id, rows, size_bytes)
        self.batches.pin(batch_id)

    def unhold(self, change: Change, batch_id: int) -> None:
        """It does not any more."""
        self.batches.unpin(batch_id)
        self.batches.record(change)

    def persist(self, change: Change, queue: Queue, start: int, end: int) -> None:
        """Transient messages within [start, end) become rows of the open batch: they must survive a restart now."""
        if not queue.written:
            return
        for run in queue.transient_runs(start, end):
            pieces: list[Run] = []
            for ahead, number in enumerate(run.rows()):
                row = self.batches.row(run.batch.batch_id, int(number))
                batch = self.batches.open()
                routes = ROUTE.pack(queue.queue_id, run.first + ahead)
                entry = row._replace(batch_id=batch.batch_id, row=batch.rows, routes=routes)
                batch.add(entry)
                change.rows.append(entry)
                if pieces and pieces[-1].batch is batch:
                    pieces[-1].extend(entry.row)
                else:
                    self.batches.pin(batch.batch_id)
                    pieces.append(Run(run.first + ahead, 1, batch, entry.row, b"", 0, 0))
            queue.replace_run(run, pieces)

    def publish(self) -> None:
        """The commits in hand are durable: show them. Called under the state lock by the committer."""
        for queue in self.touched:
            queue.visible_end = queue.next_offset
        self.touched.clear()

    def fetch(self, queue: Queue, offset: int) -> InboxRow:
        """The message of an entry that is not deleted, with its commit sequence and time."""
        run, number = queue.locate(offset)
        row = self.batches.row(run.batch.batch_id, number)
        return row._replace(sequence=run.sequence, committed_at=run.committed_at) if run.sequence else row

    # -- overflow, expiry, dead-lettering -------------------------------------------------------------------------------
    def check_overflow(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """Before anything is written: messages and bytes per queue. Raises PreconditionFailed for a full reject-publish queue."""
        for queue, (messages, size_bytes) in incoming.items():
            if queue.deleted or queue.arguments.get("x-overflow") != "reject-publish":
                continue
            limit = queue.arguments.get("x-max-length")
            if limit is not None and queue.ready + messages > limit:
                raise PreconditionFailed(
                    f"queue '{queue.name}' in vhost '/' is full: {messages} more messages on {queue.ready} "
                    f"are over x-max-length {limit}; nothing was enqueued"
                )
            limit = queue.arguments.get("x-max-length-bytes")
            if limit is not None and self._ready_bytes(queue) + size_bytes > limit:
                raise PreconditionFailed(
                    f"queue '{queue.name}' in vhost '/' is full: {size_bytes} more bytes on {self._ready_bytes(queue)} "
                    f"are over x-max-length-bytes {limit}; nothing was enqueued"
                )

    def _measure(self, queue: Queue, start: int) -> None:
        """Body sizes of a queue that is limited in bytes, from offset ``start`` on."""
        if "x-max-length-bytes" not in queue.arguments:
            return
        if queue.sizes is None:
            queue.sizes, queue.sizes_sum, start = {}, 0, queue.floor
        for first, end in queue.unsettled_within(start, queue.next_offset):
            for offset in range(first, end):
                queue.add_size(offset, len(self.fetch(queue, offset).body))

    def _ready_bytes(self, queue: Queue) -> int:
        if queue.sizes is None:
            self._measure(queue, queue.floor)
        sizes = queue.sizes or {}
        frozen = sum(size for offset, size in sizes.items() if offset < queue.claimed_end) if queue.owner else 0
        return queue.sizes_sum - sum(sizes.get(offset, 0) for offset in queue.held) - frozen

    def _overflow(self, change: Change, queue: Queue, now: int) -> None:
        """Drop the oldest ready messages until the queue is within its limits (x-overflow drop-head)."""
        if queue.arguments.get("x-overflow") == "reject-publish":
            return  # checked before; what is dead-lettered into it is never lost
        length, size_bytes = queue.arguments.get("x-max-length"), queue.arguments.get("x-max-length-bytes")
        dropped = False
        while (length is not None and queue.ready > length) or (size_bytes is not None and self._ready_bytes(queue) > size_bytes):
            offset = queue.head(queue.next_offset)
            if offset is None:
                break
            try:
                self._discard(change, queue, offset, "maxlen", now)
            except StoreError as error:  # in the middle of a commit: half of it must never be committed
                raise RuntimeError(f"a message that overflows queue '{queue.name}' cannot be read: {error}") from error
            dropped = True
        if dropped:
            queue.record(change)

    def _discard(self, change: Change, queue: Queue, offset: int, reason: Reason, now: int) -> None:
        """Settle an entry, and dead-letter it where the queue says so, in the same commit."""
        exchange = queue.arguments.get("x-dead-letter-exchange")
        row = self.fetch(queue, offset) if exchange is not None else None
        queue.settle_held(offset)
        if row is None:
            return
        source = self.exchanges.get(str(exchange))
        if source is None:
            return  # as RabbitMQ: an exchange that does not exist takes nothing
        message = dead_letter_copy(
            row, queue.name, reason, source.name, queue.arguments.get("x-dead-letter-routing-key"), row.sequence, now
        )
        queues = without_cycles(source.route(message.routing_key, message.properties), message)
        self.enqueue_rows(change, [Publish(message, queues)], now)

    def deadline(self, queue: Queue, offset: int) -> int | None:
        """When an entry expires, in microseconds since the epoch; None: never. The time to live starts at commit."""
        ttl_ms: int | None = queue.arguments.get("x-message-ttl")
        run, number = queue.locate(offset)
        own_ms: int | None = None
        if self.batches.may_expire(run.batch):
            text = expiration(self.batches.row(run.batch.batch_id, number).properties)
            own_ms = int(text) if text is not None and text.isdecimal() else None
        times_ms = [time_ms for time_ms in (ttl_ms, own_ms) if time_ms is not None]
        if not times_ms:
            return None
        committed_at = run.committed_at if run.sequence else self.batches.row(run.batch.batch_id, number).committed_at
        return committed_at + min(times_ms) * 1000

    def head_expired(self, queue: Queue, now: int) -> bool:
        offset = queue.head(queue.visible_end)
        if offset is None:
            return False
        deadline = self.deadline(queue, offset)
        return deadline is not None and deadline <= now

    def expire(self, change: Change, now: int, queues: Iterable[Queue] | None = None) -> int:
        """Expire what has come to the head of a queue; how many. What is held or claimed never expires."""
        count = 0
        for queue in list(self.queues.values()) if queues is None else queues:
            before = count
            while not queue.deleted and self.head_expired(queue, now):
                offset = queue.head(queue.visible_end)
                assert offset is not None
                self._discard(change, queue, offset, "expired", now)
                count += 1
            if count > before:
                queue.record(change)
        return count

    def purge(self, change: Change, name: str, connection: object = None) -> int:
        """Settle every visible message that nobody holds; how many. Raises QueueNotFound, ResourceLocked."""
        queue = self.usable(name, connection)
        count = 0
        for start, end in queue.ready_offsets():
            queue.settle(start, end)
            count += end - start
        queue.record(change)
        return count
