"""A driver of ``recovery_s``: a streaming query that appends to a Delta table, and says when its steps ended.

``python -m bench.recovery_driver FOLDER KIND URL BEGUN``; BEGUN is when the process was asked for.

Invariant: a driver imports nothing that a job of its kind does not need.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

ROWS = 100  # in a batch
BATCHES = 1_000
PLAIN, PYTHON, TXMQ = "plain", "python", "txmq"  # the kinds of jobs, by their sources


def drive(folder: str, kind: str, url: str, begun: str) -> None:
    steps: dict[str, float] = {}

    def ended(step: str) -> None:
        steps[step] = time.time() - float(begun)

    ended("process")
    from bench.session import session
    from txmq import recommended_conf

    ended("imports")
    with session("recovery", recommended_conf()) as spark:
        ended("session")
        table = f"{folder}/table"
        spark.createDataFrame([], "body string").write.format("delta").mode("append").save(table)
        ended("table")
        stream, function = (_txmq if kind == TXMQ else _plain)(spark, kind, table, url)
        ended("source")
        writer = stream.writeStream.foreachBatch(function)
        query = writer.option("checkpointLocation", f"{folder}/checkpoint").start()
        ended("query")
        while not query.awaitTermination(0.05):
            if "batch" not in steps and query.recentProgress:
                ended("batch")
                first = query.recentProgress[0]["durationMs"]
                print(json.dumps({"steps_s": steps, "first_batch_ms": first}), flush=True)


def _txmq(spark: Any, _kind: str, table: str, url: str) -> tuple[Any, Any]:
    import txmq

    options = {"url": url, "queue": "orders", "appId": "recovery", "maxOffsetsPerTrigger": str(ROWS)}

    def once(batch: Any, tx: Any) -> None:
        tx.append(batch.selectExpr("base64(body) AS body"), table)

    stream = spark.readStream.format("txmq").options(**options).load()
    return stream, txmq.transactional(once, url=url, app_id="recovery")


def _plain(spark: Any, kind: str, table: str, _url: str) -> tuple[Any, Any]:
    def plain(batch: Any, _batch_id: int) -> None:
        batch.selectExpr(f"{column} AS body").write.format("delta").mode("append").save(table)

    if kind == PLAIN:
        column = "CAST(value AS STRING)"
        stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", str(ROWS)).load()
    else:
        from bench.reference import ReadySource

        column = "base64(body)"
        spark.dataSource.register(ReadySource)
        stream = spark.readStream.format("ready").options(total=BATCHES * ROWS, step=ROWS, tasks=1).load()
    return stream, plain


if __name__ == "__main__":
    drive(*sys.argv[1:])
