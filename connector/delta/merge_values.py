"""Which given rows of a merge the table would refuse: NOT NULL, CHECK, lengths, widths, generated columns.

A row is asked if a clause could write it, as far as its own values tell: a condition that names the row of
the table may be true or not. Of a value that follows from the row of the table, nothing is known.

Not here: whether the merge itself is possible (``changes.py``).
Invariant: a row that no clause can write is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from connector.fit import Fit, Known, fit, quoted, raising
from connector.merge import SOURCE, TARGET, Merge
from connector.staging import no_rows
from connector.table import Table
from connector.when import Clause, enclosed

_ROW, _REACHED = "__txmq_row_", "__txmq_reached"
_NEVER = "7046029254386353131"  # a comparison with it makes Spark evaluate a value
_NESTED = (StructType, ArrayType, MapType)

Typed = Callable[[str], DataType | None]


@dataclass(frozen=True)
class Written:
    """What one clause writes. ``reached``: SQL over ``s``, whether it may write a row; ``values``: SQL over
    ``s`` by column of the table, as far as it is known; ``fit``: how the table takes them.
    """

    reached: str
    values: Mapping[str, str]
    fit: Fit


def written(spark: SparkSession, table: Table, schema: StructType, merge: Merge) -> tuple[Written, ...]:
    """What the clauses of a merge of rows of ``schema`` write, if the table may refuse it. Raises OptionError
    if it refuses every row.
    """
    if TARGET in (name.lower() for name in schema.names):
        return ()  # t.x is then a field of the row, or a column of the table
    rows = no_rows(spark, schema).alias(SOURCE)

    def typed(sql: str) -> DataType | None:
        """The type of an expression over ``s`` alone."""
        try:
            return rows.select(expr(sql)).schema[0].dataType
        except PySparkException:
            return None

    return tuple(_written(table, schema, merge, typed))


def _written(table: Table, schema: StructType, merge: Merge, typed: Typed) -> Iterator[Written]:
    known = Known.of(table.metadata)
    passed: dict[str, list[str]] = {}  # rows -> that no clause before takes the row
    for clause in merge.clauses:
        before = passed.setdefault(clause.rows, [])
        own = clause.condition if clause.condition and typed(clause.condition) is not None else ""
        if clause.action != "delete" and clause.rows != "NOT MATCHED BY SOURCE":
            reached = " AND ".join([*before, *([_true(own)] if own else [])]) or "true"
            values = dict(_values(clause, known, schema, typed))
            found = _fit(table, clause, known, values)
            if found.conditions:
                yield Written(reached, {name: sql for name, (sql, _) in values.items()}, found)
        if not clause.condition:
            before.append("false")
        elif own:
            before.append(f"NOT {_true(own)}")


def _true(condition: str) -> str:
    return f"coalesce({enclosed(condition)}, false)"


def _values(
    clause: Clause, known: Known, schema: StructType, typed: Typed
) -> Iterator[tuple[str, tuple[str, DataType]]]:
    """The columns of the table whose values are known from the row, with SQL and type."""
    held = {column.name.lower(): column for column in known.schema}
    given = clause.values
    if given is None:
        given = {name: f"{SOURCE}.{quoted(name)}" for name in schema.names}
    for name, sql in given.items():
        column = held.get(name.strip("`").lower())
        kind = typed(sql)
        if column is None or kind is None:
            continue
        if kind != column.dataType and not {kind.typeName(), column.dataType.typeName()} <= _INTEGERS:
            if isinstance(kind, _NESTED) or isinstance(column.dataType, _NESTED):
                continue
            sql, kind = f"CAST({enclosed(sql)} AS {column.dataType.simpleString()})", column.dataType
        yield column.name, (sql, kind)


_INTEGERS = {"byte", "short", "integer", "long", "tinyint", "smallint", "int", "bigint"}


def _fit(table: Table, clause: Clause, known: Known, values: Mapping[str, tuple[str, DataType]]) -> Fit:
    whole = len(values) == len(known.schema) or (
        clause.action == "insert" and (clause.values is None or len(values) == len(clause.values))
    )
    if not whole:  # CHECKs and generated columns need the others
        columns = [
            StructField(
                column.name,
                column.dataType,
                column.nullable,
                {key: value for key, value in column.metadata.items() if "generation" not in key},
            )
            for column in known.schema
            if column.name in values
        ]
        known = Known(StructType(columns))
    schema = StructType([StructField(name, kind) for name, (_, kind) in values.items()])
    found = fit(table.name, schema, known, (), merges=True)
    narrow = tuple(
        (f"xxhash64({quoted(name)}) <> {_NEVER}", f"table {table.name!r}: column {name!r} cannot be written")
        for name, sql in found.columns.items()
        if "raise_error" in sql
    )
    return Fit(found.columns, found.beside, (*narrow, *found.conditions))


def asserted(rows: DataFrame, clauses: tuple[Written, ...]) -> DataFrame:
    """The rows. Their execution fails for a row that the table would refuse."""
    for clause in clauses:
        names = rows.columns
        kept = {f"{_ROW}{number}": name for number, name in enumerate(names)}
        values = [
            expr(f"CASE WHEN {clause.reached} THEN {enclosed(sql)} END").alias(name)
            for name, sql in clause.values.items()
        ]
        packed = rows.alias(SOURCE).select(
            *(expr(f"{SOURCE}.{quoted(name)}").alias(place) for place, name in kept.items()),
            expr(clause.reached).alias(_REACHED),
            *values,
        )
        found = clause.fit
        fitted = packed.select(
            *kept, _REACHED, *(expr(sql).alias(name) for name, sql in found.columns.items())
        )
        beside = fitted.select("*", *(expr(sql).alias(name) for name, sql in found.beside.items()))
        first, *others = kept
        cases = " ".join(
            f"WHEN {_REACHED} AND NOT coalesce(({sql}), false) THEN {raising(told)}"
            for sql, told in found.conditions
        )
        rows = beside.select(
            expr(f"CASE {cases} ELSE {first} END").alias(kept[first]),
            *(expr(place).alias(kept[place]) for place in others),
        )
    return rows
