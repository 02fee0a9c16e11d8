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
Check = tuple[Callable[[Column], Column], str]  # the condition on a value, and the reason


def violations(value: Column, schema: StructType, *, finite: bool) -> Iterator[Violation]:
    """Yields what may be wrong in ``value``, a struct of ``schema``. ``finite``: infinity is wrong.

    Each condition is built once, over the whole way to its field: their number and size grow with the fields
    and the depth, not with their product over the levels.
    """
    for condition, reason in _of_fields(schema, "", finite):
        yield condition(value), reason


def _of_fields(schema: StructType, within: str, finite: bool) -> Iterator[Check]:
    for field in schema.fields:
        for condition, reason in _of(field.dataType, f"{within}{field.name}", field.nullable, finite):
            yield _of_field(field.name, condition), reason


def _of(kind: DataType, path: str, nullable: bool, finite: bool) -> Iterator[Check]:
    """Of a value of one type."""
    if not nullable:
        yield (lambda value: value.isNull()), f"field {path!r} is missing or null"
    if finite and isinstance(kind, (DoubleType, FloatType)):
        reason = f"field {path!r} is too large for {kind.simpleString()}"
        yield (lambda value: F.abs(value) == F.lit(float("inf"))), reason
    if isinstance(kind, StructType):
        for condition, reason in _of_fields(kind, f"{path}.", finite):
            yield _where_there(condition), reason
    elif isinstance(kind, ArrayType):
        for condition, reason in _of(kind.elementType, f"{path}[]", kind.containsNull, finite):
            yield _of_any(condition), reason
    elif isinstance(kind, MapType):
        for condition, reason in _of(kind.valueType, f"{path}{{}}", kind.valueContainsNull, finite):
            yield _of_any(condition, F.map_values), reason


def _of_field(name: str, condition: Callable[[Column], Column]) -> Callable[[Column], Column]:
    return lambda value: condition(value.getField(name))


def _where_there(condition: Callable[[Column], Column]) -> Callable[[Column], Column]:
    return lambda value: value.isNotNull() & condition(value)


def _of_any(
    condition: Callable[[Column], Column], elements: Callable[[Column], Column] = lambda value: value
) -> Callable[[Column], Column]:
    """Of an element, where there is one."""
    return lambda value: F.exists(
        elements(value), lambda element: F.coalesce(condition(element), F.lit(False))
    )
