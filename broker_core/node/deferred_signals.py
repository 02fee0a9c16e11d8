"""A signal handler that raises (Ctrl-C does) waits until the operation of the main thread is done.

Python runs signal handlers in the main thread, between any two instructions. An exception there would
interrupt a commit, or lose the lead of a group. So an operation of the main thread replaces the handlers, and
calls them at its end: first it is done or refused, then the interrupt is raised. Other threads are never
interrupted; for them the cost is one comparison.

Invariant: inside, no handler of :data:`SIGNALS` raises; outside, every handler is the original one.
"""

from __future__ import annotations

import _thread
import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# SIGINT is replaced first and restored last, so that its frequent exceptions find the others in order
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# the functions behind the module ``signal``, without its enums: fifteen times as fast
_c = importlib.import_module("_signal")
_set: Callable[[int, object], object] = _c.signal
_get: Callable[[int], object] = _c.getsignal
_numbers = tuple(int(number) for number in SIGNALS)
_default = int(signal.SIG_DFL)

main = threading.main_thread().ident


def _after_fork() -> None:
    global main
    main = _thread.get_ident()


os.register_at_fork(after_in_child=_after_fork)


def _defer(number: int, frame: FrameType | None) -> None:
    _waiting[number] = frame


_waiting: dict[int, FrameType | None] = {}  # signals that arrived meanwhile


class DeferredSignals:
    """For the main thread only; may be nested. ``depth`` is 0 outside."""

    def __init__(self) -> None:
        self.depth = 0
        self._aside: list[tuple[int, Callable[[int, FrameType | None], object]]] = []

    def __enter__(self) -> None:
        if self.depth:
            self.depth += 1
            return
        _waiting.clear()
        try:
            for number in _numbers:
                handler = _get(number)
                if handler is not _default and callable(handler) and handler is not _defer:
                    # before the next line, which may raise for another signal
                    self._aside.append((number, handler))
                    _set(number, _defer)
        except BaseException:
            self._put_back()
            raise
        self.depth = 1

    def __exit__(self, *_: object) -> None:
        if self.depth > 1:
            self.depth -= 1
            return
        aside = tuple(self._aside)
        self.depth = 0
        raised = self._put_back()
        while _waiting:
            number, frame = _waiting.popitem()
            try:
                dict(aside)[number](number, frame)
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised

    def _put_back(self) -> BaseException | None:
        """Restores all handlers, and returns an exception that restored ones raise meanwhile."""
        raised: BaseException | None = None
        while self._aside:
            try:
                number, handler = self._aside[-1]
                if _get(number) is _defer:
                    # may raise before or after it takes effect: then the loop repeats it
                    _set(number, handler)
                self._aside.pop()
            except BaseException as error:
                raised = error
        return raised


deferred_signals = DeferredSignals()


def uninterrupted(operation: Callable[P, T]) -> Callable[P, T]:
    """Makes ``operation`` uninterruptible if it is called in the main thread. A signal that arrives meanwhile
    is handled after it.
    """

    @functools.wraps(operation)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        if _thread.get_ident() != main or deferred_signals.depth:
            return operation(*args, **keywords)
        with deferred_signals:
            return operation(*args, **keywords)

    return call
