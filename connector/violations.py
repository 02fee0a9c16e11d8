"""What a schema demands and Spark's parsers let pass, as conditions over the decoded columns.

Spark makes every field of a parsed struct nullable, whatever the schema says, and reads a number that is too
large for a double as infinity.
Not here: what the parsers themselves refuse (``formats.py``).
Invariant: a condition is true or not true of every value; null is not true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StructType

Violation = tuple[Column, str]  # a condition, and the reason where it is true


def violations(value: Column, schema: StructType, *, finite: bool, within: str = "") -> Iterator[Violation]:
    """Yields what may be wrong in ``value``, a struct of ``schema``. ``finite``: infinity is wrong."""
    for field in schema.fields:
        yield from _of(
            value.getField(field.name), field.dataType, f"{within}{field.name}", field.nullable, finite
        )


def _of(value: Column, kind: DataType, path: str, nullable: bool, finite: bool) -> Iterator[Violation]:
    if not nullable:
        yield value.isNull(), f"field {path!r} is missing or null"
    if finite and isinstance(kind, (DoubleType, FloatType)):
        yield F.abs(value) == F.lit(float("inf")), f"field {path!r} is too large for {kind.simpleString()}"
    if isinstance(kind, StructType):
        for condition, reason in violations(value, kind, finite=finite, within=f"{path}."):
            yield value.isNotNull() & condition, reason
    elif isinstance(kind, ArrayType):
        yield from _of_each(value, kind.elementType, f"{path}[]", kind.containsNull, finite)
    elif isinstance(kind, MapType):
        values = F.map_values(value)
        yield from _of_each(values, kind.valueType, f"{path}{{}}", kind.valueContainsNull, finite)


def _of_each(values: Column, kind: DataType, path: str, nullable: bool, finite: bool) -> Iterator[Violation]:
    """One condition for each that an element may violate."""
    reasons = [reason for _, reason in _of(F.lit(None), kind, path, nullable, finite)]
    for number, reason in enumerate(reasons):
        yield F.exists(values, _violated(number, kind, path, nullable, finite)), reason


def _violated(
    number: int, kind: DataType, path: str, nullable: bool, finite: bool
) -> Callable[[Column], Column]:
    """The condition with this number, of an element."""

    def violated(element: Column) -> Column:
        condition, _ = list(_of(element, kind, path, nullable, finite))[number]
        return F.coalesce(condition, F.lit(False))

    return violated
