"""How many threads compute at once for calls. They share one interpreter: with each one that computes, all
others wait longer for it, and so does the loop of AMQP.

Not here: how many calls may be in progress (``quotas.py``), and who reads a block (``flight/calls.py``).
Invariant: who waits for a commit or for a channel has no slot, and waits for none after it, so that none of
these waits for a slot.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class _Thread(threading.local):
    slots: Slots | None = None  # of which it has one


_this = _Thread()


class Slots:
    """A slot that is free goes to the users in turn, so that nobody waits behind all calls of another."""

    def __init__(self, most: int) -> None:
        self._lock = _thread.allocate_lock()  # guards the next two
        self.free = most
        self.waiting: dict[str, deque[_thread.LockType]] = {}  # by user, the next one first

    @contextlib.contextmanager
    def computing(self, user: str) -> Iterator[None]:
        """Waits for a slot, and has it until the thread waits for something else."""
        self._take(user)
        _this.slots = self
        try:
            yield
        finally:
            free()

    def _take(self, user: str) -> None:
        with self._lock:
            if self.free:
                self.free -= 1
                return
            gate = _thread.allocate_lock()
            gate.acquire()
            self.waiting.setdefault(user, deque()).append(gate)
        gate.acquire()

    def _leave(self) -> None:
        with self._lock:
            if not self.waiting:
                self.free += 1
                return
            user = next(iter(self.waiting))
            gates = self.waiting.pop(user)
            gate = gates.popleft()
            if gates:
                self.waiting[user] = gates  # after the other users
        gate.release()


def free() -> None:
    """This thread is going to wait. It takes no slot again: it may hold what others wait for in theirs."""
    slots, _this.slots = _this.slots, None
    if slots is not None:
        slots._leave()


@contextlib.contextmanager
def holding(lock: _thread.LockType) -> Iterator[None]:
    """Who waits for ``lock`` has no slot."""
    if not lock.acquire(blocking=False):
        free()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
