"""Overflow of queues with a maximum length: new messages are refused, or the oldest are dropped.

Not here: dead-lettering of dropped messages (``messages.py``).
Invariant: messages of a prepared transaction count from its preparation on, so its commit is never refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from broker_core.broker.message.removals import Removals, leave, rows_of
from broker_core.broker.queue import Queue
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.core.block import Blocks, NotLoaded
from broker_core.core.change import Change
from broker_core.core.errors import PreconditionFailed, StoreError

_LIMITS = ("x-max-length", "x-max-length-bytes")
STEP = 256  # messages that overflow takes at once, if they are dead-lettered


class Overflow:
    def __init__(self, blocks: Blocks, pending_checks: PendingChecks) -> None:
        self._undo = blocks.undo
        self._blocks = blocks
        self._pending_checks = pending_checks

    def check(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """Checks messages and bytes per queue before anything is written. Raises PreconditionFailed for a
        full reject-publish queue.
        """
        for queue, (messages, size_bytes) in incoming.items():
            if (
                not queue.deleted
                and queue.arguments.refuses
                and self.would_overflow(queue, messages, size_bytes)
            ):
                most = (queue.arguments.max_length, queue.arguments.max_bytes)
                limits = " and ".join(
                    f"{name} {limit}" for name, limit in zip(_LIMITS, most, strict=True) if limit is not None
                )
                prepared = queue.room.prepared
                stays = f" and {prepared} that prepared transactions will bring" if prepared else ""
                raise PreconditionFailed(
                    f"{queue.full_name} is full: {messages} more messages of {size_bytes} bytes on "
                    f"{queue.droppable}{stays} are over {limits}; nothing was enqueued"
                )

    def would_overflow(self, queue: Queue, messages: int, size_bytes: int) -> bool:
        """Returns whether these messages do not fit beside the ready ones and those of prepared
        transactions.
        """
        length, total = queue.arguments.max_length, queue.arguments.max_bytes
        if length is not None and queue.droppable + queue.room.prepared + messages > length:
            return True
        return total is not None and self._ready_bytes(queue) + queue.room.prepared_bytes + size_bytes > total

    def keep_room(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """Reserves room for a prepared transaction: reject-publish queues accept less from others until it is
        decided.
        """
        for queue, (messages, size_bytes) in incoming.items():
            queue.room.reserve(messages, size_bytes)

    def give_room_back(self, incoming: Mapping[Queue, tuple[int, int]]) -> None:
        """Releases the room of a prepared transaction that is decided."""
        self.keep_room(
            {queue: (-messages, -size_bytes) for queue, (messages, size_bytes) in incoming.items()}
        )

    def measure(self, queue: Queue) -> None:
        """Measures the body sizes of a queue that is limited in bytes."""
        self._know_sizes(queue)
        queue.room.begin()
        for first, end in queue.progress.unsettled_within(queue.progress.floor, queue.log.next_offset):
            for offset in range(first, end):
                queue.room.add(offset, self._size(queue, offset))
        queue.room.measure(queue.ready.unacked, queue.progress.claimed)

    def _know_sizes(self, queue: Queue) -> None:
        """Raises NotLoaded for one block after the other, so that a long queue is never in memory as a
        whole.
        """
        for run in queue.log.runs:
            block = run.block
            needed = queue.progress.unsettled_within(run.first, run.end)
            if needed and block.inbox is None and block.body_sizes is None:
                try:
                    self._blocks.body_sizes(block.block_id)
                except NotLoaded as missing:
                    raise NotLoaded(missing.block_ids, prepare=partial(self._know_sizes, queue)) from None

    def _size(self, queue: Queue, offset: int) -> int:
        run, number = queue.log.locate(offset)
        if run.block.inbox is not None:
            return len(run.block.inbox[number].body)
        return int(self._blocks.body_sizes(run.block_id)[number])

    def _ready_bytes(self, queue: Queue) -> int:
        if queue.room.sizes is None:
            self.measure(queue)
        return queue.room.ready_bytes

    def cut(self, change: Change, queue: Queue, now: int, removals: Removals) -> None:
        """Drops the oldest ready messages until the queue is within its limits (x-overflow drop-head).

        As in RabbitMQ, messages that consumers take at once do not count. A message that cannot be read, and
        so not be dead-lettered, stays until it is repaired, and does not count.
        """
        if queue.arguments.refuses:
            return  # checked before; a message that is dead-lettered into it is never lost
        if not self._too_much(queue, 0, 0) or (queue.consumers and queue.consumers.credit >= queue.droppable):
            return
        spared = self._for_consumers(queue)
        spared_bytes = queue.room.of(spared)
        unreadable: list[int] = []
        dropped = one_by_one = False
        while self._too_much(queue, len(spared) + len(unreadable), spared_bytes):
            if queue.arguments.dead_letters and removals.full:
                self._pending_checks.cut_later(queue, now)
                break
            most = 1 if one_by_one else self._excess(queue, len(spared))
            head = queue.ready.take_next(most, queue.log.next_offset)
            if not head:
                break
            if len(head) > 1 and queue.room.sizes is not None:
                head = self._needed(queue, head, spared_bytes)
            try:
                fit = len(head)
                if queue.arguments.dead_letters:
                    fit = removals.add(queue, rows_of(queue, head), "maxlen")
                queue.ready.untake(head[fit:])
                leave(queue, head[:fit], "maxlen", removals.effects)
                dropped = True
            except StoreError:
                if len(head) > 1:
                    queue.ready.untake(head)
                    one_by_one = True
                    continue
                unreadable.append(head[0])
                spared_bytes += queue.room.of(head)
        queue.ready.untake(spared)
        queue.ready.untake(unreadable)
        if dropped:
            queue.record(change)

    def _excess(self, queue: Queue, spared: int) -> int:
        """Returns how many of the oldest messages may be dropped in one step."""
        length = queue.arguments.max_length
        if length is None and queue.room.sizes is not None and not queue.arguments.dead_letters:
            return STEP
        if length is None or queue.room.sizes is not None or queue.arguments.max_bytes is not None:
            return 1
        excess: int = queue.droppable - spared - length
        return min(excess, STEP) if queue.arguments.dead_letters else excess

    def _needed(self, queue: Queue, taken: Sequence[int], spared_bytes: int) -> Sequence[int]:
        """Returns the first of the taken messages, until the queue has few enough bytes, and the others to
        it.
        """
        left = self._ready_bytes(queue) - spared_bytes - (queue.arguments.max_bytes or 0)
        count = 0
        for offset in taken:
            if left <= 0:
                break
            left -= queue.room.of((offset,))
            count += 1
        queue.ready.untake(taken[count:])
        return taken[:count]

    def _too_much(self, queue: Queue, spared: int, spared_bytes: int) -> bool:
        length, total = queue.arguments.max_length, queue.arguments.max_bytes
        if length is not None and queue.droppable - spared > length:
            return True
        return total is not None and self._ready_bytes(queue) - spared_bytes > total

    def _for_consumers(self, queue: Queue) -> list[int]:
        """Takes and returns the next entries that consumers have credit for."""
        spare = queue.consumers.credit if queue.consumers else 0
        end = queue.log.visible_end if queue.ready.ranks is not None else queue.log.next_offset
        taken: list[int] = []
        while len(taken) < spare and (head := queue.ready.take_next(spare - len(taken), end)):
            taken += head
        return taken
