"""Which frames of Spark Connect are the whole batch, by what their client asks for. No server is needed to know."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.connect.dataframe import DataFrame
from pyspark.sql.connect.functions import lit
from pyspark.sql.connect.plan import CachedRemoteRelation

from connector.reject.plan import executed_whole


def batch(number: str = "one") -> Any:
    """As the worker of Spark gives it to a function of foreachBatch."""
    ended: Any = SimpleNamespace(
        session_id="", client=SimpleNamespace(is_closed=True)
    )  # a session that asks no server
    return DataFrame(CachedRemoteRelation(number, ended), ended)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda rows: rows,
        lambda rows: rows.select("a", lit(1).alias("b")),
        lambda rows: rows.selectExpr("CAST(body AS STRING) AS body").select("body"),
        lambda rows: rows.withColumn("b", lit(1)).withColumnRenamed("b", "c").drop("a"),
        lambda rows: rows.toDF("c0", "c1"),
    ],
)
def test_columns_of_a_batch_have_all_its_rows(chosen: Callable[[Any], Any]) -> None:
    rows = batch()
    assert executed_whole(chosen(rows), rows, stages=False)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda rows: rows.where("a > 1"),
        lambda rows: rows.limit(1).select("a"),
        lambda rows: rows.select("a").sample(0.5),
        lambda rows: rows.offset(1),
        lambda rows: rows.union(rows),
        lambda rows: rows.crossJoin(batch("another")),
        lambda rows: rows.groupBy().count(),
        lambda rows: batch("another").select("a"),
    ],
)
def test_what_may_leave_rows_out_is_not_the_whole_batch(chosen: Callable[[Any], Any]) -> None:
    rows = batch()
    assert not executed_whole(chosen(rows), rows, stages=False)
