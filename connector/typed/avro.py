"""Avro by fastavro: schemas as types of Spark, bodies as values of Arrow, and back.

Spark's own functions read a damaged body as a row of nulls, and take one schema for all rows of a frame. With
a schema registry, each body has the id of its own.
Not here: the registry and the ids (``typed/registry/client.py``, ``typed/registry/wire_format.py``).
Invariant: a body is good only if a value of the reader's schema was read from all of its bytes.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Context, Decimal
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from broker_core.core.errors import OptionError
from connector.arrow_type import arrow_type
from connector.typed.decode_udf import (
    HEADER_BYTES,
    DecodedBody,
    OverArrays,
    UnsupportedSchema,
    decode_each,
    encode_each,
    fault_text,
    once_in_task,
)

Schema = Any  # the JSON of a schema, as fastavro has parsed it
Texts = tuple[str, ...]  # a schema behind those that it refers to

_PRIMITIVES: dict[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "bytes": T.BinaryType(),
    "string": T.StringType(),
}
_LOGICAL: dict[tuple[str, str], T.DataType] = {
    ("int", "date"): T.DateType(),
    ("long", "timestamp-millis"): T.TimestampType(),
    ("long", "timestamp-micros"): T.TimestampType(),
    ("long", "local-timestamp-millis"): T.TimestampNTZType(),
    ("long", "local-timestamp-micros"): T.TimestampNTZType(),
}
_OF_SPARK: dict[T.DataType, Any] = {
    **{kind: name for name, kind in _PRIMITIVES.items()},
    **dict.fromkeys((T.ByteType(), T.ShortType()), "int"),
    **{kind: {"type": of, "logicalType": name} for (of, name), kind in _LOGICAL.items()},  # the last: micros
}
_DECIMAL = "txmq-decimal"  # fastavro rounds a decimal that has too many digits
_MOST_DIGITS = 38  # of a decimal of Spark
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def library() -> Any:
    """fastavro. Raises OptionError if it is not installed."""
    try:
        import fastavro
        import fastavro.read
        import fastavro.schema
        import fastavro.validation
    except ImportError:
        raise OptionError(
            "format 'avro' needs the package fastavro", "pip install '.[avro]' in a checkout"
        ) from None
    for kind in ("bytes", "fixed"):
        fastavro.read.LOGICAL_READERS[f"{kind}-{_DECIMAL}"] = _read_decimal
    return fastavro


def _read_decimal(data: bytes, writer_schema: Any = None, reader_schema: Any = None) -> Decimal:
    del reader_schema
    unscaled = int.from_bytes(data, "big", signed=True)
    if not data or abs(unscaled) >= 10 ** writer_schema["precision"]:
        raise ValueError(f"a decimal has more than {writer_schema['precision']} digits, or none")
    return Decimal(unscaled).scaleb(-writer_schema.get("scale", 0), Context(prec=_MOST_DIGITS))


# -- schemas -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AvroSchema:
    """``by_name``: its named types, by full name."""

    parsed: Schema
    by_name: Mapping[str, Schema] = field(repr=False)

    @classmethod
    def of(cls, texts: Texts) -> AvroSchema:
        """Raises UnsupportedSchema."""
        parse = library().schema.parse_schema
        by_name: dict[str, Schema] = {}
        parsed: Schema = None
        try:
            for text in texts:
                parsed = parse(_plain(json.loads(text)), named_schemas=by_name)
        except Exception as error:  # of any class, for any damage
            raise UnsupportedSchema(f"is not a schema of Avro ({fault_text(error)})") from None
        found = cls(parsed, by_name)
        found._least(parsed, {}, "")
        return found

    def columns(self) -> T.StructType:
        """The columns of a reader. Raises UnsupportedSchema."""
        kind = self._type(self.parsed, "")
        if not isinstance(kind, T.StructType):
            raise UnsupportedSchema(f"is of type {kind.simpleString()}, not a record")
        return kind

    def _type(self, schema: Schema, path: str) -> T.DataType:
        if isinstance(schema, list):
            others = [each for each in schema if each != "null" and each != {"type": "null"}]
            if len(others) != 1:
                raise UnsupportedSchema(f"has a union of several types in field {path!r}")
            return self._type(others[0], path)
        if isinstance(schema, str):
            if schema in _PRIMITIVES:
                return _PRIMITIVES[schema]
            if schema not in self.by_name:
                raise UnsupportedSchema(f"has the type {schema} in field {path!r}")
            return self._type(self.by_name[schema], path)
        kind = schema["type"]
        if kind == "record":
            return T.StructType(
                [
                    T.StructField(
                        each["name"], self._type(each["type"], f"{path}.{each['name']}".lstrip("."))
                    )
                    for each in schema["fields"]
                ]
            )
        if kind == "array":
            return T.ArrayType(self._type(schema["items"], f"{path}[]"))
        if kind == "map":
            return T.MapType(T.StringType(), self._type(schema["values"], f"{path}{{}}"))
        if kind == "enum":
            return T.StringType()
        if schema.get("logicalType") == _DECIMAL:
            return T.DecimalType(schema["precision"], schema.get("scale", 0))
        if kind == "fixed":
            return T.BinaryType()
        found = _LOGICAL.get((kind, schema.get("logicalType", "")))
        return self._type(kind, path) if found is None else found

    def _least(self, schema: Schema, sizes: dict[str, int | None], path: str) -> int:
        """The least bytes of a value. Raises UnsupportedSchema for what a few bytes could make endless: types
        within themselves, and items without bytes. ``sizes``: by name, None while it is computed.
        """
        if isinstance(schema, list):
            return 1 + min((self._least(each, sizes, path) for each in schema), default=0)
        if isinstance(schema, str):
            if schema in self.by_name:
                return self._least(self.by_name[schema], sizes, path)
            return {"null": 0, "float": 4, "double": 8}.get(schema, 1)
        kind = schema["type"]
        if kind in ("record", "error"):
            name = schema["name"]
            if name in sizes:
                size = sizes[name]
                if size is None:
                    raise UnsupportedSchema(f"has the type {name} within itself")
                return size
            sizes[name] = None
            least = sum(self._least(each["type"], sizes, each["name"]) for each in schema["fields"])
            sizes[name] = least
            return least
        if kind == "array":
            if self._least(schema["items"], sizes, path) == 0:
                raise UnsupportedSchema(f"has an array of items without bytes in field {path!r}")
            return 1
        if kind == "map":
            self._least(schema["values"], sizes, path)
            return 1
        if kind == "fixed":
            return int(schema["size"])
        return 1 if kind == "enum" else self._least(kind, sizes, path)


def text_of(schema: object) -> str:
    """``schema``, which must be text. Raises OptionError."""
    if not isinstance(schema, str):
        raise OptionError(f"format 'avro' got the schema {schema!r:.200}", "give it as JSON text")
    return schema


def _plain(schema: Schema) -> Schema:
    """The schema with the logical types that Spark has values for. Others are ignored, as Avro says."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: value for name, value in schema.items() if not name.startswith("__")}
    logical = plain.pop("logicalType", None)
    kind = plain.get("type")
    if isinstance(kind, str):
        if (kind, logical) in _LOGICAL:
            plain["logicalType"] = logical
        elif kind in ("bytes", "fixed") and logical == "decimal" and _is_decimal(plain):
            plain["logicalType"] = _DECIMAL
    for name in ("type", "items", "values"):
        if name in plain:
            plain[name] = _plain(plain[name])
    if isinstance(plain.get("fields"), list):
        plain["fields"] = [_plain(each) for each in plain["fields"]]
    return plain


def _is_decimal(schema: Mapping[str, object]) -> bool:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    return (
        type(precision) is int
        and type(scale) is int
        and 0 <= scale <= precision <= _MOST_DIGITS
        and precision > 0
    )


def avro_schema(columns: T.StructType, name: str = "Value") -> dict[str, Any]:
    """The schema of rows with ``columns``. Raises OptionError."""
    fields = []
    for each in columns.fields:
        if not _NAME.fullmatch(each.name):
            raise OptionError(f"column {each.name!r} cannot be a field of Avro", "rename it")
        kind = _avro_type(each.dataType, f"{name}_{each.name}")
        fields.append(
            {"name": each.name, "type": ["null", kind], "default": None}
            if each.nullable
            else {"name": each.name, "type": kind}
        )
    return {"type": "record", "name": name, "fields": fields}


def _avro_type(kind: T.DataType, name: str) -> Any:
    if isinstance(kind, T.StructType):
        return avro_schema(kind, name)
    if isinstance(kind, T.ArrayType):
        items = _avro_type(kind.elementType, name)
        return {"type": "array", "items": ["null", items] if kind.containsNull else items}
    if isinstance(kind, T.MapType):
        if not isinstance(kind.keyType, T.StringType):
            raise OptionError(
                f"a map with keys of {kind.keyType.simpleString()} has no type in Avro", "cast it"
            )
        values = _avro_type(kind.valueType, name)
        return {"type": "map", "values": ["null", values] if kind.valueContainsNull else values}
    if isinstance(kind, T.DecimalType):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    found = "string" if isinstance(kind, T.StringType) else _OF_SPARK.get(kind)
    if found is None:
        raise OptionError(f"the type {kind.simpleString()} has no type in Avro", "cast it")
    return found


# -- values, in tasks ----------------------------------------------------------------------------------------


class _Decoder:
    """A function over bodies with an id: structs of ``value``, of the columns of ``reader``, and ``fault``
    (string). Both are null for an id that is not in ``writers``.
    """

    def __init__(self, writers: Mapping[int, Texts], reader: Texts) -> None:
        self._read = library().schemaless_reader
        reader_schema = AvroSchema.of(reader)
        # without a reader's schema if it is the writer's, which is quicker
        self._writers = {
            number: (AvroSchema.of(texts).parsed, None if texts == reader else reader_schema.parsed)
            for number, texts in writers.items()
        }
        self._type = arrow_type(reader_schema.columns())

    def __call__(self, bodies: pa.Array) -> pa.Array:
        return decode_each(bodies, self._one, self._type)

    def _one(self, number: int, body: bytes) -> DecodedBody:
        schemas = self._writers.get(number)
        if schemas is None:
            return None, None
        bytes_ = io.BytesIO(body)
        bytes_.seek(HEADER_BYTES)
        try:
            value = self._read(bytes_, *schemas)
        except Exception as error:  # of any class, for any damage
            return None, f"the body is not Avro of the schema ({fault_text(error)})"
        if bytes_.tell() != len(body):
            return None, f"the body has {len(body) - bytes_.tell()} bytes behind the value"
        return value, None


decoder = once_in_task(_Decoder)


def _encoder(header: bytes, text: str) -> OverArrays:
    """A function over structs: bodies of ``header`` and the value by the schema ``text``. It raises
    OptionError for a value that does not fit.
    """
    fastavro = library()
    schema = fastavro.schema.parse_schema(json.loads(text))

    def body(value: object) -> bytes:
        buffer = io.BytesIO(header)
        buffer.seek(len(header))
        fastavro.validation.validate(value, schema, strict=False)
        fastavro.schemaless_writer(buffer, schema, value)
        return buffer.getvalue()

    return partial(encode_each, body_of=body, format="Avro")


encoder = once_in_task(_encoder)


def columns_of(texts: Texts) -> T.StructType:
    """The columns that a reader of the schema gets. Raises OptionError unless it is that of a record."""
    try:
        return AvroSchema.of(texts).columns()
    except UnsupportedSchema as error:
        raise OptionError(f"the schema {error}", "give the schema of a record, as JSON") from None
