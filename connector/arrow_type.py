"""The types of Spark as Arrow has them, with instants in UTC, on every version of Spark."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType

# before Spark 4.2 they are in UTC unless somebody asks for something else
_UTC: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_type).parameters else {}


def arrow_type(kind: DataType) -> pa.DataType:
    """``kind`` in Arrow; a schema is a struct. Raises PySparkTypeError for a type that Arrow has not."""
    return to_arrow_type(kind, **_UTC)
