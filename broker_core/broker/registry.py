"""What the queues and exchanges of all virtual hosts have in common."""

from __future__ import annotations

from broker_core.broker.consumer import Consumer
from broker_core.broker.queue import Queue
from broker_core.broker.route_room import RouteRoom
from broker_core.ids import QueueId


class Registry:
    """``by_id``: every queue. ``last_id``: the highest id of a queue so far. ``routes``: room for the cached
    routes of all exchanges.
    """

    __slots__ = ("by_id", "cancelled", "last_id", "routes")

    def __init__(self) -> None:
        self.by_id: dict[QueueId, Queue] = {}
        self.last_id = 0
        self.routes = RouteRoom()
        # consumers of deleted queues; the shell notifies them and empties the list
        self.cancelled: list[Consumer] = []
