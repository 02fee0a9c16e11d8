"""The columns that Spark sees, and the conversions between them and the batches of the engine.

Not here: the use of the rows. Invariants: a batch for Spark has exactly the Arrow types that Spark derives
from the declared schema (Spark checks only the first batch), and all columns except ``properties`` are the
engine's buffers, not copies.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema

from broker_core.core.errors import OptionError, RemoteProtocolError
from broker_core.message.message import HEADERS, READ_SCHEMA
from broker_core.message.properties import Properties
from broker_core.message.spans import PARENT
from connector.arrow_type import arrow_type
from connector.options import PLAIN, ExtraColumns

_OCTET_MAX = 127  # maximum of Spark's tinyint; AMQP's octet goes to 255

_PROPERTY_TYPES: dict[str, T.DataType] = {
    "content_type": T.StringType(),
    "content_encoding": T.StringType(),
    "headers": T.MapType(T.StringType(), T.StringType()),
    "delivery_mode": T.ByteType(),
    "priority": T.ByteType(),
    "correlation_id": T.StringType(),
    "reply_to": T.StringType(),
    "expiration": T.StringType(),
    "message_id": T.StringType(),
    "timestamp": T.TimestampType(),
    "type": T.StringType(),
    "user_id": T.StringType(),
    "app_id": T.StringType(),
}
PROPERTIES_TYPE = T.StructType([T.StructField(name, kind) for name, kind in _PROPERTY_TYPES.items()])

ARROW_PROPERTIES = arrow_type(PROPERTIES_TYPE)

_PLAIN_SCHEMA = READ_SCHEMA.remove(READ_SCHEMA.get_field_index("properties"))
_PLAIN = len(_PLAIN_SCHEMA)
_COLUMNS = from_arrow_schema(_PLAIN_SCHEMA)
_HEADER = T.StructType([T.StructField("key", T.StringType()), T.StructField("value", T.BinaryType())])
# by the fields of ``ExtraColumns``: the type in Spark, and in Arrow
_MORE: dict[str, tuple[T.DataType, pa.DataType]] = {
    "properties": (PROPERTIES_TYPE, ARROW_PROPERTIES),
    "transaction": (T.LongType(), pa.int64()),
    "key": (T.BinaryType(), pa.binary()),
    "headers": (T.ArrayType(_HEADER), HEADERS),
}

_PUBLISH_COLUMNS = ("body", "exchange", "routing_key", "properties")


# -- reading -------------------------------------------------------------------------------------------------


def read_schema(included: ExtraColumns = PLAIN) -> T.StructType:
    """The columns of ``load()``."""
    more = [T.StructField(name, kind) for name, (kind, _) in _MORE.items() if getattr(included, name)]
    return T.StructType([*_COLUMNS.fields, *more])


def check_read_schema(schema: T.StructType, own: T.StructType, what: str = "format txmq") -> None:
    """Raises OptionError if a user's ``.schema(...)`` differs from ``own``, that of ``what`` is read."""
    if [(each.name, each.dataType) for each in schema] != [(each.name, each.dataType) for each in own]:
        raise OptionError(
            f"the schema given by .schema() is {schema.simpleString()}, but {what} has the columns "
            f"{own.simpleString()}",
            "leave .schema() out and select columns afterwards (of messages, the options "
            "'includeProperties', 'includeTransaction', 'includeKey' and 'includeHeaders' add columns)",
        )


def to_spark(batches: Iterator[pa.RecordBatch], included: ExtraColumns = PLAIN) -> Iterator[pa.RecordBatch]:
    """READ_SCHEMA batches, with or without columns of the engine behind them, in Spark's types, with the same
    buffers for the plain columns.
    """
    more = [name for name in _MORE if getattr(included, name)]
    schema = pa.schema([*_PLAIN_SCHEMA, *(pa.field(name, _MORE[name][1]) for name in more)])
    for batch in batches:
        chosen = batch.columns[:_PLAIN] + [_column(batch, name) for name in more]
        yield pa.RecordBatch.from_arrays(chosen, schema=schema)


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """That of the engine, or what a message has in its place."""
    if name != "properties" and name in batch.schema.names:
        return batch.column(name)
    if name == "key":
        return batch.column("routing_key").cast(pa.binary())
    if name == "transaction":  # commits of Kafka have no numbers
        return pa.nulls(batch.num_rows, pa.int64())
    return properties_column(batch.column("properties"), name == "headers")


def properties_column(encoded: pa.Array, headers: bool = False) -> pa.Array:
    """AMQP-encoded properties as a struct column, or their ``headers`` as one of lists; null for a message
    without them or with damaged ones.

    Damaged properties are only in old data directories. A header that is not a string becomes JSON text, in
    the list only if it has no bytes either; a priority or delivery mode above 127 becomes 127.
    """
    import pyarrow.compute as pc  # slow to import, and a source without properties does not need it

    kind, form = (HEADERS, _as_list) if headers else (ARROW_PROPERTIES, _as_struct)
    if len(encoded) == 0 or (pc.max(pc.binary_length(encoded)).as_py() or 0) == 0:
        return pa.nulls(len(encoded), kind)
    distinct = encoded.dictionary_encode()  # most messages of a stream share a few sets of properties
    decoded = [_decoded(data, form) if data else None for data in distinct.dictionary.to_pylist()]
    return pa.array(decoded, kind).take(distinct.indices)


def _decoded(data: bytes, form: Callable[[Properties], Any]) -> Any:
    try:
        return form(Properties.decode(data))
    except RemoteProtocolError:
        return None  # one such message must not stop a query


def _as_list(properties: Properties) -> list[tuple[str, str | bytes | None]] | None:
    found = properties.headers.items()
    return [(name, value if isinstance(value, bytes) else _as_text(value)) for name, value in found] or None


def _as_struct(properties: Properties) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(properties, name) for name in _PROPERTY_TYPES}
    values["headers"] = [(name, _as_text(value)) for name, value in properties.headers.items()] or None
    for octet in ("delivery_mode", "priority"):
        values[octet] = None if values[octet] is None else min(values[octet], _OCTET_MAX)
    if values["timestamp"] is not None:
        values["timestamp"] = min(values["timestamp"] * 1_000_000, (1 << 63) - 1)
    return values


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(_as_json(value), separators=(",", ":"), ensure_ascii=False)


def _as_json(value: object) -> Any:
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal():
            return float(value)
        case Mapping():
            return {str(name): _as_json(item) for name, item in value.items()}
        case list():
            return [_as_json(item) for item in value]
    return value


# -- writing -------------------------------------------------------------------------------------------------


def check_publish_columns(schema: T.StructType) -> None:
    """Raises OptionError if rows of ``schema`` cannot be published: column, type and allowed types."""
    by_name = {field.name: field.dataType for field in schema.fields}
    for name in schema.names:
        if name not in _PUBLISH_COLUMNS:
            allowed = ", ".join(_PUBLISH_COLUMNS)
            raise OptionError(f"column {name!r} is not part of a message; allowed are {allowed}")
    if "body" not in by_name:
        raise OptionError("the rows have no column 'body'; add it as binary or string")
    if not isinstance(by_name["body"], (T.BinaryType, T.StringType)):
        raise OptionError(
            f"column 'body' has the type {by_name['body'].simpleString()}; allowed: binary, "
            "string (cast it, or use to_json)"
        )
    for name in ("exchange", "routing_key"):
        if not isinstance(by_name.get(name, T.StringType()), T.StringType):
            raise OptionError(f"column {name!r} has the type {by_name[name].simpleString()}; allowed: string")
    if "properties" in by_name:
        _check_properties(by_name["properties"])


def _check_properties(kind: T.DataType) -> None:
    if not isinstance(kind, T.StructType):
        raise OptionError(
            f"column 'properties' has the type {kind.simpleString()}; allowed: a struct of "
            f"{', '.join(_PROPERTY_TYPES)}"
        )
    for field in kind.fields:
        want = _PROPERTY_TYPES.get(field.name)
        if want is None:
            raise OptionError(
                f"field {field.name!r} of column 'properties' is unknown; allowed are "
                f"{', '.join(_PROPERTY_TYPES)}"
            )
        # nullability inside a map does not matter
        if field.dataType.simpleString() != want.simpleString():
            have, allowed = field.dataType.simpleString(), want.simpleString()
            raise OptionError(
                f"field {field.name!r} of column 'properties' has the type {have}; allowed: {allowed}"
            )


def to_messages(batch: pa.RecordBatch, parent: str = "") -> pa.RecordBatch:
    """Rows of a checked schema for the engine: a properties struct becomes AMQP-encoded bytes. ``parent``:
    the trace context of messages that have none.

    Raises LocalProtocolError for a property that AMQP cannot encode.
    """
    index = batch.schema.get_field_index("properties")
    if index < 0:
        return batch.append_column("properties", _same(parent, batch.num_rows)) if parent else batch
    return batch.set_column(index, "properties", _encoded(batch.column(index), parent))


def _same(parent: str, rows: int) -> pa.Array:
    data = Properties(headers={PARENT: parent}).encode() if parent else b""
    return pa.repeat(pa.scalar(data, pa.binary()), rows)


def _encoded(column: pa.StructArray, parent: str) -> pa.Array:
    if column.null_count == len(column):
        return _same(parent, len(column))
    names = [column.type.field(index).name for index in range(column.type.num_fields)]
    fields = [_values(name, values) for name, values in zip(names, column.flatten(), strict=True)]
    memo: dict[tuple[object, ...], bytes] = {}  # most rows of a batch share a few sets of properties
    encoded: list[bytes] = []
    for row in zip(*fields, strict=True):
        data = memo.get(row)
        if data is None:
            values = dict(zip(names, row, strict=True))
            values["headers"] = dict(values.get("headers") or ())
            if parent:
                values["headers"].setdefault(PARENT, parent)
            data = memo[row] = Properties(**values).encode()
        encoded.append(data)
    return pa.array(encoded, pa.binary())


def _values(name: str, column: pa.Array) -> list[Any]:
    if column.null_count == len(column):
        return [None] * len(column)
    if name == "timestamp":
        import pyarrow.compute as pc

        return list(pc.divide(column.cast(pa.int64()), 1_000_000).to_pylist())
    if name == "headers":
        return [None if headers is None else tuple(headers) for headers in column.to_pylist()]
    return list(column.to_pylist())
