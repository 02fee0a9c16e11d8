"""``encode``: typed columns as messages, the way back from ``decode``.

Not here: publishing them (``batch/foreach_batch.py``, ``stream/sink.py``).
Invariant: the columns are those that a publish takes, and every row has a body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StructType

from broker_core.core.errors import OptionError
from connector.sql import quoted
from connector.typed import avro, json_schema
from connector.typed.decode import Formats
from connector.typed.decode_udf import UnsupportedSchema, over_columns
from connector.typed.formats import one_clear_error
from connector.typed.protobuf import write
from connector.typed.protobuf.descriptors import Descriptors, descriptor_of, library, of_set
from connector.typed.protobuf.read import SchemaMismatch
from connector.typed.registry.client import RegisteredSchema, SchemaRegistry
from connector.typed.registry.wire_format import header, written_indexes

CONTENT_TYPES = {
    "json": "application/json",
    "csv": "text/csv",
    "avro": "avro/binary",  # of Avro's specification
    "protobuf": "application/protobuf",
}
_OF_MESSAGES = ("exchange", "routing_key", "properties")


def encode(
    df: DataFrame,
    schema: object = None,
    format: Formats = "json",
    *,
    options: Mapping[str, str] | None = None,
    registry: SchemaRegistry | str | None = None,
    subject: str | None = None,
    validate: bool = False,
) -> DataFrame:
    """Returns the rows of ``df`` as messages, for tx.publish and for a write to format txmq: ``body``, and
    ``properties`` with the content type.

    The columns exchange, routing_key and properties keep their meaning for a message; all others go into the
    body. ``schema``: for avro the schema as JSON, None for that of the columns; for protobuf as in
    ``decode``. ``options``: options of to_json or to_csv.

    ``registry`` (avro, json, protobuf): bodies are in Confluent's wire format, with the id under which the
    schema is registered in ``subject``. For json, ``schema`` is then a JSON Schema as text; for avro, None
    registers the schema of the columns; for protobuf, the newest schema of ``subject`` is used, and
    ``schema`` names a message in it (None: the first). ``validate``: a row of json that its JSON Schema
    rejects is an error. Raises OptionError, and RegistryFailed or LoginRefused from the registry.
    """
    if format not in CONTENT_TYPES:
        raise OptionError(f"encode got the format {format!r}", f"allowed are {', '.join(CONTENT_TYPES)}")
    names = [name for name in df.columns if name not in _OF_MESSAGES]
    if not names:
        raise OptionError(
            "encode got no column for the body", "add one beside exchange, routing_key, properties"
        )
    types = StructType([df.schema[name] for name in names])
    value = F.struct(*(F.col(quoted(name)) for name in names))
    columns = [F.col(name) for name in ("exchange", "routing_key") if name in df.columns]
    if validate and (format != "json" or registry is None):
        raise OptionError("encode got validate=True, which is for json with a registry", "leave it out")
    client = _registry(format, registry, subject)
    if client is None and format in ("json", "csv") and schema is not None:
        raise OptionError(f"format {format!r} got a schema, but the columns have their types", "leave it out")
    if options and format in ("avro", "protobuf"):
        raise OptionError(f"encode to {format} got options, but it has none", "leave them out")
    chosen = dict(options or {}) or None  # on Spark Connect an empty map has no type
    if format == "avro":
        body = _avro(types, value, schema, client, str(subject))
    elif format == "protobuf":
        body = _protobuf(types, value, schema, client, str(subject))
    else:
        body = F.to_json(value, chosen) if format == "json" else F.to_csv(value, chosen)
        body = body if client is None else _registered_json(body, schema, client, str(subject), validate)
    # with a registry, an id, and then the value
    properties = _properties(df, "application/octet-stream" if client else CONTENT_TYPES[format])
    with one_clear_error(format):
        encoded = df.select(*columns, body.alias("body"), properties.alias("properties"))
        _ = encoded.schema  # on Spark Connect, nothing is analysed before
    return encoded


def _registry(
    format: str, registry: SchemaRegistry | str | None, subject: str | None
) -> SchemaRegistry | None:
    if registry is None and subject is None:
        return None
    if registry is None or not isinstance(subject, str) or not subject:
        raise OptionError("encode got only one of registry and subject", "give both, or none")
    if format == "csv":
        raise OptionError(
            "encode supports no registry for format 'csv'", "it has one for avro, json and protobuf"
        )
    return SchemaRegistry.of(registry)


def _binary(value: Column, encoder: Callable[[pa.Array], pa.Array]) -> Column:
    body: Column = over_columns(encoder, BinaryType())(value)
    return body


def _avro(
    columns: StructType, value: Column, schema: object, registry: SchemaRegistry | None, subject: str
) -> Column:
    text = json.dumps(avro.avro_schema(columns)) if schema is None else avro.text_of(schema)
    avro.columns_of((text,))
    written_id = b"" if registry is None else header(registry.register(subject, "AVRO", text))
    return _binary(value, avro.encoder(written_id, text))


def _registered_json(
    body: Column, text: object, registry: SchemaRegistry, subject: str, validate: bool
) -> Column:
    if not isinstance(text, str):
        raise OptionError(f"format 'json' got the schema {text!r:.200}", "give it as JSON text")
    found = RegisteredSchema("JSON", (text,))
    if validate:
        json_schema.library()
        try:
            json_schema.validator(found)
        except UnsupportedSchema as error:
            raise OptionError(f"the schema {error}", "give a JSON Schema as text") from None
    written_id = header(registry.register(subject, "JSON", text))
    if not validate:
        return F.concat(F.lit(written_id), body.cast("binary"))
    return _binary(body, json_schema.encoder(written_id, found))


def _protobuf(
    columns: StructType, value: Column, message: Any, registry: SchemaRegistry | None, subject: str
) -> Column:
    library()
    if registry is not None and message is not None and not isinstance(message, str):
        raise OptionError(
            f"format 'protobuf' with a registry got the schema {message!r:.200}",
            "give the name of a message of the subject's newest schema, or None: the first",
        )
    try:
        if registry is None:
            of, other, rows = "the descriptor set", "give another message, or another set", "the message"
            schema, indexes = of_set(*descriptor_of(message))
            prefix = b""
        else:
            of, other, rows = (
                f"the newest schema of subject {subject!r}",
                "name another one",
                f"subject {subject!r}",
            )
            number, schema = registry.latest_serialized(subject)
            indexes = Descriptors.of(schema).indexes(message)
            prefix = header(number) + written_indexes(indexes)
        write.writing(Descriptors.of(schema).at(indexes), columns)  # before the rows are read
        return _binary(value, write.encoder(prefix, schema, indexes, columns))
    except UnsupportedSchema as error:
        raise OptionError(f"{of} {error}", other) from None
    except SchemaMismatch as error:
        raise OptionError(f"the rows do not fit {rows}: {error}", "cast or drop it") from None


def _properties(df: DataFrame, content_type: str) -> Column:
    if "properties" not in df.columns:
        return F.struct(F.lit(content_type).alias("content_type"))
    kind = df.schema["properties"].dataType
    if not isinstance(kind, StructType):
        raise OptionError(f"column 'properties' has the type {kind.simpleString()}", "give a struct")
    others = [F.col("properties").getField(name).alias(name) for name in kind.names if name != "content_type"]
    return F.struct(F.lit(content_type).alias("content_type"), *others)
