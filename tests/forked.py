"""``python -m MODULE`` as a process of its own, forked from one that has imported txmq (``fork_server.py``).

For tests that start and kill many. Not for those whose subject is the start itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

_lock = threading.Lock()
_server: tuple[socket.socket, subprocess.Popen[bytes]] | None = None


def _orders() -> socket.socket:
    """The socket of the fork server of this process, started at the first use. It ends with this process."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TXMQ_FAILPOINTS": ""},
            )
        _server = ours, process
    return _server[0]


class Forked:
    """Has what tests use of ``subprocess.Popen`` with a pipe for its output; stderr is that of this process."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        output, theirs = os.pipe()
        status, status_theirs = os.pipe()
        order = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        with _lock:
            socket.send_fds(_orders(), [json.dumps(order).encode()], [theirs, 2, status_theirs])
        os.close(theirs)
        os.close(status_theirs)
        self.stdout: IO[str] = os.fdopen(output)
        self._status = os.fdopen(status)
        self._waiting = threading.Lock()
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
        return code

    def _look(self, timeout: float | None) -> int | None:
        with self._waiting:
            if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
                with self._status:
                    self.returncode = int(self._status.readline())
            return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
