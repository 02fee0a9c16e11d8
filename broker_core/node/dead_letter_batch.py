"""The dead letters of very many rejects are written to a segment before their commit, which then only
names them.

Not here: what a dead letter is (``broker/message/dead_letter.py``), and its route (found at the commit). A
commit blocks all others, so it must not make fifty thousand copies. The committing thread makes them before,
a few at a time under the lock.
Invariant: until ``DeadLetterBatch.apply`` the transaction does not change. After it, its rejects
are "copied", and ``dead_letter_blocks`` holds the copies. A reject that was not copied (additional routing
keys, a message that cannot be read) stays a reject, which the commit handles as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from broker_core.broker.broker import BrokerState
from broker_core.broker.message.dead_letter import DeadLetters
from broker_core.broker.message.removals import messages_of
from broker_core.broker.queue import Queue
from broker_core.broker.state.block import NotLoaded
from broker_core.broker.state.change import Change, InboxRow
from broker_core.broker.transaction.transaction import DeadLetterBlock, Settle, Transaction, to_rows
from broker_core.errors import CorruptSegment, DataLoss
from broker_core.ids import BlockId
from broker_core.message.message import Message
from broker_core.node.committer import Committer
from broker_core.store.port import BlockInfo

Append = Callable[[pa.RecordBatch], BlockInfo]

_STEP = 256  # messages that are read under the lock at a time
_BLOCK_ROWS = 16_384
_BLOCK_BYTES = 4 * 1024 * 1024


@dataclass
class DeadLetterBatch:
    """Copies in segments; ``places`` are the indexes of their rejects in ``settles``."""

    dead_letter_blocks: list[DeadLetterBlock] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def apply(self, transaction: Transaction) -> None:
        settles = transaction.settles
        for place in self.places:
            queue, offset, _ = settles[place]
            settles[place] = Settle(queue, offset, "copied")
        transaction.dead_letter_blocks += self.dead_letter_blocks

    @property
    def appended(self) -> list[BlockId]:
        return [dead_letter_block.block_id for dead_letter_block in self.dead_letter_blocks]


def write_ahead(
    transaction: Transaction, state: BrokerState, committer: Committer, append: Append, now_us: int
) -> DeadLetterBatch:
    """Writes the copies. The transaction must not change meanwhile. Raises what ``append`` raises, after
    forgetting what was appended.
    """
    dead_letters = DeadLetterBatch()
    places: dict[Queue, list[int]] = {}
    for place, (queue, _, outcome) in enumerate(transaction.settles):
        if outcome == "reject" and queue.arguments.dead_letters:
            places.setdefault(queue, []).append(place)
    try:
        for queue, found in places.items():
            _write_queue_ahead(
                queue,
                [(place, transaction.settles[place].offset) for place in found],
                dead_letters,
                state,
                committer,
                append,
                now_us,
            )
    except BaseException:
        forget(dead_letters, committer)
        raise
    return dead_letters


def forget(dead_letters: DeadLetterBatch, committer: Committer) -> None:
    """Forgets the copies of a transaction that ended without them."""
    block_ids = dead_letters.appended
    if block_ids and committer.failure is None:
        committer.run(lambda _state, change, _now: change.forgets.extend(block_ids))


def _write_queue_ahead(
    queue: Queue,
    rejects: list[tuple[int, int]],
    dead_letters: DeadLetterBatch,
    state: BrokerState,
    committer: Committer,
    append: Append,
    now_us: int,
) -> None:
    """Writes the copies of the rejects of one queue; ``rejects`` are indexes and offsets."""
    exchange, key = queue.arguments.dead_letter_exchange, queue.arguments.dead_letter_routing_key
    letters = DeadLetters(queue.name, "rejected", exchange, key, now_us, state.names.of)
    messages: list[Message] = []
    copied: list[int] = []
    size_bytes = 0

    def write() -> None:
        nonlocal messages, copied, size_bytes
        if messages:
            rows = to_rows(messages)
            info = append(rows)
            keys = rows.select(["routing_key", "properties"])
            dead_letters.dead_letter_blocks.append(
                DeadLetterBlock(queue, exchange, info.block_id, info.rows, info.size_bytes, keys)
            )
            dead_letters.places += copied
        messages, copied, size_bytes = [], [], 0

    for start in range(0, len(rejects), _STEP):
        step = rejects[start : start + _STEP]
        try:
            rows = _rows(queue, [offset for _, offset in step], committer)
        except (CorruptSegment, DataLoss):
            continue  # the commit raises it
        if len(rows) != len(step):
            continue  # some are settled
        for (place, _), row in zip(step, rows, strict=True):
            message, keys, _ = letters.copy(row)
            if not keys:
                messages.append(message)
                copied.append(place)
                size_bytes += len(message.body)
        if len(messages) >= _BLOCK_ROWS or size_bytes >= _BLOCK_BYTES:
            write()
    write()


def _rows(queue: Queue, offsets: list[int], committer: Committer) -> list[InboxRow]:
    def read(_state: BrokerState, _change: Change, _now: int) -> list[InboxRow]:
        return [] if queue.deleted else messages_of(queue, offsets)

    try:
        with committer.look as state:
            return read(state, Change(), 0)
    except NotLoaded:
        return committer.run(read)
