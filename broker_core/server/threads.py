"""Threads that run before they are needed, so that work goes on while the system has no more; and the signals
that end a process.
"""

from __future__ import annotations

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


def asked_to_end() -> threading.Event:
    """Is set by SIGTERM or SIGINT from now on. For the main thread."""
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    return ending


def _shortage(name: str) -> ResourceShortage:
    return ResourceShortage(f"the system cannot start a thread for {name} now", "try again, or allow more")
