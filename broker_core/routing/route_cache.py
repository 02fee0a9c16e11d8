"""The cached routes of an exchange, and how much memory those of all exchanges may take together.

Not here: what is cached, and until when (``exchange.py``).
Invariant: an exchange that caches much only makes others look at their bindings again.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

Q = TypeVar("Q")

ROUTE_BYTES = 16 * 1024 * 1024
_ENTRY_BYTES = 200  # of the table, the text and the tuple, about


class RouteCache(dict[str, tuple[Q, ...]]):
    """By routing key. Equal routes are one object, so that a commit tells them apart at no cost."""

    def __init__(self) -> None:
        super().__init__()
        self._routes: dict[tuple[Q, ...], tuple[Q, ...]] = {}

    def keep(self, routing_key: str, route: tuple[Q, ...]) -> tuple[Q, ...]:
        """Returns the one object."""
        self[routing_key] = one = self._routes.setdefault(route, route)
        return one


class Routes(Protocol):
    def forget_routes(self) -> None:
        """Clears the route cache, and calls ``release``."""


class RouteCacheBudget:
    def __init__(self, limit: int = ROUTE_BYTES) -> None:
        self._limit = limit
        self._used = 0
        self._by_exchange: dict[Routes, int] = {}

    def charge(self, exchange: Routes, key_size: int, queues: int) -> None:
        """Before ``exchange`` caches a route. If the budget is used up, all route caches are cleared."""
        size = _ENTRY_BYTES + key_size + 8 * queues
        if self._used + size > self._limit:
            for each in list(self._by_exchange):
                each.forget_routes()
        self._used += size
        self._by_exchange[exchange] = self._by_exchange.get(exchange, 0) + size

    def release(self, exchange: Routes) -> None:
        """The route cache of ``exchange`` has been cleared."""
        self._used -= self._by_exchange.pop(exchange, 0)
