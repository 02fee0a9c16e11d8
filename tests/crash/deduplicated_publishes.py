"""A driver for ``test_spark_deduplication_crash.py``: two queries publish with ids, until it is killed.

``python -m tests.crash.deduplicated_publishes URL SCRATCH``
"""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame

from connector.batch.foreach_batch import BatchTransaction, transactional
from tests.spark.jobs import session

PUBLISHED, SUNK, ONCE, NEWS, PLAIN = "published", "sunk", "once", "news", "plain"
ID = "cast(body AS string)"
BY_MESSAGE_ID = ("body", f"named_struct('message_id', {ID}) AS properties")


def publish(rows: DataFrame, tx: BatchTransaction) -> None:
    """To a queue and an exchange that drop duplicates, and to a queue that takes all."""
    tx.publish(rows.selectExpr(*BY_MESSAGE_ID), queue=ONCE)
    by_header = f"named_struct('headers', map('x-deduplication-header', {ID})) AS properties"
    tx.publish(rows.selectExpr("body", by_header), exchange=NEWS)
    tx.publish(rows.select("body"), queue=PLAIN)


def run(url: str, scratch: str) -> None:
    spark = session({}, scratch)
    options = {"url": url, "maxOffsetsPerTrigger": "7"}

    def rows(queue: str) -> DataFrame:
        source = spark.readStream.format("txmq").options(**options, queue=queue, appId=f"reads-{queue}")
        return source.load()

    function = transactional(publish, url=url, app_id=f"reads-{PUBLISHED}")
    rows(PUBLISHED).writeStream.foreachBatch(function).option(
        "checkpointLocation", f"{scratch}/{PUBLISHED}"
    ).start()
    sink = rows(SUNK).selectExpr(*BY_MESSAGE_ID, f"'{ONCE}' AS routing_key").writeStream.format("txmq")
    sink.options(url=url, appId=f"reads-{SUNK}", checkpointLocation=f"{scratch}/{SUNK}").start()
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    run(*sys.argv[1:])
