"""Threads that run before they are needed, so that work goes on while the system has no more; and the signals
that end a process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
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
        # A handler runs between any two steps of the main thread, so a lock that it takes may be held for
        # ever: it takes none. What is waited for is the byte that the interpreter writes for each signal.
        self._arrived: deque[int] = deque()
        self._came, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._came, select.POLLIN)
        self.take(*numbers)

    def take(self, *numbers: signal.Signals) -> None:
        """Takes these signals from now on."""
        for number in numbers:
            signal.signal(number, lambda number, _: self._arrived.append(number))

    def wait(self, seconds: float) -> int | None:
        """Returns the next signal, or None after so many seconds."""
        ends = time.monotonic() + seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                os.read(self._came, 1024)
            if self._arrived:
                return self._arrived.popleft()
            if (left := ends - time.monotonic()) <= 0:
                return None
            self._poll.poll(left * 1000)


def _shortage(name: str) -> ResourceShortage:
    return ResourceShortage(f"the system cannot start a thread for {name} now", "try again, or allow more")
