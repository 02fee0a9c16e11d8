"""Many similar messages at once: persistent ones for the same queues, of which only the places are needed.

Most transactions are of this kind. Their messages are appended together, in a fraction of the time.
Not here: all other messages, and the plain way of these (``messages.py``).
Invariant: what ``append_many`` does is what ``Messages.enqueue`` would do message by message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from broker_core.broker.message.admission import Admission
from broker_core.broker.queue import Queue
from broker_core.broker.transaction.publish import Publish
from broker_core.core.block import EXPIRATION, OPEN_BYTES, OPEN_ROWS
from broker_core.core.change import PUBLISHED, ROUTE, Change, InboxRow
from broker_core.core.errors import RemoteProtocolError
from broker_core.message.properties import TRANSIENT, delivery_mode

_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


def append_many(admission: Admission, change: Change, publishes: Sequence[Publish], now: int) -> bool:
    """Appends the messages to their queues, if they are alike and fit into the open block. Otherwise it
    returns False, with nothing done.
    """
    queues, size_bytes = publishes[0][1], _size_if_alike(publishes)
    if size_bytes is None:
        return False
    count = len(publishes)
    ids: dict[Queue, list[bytes]] = {}
    for queue in queues:
        seen = queue.log.ids
        if seen is not None and change.drops_duplicates:
            new = [seen.rule.id_of(publish.message.properties) for publish in publishes]
            if not seen.are_new(new, now):
                return False
            ids[queue] = new
    block = admission.blocks.open()
    if block.rows + count > OPEN_ROWS or block.size_bytes + size_bytes >= OPEN_BYTES:
        return False  # an empty body behind those that fill the block would be in the next one
    first_row = block.rows
    columns: list[Iterator[bytes]] = []
    for queue in queues:
        first = queue.log.append_rows(block, first_row, count)
        columns.append(map(ROUTE.pack, repeat(queue.queue_id), range(first, first + count)))
        admission.pending_checks.touched.add(queue)
        change.effects.note(PUBLISHED, queue, first, first + count)
        if queue in ids:
            admission.remember(queue, ids[queue], first, now)
    routes = map(b"".join, zip(*columns)) if len(columns) > 1 else columns[0]
    block_id, sequence = block.block_id, change.sequence
    rows = [
        _new(InboxRow, (block_id, row, sequence, now, exchange, routing_key, properties, body, route))
        for row, ((body, routing_key, exchange, properties), _, _), route in zip(
            range(first_row, first_row + count), publishes, routes
        )
    ]
    block.extend(rows, size_bytes)
    change.rows += rows
    return True


def _size_if_alike(publishes: Sequence[Publish]) -> int | None:
    """Returns the bytes of the bodies of messages that are alike, and None of others."""
    queues = publishes[0][1]
    if not queues or not all(map(_only_appends, queues)):
        return None
    size_bytes, plain = 0, b""
    for (body, _, _, properties), others, _ in publishes:
        if others is not queues and others != queues:
            return None
        if properties is not plain:  # often it is one object
            if not _is_plain(properties):
                return None
            plain = properties
        size_bytes += len(body)
    return size_bytes


def _only_appends(queue: Queue) -> bool:
    """Returns whether a persistent message is only appended to the queue."""
    return (
        queue.written
        and not queue.deleted
        and not queue.arguments.limited
        and queue.room.sizes is None
        and queue.consumers.publishers is None
    )


def _is_plain(properties: bytes) -> bool:
    """Returns whether a message with these properties is persistent, without an expiration of its own."""
    if not properties:
        return True
    if properties[0] & EXPIRATION:
        return False
    try:
        return delivery_mode(properties) != TRANSIENT
    except RemoteProtocolError:
        return True  # damaged properties are accepted as they are
