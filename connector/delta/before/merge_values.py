"""Which given rows of a merge the table would refuse, or Delta could not evaluate.

NOT NULL, CHECK, lengths, widths, generated columns; casts to the types of the table; ``on``, conditions and
values that fail. A row is asked if a clause could write it, as far as its own values decide that: a condition
that names the row of the table may be true or not. Of a value that follows from the row of the table, only
the parts over the given row are known.

Not here: whether the merge itself is possible (``check_change.py``).
Invariant: a row that no clause can write is checked only by ``on`` and the conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import DataType, LongType, StructField, StructType

from broker_core.core.errors import OptionError
from connector.delta.before.cast import castable, evaluated, value
from connector.delta.before.fit import Fit, Shape, asserting, fit, not_null_within
from connector.delta.before.source_parts import Order, RowCheck, SourceParts
from connector.errors import without_logs
from connector.sql import quoted, type_in_sql
from connector.stream.staging import no_rows
from connector.tables.change import SOURCE, TARGET, Merge
from connector.tables.table import Table, name_parts
from connector.tables.when import Clause, enclosed

_INNER = "spark.databricks.delta.merge.optimizeMatchedOnlyMerge.enabled"
_ROW, _REACHED, _ASKED = "__txmq_row_", "__txmq_reached", "__txmq_asked_"

Typed = Callable[[str], DataType | None]


@dataclass(frozen=True)
class Written:
    """What one clause writes. ``reached``: SQL over ``s``, whether it may write a row; ``checks``: what must
    be true of the row then; ``values``: SQL over ``s`` by column of the table, as far as known; ``fit``: how
    the table takes them.
    """

    reached: str
    checks: tuple[RowCheck, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    fit: Fit = field(default_factory=Fit)


@dataclass(frozen=True)
class MergeValues:
    """What a merge makes of its rows. ``compared``: what ``on`` compares in the place of a column of them."""

    written: tuple[Written, ...] = ()
    compared: Mapping[str, str] = field(default_factory=dict)


def merge_values(
    spark: SparkSession, table: Table, schema: StructType, merge: Merge, wide: StructType | None = None
) -> MergeValues:
    """What a merge makes of rows of ``schema``, if the table may refuse it. ``wide``: the schema that it
    gives to the table. Raises OptionError if it refuses every row.
    """
    if TARGET in (name.lower() for name in schema.names):
        return MergeValues()  # t.x is then a field of the row, or a column of the table
    rows = no_rows(spark, schema).alias(SOURCE)

    def typed(sql: str) -> DataType | None:
        """The type of an expression over ``s`` alone."""
        try:
            with without_logs():
                return rows.select(expr(sql)).schema[0].dataType
        except PySparkException:
            return None

    target = Shape.of(table.metadata, table.location).widened(wide)
    parts = SourceParts(spark, table.name, target.schema, schema)
    # whether Delta joins so that rows without a match are kept
    keeps = any(clause.rows != "MATCHED" for clause in merge.clauses)
    keeps = keeps or str(spark.conf.get(_INNER, "true")).lower() != "true"
    on = parts.of("on", merge.on, Order.JOINED if keeps else Order.FILTERED)
    first = (Written("true", on.checks),) if on.checks else ()
    casts = _Casts(table.name, target.schema, _cast_of(spark), typed, parts)
    return MergeValues((*first, *_written(table, target, schema, merge, casts)), on.compared)


def _written(
    table: Table, target: Shape, schema: StructType, merge: Merge, casts: _Casts
) -> Iterator[Written]:
    passed: dict[str, list[str]] = {}  # rows -> that no clause before takes the row
    for clause in merge.clauses:
        if clause.rows == "NOT MATCHED BY SOURCE":
            continue
        before = passed.setdefault(clause.rows, [])
        own = clause.condition if clause.condition and casts.typed(clause.condition) is not None else ""
        checks = casts.parts.of("a condition", clause.condition).checks
        if checks:
            yield Written(" AND ".join(before) or "true", checks)
        if clause.action != "delete":
            reached = " AND ".join([*before, *([_true(own)] if own else [])]) or "true"
            values, checks = casts.of(clause, schema)
            found = _fit(table, clause, target, values)
            if found.conditions or checks:
                yield Written(reached, checks, {name: sql for name, (sql, _) in values.items()}, found)
        if not clause.condition:
            before.append("false")
        elif own:
            before.append(f"NOT {_true(own)}")


def _true(condition: str) -> str:
    return f"coalesce({enclosed(condition)}, false)"


_FOLLOWS = "spark.databricks.delta.updateAndMergeCastingFollowsAnsiEnabledFlag"


def _cast_of(spark: SparkSession) -> str:
    """The function that casts as Delta will: ``try_cast`` where it fails for a value that does not fit."""
    ansi = str(spark.conf.get("spark.sql.ansi.enabled", "true")).lower() == "true"
    follows = str(spark.conf.get(_FOLLOWS, "false")).lower() == "true"
    policy = str(spark.conf.get("spark.sql.storeAssignmentPolicy", "ANSI")).upper()
    strict = ansi if follows else policy != "LEGACY"
    # under ANSI mode, no text is a cast that does not fail: then only what both casts take is taken
    return "try_cast" if strict or ansi else "CAST"


@dataclass(frozen=True)
class _Casts:
    """How the values of a clause are cast to the columns of a table."""

    table: str
    there: StructType
    cast: str
    typed: Typed
    parts: SourceParts

    def of(
        self, clause: Clause, schema: StructType
    ) -> tuple[dict[str, tuple[str, DataType]], tuple[RowCheck, ...]]:
        """The columns whose values are known from the row, with SQL and type; what is asked of the row."""
        plain = clause.values is None
        assigned = clause.values or {name: f"{SOURCE}.{quoted(name)}" for name in schema.names}
        values: dict[str, tuple[str, DataType]] = {}
        checks: list[RowCheck] = []
        for name, sql in assigned.items():
            if not plain:
                checks += self.parts.of(f"the value of column {name!r}", sql).checks
            try:
                path = [name] if plain else name_parts(name)
            except OptionError:
                path = [name.strip("`")]  # a name with odd characters
            place, kind = _column(self.there, path), self.typed(sql)
            if place is None or kind is None:
                continue
            nested, column = place
            sql = sql if plain else enclosed(sql)
            if {kind.typeName(), column.dataType.typeName()} <= _INTEGERS and not nested:
                values[column.name] = sql, kind  # the width is a condition of ``fit``
                continue
            text = f"table {self.table!r}: column {name!r} has a value that "
            want = column.dataType
            fits = castable(sql, kind, want) if self.cast == "try_cast" else ""
            if fits and self.typed(fits) is None:
                fits = evaluated(f"CAST({sql} AS {type_in_sql(want)})", want)
            if fits:
                text += f"cannot be cast from {kind.simpleString()} to {want.simpleString()}"
                checks.append((fits, f"{text}; cast it in the query, for example with try_cast"))
            cast = value(sql, kind, want, self.cast)
            if not nested:
                values[column.name] = cast, want
                continue
            conditions = [] if column.nullable else [f"{cast} IS NOT NULL"]
            conditions += not_null_within(cast, want, 0)
            null = f"table {self.table!r}: column {name!r} contains a null in a NOT NULL field"
            checks += [(sql, null) for sql in conditions]
        return values, tuple(checks)


def _column(there: StructType, names: list[str]) -> tuple[bool, StructField] | None:
    """(whether it is within another one, the column) of a name or a path."""
    found = StructField("", there)
    for name in names:
        fields = found.dataType if isinstance(found.dataType, StructType) else StructType()
        same = [each for each in fields if each.name.lower() == name.lower()]
        if not same:
            return None
        found = same[0]
    return len(names) > 1, found


_INTEGERS = {"byte", "short", "integer", "long", "tinyint", "smallint", "int", "bigint"}


def _fit(table: Table, clause: Clause, target: Shape, values: Mapping[str, tuple[str, DataType]]) -> Fit:
    whole = len(values) == len(target.schema) or (
        clause.action == "insert" and (clause.values is None or len(values) == len(clause.values))
    )
    if not whole:  # CHECKs and generated columns need the others
        columns = StructType()
        for column in target.schema:
            if column.name in values:
                metadata = {key: value for key, value in column.metadata.items() if "generation" not in key}
                columns.add(column.name, column.dataType, column.nullable, metadata)
        target = Shape(columns, directories=target.directories)
    schema = StructType([StructField(name, kind) for name, (_, kind) in values.items()])
    found = fit(table.name, schema, target, (), merges=True)
    narrow = tuple(
        (evaluated(quoted(name), LongType()), f"table {table.name!r}: column {name!r} cannot be written")
        for name, sql in found.columns.items()
        if "raise_error" in sql
    )
    return Fit(found.columns, found.beside, (*narrow, *found.conditions))


def asserted(rows: DataFrame, clauses: tuple[Written, ...]) -> DataFrame:
    """The rows, whose execution fails for one that the table would refuse."""
    for clause in clauses:
        names = rows.columns
        places = {f"{_ROW}{number}": name for number, name in enumerate(names)}
        values = [
            expr(f"CASE WHEN {clause.reached} THEN {enclosed(sql)} END").alias(name)
            for name, sql in clause.values.items()
        ]
        asks = {
            f"{_ASKED}{number}": expr(f"CASE WHEN {clause.reached} THEN {enclosed(sql)} END")
            for number, (sql, _) in enumerate(clause.checks)
        }
        packed = rows.alias(SOURCE).select(
            *(expr(f"{SOURCE}.{quoted(name)}").alias(place) for place, name in places.items()),
            expr(clause.reached).alias(_REACHED),
            *(check.alias(name) for name, check in asks.items()),
            *values,
        )
        found = clause.fit
        fitted = packed.select(
            *places, _REACHED, *asks, *(expr(sql).alias(name) for name, sql in found.columns.items())
        )
        beside = fitted.select("*", *(expr(sql).alias(name) for name, sql in found.beside.items()))
        first, *others = places
        texts = [(name, text) for name, (_, text) in zip(asks, clause.checks, strict=True)]
        conditions = [(f"NOT {_REACHED} OR ({sql})", text) for sql, text in (*texts, *found.conditions)]
        rows = beside.select(
            expr(asserting(first, conditions)).alias(places[first]),
            *(expr(place).alias(places[place]) for place in others),
        )
    return rows
