"""Records which functions of the product a piece of work calls, in all threads, in their order.

Not here: the works (``walks.py``). Invariant: only threads that were started after :meth:`Recorder.install` are
seen, and the one that called it; so a broker is opened afterwards.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = tuple(f"{ROOT / package}/" for package in ("broker_core", "connector", "txmq"))
# threads that only do work of their own, whenever it is due
_BACKGROUND = ("broker_core/server/flight/", "broker_core/node/upkeep.py")
_SKIPPED = (str(ROOT / "broker_core" / "core" / "failpoint.py"),)  # it stands everywhere, and does nothing


class Call(NamedTuple):
    """A call of a function. ``file``: its path from the project's root."""

    file: str
    function: str


class Walk(NamedTuple):
    """The calls of one piece of work."""

    calls: tuple[Call, ...]

    @property
    def files(self) -> list[str]:
        """In the order in which they are reached."""
        return list(dict.fromkeys(call.file for call in self.calls))

    @property
    def hand_overs(self) -> int:
        """How often a call is in another file than the one before."""
        return sum(first.file != second.file for first, second in pairwise(self.calls))

    def visits(self) -> Iterator[tuple[str, list[str]]]:
        """Yields each file with the functions that are called there, until another file has its turn."""
        for file, calls in groupby(self.calls, lambda call: call.file):
            yield file, list(dict.fromkeys(call.function for call in calls))


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._on = False
        self._background: dict[int, bool] = {}  # by thread, since its first call

    @contextmanager
    def installed(self) -> Iterator[Recorder]:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.calls, self._background = [], {}
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def walk(self, work: Callable[[], object]) -> Walk:
        """Returns what ``work`` calls."""
        with self.recording():
            work()
        return Walk(tuple(self.calls))

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(_FOLDERS) and code.co_filename not in _SKIPPED:
                file = code.co_filename[len(str(ROOT)) + 1 :]
                background = self._background.setdefault(threading.get_ident(), file.startswith(_BACKGROUND))
                if not background and not _is_periodic(frame):
                    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names
                    self.calls.append(Call(file, name.replace(".<locals>", "")))


def _is_periodic(frame: FrameType | None) -> bool:
    """Whether the event loop does what is due by time."""
    while frame is not None:
        if frame.f_code.co_name == "_sweep":
            return True
        frame = frame.f_back
    return False
