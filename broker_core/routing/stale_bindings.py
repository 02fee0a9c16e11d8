"""Bindings of deleted destinations that the indexes of exchanges still have. Nothing is routed by them
(``exchange.py``); upkeep takes them out in pieces, because a destination may have any number of them.

Invariant: an entry of an index has a destination that is bound, or is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from broker_core.core.undo import Undo

K = TypeVar("K")
V = TypeVar("V")


class StaleBindings:
    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._waiting: deque[tuple[Callable[[Any, Any], None], dict[Any, Any]]] = deque()

    def __len__(self) -> int:
        """Returns how many bindings wait."""
        return sum(len(bindings) for _, bindings in self._waiting)

    def add(self, remove: Callable[[K, V], None], bindings: dict[K, V]) -> None:
        """``remove`` takes a key and a binding out of an index."""
        self._undo.append((_truncate, self._waiting, len(self._waiting)))
        self._waiting.append((remove, bindings))

    def remove(self, count: int) -> bool:
        """Removes so many, outside of any work. Returns whether others wait."""
        while self._waiting and count > 0:
            remove, bindings = self._waiting[0]
            while bindings and count > 0:
                remove(*bindings.popitem())
                count -= 1
            if not bindings:
                self._waiting.popleft()
        return bool(self._waiting)


def _truncate(waiting: deque[object], length: int) -> None:
    while len(waiting) > length:
        waiting.pop()
