"""Rows that must differ in some columns. Two given rows for one row of the table make a merge ambiguous.

Not here: when this is asked (``checks.py``).
Invariant: the rows that are staged are those that were compared: both happen in one execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Window
from pyspark.sql.functions import col, count, expr, lit

from broker_core.core.errors import OptionError
from connector.errors import first_line, unlogged
from connector.sql import literal, quoted
from connector.tables.change import SOURCE
from connector.tables.table import is_connect

_COUNT = "__txmq_rows"


def unique(
    rows: DataFrame, keys: Sequence[str], table: str, compared: Mapping[str, str] | None = None
) -> DataFrame:
    """The rows. Their execution fails if two of them have the same values in ``keys``; nulls are equal.
    ``compared``: SQL over ``s`` that is compared in the place of a key, by its name in lower case.
    Raises OptionError unless ``keys`` are columns that can be compared.

    The rows are shuffled by ``keys``, unless they are already.
    """
    if not keys and not isinstance(keys, str):
        return rows
    _check(keys, rows.columns, table)
    try:
        with unlogged():
            return _asserted(rows.alias(SOURCE), keys, table, compared or {})
    except PySparkException as error:
        raise OptionError(
            f"table {table!r}: keys={list(keys)!r} cannot be compared: {first_line(error)[:500]}"
        ) from error


def _asserted(rows: DataFrame, keys: Sequence[str], table: str, compared: Mapping[str, str]) -> DataFrame:
    columns = [expr(compared.get(key.lower(), quoted(key))) for key in keys]
    spark = rows.sparkSession
    if not is_connect(spark) and str(spark.conf.get("spark.sql.adaptive.enabled")).lower() != "true":
        # otherwise Spark makes a task for each of the shuffle partitions, by default 200
        rows = rows.repartition(spark.sparkContext.defaultParallelism, *columns)
    counted = rows.withColumn(_COUNT, count(lit(1)).over(Window.partitionBy(*columns)))
    error = OptionError(f"table {table!r}: several rows of the batch have the same {', '.join(keys)}")
    advice = "; keep one row for each, for example the last one"
    struct = f"struct({', '.join(map(quoted, keys))})"
    text = f"concat({literal(str(error) + ': ')}, to_json({struct}), {literal(advice)})"
    first, *others = (name for name in counted.columns if name != _COUNT)
    asserted = f"CASE WHEN {_COUNT} > 1 THEN raise_error({text}) ELSE {quoted(first)} END"
    return counted.select(expr(asserted).alias(first), *(col(quoted(name)) for name in others))


def _check(keys: Sequence[str], columns: Sequence[str], table: str) -> None:
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise OptionError(f"table {table!r}: keys={keys!r}", "give a list of columns of the rows")
    known = [column.lower() for column in columns]
    missing = [key for key in keys if key.lower() not in known]
    if missing:
        raise OptionError(
            f"table {table!r}: keys names {', '.join(missing)}, which the rows do not have",
            f"use columns of {', '.join(columns)}",
        )
