"""The conditions of ``decode``: one for each reason, and how many expressions it takes to build them.

Columns of Spark Connect, because they need neither a JVM nor a server.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.connect import functions
from pyspark.sql.connect.column import Column
from pyspark.sql.types import ArrayType, DataType, DoubleType, MapType, StringType, StructField, StructType

from connector.typed import violations

MOST = 20_000  # a build that grows exponentially would not end


def nested(fields: int, depth: int) -> StructType:
    """Doubles within arrays and maps of structs, each of which has a field of its own that is not null."""
    kind = StructType([StructField(f"d{number}", DoubleType(), False) for number in range(fields)])
    for level in range(depth):
        inner: DataType = ArrayType(kind, False) if level % 2 else MapType(StringType(), kind, False)
        kind = StructType([StructField("x", inner), StructField("y", StringType(), False)])
    return kind


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each expression."""
    made: list[None] = []
    construct = Column.__init__

    def counted(self: Column, *arguments: object) -> None:
        made.append(None)
        assert len(made) < MOST
        construct(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(violations, "F", functions)
    monkeypatch.setattr(Column, "__init__", counted)
    return made


def cost(built: list[None], fields: int, depth: int) -> tuple[int, int]:
    """How many expressions are built, and the bytes of their plan."""
    built.clear()
    found: list[Any] = list(violations.violations(functions.col("v"), nested(fields, depth), finite=True))
    expressions = len(built)
    assert len({reason for _, reason in found}) == len(found) == 2 * fields + 2 * depth
    return expressions, sum(condition.to_plan(None).ByteSize() for condition, _ in found)


def test_conditions_of_nested_arrays_grow_with_the_fields_and_the_depth_not_exponentially(
    built: list[None],
) -> None:
    few, many = cost(built, 4, 4), cost(built, 16, 4)
    assert all(more <= 4 * less for less, more in zip(few, many, strict=True)), (few, many)
    shallow, deep = cost(built, 4, 2), cost(built, 4, 6)
    # a field in a depth d has d levels around it: at most the square of the depth
    assert all(more <= 9 * less for less, more in zip(shallow, deep, strict=True)), (shallow, deep)
