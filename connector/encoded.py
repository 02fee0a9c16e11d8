"""``encode``: typed columns as messages, the way back from ``decode``.

Not here: publishing them (``foreach_batch.py``, ``sink.py``).
Invariant: the columns are those that a publish takes, and every row has a body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StructType

from broker_core.errors import OptionError
from connector.avro import avro_schema, columns_of, encoder, over_columns
from connector.decoded import Formats, descriptor_of
from connector.fit import quoted
from connector.formats import one_clear_error
from connector.registry import SchemaRegistry
from connector.wire_format import header

CONTENT_TYPES = {
    "json": "application/json",
    "csv": "text/csv",
    "avro": "avro/binary",  # of Avro's specification
    "protobuf": "application/protobuf",
}
_OF_MESSAGES = ("exchange", "routing_key", "properties")


def encode(
    df: DataFrame,
    schema: Any = None,
    format: Formats = "json",
    *,
    options: Mapping[str, str] | None = None,
    registry: SchemaRegistry | str | None = None,
    subject: str | None = None,
) -> DataFrame:
    """The rows of ``df`` as messages: ``body`` and ``properties`` with its ``content_type``, for tx.publish
    and for a write to format txmq.

    The columns exchange, routing_key and properties stay what they are to a message; all others are in the
    body. ``schema``: for avro the schema in JSON, or None: Spark's own; for protobuf as in ``decode``.
    ``options``: of to_json, to_csv or to_protobuf.

    ``registry`` (avro, json): the bodies are in Confluent's wire format, with the id that the schema gets in
    ``subject``. Then the schema of json is a JSON Schema as text, and None for avro that of the columns.
    Raises OptionError; RegistryFailed and LoginRefused of the registry.
    """
    if format not in CONTENT_TYPES:
        raise OptionError(f"encode has the format {format!r}", f"allowed are {', '.join(CONTENT_TYPES)}")
    names = [name for name in df.columns if name not in _OF_MESSAGES]
    if not names:
        raise OptionError(
            "encode got no column for the body", "add one beside exchange, routing_key, properties"
        )
    value = F.struct(*(F.col(quoted(name)) for name in names))
    columns = [F.col(name) for name in ("exchange", "routing_key") if name in df.columns]
    given = dict(options or {})
    if registry is None and subject is None:
        properties = _properties(df, CONTENT_TYPES[format])
        body = _body(value, schema, format, given)
    else:
        properties = _properties(df, "application/octet-stream")  # an id, and then the value
        body = _registered(
            StructType([df.schema[name] for name in names]), value, schema, format, given, registry, subject
        )
    with one_clear_error(df.sparkSession, format):
        encoded = df.select(*columns, body.alias("body"), properties.alias("properties"))
        _ = encoded.schema  # on Spark Connect, nothing is analysed before
    return encoded


def _body(value: Column, schema: Any, format: str, options: dict[str, str]) -> Column:
    if format in ("json", "csv") and schema is not None:
        raise OptionError(f"format {format!r} got a schema, but the columns have their types", "leave it out")
    if format == "json":
        return F.to_json(value, options)
    if format == "csv":
        return F.to_csv(value, options)
    if format == "avro":
        from pyspark.sql.avro.functions import to_avro

        return to_avro(value) if schema is None else to_avro(value, schema)
    from pyspark.sql.protobuf.functions import to_protobuf

    message, descriptor = descriptor_of(schema)
    return to_protobuf(value, message, options=options, binaryDescriptorSet=descriptor)


def _registered(
    columns: StructType,
    value: Column,
    schema: Any,
    format: str,
    options: dict[str, str],
    registry: SchemaRegistry | str | None,
    subject: str | None,
) -> Column:
    if registry is None or not isinstance(subject, str) or not subject:
        raise OptionError("encode got only one of registry and subject", "give both, or none")
    if format not in ("avro", "json"):
        raise OptionError(f"encode has no registry for format {format!r}", "it has one for avro and json")
    text = json.dumps(avro_schema(columns)) if schema is None and format == "avro" else schema
    if not isinstance(text, str):
        raise OptionError(f"format {format!r} got the schema {schema!r:.200}", "give it as JSON text")
    asked = SchemaRegistry.of(registry)
    if format == "json":
        written = header(asked.register(subject, "JSON", text))
        return F.concat(F.lit(written), F.to_json(value, options).cast("binary"))
    if options:
        raise OptionError("encode to avro with a registry got options, but it has none", "leave them out")
    columns_of((text,))
    written = header(asked.register(subject, "AVRO", text))
    body: Column = over_columns(encoder(written, text), BinaryType())(value)
    return body


def _properties(df: DataFrame, content_type: str) -> Column:
    if "properties" not in df.columns:
        return F.struct(F.lit(content_type).alias("content_type"))
    kind = df.schema["properties"].dataType
    if not isinstance(kind, StructType):
        raise OptionError(f"column 'properties' has the type {kind.simpleString()}", "give a struct")
    others = [F.col("properties").getField(name).alias(name) for name in kind.names if name != "content_type"]
    return F.struct(F.lit(content_type).alias("content_type"), *others)
