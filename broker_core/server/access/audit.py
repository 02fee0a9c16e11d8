"""The audit log: one JSON line for each login, refusal, change of users, permissions and topology, and
decision by hand.

Invariant: a line is bounded, whatever a caller sends, and never has a body, a password, its hash or a token.
A disk that refuses a line does not stop the broker; the log of the broker says so.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from datetime import datetime, timezone
from pathlib import Path

logger = logging.getLogger("txmq.audit")

FILE = "audit.log"
MAX_BYTES = 10 * 1024 * 1024  # then it becomes audit.log.1, and so on
KEPT = 5  # older files
FIELD_BYTES = 1024  # of one field of a line, as JSON
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def cut(value: object) -> object:
    """``value``, or the first FIELD_BYTES of it as JSON: a caller chooses names, and a line is written before
    anything is known of them.
    """
    written = json.dumps(value)
    if len(written) <= FIELD_BYTES:
        return value
    text = value if isinstance(value, str) else written
    kept = FIELD_BYTES
    while len(json.dumps(text[:kept])) > FIELD_BYTES:
        kept //= 2
    return f"{text[:kept]}... ({len(text)} characters)"


class Audit:
    """Writes ``directory/audit.log``; "": nothing is written. Thread-safe."""

    def __init__(self, directory: str = "") -> None:
        self._path = Path(directory, FILE) if directory else None
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._failing = False

    def say(self, event: str, user: str, address: str, **what: object) -> None:
        """``user`` "": the owner of the data directory. ``address`` "": this process."""
        if self._path is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        told = {"event": event, "user": user, "address": address, **what}
        line = json.dumps({"time": now, **{name: cut(value) for name, value in told.items()}}) + "\n"
        try:
            with self._lock:
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
            for number in range(KEPT, 0, -1):
                older = path.with_name(f"{FILE}.{number - 1}") if number > 1 else path
                if older.exists():
                    older.replace(path.with_name(f"{FILE}.{number}"))
            self._write(path, line)
            return
        self._file.write(line)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
