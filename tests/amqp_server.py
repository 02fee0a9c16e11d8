"""``txmq serve`` as a process of its own, with its AMQP endpoint, for tests that kill it and start it again.

Not here: clients. ``TXMQ_INTEROP_URL`` names another broker that tests which only talk AMQP may use instead
(``endpoint``).
Invariant: both ports stay the same over a restart, and no broker outlives its ``serving`` block.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.ports import free_ports
from broker_core.client.broker import BrokerClient
from tests.forked import Forked
from tests.progress import GUARD_S


class NotReady(AssertionError):
    """The broker ended before it served."""


class Process:
    """A broker that is a process, once a subclass has started it."""

    process: Forked | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the broker does not run"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def run(self, command: list[str], failpoints: str) -> list[str]:
        """Starts it; the words that it says when it is ready."""
        assert self.process is None, "the broker runs already"
        self.process = Forked("txmq", command, {**os.environ, "TXMQ_FAILPOINTS": failpoints})
        return self.process.stdout.readline().split()

    def kill(self) -> int:
        """SIGKILL; the exit code (negative: the signal that ended it, perhaps an earlier one)."""
        assert self.process is not None
        self.process.kill()
        return self.wait()

    def terminate(self) -> int:
        """SIGTERM, as an operator ends it; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """The exit code, once it has ended."""
        assert self.process is not None
        process, self.process = self.process, None
        try:
            code = process.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            left = process.stdout.read()
            process.stdout.close()
        assert left == "", "it still wrote to its output"
        return code


class AmqpServed(Process):
    """A broker on ``directory``. ``failpoints`` are of the next start only; ``args`` are of every start."""

    def __init__(self, directory: Path, *args: str) -> None:
        self.directory, self.args = directory, args
        self.host = "127.0.0.1"
        self.port, self.flight_port = free_ports(2)

    @property
    def url(self) -> str:
        """For ``BrokerClient`` and ``txmq --url``."""
        return f"txmq://{self.host}:{self.flight_port}"

    @property
    def amqp_url(self) -> str:
        """For AMQP clients."""
        return f"amqp://guest:guest@{self.host}:{self.port}/%2F"

    def start(self, failpoints: str = "") -> AmqpServed:
        listen = ["--listen", f"{self.host}:{self.flight_port}", "--amqp", f"{self.host}:{self.port}"]
        command = ["serve", "--data", str(self.directory), *listen, *self.args]
        ready = self.run(command, failpoints)
        if len(ready) != 3 or ready[0] != "ready":
            self.kill()
            raise NotReady(
                f"the broker did not say `ready txmq://HOST:PORT amqp://HOST:PORT` but {' '.join(ready)!r}"
            )
        return self

    def restart(self, failpoints: str = "") -> AmqpServed:
        """SIGKILL where it still runs, then a start on the same directory and ports."""
        if self.process is not None:
            self.kill()
        return self.start(failpoints)

    def client(self) -> BrokerClient:
        """A client of the other endpoint."""
        return BrokerClient(self.url)

    def memory_bytes(self) -> int:
        """Resident memory of the broker."""
        return int(psutil.Process(self.pid).memory_info().rss)


@contextlib.contextmanager
def serving(directory: Path, *args: str, failpoints: str = "") -> Iterator[AmqpServed]:
    """A running broker on ``directory``; it is gone afterwards."""
    served = AmqpServed(directory, *args)
    try:
        served.start(failpoints)
        yield served
    finally:
        if served.process is not None:
            served.kill()


@contextlib.contextmanager
def endpoint(directory: Path, *args: str) -> Iterator[str]:
    """The URL of the broker that ``TXMQ_INTEROP_URL`` names, else of a new one on ``directory``."""
    other = os.environ.get("TXMQ_INTEROP_URL")
    if other:
        yield other
        return
    with serving(directory, *args) as served:
        yield served.amqp_url
