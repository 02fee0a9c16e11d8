"""The log of a broker whose output is a file of its directory: it is bounded, as such a file is nobody's.

Not here: a log that an operator has redirected, which is theirs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import TextIO

MAX_BYTES = 10 * 1024 * 1024
OUTPUT = (1, 2)  # descriptors: lines of libraries and of Python go there too


class LogFile(logging.StreamHandler[TextIO]):
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
