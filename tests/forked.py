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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from tests.fork_server import PLACE, listen, place

OF_TXMQ = ("txmq.cli", "broker_core.launcher")
OF_SPARK = (
    "pyspark.worker",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "connector.datasource",
    "connector.stream.sink",
    "connector.stream.source",
    "broker_core.kafka.engine",
)
_starting = threading.Lock()
_servers: dict[tuple[str, ...], str] = {}  # what it has imported -> its name
_alive: list[int] = []  # open until the end of this process


def fork_server(imported: tuple[str, ...]) -> str:
    """The name of the fork server of this process that has imported these modules, started at the first use."""
    with _starting:
        if imported not in _servers:
            listener, name = listen()
            starter, ours = os.pipe()
            with listener:
                passed = [listener.fileno(), starter]
                subprocess.Popen(
                    [sys.executable, "-m", "tests.fork_server", *map(str, passed), *imported],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=passed,
                    env={**os.environ, "TXMQ_FAILPOINTS": ""},
                )
            os.close(starter)
            _alive.append(ours)
            _servers[imported] = name
        return _servers[imported]


@contextlib.contextmanager
def spark_forks() -> Iterator[None]:
    """The Python processes of a JVM that is started here are forks; each dies with the process that stands in for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACE, place(fork_server(OF_SPARK)))
        yield


def program(module: str) -> str:
    """The text of a Python program that is ``python -m MODULE`` with its own arguments, signals and streams."""
    startup = str(Path(__file__).parent / "startup")
    return (
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.path.insert(0, {startup!r})\n"
        f"sys.orig_argv[:] = [sys.executable, '-m', {module!r}, *sys.argv[1:]]\n"
        "from standing_in import stand_in\n"
        f"stand_in({place(fork_server(OF_TXMQ))!r})\n"
        "sys.exit('no fork server')\n"
    )


class Forked:
    """Has what tests use of ``subprocess.Popen`` with a pipe for its output; stderr is that of this process."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        order = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        output, theirs = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status.connect(f"\0{fork_server(OF_TXMQ)}")
        socket.send_fds(self._status, [json.dumps(order).encode()], [nothing, theirs, 2])
        os.close(theirs)
        os.close(nothing)
        self.stdout: IO[str] = os.fdopen(output)
        self.pid = int(self._status.recv(64))
        self._waiting = threading.Lock()
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
            if self.returncode is None and self._answers(timeout):
                with self._status:
                    self.returncode = int(self._status.recv(64))
            return self.returncode

    def _answers(self, timeout: float | None) -> bool:
        waiting = select.poll()  # select takes no descriptor above 1,023
        waiting.register(self._status, select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
