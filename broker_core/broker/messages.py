"""Messages in queues: enqueueing, overflow, expiry, dead-lettering, purging.

Pure. Not here: transactions (``broker.py``), topology (``topology.py``), the log of one queue (``queue.py``).
Invariant: whatever leaves a queue unasked (overflow, expiry) is settled, and dead-lettered where the queue says so, in one change.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping

import pyarrow as pa

from broker_core.broker.arguments import MAX_TIME_MS
from broker_core.broker.batch import EXPIRATION, Batches
from broker_core.broker.carbon_copy import carbon_copies, has_copies
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.dead_letter import Reason, dead_letter_copy, without_cycles
from broker_core.broker.exchange import Queues
from broker_core.broker.queue import Queue, Run
from broker_core.broker.routing import Routed, Selection, selected_rows
from broker_core.broker.topology import Topology
from broker_core.broker.transaction import Publish
from broker_core.errors import PreconditionFailed, RemoteProtocolError, StoreError
from broker_core.message import Message
from broker_core.properties import delivery_mode, expiration

ROUTE = struct.Struct("<qq")  # queue_id, offset
NEVER = 1 << 62
_TRANSIENT = 1
_TIME_TO_LIVE = re.compile(r"[+-]?[0-9]+")
_LIMITS = ("x-max-length", "x-max-length-bytes")


def time_to_live_ms(text: str | None) -> int | None:
    """What ``expiration`` says, in milliseconds; None where it says nothing."""
    return int(text) if text is not None and _TIME_TO_LIVE.fullmatch(text) else None


def own_time_to_live_ms(properties: bytes) -> int | None:
    """Of a message, by its encoded properties. None for damaged ones too: they came in as they are, and go out so."""
    try:
        return time_to_live_ms(expiration(properties))
    except RemoteProtocolError:
        return None


def check_expiration(properties: bytes) -> None:
    """Raises PreconditionFailed where it is no time to live, with RabbitMQ's text."""
    text = expiration(properties)
    if text is None:
        return
    start = _TIME_TO_LIVE.match(text)
    if start is None:
        why = "no_integer"
    elif start.end() < len(text):
        why = f'{{leftover_string,"{text[start.end() :]}"}}'
    elif int(text) < 0:
        why = f"{{value_negative,{int(text)}}}"
    elif int(text) > MAX_TIME_MS:
        why = f"{{value_too_large,{int(text)}}}"
    else:
        return
    raise PreconditionFailed(f"invalid expiration '{text}': {why}", "give milliseconds as a whole number, 0 or more")


class Messages(Topology):
    def __init__(self, batches: Batches) -> None:
        super().__init__(batches)
        self.touched: set[Queue] = set()  # of the commits in hand
        self.runnable: dict[Queue, None] = {}  # for ``Dispatch.dispatch``
        self.next_deadline = NEVER  # when the head of some queue expires, in microseconds since the epoch

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
        """Small commits: rows into the open batch, transient ones into memory. Returns mandatory messages without a queue.

        Not ``atomic``: a full reject-publish queue does not get a message, the others do; the places in ``publishes`` of
        those that some queue refused go to ``rejected``. ``connection`` is whose they are.
        """
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
            if not queues:
                if mandatory:
                    returned.append(message)
                continue
            if not atomic:
                for queue in queues:
                    if queue.refuses:
                        queues = self._accepting(change, message, queues, now, index, rejected)
                        break
                if not queues:
                    continue
            written = queues[0].written or any(queue.written for queue in queues)
            if properties:
                if delivery_mode(properties) == _TRANSIENT:
                    written = False
                if properties[0] & EXPIRATION:
                    at_once = own_time_to_live_ms(properties) == 0
                    for queue in queues:
                        queue.timed = True
                        queue.hasty = queue.hasty or at_once
            batch = self.batches.open() if written else self.batches.transient()
            row = batch.rows
            routes = b""
            for queue in queues:
                offset = queue.append_row(batch, row)
                if written and queue.written:
                    routes += ROUTE.pack(queue.queue_id, offset)
                if queue.sizes is not None:
                    queue.add_size(offset, len(body))
                if queue.publishers is not None and connection is not None:
                    self.undo.item(queue.publishers, offset)
                    queue.publishers[offset] = connection
                touched.add(queue)
            entry = InboxRow(batch.batch_id, row, sequence, now, exchange, routing_key, properties, body, routes)
            batch.add(entry)
            if written:
                change.rows.append(entry)
            for queue in queues:
                if queue.limited:
                    self._overflow(change, queue, now)
        return returned

    def _accepting(self, change: Change, message: Message, queues: Queues, now: int, index: int, rejected: list[int] | None) -> Queues:
        """Those of ``queues`` that are not full; what reject-publish-dlx refuses is dead-lettered."""
        full = [queue for queue in queues if queue.refuses and self.would_overflow(queue, 1, len(message.body))]
        if full and rejected is not None:
            rejected.append(index)
        for queue in full:
            if queue.arguments["x-overflow"] == "reject-publish-dlx":
                row = InboxRow(0, 0, change.sequence, now, message.exchange, message.routing_key, message.properties, message.body, b"")
                self._dead_letter(change, queue, row, "maxlen", now)
        return tuple(queue for queue in queues if queue not in full)

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
        connection: object = None,
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
            if queue.publishers is not None and connection is not None:
                self.undo.append((setattr, queue, "publishers", dict(queue.publishers)))
                queue.publishers.update(dict.fromkeys(range(first, first + count), connection))
            if expiring is not False:
                queue.timed = True
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
            if queue.deleted:  # in one of these commits, behind what touched it
                continue
            queue.visible_end = queue.next_offset
            if queue.consumers or queue.hasty:
                self.runnable[queue] = None
            if queue.timed:
                self._plan(queue)
        self.touched.clear()

    def _plan(self, queue: Queue) -> None:
        try:
            offset = queue.head(queue.visible_end)
            deadline = self.deadline(queue, offset) if offset is not None else None
        except StoreError:
            return  # what cannot be read does not expire; whoever reads it gets the error
        if deadline is not None and deadline < self.next_deadline:
            self.next_deadline = deadline

    def due(self, now: int) -> list[Queue]:
        """Queues whose head has to go now; ``next_deadline`` is when to ask again, as far as it is known."""
        self.next_deadline = NEVER
        due: list[Queue] = []
        for queue in self.queues.values():
            try:
                expired = self.head_expired(queue, now)
            except StoreError:
                continue
            if expired or queue.has_news:
                due.append(queue)
            elif queue.timed:
                self._plan(queue)
        return due

    def fetch(self, queue: Queue, offset: int) -> InboxRow:
        """The message of an entry that is not deleted, with its commit sequence and time."""
        run, number = queue.locate(offset)
        row = self.batches.row(run.batch.batch_id, number)
        return row._replace(sequence=run.sequence, committed_at=run.committed_at) if run.sequence else row

    # -- overflow, expiry, dead-lettering -------------------------------------------------------------------------------
    def check_overflow(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """Before anything is written: messages and bytes per queue. Raises PreconditionFailed for a full reject-publish queue."""
        for queue, (messages, size_bytes) in incoming.items():
            if not queue.deleted and queue.refuses and self.would_overflow(queue, messages, size_bytes):
                limits = " and ".join(f"{name} {queue.arguments[name]}" for name in _LIMITS if name in queue.arguments)
                raise PreconditionFailed(
                    f"queue '{queue.name}' in vhost '/' is full: {messages} more messages of {size_bytes} bytes on {queue.ready} "
                    f"are over {limits}; nothing was enqueued"
                )

    def would_overflow(self, queue: Queue, messages: int, size_bytes: int) -> bool:
        """Whether so much more does not fit into what is ready and not held."""
        length, total = queue.arguments.get("x-max-length"), queue.arguments.get("x-max-length-bytes")
        if length is not None and queue.ready + messages > length:
            return True
        return total is not None and self._ready_bytes(queue) + size_bytes > total

    def _measure(self, queue: Queue, start: int) -> None:
        """Body sizes of a queue that is limited in bytes, from offset ``start`` on."""
        if "x-max-length-bytes" not in queue.arguments:
            return
        initial = queue.sizes is None
        if initial:
            for name in ("sizes", "sizes_sum", "held_bytes"):
                self.undo.attribute(queue, name)
            queue.sizes, queue.sizes_sum, start = {}, 0, queue.floor
        for first, end in queue.unsettled_within(start, queue.next_offset):
            for offset in range(first, end):
                queue.add_size(offset, len(self.fetch(queue, offset).body))
        if initial:
            queue.held_bytes = sum(queue.sizes.get(offset, 0) for offset in queue.held) if queue.sizes else 0

    def _ready_bytes(self, queue: Queue) -> int:
        if queue.sizes is None:
            self._measure(queue, queue.floor)
        sizes = queue.sizes or {}
        frozen = sum(size for offset, size in sizes.items() if offset < queue.claimed_end) if queue.owner else 0
        return queue.sizes_sum - queue.held_bytes - frozen

    def _overflow(self, change: Change, queue: Queue, now: int) -> None:
        """Drop the oldest ready messages until the queue is within its limits (x-overflow drop-head).

        What its consumers take as soon as it is visible was never in the queue, as in RabbitMQ.
        """
        if queue.refuses:
            return  # checked before; what is dead-lettered into it is never lost
        if not self._too_much(queue, 0, 0) or (queue.consumers and queue.consumers.credit >= queue.ready):
            return
        taken = self._for_consumers(queue)
        count, size_bytes = len(taken), sum(queue.sizes.get(offset, 0) for offset in taken) if queue.sizes else 0
        dropped = False
        while self._too_much(queue, count, size_bytes):
            head = queue.take_block(1, queue.next_offset)
            if not head:
                break
            try:
                self._discard(change, queue, head[0], "maxlen", now)
            except StoreError as error:  # in the middle of a commit: half of it must never be committed
                raise RuntimeError(f"a message that overflows queue '{queue.name}' cannot be read: {error}") from error
            dropped = True
        queue.untake(taken)
        if dropped:
            queue.record(change)

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
        while len(taken) < spare and (block := queue.take_block(spare - len(taken), end)):
            taken += block
        return taken

    def _discard(self, change: Change, queue: Queue, offset: int, reason: Reason, now: int) -> None:
        """Settle an entry, and dead-letter it where the queue says so, in the same commit; once it is settled nothing more is done."""
        if queue.is_settled(offset):
            return
        row = self.fetch(queue, offset) if queue.dead_letters else None
        queue.settle_held(offset)
        if row is not None:
            self._dead_letter(change, queue, row, reason, now)

    def _dead_letter(self, change: Change, queue: Queue, row: InboxRow, reason: Reason, now: int) -> None:
        source = self.exchanges.get(str(queue.arguments.get("x-dead-letter-exchange"))) if queue.dead_letters else None
        if source is None:
            return  # as RabbitMQ: an exchange that does not exist takes nothing
        message = dead_letter_copy(
            row, queue.name, reason, source.name, queue.arguments.get("x-dead-letter-routing-key"), row.sequence, now
        )
        queues = source.route(message.routing_key, message.properties)
        for key in carbon_copies(message.properties)[0] if has_copies(message.properties) else ():
            queues = tuple(dict.fromkeys((*queues, *source.route(key, message.properties))))
        queues = without_cycles(queues, message, reason)
        self.enqueue_rows(change, [Publish(message, queues)], now)

    def deadline(self, queue: Queue, offset: int) -> int | None:
        """When an entry expires, in microseconds since the epoch; None: never. The time to live starts at commit."""
        ttl_ms: int | None = queue.arguments.get("x-message-ttl")
        run, number = queue.locate(offset)
        own_ms: int | None = None
        if self.batches.may_expire(run.batch):
            own_ms = own_time_to_live_ms(self.batches.row(run.batch.batch_id, number).properties)
        times_ms = [time_ms for time_ms in (ttl_ms, own_ms) if time_ms is not None]
        if not times_ms:
            return None
        committed_at = run.committed_at if run.sequence else self.batches.row(run.batch.batch_id, number).committed_at
        return committed_at + min(times_ms) * 1000

    def head_expired(self, queue: Queue, now: int) -> bool:
        """Whether the next message has to go instead of being delivered: it is too old, or came back too often."""
        offset = queue.head(queue.visible_end)
        if offset is None:
            return False
        if queue.counts and queue.over_limit(offset):
            return True
        deadline = self.deadline(queue, offset)
        return deadline is not None and deadline <= now

    def expire(self, change: Change, now: int, queues: Iterable[Queue] | None = None) -> int:
        """Expire what has come to the head of a queue; how many. What is held or claimed never expires.

        What came back more often than its x-delivery-limit goes too. The queues are woken. A message that cannot be read stops its
        queue only; raises CorruptSegment or DataLoss where such a message is all there was to expire.
        """
        count = 0
        unreadable: StoreError | None = None
        for queue in list(self.queues.values()) if queues is None else queues:
            before = count
            try:
                while not queue.deleted and self.head_expired(queue, now):
                    offset = queue.head(queue.visible_end)
                    assert offset is not None
                    reason: Reason = "delivery_limit" if queue.counts and queue.over_limit(offset) else "expired"
                    self._discard(change, queue, offset, reason, now)
                    count += 1
            except StoreError as error:
                unreadable = error
            if count > before or queue.has_news:
                queue.record(change)
            if not queue.deleted:
                self._plan(queue)
            if queue.consumers and not queue.deleted:
                self.wake(queue)
        if unreadable is not None and not count:
            raise unreadable
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
