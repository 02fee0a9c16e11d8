"""Columns as DDL without a session of Spark, whose own parser needs one: the types that tests name, and no more."""

from __future__ import annotations

import re

from pyspark.sql import types as T
from pyspark.sql.types import DataType, StructField, StructType

_NAMES: dict[str, DataType] = {
    "tinyint": T.ByteType(),
    "smallint": T.ShortType(),
    "int": T.IntegerType(),
    "bigint": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "boolean": T.BooleanType(),
    "string": T.StringType(),
    "binary": T.BinaryType(),
    "date": T.DateType(),
    "timestamp": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
    "interval year": T.YearMonthIntervalType(0, 0),
    "variant": T.VariantType(),
    "void": T.NullType(),
}
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def columns(text: str) -> StructType:
    return StructType([_column(each.strip()) for each in _parts(text)])


def _parts(text: str) -> list[str]:
    """Between the commas that are in no brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character in "<(") - (character in ">)")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return [each for each in found if each.strip()]


def _column(text: str) -> StructField:
    name, kind = re.split(r"[ :]+", text, maxsplit=1)
    return StructField(name, _type(kind.removesuffix(" not null")), not kind.endswith(" not null"))


def _type(text: str) -> DataType:
    text = text.strip()
    if text.startswith("struct<"):
        return columns(text[7:-1])
    if text.startswith("array<"):
        return T.ArrayType(_type(text[6:-1]))
    if text.startswith("map<"):
        key, value = _parts(text[4:-1])
        return T.MapType(_type(key), _type(value))
    decimal = _DECIMAL.fullmatch(text)
    return T.DecimalType(int(decimal[1]), int(decimal[2])) if decimal else _NAMES[text]
