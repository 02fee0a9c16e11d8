"""The types of Spark as Arrow has them, with instants in UTC, on every version of Spark."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType

# before Spark 4.2 they are in UTC unless somebody asks for something else
_convert: Callable[[DataType], pa.DataType] = to_arrow_type
if "timezone" in signature(to_arrow_type).parameters:
    _convert = partial(to_arrow_type, timezone="UTC")


def arrow_type(kind: DataType) -> pa.DataType:
    """``kind`` in Arrow; a schema is a struct. Raises PySparkTypeError for a type that Arrow has not."""
    return _convert(kind)
