"""A reserve of file descriptors: the store opens its files although clients hold all that the process has.

Not here: which files (``segment.py``).

Invariant: while the reserve is not full, the descriptor of a file that the store closes becomes a part of it
in the same step, so that no socket gets it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from pathlib import Path

FILES = 32  # open segments of all schemas, and some that are read at the same time
_SHARE = 8  # not more than this part of what the process may open
_USED_UP = {errno.EMFILE, errno.ENFILE}


class Reserve:
    """Thread-safe."""

    def __init__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._size = FILES if hard == resource.RLIM_INFINITY else max(1, min(FILES, hard // _SHARE))
        self._lock = threading.Lock()
        self._files = [os.open(os.devnull, os.O_RDONLY)]
        with contextlib.suppress(OSError):
            while len(self._files) < self._size:
                self._files.append(os.dup(self._files[0]))

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        """As ``os.open``."""
        while True:
            try:
                return os.open(path, flags, mode)
            except OSError as error:
                if error.errno not in _USED_UP or not self._give_up_one():
                    raise

    def close(self, descriptor: int) -> None:
        """Closes a file of the store."""
        with self._lock:
            if 0 < len(self._files) < self._size:
                with contextlib.suppress(OSError):
                    os.dup2(self._files[0], descriptor, inheritable=False)
                    self._files.append(descriptor)
                    return
        os.close(descriptor)

    def _give_up_one(self) -> bool:
        """Closes one; another thread may be faster to use it. The first one stays, to make others of it."""
        with self._lock:
            if len(self._files) < 2:
                return False
            os.close(self._files.pop())
            return True

    def release(self) -> None:
        with self._lock:
            files, self._files = self._files, []
        for descriptor in files:
            with contextlib.suppress(OSError):
                os.close(descriptor)
