"""Checks whether rows of a schema can be appended to a Delta table, and the conditions on their values.

Not here: sessions, and the append (delta.py). No I/O: a :class:`Shape` describes the table.

Invariant: Delta appends all rows that pass these checks and meet the conditions. Other rows are refused
before the decision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql import types as T

from broker_core.core.errors import OptionError
from connector.sql import arrays, has, inner_types, literal, quoted, type_in_sql

_LIMITS: dict[type[T.DataType], int] = {T.ByteType: 7, T.ShortType: 15, T.IntegerType: 31, T.LongType: 63}
_CHAR = "__CHAR_VARCHAR_TYPE_STRING"
_GENERATED = "delta.generationExpression"
_IDENTITY_EXPLICIT = "delta.identity.allowExplicitInsert"
_IDENTITY = "delta.identity.start"
_DEFAULT = "CURRENT_DEFAULT"
_INVARIANT = "delta.invariants"
_CHECK = "delta.constraints."
_WIDENING = "delta.enableTypeWidening"
# partitions are directories unless one of these says otherwise
_DIRECTORIES = {"delta.columnMapping.mode": "none", "delta.randomizeFilePrefixes": "false"}
_LIMITED, _LONGEST = ("file:", "hdfs:"), 255  # bytes of a name
_ESCAPED = r"""[\x01-\x1f"#%'*/:=?\\\x7f{\[\]^]"""


@dataclass(frozen=True)
class Shape:
    """The properties of an existing table that matter for an append. ``directories``: those of the columns
    whose values are names of directories on a file system that limits them.
    """

    schema: T.StructType
    partition_columns: tuple[str, ...] = ()
    configuration: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()

    @classmethod
    def of(cls, metadata: str, location: str = "") -> Shape:
        """From the JSON of the log's metadata action, and where the table is."""
        text = json.loads(metadata)["metaData"]
        schema = T.StructType.fromJson(json.loads(text["schemaString"]))
        partitions, configuration = tuple(text.get("partitionColumns", ())), text.get("configuration", {})
        elsewhere = [configuration.get(name, other) != other for name, other in _DIRECTORIES.items()]
        limited = location.startswith(_LIMITED) and not any(elsewhere)
        return cls(schema, partitions, dict(configuration), partitions if limited else ())

    def widened(self, schema: T.StructType | None) -> Shape:
        """The same table with the types of ``schema``, which it has after a write that may widen columns."""
        kinds = {column.name.lower(): column.dataType for column in schema or ()}
        columns = [
            T.StructField(
                each.name, kinds.get(each.name.lower(), each.dataType), each.nullable, each.metadata
            )
            for each in self.schema
        ]
        return replace(self, schema=T.StructType(columns))

    @property
    def widens(self) -> bool:
        """Whether a write that may change the schema may widen a column."""
        return self.configuration.get(_WIDENING, "false").lower() == "true"


@dataclass(frozen=True)
class Fit:
    """How rows are converted to rows of the table.

    ``columns``: SQL expressions over the given rows, by name. ``beside``: the other columns of the table,
    only for the conditions. ``conditions``: (SQL that must be true, error text).
    """

    columns: dict[str, str] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    conditions: tuple[tuple[str, str], ...] = ()

    @property
    def plain(self) -> bool:
        return not self.conditions and all(
            expression == quoted(name) for name, expression in self.columns.items()
        )


def check_columns(table: str, schema: T.StructType, partition_by: Sequence[str]) -> None:
    """Checks for any table. Raises OptionError."""
    if not schema.fields:
        raise OptionError(f"table {table!r}: the DataFrame has no columns", "select its columns")
    for path, fields in _structs(schema, ""):
        names = [column.name.lower() for column in fields]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise OptionError(
                f"table {table!r}: column {path + doubled[0]!r} occurs twice", "rename one of them"
            )
    names = [name.lower() for name in schema.names]
    for name in partition_by:
        if name.lower() not in names:
            raise OptionError(
                f"table {table!r}: partitionBy names column {name!r}, which the DataFrame does not have",
                f"use columns of {', '.join(schema.names)}",
            )


def check_void(table: str, schema: T.StructType, target: T.StructType) -> None:
    """Raises OptionError for a column without a type, unless the table has one for it."""
    types = {column.name.lower(): column for column in target}
    for column in schema:
        there = types.get(column.name.lower())
        typed = there is not None and not has(there.dataType, T.NullType)
        if has(column.dataType, T.NullType) and not (typed and isinstance(column.dataType, T.NullType)):
            raise OptionError(
                f"table {table!r}: column {column.name!r} has type {column.dataType.simpleString()}, "
                "and void cannot be written",
                "cast it",
            )


def fit(table: str, schema: T.StructType, target: Shape, partition_by: Sequence[str], *, merges: bool) -> Fit:
    """How to convert rows of ``schema`` to rows of the table. Raises OptionError if that is impossible."""
    of_table = {column.name.lower(): column for column in target.schema}
    partitions = [name.lower() for name in target.partition_columns]
    if partition_by and [name.lower() for name in partition_by] != partitions:
        raise OptionError(
            f"table {table!r}: partitionBy is {', '.join(partition_by)}, but the table is partitioned by "
            f"{', '.join(target.partition_columns) or 'nothing'}",
            "leave partitionBy out",
        )
    columns: dict[str, str] = {}
    conditions: list[tuple[str, str]] = []
    for column in schema:
        there = of_table.get(column.name.lower())
        if there is None:
            if not merges:
                raise OptionError(
                    f"table {table!r}: the table has no column {column.name!r}",
                    "drop it, or set mergeSchema=True",
                )
            columns[column.name] = quoted(column.name)
            continue
        if _IDENTITY in there.metadata and not there.metadata.get(_IDENTITY_EXPLICIT):
            raise OptionError(
                f"table {table!r}: column {column.name!r} is GENERATED ALWAYS AS IDENTITY", "leave it out"
            )
        columns[there.name] = _value(table, column, there, merges=merges)
        conditions += _conditions(table, there)
        if there.name in target.directories and isinstance(there.dataType, T.StringType):
            conditions.append(_directory(table, there.name))
    beside = _beside(table, target.schema, {name.lower() for name in columns})
    for name, expression in beside.items():
        if _GENERATED in of_table[name.lower()].metadata:
            # forces the evaluation, which may fail; the optimizer cannot remove it
            conditions.append(
                (f"xxhash64({expression}) <> 7046029254386353131", f"column {name} cannot be generated")
            )
    for name, expression in sorted(target.configuration.items()):
        if name.startswith(_CHECK):
            text = f"table {table!r}: a row violates CHECK constraint {name[len(_CHECK) :]} ({expression})"
            conditions.append((expression, text))
    return Fit(columns, beside, tuple(conditions))


def fit_new(table: str, schema: T.StructType, location: str, partition_by: Sequence[str]) -> Fit | None:
    """The conditions on rows of a table that does not exist yet, if any."""
    partitions = {name.lower() for name in partition_by if location.startswith(_LIMITED)}
    conditions = tuple(
        _directory(table, column.name)
        for column in schema
        if column.name.lower() in partitions and isinstance(column.dataType, T.StringType)
    )
    return Fit({name: quoted(name) for name in schema.names}, {}, conditions) if conditions else None


def _value(table: str, source: T.StructField, target: T.StructField, *, merges: bool) -> str:
    name = quoted(source.name)
    have, want = source.dataType, target.dataType
    if isinstance(have, T.NullType):
        return f"CAST({name} AS {type_in_sql(want)})"
    bits, limit = _LIMITS.get(type(have)), _LIMITS.get(type(want))
    if bits is not None and limit is not None and bits != limit:
        kind = want.simpleString()
        cast = f"CAST({name} AS {kind})"
        if bits < limit:
            return cast
        text = f"table {table!r}: column {source.name!r} has a value that does not fit into {kind}"
        text += "; cast it, or widen the column"
        low, high = -(1 << limit), (1 << limit) - 1
        fits = f"{name} IS NULL OR {name} BETWEEN {low}L AND {high}L"
        return f"CASE WHEN {fits} THEN {cast} ELSE {raising(text)} END"
    if not _same(have, want, merges=merges):
        raise OptionError(
            f"table {table!r}: column {source.name!r} is {have.simpleString()}, not {want.simpleString()}",
            "cast it to the type of the table",
        )
    return name


def _same(source: T.DataType, target: T.DataType, *, merges: bool) -> bool:
    """Whether a value needs no conversion. Nulls are checked per value; a nested field may be missing."""
    if isinstance(source, T.StructType) and isinstance(target, T.StructType):
        fields = {column.name.lower(): column.dataType for column in target}
        return all(
            merges
            if (kind := fields.get(column.name.lower())) is None
            else _same(column.dataType, kind, merges=merges)
            for column in source
        )
    if isinstance(source, (T.ArrayType, T.MapType)) and type(source) is type(target):
        pairs = zip(inner_types(source), inner_types(target), strict=True)
        return all(_same(*pair, merges=merges) for pair in pairs)
    return source == target


def _conditions(table: str, column: T.StructField) -> Iterator[tuple[str, str]]:
    """The conditions on the values of a given column, under its name in the table."""
    name = quoted(column.name)
    if not column.nullable:
        yield f"{name} IS NOT NULL", f"table {table!r}: column {column.name!r} is NOT NULL and has a null"
    for sql in not_null_within(name, column.dataType, 0):
        yield sql, f"table {table!r}: column {column.name!r} contains a null in a NOT NULL field"
    length = re.fullmatch(r"(?i)(?:var)?char\((\d+)\)", str(column.metadata.get(_CHAR, "")))
    if length:
        text = f"table {table!r}: column {column.name!r} is {column.metadata[_CHAR]} and has a longer value"
        yield f"{name} IS NULL OR length({name}) <= {length[1]}", text
    if _GENERATED in column.metadata:
        expression = column.metadata[_GENERATED]
        yield (
            f"{name} <=> ({expression})",
            f"table {table!r}: column {column.name!r} is generated as {expression}, and a row has another "
            "value",
        )
    if _INVARIANT in column.metadata:
        expression = str(json.loads(column.metadata[_INVARIANT])["expression"]["expression"])
        yield expression, f"table {table!r}: a row violates {expression}"


def _directory(table: str, column: str) -> tuple[str, str]:
    """The condition that a file system has a directory ``column=value``. Hive's way to escape is Delta's."""
    name = quoted(column)
    room = _LONGEST - len(re.sub(_ESCAPED, "%00", column).encode()) - len("=")
    length = f"octet_length(regexp_replace({name}, {literal(_ESCAPED)}, '%00'))"
    text = f"table {table!r}: partition column {column!r} has a value that cannot be the name of a directory"
    text += f" (more than {room} bytes, of which some characters take 3, or a zero)"
    return f"{name} IS NULL OR ({length} <= {room} AND instr({name}, char(0)) = 0)", text


def not_null_within(value: str, kind: T.DataType, depth: int) -> Iterator[str]:
    """SQL conditions for NOT NULL fields and elements inside a value."""
    if isinstance(kind, T.StructType):
        for column in kind:
            inner = f"{value}.{quoted(column.name)}"
            if not column.nullable:
                yield f"{inner} IS NOT NULL"
            yield from not_null_within(inner, column.dataType, depth)
        return
    item = f"item{depth}"
    for array, element, nullable in arrays(value, kind):
        if not nullable:
            yield f"{value} IS NULL OR forall({array}, {item} -> {item} IS NOT NULL)"
        for sql in not_null_within(item, element, depth + 1):
            yield f"{value} IS NULL OR forall({array}, {item} -> {item} IS NULL OR ({sql}))"


def _beside(table: str, schema: T.StructType, present: set[str]) -> dict[str, str]:
    """The columns that are not given, with the values that Delta will use."""
    beside: dict[str, str] = {}
    for column in schema:
        if column.name.lower() in present:
            continue
        kind = type_in_sql(column.dataType)
        if _GENERATED in column.metadata:
            beside[column.name] = f"CAST(({column.metadata[_GENERATED]}) AS {kind})"
            continue
        if not column.nullable and _IDENTITY not in column.metadata and _DEFAULT not in column.metadata:
            raise OptionError(
                f"table {table!r}: NOT NULL column {column.name!r} is not in the DataFrame", "add it"
            )
        beside[column.name] = f"CAST(NULL AS {kind})"
    return beside


def raising(text: str) -> str:
    """SQL that fails with an OptionError."""
    return f"raise_error({literal(str(OptionError(text)))})"


def asserting(name: str, conditions: Sequence[tuple[str, str]]) -> str:
    """SQL for the column; it raises an error for the first condition that a row does not meet."""
    cases = " ".join(f"WHEN NOT coalesce(({sql}), false) THEN {raising(text)}" for sql, text in conditions)
    return f"CASE {cases} ELSE {quoted(name)} END" if cases else quoted(name)


def _structs(kind: T.DataType, path: str) -> Iterator[tuple[str, list[T.StructField]]]:
    if isinstance(kind, T.StructType):
        yield path, kind.fields
        for column in kind:
            yield from _structs(column.dataType, f"{path}{column.name}.")
        return
    for element in inner_types(kind):
        yield from _structs(element, path)
