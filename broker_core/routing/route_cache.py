"""The cached routes of an exchange, and how much memory those of all exchanges may take together.

Not here: how a route is found (``exchange.py``).
Invariant: an exchange that caches much only makes others look at their bindings again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

Q = TypeVar("Q")

ROUTE_BYTES = 16 * 1024 * 1024
_ENTRY_BYTES = 200  # of the table, the text and the tuple, about


class RouteCache(Generic[Q]):
    """The routes of one exchange, and what else was found by looking at the exchanges behind it."""

    def __init__(self) -> None:
        self.budget = RouteCacheBudget()  # one for all exchanges of a virtual host
        self.by_key: dict[str, tuple[Q, ...]] = {}
        self._routes: dict[tuple[Q, ...], tuple[Q, ...]] = {}  # one object each: a commit compares them so
        self.reach: tuple[bool, int] | None = None  # see ``Exchange``; None: not looked at yet
        self._relying: set[RouteCache[Q]] = set()  # those that keep what was found out here
        self._relied: set[RouteCache[Q]] = set()  # the other end

    def keep(self, routing_key: str, route: tuple[Q, ...], by: Iterable[RouteCache[Q]]) -> tuple[Q, ...]:
        """Caches a route that came ``by`` these exchanges, and returns the one object of all equal routes."""
        self.budget.charge(self, len(routing_key), len(route))
        self.by_key[routing_key] = one = self._routes.setdefault(route, route)
        self.rely_on(by)
        return one

    def rely_on(self, others: Iterable[RouteCache[Q]]) -> None:
        """Something is kept that changes with any of these exchanges."""
        for other in others:
            if other is not self:
                self._relied.add(other)
                other._relying.add(self)

    def change(self) -> None:
        """The bindings have changed: clears it, and all caches whose routes led here."""
        self.clear()
        for cache in list(self._relying):
            cache.clear()

    def clear(self) -> None:
        self.reach = None
        if self.by_key:
            self.budget.release(self)
            self.by_key, self._routes = {}, {}  # others read them meanwhile
        for cache in self._relied:
            cache._relying.discard(self)
        self._relied.clear()


AnyCache = RouteCache[Any]  # of any queues


class RouteCacheBudget:
    def __init__(self) -> None:
        self.used = 0
        self._by_cache: dict[AnyCache, int] = {}

    def charge(self, cache: AnyCache, key_size: int, queues: int) -> None:
        """Before ``cache`` keeps a route. If the budget is used up, all route caches are cleared."""
        size = _ENTRY_BYTES + key_size + 8 * queues
        if self.used + size > ROUTE_BYTES:
            for each in list(self._by_cache):
                each.clear()
        self.used += size
        self._by_cache[cache] = self._by_cache.get(cache, 0) + size

    def release(self, cache: AnyCache) -> None:
        """``cache`` has been cleared."""
        self.used -= self._by_cache.pop(cache, 0)
