"""append_rows_connect: ``append_rows`` on Spark Connect, where rows are staged as rows, and written to the
table after the decision. Both queries run in the same server, and their client is a process of its own.

``python -m bench.connect`` is the client.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import txmq
from bench.broker import serving
from bench.connect_server import connect_server
from bench.report import Figure, against
from bench.session import BASE

ROWS = 100_000  # in a batch
BATCHES = 4
REPETITIONS = 3


def append_rows_connect(folder: Path) -> list[Figure]:
    conf = {**BASE, **txmq.recommended_conf()}
    with serving(folder / "connect") as served, connect_server(folder, conf) as remote:
        command = [sys.executable, "-m", "bench.connect", remote, served.url, str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found, references = json.loads(done.stdout.splitlines()[-1])
    return [against("append_rows_connect", found, references, "rows/s")]


def main(remote: str, url: str, folder: str) -> None:
    from pyspark.sql import SparkSession

    from bench.streams import appends, rate

    spark = SparkSession.builder.remote(remote).getOrCreate()
    found, references = [], []
    for _ in range(REPETITIONS + 1):
        once, plain = appends(spark, url, Path(folder), BATCHES, ROWS, 2, lineage="bench")
        found.append(rate(once[1:]))
        references.append(rate(plain[1:]))
    print(json.dumps([found[1:], references[1:]]))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
