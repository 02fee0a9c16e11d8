"""Many parts of a queue in one step: settled, or ready again. One by one they would take a time that grows
with the square of their number.

Not here: what is settled or held, and how that is kept (``progress.py``, ``ready.py``).
Invariant: a part is [start, end). Parts are sorted and do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_core.broker.queue.queue import Queue

Parts = Sequence[Sequence[int]]


def settle_parts(queue: Queue, parts: Parts) -> None:
    """Like ``Queue.settle_range`` of each part."""
    progress, ready, room = queue.progress, queue.ready, queue.room
    if ready.unacked:
        ready.let_go_all(parts)
    parts = [(max(start, progress.floor), end) for start, end in parts if end > progress.floor]
    if not parts:
        return
    for start, end in parts:
        if room.sizes is not None:
            room.settle(start, end, progress.claimed.within(start, end) if progress.owner else ())
        ready.forget(start, end)
        queue.consumers.forget(start, end)
    progress.settle_all(parts)
    queue.free(parts[0][0], parts[-1][1])


def requeue_parts(queue: Queue, parts: Parts) -> None:
    """Makes held entries ready again at their old places; later deliveries say redelivered."""
    queue.ready.let_go_all(parts)
    progress = queue.progress
    if progress.holes.total or parts[0][0] < progress.floor:
        parts = [part for start, end in parts for part in progress.unsettled_within(start, end)]
    if parts:
        queue.ready.put_back(parts)
        queue.marks.ready_again(parts)
