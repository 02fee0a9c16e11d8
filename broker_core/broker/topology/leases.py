"""Queues with x-expires, and which of them nobody has used for so long.

Not here: deleting them (``topology.py``).
"""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.core.undo import Undo


class Leases:
    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.queues: dict[Queue, None] = {}

    def renew(self, queue: Queue) -> None:
        """After its x-expires may have changed, or the queue was deleted."""
        self._undo.item(self.queues, queue)
        self.queues.pop(queue, None)
        if queue.arguments.expires_ms is not None and not queue.deleted:
            self.queues[queue] = None

    def end_all(self) -> None:
        self._undo.attribute(self, "queues")
        self.queues = {}

    def unused(self, now: int) -> list[Queue]:
        """Returns the queues whose x-expires is over, for ``delete_unused``. A queue with consumers or an
        owner, or checked for the first time, is not due. ``now``: microseconds since the epoch.
        """
        due: list[Queue] = []
        for queue in self.queues:
            if queue.consumers or queue.owner:
                queue.marks.used_at_us = 0  # the time starts when they have left
            elif not queue.marks.used_at_us:
                queue.marks.used_at_us = now
            elif queue.marks.used_at_us + (queue.arguments.expires_ms or 0) * 1000 <= now:
                due.append(queue)
        return due
