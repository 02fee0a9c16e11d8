"""The entry point ``orders-job``: arguments, secrets, one query, a line of JSON for each batch, a good end.

Orders are JSON. The newest state of each is merged into the table; what is no order becomes a dead letter. A
batch is one transaction, so a job that is killed at any moment continues exactly where it was.

It returns if all was read (``--once``) or the job was told to end. It raises an error: Databricks looks at
nothing that an entry point returns.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import txmq
from connector.datasource import TxmqDataSource

ORDER = "id BIGINT NOT NULL, state STRING NOT NULL, amount DOUBLE"
OF_SOURCE = ("numInputRows", "processedRowsPerSecond")  # Spark Connect has no totals of a batch
LOOK_S = 1.0  # how often it looks for the end, and for progress
GRACE_S = 60.0  # what a batch may take after the job was told to end


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orders-job", description="Orders from a queue to a Delta table.")
    parser.add_argument("--url", required=True, help="the broker: txmqs://host:port or kafka://host:port")
    parser.add_argument("--queue", default="orders")
    parser.add_argument(
        "--table", required=True, help="a Delta table that exists: catalog.schema.name, or a path"
    )
    parser.add_argument(
        "--checkpoint", required=True, help="a directory of this query alone, in durable storage"
    )
    parser.add_argument("--app", default="orders", help="the stable name of this job for the broker")
    parser.add_argument("--user", help="of the broker")
    parser.add_argument("--password-file", help="a mounted secret")
    parser.add_argument("--secret", metavar="SCOPE/KEY", help="a Databricks secret with the password")
    parser.add_argument("--tls-ca", help="the certificates to trust")
    parser.add_argument("--max-messages", type=int, default=100_000, help="in a batch")
    parser.add_argument("--no-persist", action="store_true", help="serverless compute has no caches")
    parser.add_argument("--once", action="store_true", help="read what is there, and end")
    return parser.parse_args(arguments)


def login(options: argparse.Namespace, spark: SparkSession) -> dict[str, str]:
    """The options of the connection. No password is an argument: the page of a job shows them."""
    settings = {"user": options.user, "passwordFile": options.password_file, "tlsCa": options.tls_ca}
    if options.secret:
        from pyspark.dbutils import DBUtils  # in the runtime of Databricks

        scope, _, key = options.secret.partition("/")
        settings["password"] = DBUtils(spark).secrets.get(scope, key)
    return {name: value for name, value in settings.items() if value}


def orders(table: str) -> Callable[[DataFrame, Any], None]:
    """The function of a batch."""

    def merge(batch: DataFrame, tx: Any) -> None:
        decoded = txmq.decode(batch, ORDER, keep=["queue", "partition", "offset"])
        newest = Window.partitionBy("id").orderBy(F.desc("offset"))
        rows = decoded.good.withColumn("age", F.row_number().over(newest)).where("age = 1")
        rows = rows.select("id", "state", "amount")
        tx.merge(rows, table, on="t.id = s.id", update=True, insert=True, keys=["id"])
        tx.reject(decoded.rejected)

    return merge


def start(spark: SparkSession, options: argparse.Namespace, connection: Mapping[str, str]) -> StreamingQuery:
    # Spark looks for data sources once, and maybe before it has this wheel
    spark.dataSource.register(TxmqDataSource)
    # the merge and the rejection read the batch: the cache serves the second one
    each = txmq.transactional(
        orders(options.table),
        url=options.url,
        app_id=options.app,
        settings=connection,
        persist=not options.no_persist,
    )
    stream = spark.readStream.format("txmq").options(**connection).option("url", options.url)
    stream = stream.option("queue", options.queue).option("appId", options.app)
    stream = stream.option("maxOffsetsPerTrigger", options.max_messages)
    writer = stream.load().writeStream.queryName(options.app).foreachBatch(each)
    writer = writer.option("checkpointLocation", options.checkpoint)
    return (writer.trigger(availableNow=True) if options.once else writer).start()


def watch(query: StreamingQuery, ended: queue.SimpleQueue[int]) -> None:
    """A line of JSON for each batch with rows, until the query ends or the job is told to. Raises."""
    last_batch = -1
    while ended.empty() and not query.awaitTermination(LOOK_S):
        last_batch = report(query, last_batch)
    # between two batches, if there is a pause soon; one that is interrupted is repeated, without harm
    deadline = time.monotonic() + GRACE_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        query.awaitTermination(0.01)
    query.stop()
    report(query, last_batch)


def report(query: StreamingQuery, last_batch: int) -> int:
    for progress in query.recentProgress:
        (source,) = progress["sources"]
        if progress["batchId"] > last_batch and source["numInputRows"]:
            last_batch = progress["batchId"]
            line = {"batchId": last_batch, **{name: source[name] for name in OF_SOURCE}}
            print(json.dumps({**line, "durationMs": progress["durationMs"]}), flush=True)
    return last_batch


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # a handler may interrupt whoever holds a lock
    builder = SparkSession.builder.appName(options.app)
    for name, value in txmq.recommended_conf().items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()  # of a job of Databricks: the one that there is
    for number in (signal.SIGTERM, signal.SIGINT):  # after the session, which takes SIGINT for itself
        signal.signal(number, lambda number, _: ended.put(number))
    try:
        watch(start(spark, options, login(options, spark)), ended)
    except Exception as error:
        print(f"orders-job: {txmq.cause(error) or error}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
