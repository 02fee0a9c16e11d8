"""A first stream: four messages become rows of a Delta table and messages in two queues, in one transaction.

``make first``, or ``python examples/first_stream.py [FOLDER]`` in an environment with ``txmq[spark]``.
Kill it at any moment and run it again: each payment is in the table once, and each large or broken one in its
queue once. What Spark logs is in ``FOLDER/spark.log``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from delta import configure_spark_with_delta_pip
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # not ``python3``, which may have no txmq

import txmq

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "first-stream").absolute()
DATA, TABLE, CHECKPOINT = (str(FOLDER / name) for name in ("data", "payments", "checkpoint"))
SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def spark_session() -> SparkSession:
    """A local session with Delta. Its JVM keeps the standard error that it starts with: the log file."""
    builder = SparkSession.builder.master("local[2]").appName("first stream")
    for name, value in {**txmq.recommended_conf(), **SETTINGS}.items():
        builder = builder.config(name, value)
    screen = os.dup(2)
    with (FOLDER / "spark.log").open("ab") as log:
        os.dup2(log.fileno(), 2)
        try:
            return configure_spark_with_delta_pip(builder).getOrCreate()
        finally:
            os.dup2(screen, 2)
            os.close(screen)


def publish_payments() -> None:
    """Four messages in one transaction: all of them are in the queue afterwards, or none."""
    with txmq.connect(data=DATA).channel() as channel:
        for queue in ("payments", "large", "broken"):
            channel.queue_declare(queue)
        channel.tx_select()
        for body in (b'{"amount": 5}', b'{"amount": 40}', b'{"amount": 700}', b"not a payment"):
            channel.publish(body, routing_key="payments")
        channel.tx_commit()


def book(batch: DataFrame, tx: Any) -> None:
    good, broken = txmq.decode(batch, "amount BIGINT", keep=["offset", "body"])
    tx.append(good.select("offset", "amount"), TABLE)
    tx.publish(good.where("amount > 100").select("body"), routing_key="large")
    tx.reject(broken, queue="broken")


def start(spark: SparkSession) -> StreamingQuery:
    payments = spark.readStream.format("txmq").options(data=DATA, queue="payments", appId="book").load()
    writer = payments.writeStream.foreachBatch(txmq.transactional(book, data=DATA, app_id="book"))
    return writer.option("checkpointLocation", CHECKPOINT).trigger(availableNow=True).start()


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    print("Publishing four payments to the queue 'payments'", flush=True)
    publish_payments()
    print("Starting Spark (the first start downloads Delta)", flush=True)
    spark = spark_session()
    start(spark).awaitTermination()

    table = spark.read.format("delta").load(TABLE).orderBy("offset")
    print("table: ", [row.amount for row in table.collect()])
    for queue in ("large", "broken"):  # a batch read consumes nothing
        messages = spark.read.format("txmq").options(data=DATA, queue=queue).load().orderBy("offset")
        print(f"{queue}:".ljust(7), [bytes(row.body).decode() for row in messages.collect()])
    spark.stop()


if __name__ == "__main__":
    main()
