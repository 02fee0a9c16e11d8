"""The purge of a queue: what is visible when it begins, and neither settled nor held, is dropped.

Not here: who may purge (``Topology.purgeable``, and the permissions of each listener). A queue may have very
many parts between what is settled or held, so a purge is several commits, the oldest messages first, and
others commit in between. A broker that dies meanwhile has dropped those of the commits before.
"""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.broker.queue.parts import settle_parts
from broker_core.broker.queue.ready import purgeable, purged
from broker_core.broker.topology.topology import Topology
from broker_core.core.change import PURGED, Change

PARTS = 2_048  # in one commit


class Purge:
    """Each step is a work, and returns whether it was the last one. ``connection``: see ``Topology.usable``.
    ``count``: how many messages are dropped so far.
    """

    def __init__(self, topology: Topology, name: str, connection: object = None) -> None:
        self._topology = topology
        self._name = name
        self._connection = connection
        self._queue: Queue | None = None  # not known before the first step
        self._start = self._end = 0  # it is what is left
        self.count = 0

    def step(self, _state: object, change: Change, _now: int) -> bool:
        """Raises QueueNotFound, ResourceLocked."""
        if self._queue is not None and self._queue.deleted:
            return True
        queue = self._topology.purgeable(self._name, self._connection)
        last = self._end if self._queue is not None else queue.log.visible_end
        parts, stop = _left(queue, self._start, last)
        if parts:
            settle_parts(queue, parts)
            purged(queue.ready, parts[0][0], parts[-1][1])
            for start, end in parts:
                change.effects.note(PURGED, queue, start, end)
            queue.record(change)
        # at the end, because a step that raises may be carried out again
        self._queue, self._start, self._end = queue, stop, last
        self.count += sum(end - start for start, end in parts)
        return stop == last


def _left(queue: Queue, start: int, end: int) -> tuple[list[list[int]], int]:
    """Returns the next parts to be settled, and where to go on. In a queue of an app, what that skipped."""
    progress = queue.progress
    if not progress.owner:
        return purgeable(queue.ready, start, end, PARTS)
    start, skipped = max(start, progress.floor), min(end, progress.acked)
    parts, start = progress.holes.outside_some(start, skipped, PARTS) if start < skipped else ([], skipped)
    return parts, end if start == skipped else start
