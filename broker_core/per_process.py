"""What a process makes once for each key. A forked process makes its own.

What the parent made stays referenced in the child, because ending it there could hang: its threads are gone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    @property
    def closed(self) -> bool: ...


K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound=Closable)


class PerProcess(Generic[K, C]):
    """Thread-safe. What is closed is made again."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, K], C] = {}
        self._unlock()
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], C]) -> C:
        with self._lock:
            found = self._made.get((os.getpid(), key))
            if found is None or found.closed:
                found = self.put(key, make())
            return found

    def put(self, key: K, made: C) -> C:
        self._made[os.getpid(), key] = made
        return made
