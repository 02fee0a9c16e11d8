"""The arguments of PySpark's own function differ between its versions; what is made of a type must not."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import ArrayType, MapType, StringType, StructType, TimestampNTZType, TimestampType

from connector.arrow_type import arrow_type


def test_instants_are_in_utc_at_every_depth_and_a_schema_is_a_struct() -> None:
    utc = pa.timestamp("us", "UTC")
    kind = StructType().add("at", TimestampType()).add("ats", ArrayType(TimestampType()))
    kind = kind.add("by", MapType(StringType(), TimestampType())).add("clock", TimestampNTZType())
    made = arrow_type(StructType().add("row", kind))
    assert pa.types.is_struct(made) and pa.schema(made).names == ["row"]
    row = {field.name: field.type for field in made.field("row").type}
    assert row["at"] == row["ats"].value_type == row["by"].item_type == utc
    assert row["clock"] == pa.timestamp("us")
