"""Rows of wider or narrower types than their table, which has ``delta.enableTypeWidening``, with and without schema
evolution, in every operation: rows and schema are those of plain Delta, with the differences that docs/foreach_batch.md names.

Not here: rows of the types of the table (``test_values.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker_core.core.errors import OptionError
from connector.batch.foreach_batch import BatchTransaction
from tests.spark.test_tables_changed import Driver
from tests.spark.test_values import Operation, append, merge_all, merge_named

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("planned_once")]


class Pair(NamedTuple):
    """Columns of a table, and the rows that are written: a value of each column in its type there."""

    held: dict[str, str]
    given: dict[str, str]


WIDER = Pair(
    {"a": "TINYINT", "b": "INT", "c": "FLOAT", "d": "DECIMAL(6,2)", "e": "STRUCT<x: INT>", "f": "ARRAY<INT>"},
    {
        "a": "CAST(7 AS INT)",
        "b": "CAST(8 AS BIGINT)",
        "c": "CAST(0.5 AS DOUBLE)",
        "d": "CAST(1.25 AS DECIMAL(12,2))",
        "e": "named_struct('x', CAST(9 AS BIGINT))",
        "f": "array(CAST(10 AS BIGINT))",
    },
)
PAIRS = {
    "wider": WIDER,
    "integers": Pair({"a": "TINYINT", "b": "INT"}, {name: WIDER.given[name] for name in "ab"}),
    "too large": Pair({"b": "INT"}, {"b": "CAST(1099511627776 AS BIGINT)"}),
    "narrow": Pair({"a": "TINYINT", "b": "INT"}, {name: WIDER.given[name] for name in "ab"}),
    "narrow and too large": Pair({"b": "INT"}, {"b": "CAST(1099511627776 AS BIGINT)"}),
    "narrower": Pair({"a": "BIGINT", "b": "DOUBLE"}, {"a": "CAST(7 AS INT)", "b": "CAST(0.5 AS DOUBLE)"}),
    "another family": Pair({"a": "INT"}, {"a": "CAST(7 AS DOUBLE)"}),
    "text": Pair({"a": "INT"}, {"a": "'7'"}),
}
FIXED = "narrow", "narrow and too large"  # pairs without schema evolution, and all of ``merge named``
WHERE = "id >= 0"


def overwrite(**options: Any) -> Operation:
    def plain(rows: DataFrame, table: str) -> None:
        writer = rows.write.format("delta").mode("overwrite").option("replaceWhere", WHERE)
        writer.options(**options).save(table)

    return Operation("", lambda tx, rows, table: tx.overwrite(rows, table, WHERE, **options), plain)


OPERATIONS: dict[str, Callable[[bool, Pair], Operation]] = {
    "append": lambda evolves, _: append(**({"mergeSchema": True} if evolves else {})),
    "merge all": lambda evolves, _: merge_all(schema=evolves),
    "merge named": lambda _, pair: merge_named(list(pair.held)),
    "overwrite": lambda evolves, _: overwrite(**({"mergeSchema": True} if evolves else {})),
}
# where plain Delta may take what txmq asks to be cast in the query
STRICTER = {(kind, pair) for kind in ("append", "overwrite") for pair in ("wider", "another family", "text")}
# where plain Delta refuses, and txmq casts integers to the width of the table
CASTS = {(kind, pair) for kind in ("append", "overwrite") for pair in ("narrow", "narrower")}
# each operation, each way to differ once, with and without schema evolution; ``make soak`` has the product
FIRST = {
    "append": ("wider", "narrow"),
    "merge all": ("too large",),
    "merge named": ("narrow and too large",),
    "overwrite": ("narrower", "text"),
}


def attempted(act: Callable[[], object]) -> str:
    """The error of an operation, "" if it has none."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_rows_of_wider_types_make_of_a_table_what_plain_delta_makes_of_it(
    rig: Any, tmp_path: Path, every: bool
) -> None:
    """All cells in one micro-batch: what is refused is refused before the decision."""
    spark: SparkSession = rig.spark
    cells = [
        cell
        for cell in itertools.product(OPERATIONS, (True, False), PAIRS)
        if cell[1] != (cell[0] == "merge named" or cell[2] in FIXED) and (every or cell[2] in FIRST[cell[0]])
    ]
    frames = {name: _rows(spark, pair) for name, pair in PAIRS.items()}
    places = {cell: str(tmp_path / f"{number}") for number, cell in enumerate(cells)}
    for (_, _, name), place in places.items():
        for table in (place, f"{place}-plain"):
            _create(spark, table, PAIRS[name])
    refused: dict[tuple[str, bool, str], str] = {}

    def fn(_batch: DataFrame, tx: BatchTransaction) -> None:
        for cell, place in places.items():
            operation = OPERATIONS[cell[0]](cell[1], PAIRS[cell[2]])
            refused[cell] = attempted(lambda: operation.ours(tx, frames[cell[2]], place))  # noqa: B023

    error = Driver(rig, "wide", fn).batch(0, spark.range(1).toDF("n"))
    assert error is None, error
    wrong = {}
    for cell, place in places.items():
        operation = OPERATIONS[cell[0]](cell[1], PAIRS[cell[2]])
        told = attempted(lambda: operation.plain(frames[cell[2]], f"{place}-plain"))  # noqa: B023
        ours, plain = (_look(spark, table) for table in (place, f"{place}-plain"))
        if refused[cell]:
            assert OptionError.code in refused[cell], refused[cell]
        kind = cell[0], cell[2]
        if refused[cell] and not told and kind in STRICTER:
            continue
        if told and not refused[cell] and kind in CASTS:
            assert "_MISMATCH" in told or "FAILED_TO_MERGE" in told, told
            assert (ours[0], len(ours[1])) == (plain[0], 2), cell
            continue
        if bool(refused[cell]) != bool(told) or ours != plain:
            wrong[cell] = refused[cell][:150], told[:150], ours, plain
    assert wrong == {}


def _create(spark: SparkSession, table: str, pair: Pair) -> None:
    columns = ", ".join(f"{name} {kind}" for name, kind in pair.held.items())
    properties = "TBLPROPERTIES ('delta.enableTypeWidening' = 'true')"
    spark.sql(f"CREATE TABLE delta.`{table}` (id INT, {columns}) USING delta {properties}")


def _rows(spark: SparkSession, pair: Pair) -> DataFrame:
    return (
        spark.range(2)
        .coalesce(1)
        .selectExpr("CAST(id AS INT) AS id", *(f"{sql} AS {name}" for name, sql in pair.given.items()))
    )


def _look(spark: SparkSession, table: str) -> tuple[str, list[str]]:
    found = spark.read.format("delta").load(table)
    return found.schema.simpleString(), sorted(map(str, found.collect()))
