"""append_rows_connect: ``append_rows`` on Spark Connect, where rows are staged as rows, and written to the
table after the decision. Both queries run in the same server, and their client is a process of its own.

``python -m bench.connect`` is the client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import txmq
from bench.broker import serving
from bench.connect_server import connect_server
from bench.report import Figure, against, note
from bench.session import BASE

ROWS = 100_000  # in a batch
BATCHES = 3
REPETITIONS = 2
LIMIT_S = 600.0


def append_rows_connect(folder: Path) -> list[Figure]:
    conf = {**BASE, **txmq.recommended_conf()}
    with serving(folder / "connect") as served, connect_server(folder, conf) as remote:
        note("append_rows_connect: the server of Spark Connect has started")
        command = [sys.executable, "-m", "bench.connect", remote, served.url, str(folder)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
        except subprocess.SubprocessError as error:
            log = (folder / "server.log").read_text(errors="replace")
            raise RuntimeError(f"{error}; the server said: {log[-3000:]}") from error
    found, references = json.loads(done.stdout.splitlines()[-1])
    return [against("append_rows_connect", found, references, "rows/s")]


def main(remote: str, url: str, folder: str) -> None:
    from pyspark.sql import SparkSession

    from bench.streams import appends

    spark = SparkSession.builder.remote(remote).getOrCreate()
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(REPETITIONS):
        begun = time.monotonic()
        both = appends(spark, url, Path(folder), BATCHES, ROWS, 2)
        for found, progress in zip(rates, both, strict=True):
            # without the first batch; the rows are those of the table: a batch may be read more than once
            assert len(progress) == BATCHES, progress
            found.append(
                (BATCHES - 1) * ROWS * 1000 / sum(each["durationMs"]["addBatch"] for each in progress[1:])
            )
        note(
            f"append_rows_connect: {number + 1} of {REPETITIONS} runs, {rates[0][-1]:,.0f} rows/s beside "
            f"{rates[1][-1]:,.0f}, {time.monotonic() - begun:.0f} s"
        )
    print(json.dumps(rates))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
