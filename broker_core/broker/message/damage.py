"""Messages in damaged rows of blocks: found in every queue that needs them, and settled.

Not here: which rows are damaged (``store/salvage/live.py``).
Invariant: no message whose row is intact is settled, and none that somebody holds or has claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from broker_core.broker.queue import Queue
from broker_core.broker.queue.log import Run
from broker_core.broker.queue.progress import IntervalSet
from broker_core.core.block import Blocks
from broker_core.core.change import Change
from broker_core.core.errors import PreconditionFailed
from broker_core.core.ids import BlockId

Intact = Mapping[BlockId, npt.NDArray[np.bool_]]  # which rows of damaged blocks are intact


class DamagedEntries(NamedTuple):
    """Offsets [start, end) of ``queue``, which are in ``run``."""

    queue: Queue
    run: Run
    start: int
    end: int


def blocks_of(queue: Queue) -> list[BlockId]:
    """Returns the blocks that hold messages of a queue, without those that are still in the catalog."""
    found = {
        run.block_id: None
        for run in queue.log.runs_between(queue.progress.needed_from(), queue.log.visible_end)
        if run.block.inbox is None and queue.progress.is_needed(run.first, run.end)
    }
    return list(found)


def damaged_entries(queues: Iterable[Queue], blocks: Blocks, intact: Intact) -> list[DamagedEntries]:
    """Raises PreconditionFailed if somebody else than a queue needs a block: its rows cannot be left out."""
    found: list[DamagedEntries] = []
    pins = dict.fromkeys(intact, 0)
    for queue in queues:
        for run in queue.log.runs_in(intact.keys()):
            pins[run.block_id] += 1
            is_damaged = ~intact[run.block_id][np.asarray(run.rows())]
            edges = np.flatnonzero(np.diff(np.concatenate(([0], is_damaged.view(np.int8), [0]))))
            damaged = IntervalSet(
                (run.first + int(start), run.first + int(end)) for start, end in edges.reshape(-1, 2)
            )
            for start, end in queue.progress.needed_within(run.first, run.end):
                found += [DamagedEntries(queue, run, low, high) for low, high in damaged.within(start, end)]
    for block_id, count in pins.items():
        if block_id in blocks.by_id and blocks.by_id[block_id].pins != count:
            raise PreconditionFailed(
                f"rows of damaged block {block_id} belong to a batch or transaction that is not decided",
                "decide it first: `txmq app staged` and `txmq tx list` list what waits",
            )
    return found


def require_free(found: Sequence[DamagedEntries]) -> None:
    """Raises PreconditionFailed if somebody holds or has claimed one of them."""
    for queue, _, start, end in found:
        if queue.owner and queue.progress.claimed.within(max(start, queue.progress.acked), end):
            raise PreconditionFailed(
                f"app {queue.owner!r} has claimed damaged messages of {queue.full_name}",
                f"stop its query and run `txmq app release {queue.owner} {queue.name} --force` first",
            )
        if any(offset in queue.ready.unacked for offset in range(start, end)):
            raise PreconditionFailed(
                f"damaged messages of {queue.full_name} are held by a consumer or a prepared transaction",
                f"close or decide it first: `txmq connection channels --queue {queue.name}` and `txmq tx "
                "list`",
            )


def settle(found: Sequence[DamagedEntries], change: Change) -> None:
    """Raises PreconditionFailed as ``require_free``, with nothing changed."""
    require_free(found)
    for queue, _, start, end in found:
        queue.settle(start, end)
    for queue in dict.fromkeys(part.queue for part in found):
        queue.record(change)
