"""What the virtual hosts of a broker share about their queues. Not here: their names (``topology.py``)."""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer
from broker_core.core.ids import QueueId
from broker_core.core.undo import Tally, Undo
from broker_core.routing.route_cache import RouteCacheBudget
from broker_core.routing.stale_bindings import StaleBindings


class Registry:
    """``by_id``: every queue. ``last_id``: the highest id of a queue so far. ``routes``: room for the cached
    routes of all exchanges. ``stale_bindings``: what their indexes have too much. ``memory``: bytes of their
    names, about. ``ending``: queues of deleted virtual hosts whose messages are not forgotten yet.
    """

    __slots__ = ("by_id", "cancelled", "ending", "last_id", "memory", "routes", "stale_bindings")

    def __init__(self, undo: Undo) -> None:
        self.by_id: dict[QueueId, Queue] = {}
        self.last_id = 0
        self.routes = RouteCacheBudget()
        self.stale_bindings = StaleBindings(undo)
        self.memory = Tally(undo)
        self.ending: list[Queue] = []
        # consumers of deleted queues; the shell notifies them and empties the list
        self.cancelled: list[Consumer] = []
