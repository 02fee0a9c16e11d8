"""A spilled piece of a transaction: publishes whose bytes are in a segment, and which queue gets which of its
rows at commit.

Not here: writing the segment (``node/node.py``), and when a transaction spills (``transaction.py`` counts,
``node/node.py`` decides). A message that must not survive a restart (transient, or for a queue that is not
durable) has its bytes in the segment too, but its share is not recorded in the catalog, so a restart does not
find it.
Invariant: rows are in the order of publishing; the shares of one queue are in that order too, and do not
overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from broker_core.broker.queue import Queue, Queues
from broker_core.broker.transaction.publish import Publish
from broker_core.core.block import EXPIRATION, RowSelection, row_numbers, select
from broker_core.core.ids import BlockId, QueueId
from broker_core.core.records import NEVER
from broker_core.message.properties import TRANSIENT, delivery_mode
from broker_core.routing.content import own_expiration_us


class Share(NamedTuple):
    """Rows for one queue. ``recorded``: they survive a restart."""

    queue: Queue
    selection: RowSelection
    recorded: bool


class Unreached(NamedTuple):
    """Rows of a block that no queue has got, and that their publisher has to get back."""

    block_id: BlockId
    rows: npt.NDArray[np.int64]


class Spilled(NamedTuple):
    """No catalog names block ``block_id`` until the transaction is committed or prepared. Sets of rows are
    bits, least significant first: an open transaction of millions of messages costs a few bytes for each.

    ``sizes`` are body sizes, only for a queue limited in bytes; None: not known.
    """

    block_id: BlockId
    rows: int
    size_bytes: int
    selections: list[tuple[Queue, RowSelection]]
    expiration_us: int  # the shortest that a message has of its own
    transient: bytes = b""  # rows that must not survive a restart; empty: none
    mandatory: bytes = b""
    sizes: npt.NDArray[np.uint32] | None = None

    def record(self) -> dict[str, object]:
        """Returns the record for the catalog, as JSON."""
        return {
            "block": [self.block_id, self.rows, self.size_bytes, self.expiration_us],
            "queues": {
                str(queue.queue_id): [row, count, bitmap.hex()]
                for queue, (row, count, bitmap) in self.selections
            },
            "transient": self.transient.hex(),
            "mandatory": self.mandatory.hex(),
        }

    def shares(self) -> Iterator[Share]:
        """Returns the shares of the existing queues, in order. A share is split where messages that survive a
        restart and others meet.
        """
        transient = _unpacked(self.transient, self.rows) if self.transient else None
        alike = transient is None or bool(transient.all())
        for queue, selection in self.selections:
            if queue.deleted:
                continue
            if transient is None or alike or not queue.written:
                yield Share(queue, selection, transient is None and queue.written)
                continue
            rows = row_numbers(selection)
            flags = transient[rows]
            for part in np.split(rows, np.flatnonzero(flags[1:] != flags[:-1]) + 1):
                yield Share(queue, _selection(part), not transient[part[0]])

    def unreached(self) -> Unreached | None:
        """Returns the mandatory rows, if any, whose queues have all been deleted."""
        if not self.mandatory:
            return None
        lost = _unpacked(self.mandatory, self.rows)
        for queue, selection in self.selections:
            if not (queue.deleted or queue.replies):
                lost[row_numbers(selection)] = False
        return Unreached(self.block_id, np.flatnonzero(lost)) if lost.any() else None


def spill(block_id: BlockId, size_bytes: int, publishes: Sequence[Publish]) -> Spilled:
    """Returns the piece for ``publishes``, which are rows of a block now."""
    same: dict[int, list[int]] = {}  # rows by the identity of their route, mostly that of a cache
    by_route: dict[Queues, list[int]] = {}
    transient: list[int] = []
    mandatory: list[int] = []
    expiration_us = NEVER
    for row, (message, queues, must_arrive) in enumerate(publishes):
        rows = same.get(id(queues))
        if rows is None:
            rows = same[id(queues)] = by_route.setdefault(queues, [])
        rows.append(row)
        properties = message.properties
        if properties:
            if properties[0] & EXPIRATION:
                expiration_us = min(expiration_us, own_expiration_us(properties))
            if delivery_mode(properties) == TRANSIENT:
                transient.append(row)
        if must_arrive:
            mandatory.append(row)
    sizes = None
    selections = list(_selections(by_route))
    if any(queue.arguments.max_bytes is not None for queue, _ in selections):
        sizes = np.array([len(publish.message.body) for publish in publishes], np.uint32)
    count = len(publishes)
    flags = _packed(transient, count), _packed(mandatory, count)
    return Spilled(block_id, count, size_bytes, selections, expiration_us, *flags, sizes)


def _selections(by_route: Mapping[Queues, list[int]]) -> Iterator[tuple[Queue, RowSelection]]:
    """Yields the rows for each queue. Queues of the same routes share them."""
    routes_of: dict[Queue, list[int]] = {}
    for number, queues in enumerate(by_route):
        for queue in queues:
            routes_of.setdefault(queue, []).append(number)
    rows = [np.array(numbers, np.int64) for numbers in by_route.values()]
    memo: dict[tuple[int, ...], RowSelection] = {}
    for queue, numbers in routes_of.items():
        routes = tuple(numbers)
        if routes not in memo:
            memo[routes] = _selection(np.sort(np.concatenate([rows[number] for number in routes])))
        yield queue, memo[routes]


def restore(record: Mapping[str, Any], queues: Mapping[QueueId, Queue]) -> tuple[Spilled, int]:
    """Returns what ``Spilled.record`` wrote, and how many messages are for deleted queues."""
    block_id, rows, size_bytes, expiration_us = record["block"]
    found: list[tuple[Queue, RowSelection]] = []
    gone = 0
    for queue_id, (row, count, bitmap) in record["queues"].items():
        queue = queues.get(QueueId(int(queue_id)))
        if queue is None:
            gone += count
        else:
            found.append((queue, RowSelection(row, count, bytes.fromhex(bitmap))))
    transient, mandatory = (bytes.fromhex(record.get(name, "")) for name in ("transient", "mandatory"))
    return Spilled(block_id, rows, size_bytes, found, expiration_us, transient, mandatory), gone


def _packed(rows: list[int], count: int) -> bytes:
    if not rows:
        return b""
    mask = np.zeros(count, dtype=np.bool_)
    mask[rows] = True
    return np.packbits(mask, bitorder="little").tobytes()


def _unpacked(bits: bytes, count: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count, bitorder="little").astype(np.bool_)


def _selection(rows: npt.NDArray[np.int64]) -> RowSelection:
    first = int(rows[0]) & ~7
    mask = np.zeros(int(rows[-1]) + 1 - first, dtype=np.bool_)
    mask[rows - first] = True
    row, count, bitmap = select(mask)
    return RowSelection(row + first, count, bitmap)


class SpilledLetters(NamedTuple):
    """Dead letters of ``sources`` whose bytes are in a segment, routed when they were written."""

    sources: tuple[Queue, ...]
    spilled: Spilled


@dataclass(slots=True)
class Letters:
    """The dead letters of what a transaction rejects, and how many. ``ahead``: all of them, if they were
    written before its commit; ``failure``: why they could not be.
    """

    count: int = 0
    ahead: list[SpilledLetters] | None = None
    failure: Exception | None = None
