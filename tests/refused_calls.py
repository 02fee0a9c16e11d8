"""System calls that the operating system refuses: every place of the broker's own code that makes one.

Not here: a failed fdatasync or fsync, after which the store takes no more work (``tests/crash``), and what C makes,
the sockets of the event loop and SQLite's files (a real limit: ``tests/server/test_files_run_out.py``).
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import broker_core

PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EINTR)
CALLS = (
    "open write pwrite pread preadv ftruncate lseek link unlink rename replace mkdir stat statvfs dup dup2"
)
_ROOT = str(Path(broker_core.__file__).parent)
_DEPTH = 3  # functions of the broker that tell one place from another


class RefusedCalls:
    """Nothing is refused until ``always`` or ``next_of_each`` is set.

    ``always``: every call, with this error. ``each``: so many calls of each place, one with each error of
    ``PASSING``. ``places``: how often each was refused.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.always = 0
        self.each = False
        self.places: Counter[str] = Counter()
        for name in CALLS.split():
            patch.setattr(os, name, self._refusing(name, getattr(os, name)))
        patch.setattr(io, "open", self._refusing("io.open", io.open))
        patch.setattr(threading.Thread, "start", self._refusing("thread", threading.Thread.start))

    def _refusing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.always or self.each:
                place = _place(sys._getframe(1))
                if place:
                    self._look(f"{name} < {place}", name)
            return real(*arguments, **named)

        return call

    def _look(self, place: str, name: str) -> None:
        count = self.places[place]
        number = self.always or (PASSING[count] if count < len(PASSING) else 0)
        if number:
            self.places[place] = count + 1
            if name == "thread":
                raise RuntimeError("can't start new thread")
            raise OSError(number, os.strerror(number))

    def stop(self) -> None:
        self.always, self.each = 0, False


def _place(frame: FrameType | None) -> str:
    """The functions of the broker that make a call; "" for a call of somebody else."""
    found: list[str] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        if code.co_filename.startswith(_ROOT):
            if "/client/" in code.co_filename:
                return ""
            found.append(code.co_name)
        elif not found and "/tests/" in code.co_filename and code.co_name != "call":
            return ""
        frame = frame.f_back
    return " < ".join(found)
