"""Bodies that are decoded in Python: a value or a fault for each, as a column of Arrow.

Not here: the formats (``avro.py``, ``typed/protobuf/read.py``).
Invariant: a broken body does not change the results of the other bodies of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import pyarrow as pa
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType

from broker_core.core.errors import OptionError, one_line

P = ParamSpec("P")
OverArrays = Callable[[pa.Array], pa.Array]

HEADER_BYTES = 5  # of an id: a byte 0, and four bytes big-endian
VALUE, FAULT = "value", "fault"
_LONGEST_FAULT = 300  # characters

DecodedBody = tuple[Any, str | None]  # a value, or what is wrong; both are None for a body of no known schema


class UnsupportedSchema(ValueError):
    """A schema that no message can be read with; the text follows "schema id 5" or "the schema"."""


def once_in_task(make: Callable[P, OverArrays]) -> Callable[P, OverArrays]:
    """As ``make``; the function over arrays is made in the task that first calls it."""

    def later(*arguments: P.args, **keywords: P.kwargs) -> OverArrays:
        once: list[OverArrays] = []

        def call(column: pa.Array) -> pa.Array:
            if not once:
                once.append(make(*arguments, **keywords))
            return once[0](column)

        return call

    return later


def encode_each(values: pa.Array, body_of: Callable[[Any], bytes], format: str) -> pa.Array:
    """A body for each value. Raises OptionError for a value that does not fit."""
    try:
        bodies = [body_of(value) for value in values.to_pylist(maps_as_pydicts="strict")]
    except Exception as error:  # of any class, for any value; Python has no dates after the year 9999
        raise OptionError(
            f"a row does not fit the schema of {format} ({fault_text(error)})",
            "change the row, or the schema",
        ) from None
    return pa.array(bodies, pa.binary())


def decode_each(
    bodies: pa.Array, judge: Callable[[int, bytes], DecodedBody], columns: pa.DataType
) -> pa.StructArray:
    """Structs of ``value``, of ``columns``, and ``fault`` (string). ``judge``: of the id and the body."""
    values: list[object] = []
    faults: list[str | None] = []
    for body in bodies.to_pylist():
        has_id = body is not None and len(body) >= HEADER_BYTES and not body[0]
        value, fault = judge(int.from_bytes(body[1:HEADER_BYTES], "big"), body) if has_id else (None, None)
        values.append(value)
        faults.append(fault)
    try:
        column = pa.array(values, columns)
    except Exception:  # a value is too large for its type: find out which
        for index, value in enumerate(values):
            try:
                pa.array([value], columns)
            except Exception as error:
                values[index] = None
                faults[index] = f"the body does not fit the columns ({fault_text(error)})"
        column = pa.array(values, columns)
    return pa.StructArray.from_arrays([column, pa.array(faults, pa.string())], [VALUE, FAULT])


def over_columns(function: Callable[..., pa.Array], kind: DataType) -> Any:
    """A function over columns of Spark. Spark may not evaluate it twice for a row."""
    arrow_function: Any = arrow_udf
    return arrow_function(function, kind).asNondeterministic()


def fault_text(error: BaseException) -> str:
    """An error of a library, in one line."""
    return encodable(f"{type(error).__name__}: {one_line(error)}"[:_LONGEST_FAULT])


def encodable(text: str) -> str:
    """The text, with escapes for what is no character (half of a surrogate pair), which Arrow refuses."""
    return text.encode("utf-8", "backslashreplace").decode()
