"""Queries that use a stream twice, join and aggregate, for pipelines that are killed.

Every shape makes a column ``body`` (string) without two equal rows, from the messages that ``MESSAGES`` names, in
micro-batches of two messages. ``EXPECTED`` is what it makes of them in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

OTHER = "other"  # the queue that is joined, behind the name of the pipeline's own

MESSAGES: dict[str, list[str]] = {
    "typed": ["a", "b,b", "c", "d,d"],
    "self-union": ["a", "b", "c", "d"],
    "self-join": ["a", "b", "c", "d"],
    "join-of-two-queues": ["a", "b", "c", "d"],
    "watermark": ["a@10", "b@100", "c@110", "d@120", "late@5", "e@200"],
    "deduplicated": ["a", "b", "a", "c"],
    "state-in-pandas": ["a", "b", "a", "b"],
    "processor-in-pandas": ["a", "b", "a", "b"],
}
EXPECTED: dict[str, list[str]] = {
    "typed": ["a", "c"],  # the others are rejected
    "self-union": ["a", "a again", "b", "b again", "c", "c again", "d", "d again"],
    "self-join": ["a", "b", "c", "d"],
    "join-of-two-queues": ["a", "b", "c", "d"],
    # the window of e is open; late came when Spark knew for a batch that its window had closed
    "watermark": ["a", "b", "c", "d"],
    "deduplicated": ["a", "b", "c"],
    "state-in-pandas": ["a1", "a2", "b1", "b2"],
    "processor-in-pandas": ["a1", "a2", "b1", "b2"],
}
# those that only the soak has (test_user_code.py)
MORE: dict[str, list[str]] = {
    "processor-of-rows": ["a", "b", "a", "b"],
    "deduplicated-in-watermark": ["a@10", "b@11", "a@12", "c@100"],
}
EXPECTED |= {"processor-of-rows": ["a1", "a2", "b1", "b2"], "deduplicated-in-watermark": ["a", "b", "c"]}

_STORE = "spark.sql.streaming.stateStore.providerClass"


def shaped(shape: str, reader: DataStreamReader, queue: str) -> DataFrame:
    if shape == "typed":
        return reader.load()
    # Spark refuses a processor with state at the start of its query where the store is another one
    if shape.startswith("processor"):
        reader._spark.conf.set(
            _STORE, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        )
    else:
        reader._spark.conf.unset(_STORE)
    rows = reader.load().select(F.col("body").cast("string").alias("body"), "offset", "partition")
    match shape:
        case "self-union":
            return rows.select("body").union(rows.selectExpr("concat(body, ' again')"))
        case "self-join":
            other = rows.select(F.col("offset").alias("o"), F.col("partition").alias("p"))
            return rows.join(other, F.expr("offset = o AND partition = p")).select("body")
        case "join-of-two-queues":
            others = reader.option("queue", f"{queue}.{OTHER}").load()
            return rows.join(
                others.select(F.col("body").cast("string").alias("other")), F.expr("body = other")
            ).select("body")
        case "watermark":
            return timed(rows).groupBy(F.window("at", "10 seconds"), "body").count().select("body")
        case "deduplicated-in-watermark":
            return timed(rows).dropDuplicatesWithinWatermark(["body"]).select("body")
        case "deduplicated":
            return rows.select("body").dropDuplicates()
        case "state-in-pandas":
            return rows.groupBy("body").applyInPandasWithState(
                counted, "body string", "count int", "append", GroupStateTimeout.NoTimeout
            )
        case "processor-in-pandas":
            return rows.groupBy("body").transformWithStateInPandas(
                Counter(), outputStructType="body string", outputMode="Append", timeMode="None"
            )
        case "processor-of-rows":
            return rows.groupBy("body").transformWithState(
                RowCounter(), outputStructType="body string", outputMode="Append", timeMode="None"
            )
    raise AssertionError(shape)


def timed(rows: DataFrame) -> DataFrame:
    """Bodies with the time behind their @."""
    at = F.timestamp_seconds(F.split("body", "@")[1].cast("int"))
    return rows.select(F.split("body", "@")[0].alias("body"), at.alias("at")).withWatermark(
        "at", "10 seconds"
    )


def counted(
    key: tuple[Any, ...], batches: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    before = state.get[0] if state.exists else 0
    count = before + sum(len(batch) for batch in batches)
    state.update((count,))
    yield pd.DataFrame({"body": [f"{key[0]}{number}" for number in range(before + 1, count + 1)]})


class Counter(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count int")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        found = self._count.get()
        before = found[0] if found is not None else 0
        count = before + sum(len(batch) for batch in rows)
        self._count.update((count,))
        yield pd.DataFrame({"body": [f"{key[0]}{number}" for number in range(before + 1, count + 1)]})

    def close(self) -> None:
        pass


class RowCounter(Counter):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        found = self._count.get()
        before = found[0] if found is not None else 0
        count = before + sum(1 for _ in rows)
        self._count.update((count,))
        yield from (Row(body=f"{key[0]}{number}") for number in range(before + 1, count + 1))
