"""The log of ``txmq serve``: its form, and its bounds.

Not here: the audit log (``access/audit.py``), and a log that an operator has redirected, which is theirs to
rotate.
Invariant: a record is one line, but for tracebacks of text. What clients cause cannot fill a disk or take the
time of the broker: of lines below a warning at most INFOS a second are written, and the rest is counted. No
line has a body of a message.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TextIO

from broker_core.core.errors import printable

if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]
else:  # which Python 3.10 cannot subscript
    _TextHandler = logging.StreamHandler

INFOS = 100  # lines a second below a warning
MAX_BYTES = 10 * 1024 * 1024
OUTPUT = (1, 2)  # descriptors: lines of libraries and of Python go there too


def set_up(path: str, form: str) -> None:
    """Of this process: to standard error. ``path``: see LogFile."""
    handler = LogFile(path)
    text = LineFormatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    handler.addFilter(Seldom())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("txmq").setLevel(logging.INFO)


class LineFormatter(logging.Formatter):
    """A record is one line; only a traceback has more."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(map(printable, text.splitlines()))


class JsonFormatter(logging.Formatter):
    """A record is one object in one line: time, level, logger, message, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


class Seldom(logging.Filter):
    """Leaves out lines below a warning above INFOS a second; the next one that passes says how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._second = self._passed = self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        with self._lock:
            second = int(self._clock())
            if second != self._second:
                self._second, self._passed = second, 0
            if self._passed >= INFOS:
                self._left_out += 1
                return False
            self._passed += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} lines before were left out)", ()
        return True


class LogFile(_TextHandler):
    """Writes to ``stream``, by default standard error. If its file is ``path``, that becomes ``path``.1 at
    MAX_BYTES, in place of an older one, and ``descriptors`` write to a new file.
    """

    def __init__(self, path: str, stream: TextIO | None = None, descriptors: Sequence[int] = OUTPUT) -> None:
        super().__init__(stream)
        self._path = path
        self._descriptors = descriptors

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        with contextlib.suppress(OSError):  # the log goes on in the old file
            if os.fstat(self._descriptors[-1]).st_size >= MAX_BYTES:
                self._turn()

    def _turn(self) -> None:
        there = os.stat(self._path)
        ours = [each for each in self._descriptors if os.path.samestat(os.fstat(each), there)]
        if not ours:
            return
        os.replace(self._path, f"{self._path}.1")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        new = os.open(self._path, flags, 0o600)
        try:
            for each in ours:
                os.dup2(new, each)
        finally:
            os.close(new)
