"""recovery_s: from the start of a driver, whose predecessor was killed, until its first batch is committed by
Spark. The reference is a plain job of Spark with Delta: the same appends, from a source of Spark.

recovery_python_s: the same job beside a third one, with the least Python source that there is. Spark starts
Python processes for both, and for the plain job none. All three have the same settings.

Not here: the drivers (``recovery_driver.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.broker import fill, serving
from bench.recovery_driver import PLAIN, PYTHON, TXMQ
from bench.report import Figure, against, note
from txmq import BrokerClient

MESSAGES = 100_000
BATCHES = 3  # that a driver commits before it is killed
REPETITIONS = 3
LIMIT_S = 600.0
POLL_S = 0.02


def recovery_s(folder: Path) -> list[Figure]:
    with serving(folder / "recovery") as served:
        with BrokerClient(served.url) as client:
            with client.channel() as channel:
                channel.queue_declare("orders")
            fill(client, "", "orders", MESSAGES)
        jobs = [Job(folder / kind, kind, served.url) for kind in (TXMQ, PYTHON, PLAIN)]
        for job in jobs:
            job.begin()
        seconds: dict[str, list[float]] = {job.kind: [] for job in jobs}
        for _ in range(REPETITIONS):
            for job in jobs:
                seconds[job.kind].append(job.recovered_s())
        for job in jobs:
            job.note_steps()
    return [
        against("recovery_s", seconds[TXMQ], seconds[PLAIN], "s"),
        against("recovery_python_s", seconds[TXMQ], seconds[PYTHON], "s"),
    ]


class Job:
    """A streaming query on a folder, whose source is of ``kind``; ``url``: of the broker."""

    def __init__(self, folder: Path, kind: str, url: str) -> None:
        folder.mkdir()
        self.kind = kind
        self._folder, self._url = folder, url
        self._cpu_s: list[dict[str, float]] = []  # of each recovery

    def begin(self) -> None:
        with self._driver() as process:
            self._wait(process, BATCHES)

    def recovered_s(self) -> float:
        """The driver is killed once more when it has committed some batches, at any place of the next one."""
        already = self._committed()
        started = time.perf_counter()
        with self._driver() as process:
            self._wait(process, already + 1)
            seconds = time.perf_counter() - started
            self._cpu_s.append(_cpu_s(process.pid))
            self._wait(process, already + BATCHES)
        return seconds

    def note_steps(self) -> None:
        """The medians: when each step of a driver had ended, the parts of its first batch, and the seconds of
        CPU until that was committed, which mean something on a busy machine too.
        """
        told = [json.loads(line) for line in self._log().splitlines() if line.startswith('{"steps_s"')]
        last = told[-len(self._cpu_s) :]
        parts = {what: [line[what] for line in last] for what in ("steps_s", "first_batch_ms")}
        for what, found in {**parts, "cpu_s": self._cpu_s}.items():
            medians = {name: statistics.median(each.get(name, 0) for each in found) for name in found[0]}
            text = ", ".join(f"{name} {value:,.1f}" for name, value in medians.items())
            note(f"{self.kind}: {what}: {text}")

    @contextlib.contextmanager
    def _driver(self) -> Iterator[subprocess.Popen[bytes]]:
        """Killed, with its JVM and its workers, at the end."""
        command = [sys.executable, "-m", "bench.recovery_driver", str(self._folder), self.kind, self._url]
        with (self._folder / "driver.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, str(time.time())], stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _committed(self) -> int:
        """How many batches are in Spark's commit log."""
        names = [path.name for path in (self._folder / "checkpoint" / "commits").glob("[0-9]*")]
        return max(map(int, names), default=-1) + 1

    def _log(self) -> str:
        return (self._folder / "driver.log").read_text(errors="replace")

    def _wait(self, process: subprocess.Popen[bytes], batches: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self._committed() < batches:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._committed()} batches of {batches}: {self._log()[-3000:]}")
            time.sleep(POLL_S)


def _cpu_s(pid: int) -> dict[str, float]:
    """Seconds of CPU of a driver: its own, of its JVM, and of the Python processes of that."""
    driver = psutil.Process(pid)
    found = {"driver": sum(driver.cpu_times()[:2]), "jvm": 0.0, "workers": 0.0}
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            found["jvm" if process.name() == "java" else "workers"] += sum(used[:2])
    return found
