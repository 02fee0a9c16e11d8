"""The audit log: one JSON line for each login, refusal, change of users, permissions and topology, and
decision by hand.

Not here: which lines are only counted (``repeats.py``).
Invariant: a line is bounded, whatever a caller sends, and never has a body, a password, its hash or a token.
A file is kept for KEPT_DAYS, unless there are more than MOST, so that nobody erases the log by filling it. A
disk that refuses a line does not stop the broker; the log of the broker says so.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypeVar

from broker_core.server.access.repeats import INTERVAL_S, Repeats, is_refusal

logger = logging.getLogger("txmq.audit")

Record = Callable[..., object]  # of an event and its facts, with who it was
_A = TypeVar("_A", bound="Auditor")

FILE = "audit.log"
MAX_BYTES = 10 * 1024 * 1024  # then it becomes audit.log.1, and so on
KEPT_DAYS = 90  # since the last line of a file
MOST = 200  # older files, of all ages
FIELD_BYTES = 1024  # of one field of a line, as JSON
REFUSAL_BYTES = 256  # the same of what was refused: anybody can have it written
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def cut(value: object, most: int = FIELD_BYTES) -> object:
    """``value``, or the first ``most`` bytes of it as JSON: a caller chooses names, and a line is written
    before anything is known of them.
    """
    written = json.dumps(value)
    if len(written) <= most:
        return value
    text = value if isinstance(value, str) else written
    length = most
    while len(json.dumps(text[:length])) > most:
        length //= 2
    return f"{text[:length]}... ({len(text)} characters)"


class Audit:
    """Writes ``directory/audit.log``; "": nothing is written. Thread-safe."""

    def __init__(self, directory: str = "") -> None:
        self._path = Path(directory, FILE) if directory else None
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._failing = False
        self._repeats = Repeats()
        self._timer: threading.Timer | None = None

    def record(self, event: str, user: str, address: str, **what: object) -> bool:
        """``user`` "": the owner of the data directory. ``address`` "": this process. Returns whether a line
        was written, and not only counted.
        """
        fields = {"event": event, "user": user, "address": address, **what}
        with self._lock:
            now = time.monotonic()
            if self._repeats.due(now):
                self._write_counted()
            if not self._repeats.writes(fields, now):
                self._count_later()
                return False
            self._write_line(fields)
            return True

    def recorder(self, listener: str, user: str = "", address: str = "") -> Record:
        """``record`` of one author."""
        return partial(self.record, user=user, address=address, listener=listener)

    def _count_later(self) -> None:
        """At the end of the interval, even if nothing else is said."""
        if self._timer is None and self._path is not None:
            timer = threading.Timer(INTERVAL_S, self._interval)
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread can be had: the next line brings it
                timer.start()
                self._timer = timer

    def _interval(self) -> None:
        with self._lock:
            self._timer = None
            self._write_counted()

    def _write_counted(self) -> None:
        for line, count, since in self._repeats.reset():
            seconds = round(time.monotonic() - since)
            self._write_line({**line, "more": count, "seconds": seconds})

    def _write_line(self, fields: dict[str, object]) -> None:
        if self._path is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        most = REFUSAL_BYTES if is_refusal(fields) else FIELD_BYTES
        line = json.dumps({"time": now, **{name: cut(value, most) for name, value in fields.items()}}) + "\n"
        try:
            self._write(self._path, line.encode(errors="backslashreplace"))
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                logger.error("the audit log %s cannot be written: %s", self._path, error)

    def _write(self, path: Path, line: bytes) -> None:
        if self._file is None:
            descriptor = os.open(path, _APPEND, 0o600)
            self._file = io.FileIO(descriptor, "a")
        if self._file.tell() + len(line) > MAX_BYTES and self._file.tell():
            self._file.close()
            self._file = None
            self._rotate(path)
            self._write(path, line)
            return
        self._file.write(line)

    def _rotate(self, path: Path) -> None:
        """``audit.log`` becomes ``audit.log.1``, and so on; what is too old is deleted."""
        oldest = time.time() - KEPT_DAYS * 86_400
        there = [path]
        while (older := path.with_name(f"{FILE}.{len(there)}")).exists():
            there.append(older)
        while len(there) > MOST or (len(there) > 1 and there[-1].stat().st_mtime < oldest):
            there.pop().unlink()
        for number, before in reversed(list(enumerate(there))):
            before.replace(path.with_name(f"{FILE}.{number + 1}"))

    def close(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._write_counted()
            if self._file is not None:
                self._file.close()
                self._file = None


class Auditor:
    """What an operator changes, with a line for each change. ``record`` None: without one."""

    def __init__(self, record: Record | None = None) -> None:
        self._record = record

    def by(self: _A, record: Record) -> _A:
        """The same for another author."""
        other = copy.copy(self)
        other._record = record
        return other

    def _audit(self, word: str, **what: object) -> None:
        if self._record is not None:
            self._record(f"admin.{word}", **what)
