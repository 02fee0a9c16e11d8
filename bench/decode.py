"""decode_rows: messages of JSON into a Delta table, the broken ones as dead letters, beside from_json with
the same checks by hand, which leaves the broken ones out; decode_rows_24, decode_rows_200: so many columns.
reject_rows: decode_rows beside a ``tx.reject`` that reads the batch again, which metrics save
(``connector/reject/rejected_metrics.py``).

All are appends of ``transactional``, so the difference is ``decode`` and ``tx.reject``. One message of a
thousand is broken.
"""

from __future__ import annotations

from collections.abc import Callable
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

BATCHES, REPETITIONS = 3, 5
BROKEN_EVERY = 1_000
NARROW = 6  # columns of ORDER
ROWS = {NARROW: 200_000, 24: 100_000, 200: 20_000}  # of a batch, by the number of columns
ORDER = (
    "id bigint not null, customer string not null, amount double, country string, at timestamp, "
    "lines array<struct<sku: string, quantity: int>>"
)
_ORDER = (
    '{"id":%d,"customer":"customer-%06d","amount":%d.25,"country":"AT","at":"2026-01-31T12:34:56Z",'
    '"lines":[{"sku":"sku-%d","quantity":%d},{"sku":"other","quantity":2}]'
)
_CORRUPT = "_corrupt_record"
Work = Callable[[DataFrame, Any, str, str], None]  # of a batch, its transaction, the table and the schema


def decode_rows(folder: Path) -> list[Figure]:
    """Without the first batch of each query, which rehearses the append."""
    figures = []
    with serving(folder / "decode") as served, open_spark() as spark:
        for width, rows in ROWS.items():
            kinds: dict[str, Work] = {"plain": _plain, "typed": _typed}
            kinds |= {"again": _read_again} if width == NARROW else {}
            queues = {
                kind: [f"{kind}-{width}-{number}" for number in range(REPETITIONS + 1)] for kind in kinds
            }
            with BrokerClient(served.url) as client:
                fanout(client, f"orders-{width}", [queue for each in queues.values() for queue in each])
                with client.channel() as channel:
                    channel.queue_declare("dead")
                before = client.available(["dead"])["dead"].rows
            _fill(spark, served.url, width, rows)
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for number in range(REPETITIONS + 1):
                for kind, work in kinds.items():
                    rates[kind].append(
                        _rate(spark, served.url, folder, queues[kind][number], work, width, rows)
                    )
            with BrokerClient(served.url) as client:
                dead = client.available(["dead"])["dead"].rows - before
            assert dead == rows * BATCHES // BROKEN_EVERY * (REPETITIONS + 1) * (len(kinds) - 1), dead
            plain, typed = rates["plain"][1:], rates["typed"][1:]
            figures.append(
                against("decode_rows" if width == NARROW else f"decode_rows_{width}", typed, plain, "rows/s")
            )
            if "again" in rates:
                figures.append(against("reject_rows", typed, rates["again"][1:], "rows/s"))
    return figures


def _schema(width: int) -> str:
    more = (f"c{number} {'bigint' if number % 2 else 'string'}" for number in range(width - NARROW))
    return ", ".join([ORDER, *more])


def _fill(spark: SparkSession, url: str, width: int, rows: int) -> None:
    """One transaction for each batch, because a batch does not split one."""
    more = "".join(
        f',"c{number}":{number}' if number % 2 else f',"c{number}":"text"' for number in range(width - NARROW)
    )

    def orders(batches: Any) -> Any:
        for batch in batches:
            bodies = [
                b"{"
                if number % BROKEN_EVERY == 0
                else (_ORDER % (number, number, number, number, number) + more + "}").encode()
                for number in batch.column(0).to_pylist()
            ]
            yield pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})

    for batch in range(BATCHES):
        made = spark.range(batch * rows, (batch + 1) * rows).mapInArrow(orders, "body binary")
        made.write.format("txmq").mode("append").options(url=url, exchange=f"orders-{width}").save()


def _plain(batch: DataFrame, tx: Any, table: str, schema: str) -> None:
    """What from_json tells of a body: malformed, of another type, without a field that must be there."""
    text = F.col("body").cast("string")
    options = {"columnNameOfCorruptRecord": _CORRUPT}
    parsed = F.from_json(text, f"{schema.replace(' not null', '')}, {_CORRUPT} string", options)
    rows = batch.where(F.is_valid_utf8(text)).select(parsed.alias("order")).select("order.*")
    sound = F.col(_CORRUPT).isNull() & F.col("id").isNotNull() & F.col("customer").isNotNull()
    tx.append(rows.where(sound).drop(_CORRUPT), table)


def _typed(batch: DataFrame, tx: Any, table: str, schema: str) -> None:
    decoded = txmq.decode(batch, schema)
    tx.append(decoded.good, table)
    tx.reject(decoded, queue="dead")


def _read_again(batch: DataFrame, tx: Any, table: str, schema: str) -> None:
    """Of another frame than that of ``Decoded`` nothing is known."""
    decoded = txmq.decode(batch, schema)
    tx.append(decoded.good, table)
    tx.reject(decoded.rejected.select("*"), queue="dead")


def _rate(
    spark: SparkSession, url: str, folder: Path, queue: str, work: Work, width: int, rows: int
) -> float:
    table, schema = str(folder / queue), _schema(width)
    spark.createDataFrame([], schema.replace(" not null", "")).write.format("delta").save(table)
    stream = spark.readStream.format("txmq").options(
        url=url, queue=queue, appId=queue, maxOffsetsPerTrigger=rows, minPartitions=2
    )
    each = txmq.transactional(lambda batch, tx: work(batch, tx, table, schema), url=url, app_id=queue)
    # Spark counts a row each time that it is read, and rejecting reads the batch again
    progress = run(stream.load().writeStream.foreachBatch(each), folder, rows * BATCHES, BATCHES)
    assert len(progress) == BATCHES
    taken_ms = sum(item["durationMs"]["addBatch"] for item in progress[1:])
    return float(rows * (BATCHES - 1) / taken_ms * 1000)
