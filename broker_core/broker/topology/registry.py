"""What the virtual hosts of a broker share about their queues, also of deleted ones.

Not here: their names (``topology.py``).
"""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer
from broker_core.core.change import ANY, Change
from broker_core.core.ids import QueueId
from broker_core.core.records import HoleRecord, ProgressRecord
from broker_core.core.undo import Tally, Undo
from broker_core.routing.route_cache import RouteCacheBudget
from broker_core.routing.stale_bindings import StaleBindings


class Registry:
    """``by_id``: every queue. ``last_id``: the highest id of a queue so far. ``routes``: room for the cached
    routes of all exchanges. ``stale_bindings``: what their indexes have too much. ``memory``: bytes of their
    names, about. ``ending``: queues of deleted virtual hosts whose messages are not forgotten yet.
    """

    __slots__ = ("_undo", "by_id", "cancelled", "ending", "last_id", "memory", "routes", "stale_bindings")

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.by_id: dict[QueueId, Queue] = {}
        self.last_id = 0
        self.routes = RouteCacheBudget()
        self.stale_bindings = StaleBindings(undo)
        self.memory = Tally(undo)
        self.ending: list[Queue] = []
        # consumers of deleted queues; the shell notifies them and empties the list
        self.cancelled: list[Consumer] = []

    def forget_messages(self, change: Change, queue: Queue) -> None:
        """Drops what a deleted queue had, and adds its consumers to ``cancelled``."""
        self._undo.growth(self.cancelled)
        self.cancelled += queue.consumers.clear(self._undo)
        holes = queue.progress.holes.total
        queue.forget_runs()
        queue.record(change)
        if queue.written:
            if holes:
                change.drop(HoleRecord, (queue.queue_id, ANY))
            change.drop(ProgressRecord, (queue.queue_id,))
            if queue.log.ids is not None:
                queue.log.ids.forget_all(change)

    def end_some(self, change: Change, count: int) -> None:
        """Forgets the messages of so many queues of deleted virtual hosts. After a crash, nothing names what
        they had.
        """
        some = self.ending[-count:]
        self._undo.append((self.ending.extend, some))
        del self.ending[-count:]
        for queue in some:
            self.forget_messages(change, queue)
