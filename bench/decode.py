"""decode_rows: messages of JSON into a Delta table, the broken ones as dead letters, beside plain from_json;
reject_rows: the same beside a ``tx.reject`` that reads the batch again, which metrics save
(``connector/reject/rejected_metrics.py``).

All are appends of ``transactional``, so the difference is ``decode`` and ``tx.reject``. One message of a
thousand is broken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import txmq
from bench.broker import fanout, serving
from bench.report import Figure, against
from bench.streams import open_spark, run
from txmq import BrokerClient

ROWS, BATCHES, REPETITIONS = 200_000, 3, 5
BROKEN_EVERY = 1_000
SCHEMA = (
    "id bigint not null, customer string not null, amount double, country string, at timestamp, "
    "lines array<struct<sku: string, quantity: int>>"
)
_ORDER = (
    '{"id":%d,"customer":"customer-%06d","amount":%d.25,"country":"AT","at":"2026-01-31T12:34:56Z",'
    '"lines":[{"sku":"sku-%d","quantity":%d},{"sku":"other","quantity":2}]}'
)


def decode_rows(folder: Path) -> list[Figure]:
    """Without the first batch of each query, which rehearses the append."""
    kinds = {"plain": _plain, "typed": _typed, "again": _read_again}
    queues = [f"{kind}-{number}" for number in range(REPETITIONS + 1) for kind in kinds]
    with serving(folder / "decode") as served, open_spark() as spark:
        with BrokerClient(served.url) as client:
            fanout(client, "orders", queues)
            with client.channel() as channel:
                channel.queue_declare("dead")
        _fill(spark, served.url)
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(REPETITIONS + 1):
            for kind, work in kinds.items():
                rates[kind].append(_rate(spark, served.url, folder, f"{kind}-{number}", work))
        with BrokerClient(served.url) as client:
            dead = client.available(["dead"])["dead"].rows
        assert dead == ROWS * BATCHES // BROKEN_EVERY * (REPETITIONS + 1) * 2, dead
        plain, typed, again = (found[1:] for found in rates.values())
        return [
            against("decode_rows", typed, plain, "rows/s"),
            against("reject_rows", typed, again, "rows/s"),
        ]


def _fill(spark: SparkSession, url: str) -> None:
    """One transaction for each batch, because a batch does not split one."""

    def orders(batches: Any) -> Any:
        for batch in batches:
            bodies = [
                b"{"
                if number % BROKEN_EVERY == 0
                else (_ORDER % (number, number, number, number, number)).encode()
                for number in batch.column(0).to_pylist()
            ]
            yield pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})

    for batch in range(BATCHES):
        rows = spark.range(batch * ROWS, (batch + 1) * ROWS).mapInArrow(orders, "body binary")
        rows.write.format("txmq").mode("append").options(url=url, exchange="orders").save()


def _plain(batch: DataFrame, tx: Any, table: str) -> None:
    parsed = F.from_json(F.col("body").cast("string"), SCHEMA)
    tx.append(batch.select(parsed.alias("order")).select("order.*"), table)


def _typed(batch: DataFrame, tx: Any, table: str) -> None:
    decoded = txmq.decode(batch, SCHEMA)
    tx.append(decoded.good, table)
    tx.reject(decoded, queue="dead")


def _read_again(batch: DataFrame, tx: Any, table: str) -> None:
    """Of another frame than that of ``Decoded`` nothing is known."""
    decoded = txmq.decode(batch, SCHEMA)
    tx.append(decoded.good, table)
    tx.reject(decoded.rejected.select("*"), queue="dead")


def _rate(spark: SparkSession, url: str, folder: Path, queue: str, work: Any) -> float:
    table = str(folder / queue)
    columns = SCHEMA.replace(" not null", "")
    spark.createDataFrame([], columns).write.format("delta").save(table)
    stream = spark.readStream.format("txmq").options(
        url=url, queue=queue, appId=queue, maxOffsetsPerTrigger=ROWS, minPartitions=2
    )
    each = txmq.transactional(lambda batch, tx: work(batch, tx, table), url=url, app_id=queue)
    # Spark counts a row each time that it is read, and rejecting reads the batch again
    progress = run(stream.load().writeStream.foreachBatch(each), folder, ROWS * BATCHES, BATCHES)
    assert len(progress) == BATCHES
    taken_ms = sum(item["durationMs"]["addBatch"] for item in progress[1:])
    return float(ROWS * (BATCHES - 1) / taken_ms * 1000)
