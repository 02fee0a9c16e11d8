"""recovery_s: from the start of a driver, whose predecessor was killed, until its first batch is committed by
Spark. The reference is a plain job of Spark with Delta: the same appends, from a source of Spark.

``python -m bench.recovery`` is such a driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.broker import fill, serving
from bench.report import Figure, against
from txmq import BrokerClient

ROWS = 100  # in a batch
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
        jobs = {"txmq": Job(folder / "txmq", served.url), "plain": Job(folder / "plain", "")}
        for job in jobs.values():
            job.begin()
        found, references = [], []
        for _ in range(REPETITIONS):
            found.append(jobs["txmq"].recovered_s())
            references.append(jobs["plain"].recovered_s())
    return [against("recovery_s", found, references, "s")]


class Job:
    """A streaming query on a folder; ``url``: of the broker, "" for the plain one."""

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir()
        self.folder, self.url = folder, url

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
            self._wait(process, already + BATCHES)
        return seconds

    @contextlib.contextmanager
    def _driver(self) -> Iterator[subprocess.Popen[bytes]]:
        """Killed, with its JVM and its workers, at the end."""
        command = [sys.executable, "-m", "bench.recovery", str(self.folder), self.url]
        with (self.folder / "driver.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _committed(self) -> int:
        """How many batches are in Spark's commit log."""
        names = [path.name for path in (self.folder / "checkpoint" / "commits").glob("[0-9]*")]
        return max(map(int, names), default=-1) + 1

    def _wait(self, process: subprocess.Popen[bytes], batches: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self._committed() < batches:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "driver.log").read_text(errors="replace")
                raise RuntimeError(f"{self._committed()} batches of {batches}: {log[-3000:]}")
            time.sleep(POLL_S)


def drive(folder: str, url: str) -> None:
    from bench.session import session

    settings: dict[str, str] = {}
    if url:
        import txmq

        settings = txmq.recommended_conf()
    with session("recovery", settings) as spark:
        table = f"{folder}/table"
        spark.createDataFrame([], "body string").write.format("delta").mode("append").save(table)
        if url:
            options = {"url": url, "queue": "orders", "appId": "recovery", "maxOffsetsPerTrigger": str(ROWS)}
            stream = spark.readStream.format("txmq").options(**options).load()

            def once(batch: Any, tx: Any) -> None:
                tx.append(batch.selectExpr("base64(body) AS body"), table)

            function: Any = txmq.transactional(once, url=url, app_id="recovery")
        else:
            stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", str(ROWS)).load()

            def plain(batch: Any, _batch_id: int) -> None:
                batch.selectExpr("CAST(value AS STRING) AS body").write.format("delta").mode("append").save(
                    table
                )

            function = plain
        writer = stream.writeStream.foreachBatch(function)
        writer.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()


if __name__ == "__main__":
    drive(*sys.argv[1:])
