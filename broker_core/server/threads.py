"""Threads that run before they are needed, so that work goes on while the system has no more; and the signals
that end a process.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from broker_core.core.errors import ResourceShortage


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run. Raises ResourceShortage."""
    pool = ThreadPoolExecutor(threads, name)
    together = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):  # each waits for all, so none serves two
            pool.submit(together.wait)
    except RuntimeError as error:
        together.abort()
        pool.shutdown(wait=False)
        raise _shortage(name) from error
    together.wait()
    return pool


def started_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon that runs. Raises ResourceShortage."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise _shortage(name) from error
    return thread


class Signals:
    """Signals to this process, in the order in which they came. For the main thread."""

    def __init__(self, *numbers: signal.Signals) -> None:
        # A handler runs between any two steps of the main thread. If it sets an Event for which that is
        # about to wait, it takes a lock that is held, for ever. ``put`` may interrupt ``get``.
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.take(*numbers)

    def take(self, *numbers: signal.Signals) -> None:
        """Takes these signals from now on."""
        for number in numbers:
            signal.signal(number, lambda number, _: self._arrived.put(number))

    def wait(self, seconds: float) -> int | None:
        """Returns the next signal, or None after so many seconds."""
        try:
            return self._arrived.get(timeout=seconds)
        except queue.Empty:
            return None


def _shortage(name: str) -> ResourceShortage:
    return ResourceShortage(f"the system cannot start a thread for {name} now", "try again, or allow more")
