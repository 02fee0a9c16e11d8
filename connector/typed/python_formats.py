"""The formats that Python decodes: Avro and Protobuf, with a registry or without, and JSON that is validated.

Not here: the formats of Spark (``formats.py``), the registry (``typed/registry/client.py``).
Invariant: a schema that no body can be read with makes the bodies of its id broken, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from broker_core.core.errors import OptionError
from connector.sql import nullable, quoted
from connector.typed import avro, json_schema
from connector.typed.decode_udf import FAULT, VALUE, UnsupportedSchema, over_columns
from connector.typed.formats import Fault, Format, schema_of
from connector.typed.protobuf import read
from connector.typed.protobuf.descriptors import Descriptors, descriptor_of, library, of_set
from connector.typed.protobuf.read import SchemaMismatch
from connector.typed.registry.client import RegisteredSchema, SchemaRegistry
from connector.typed.registry.wire_format import (
    FIRST,
    Indexes,
    WireFormat,
    header,
    schema_id,
    wire_format,
    written_indexes,
)

_TEXT = "text"
_ID, _BODY = "id", "body"


@dataclass(frozen=True)
class Binary(Format):
    """``parse``: bodies with an id to structs of ``decode_udf.py``. ``prefix``: what bodies lack of one."""

    name: str
    schema: StructType
    parse: Callable[[Column], Column]
    prefix: bytes

    def encoded(self, body: Column, text: Column) -> Column:
        del text
        return F.concat(F.lit(self.prefix), body) if self.prefix else body

    def parsed(self, encoded: Column) -> Column:
        return self.parse(encoded)

    def value(self, parsed: Column) -> Column:
        return parsed.getField(VALUE)

    def faults(self, parsed: Column, text: Column) -> Iterator[Fault]:
        del text
        yield parsed.getField(FAULT).isNotNull(), parsed.getField(FAULT)
        yield parsed.getField(VALUE).isNull(), f"the body is not {self.name} of the schema"


@dataclass(frozen=True)
class Validated(Format):
    """``format``: of JSON, whose bodies are also validated against the schema of their id, ``number``."""

    schema: StructType
    format: Format
    number: Column
    check: Callable[[Column, Column], Column]

    def encoded(self, body: Column, text: Column) -> Column:
        encoded = self.format.encoded(body, text)
        return F.struct(encoded.alias(_TEXT), self.number.alias(_ID), body.alias(_BODY))

    def parsed(self, encoded: Column) -> Column:
        fault = self.check(encoded.getField(_ID), encoded.getField(_BODY))
        return F.struct(self.format.parsed(encoded.getField(_TEXT)).alias(VALUE), fault.alias(FAULT))

    def value(self, parsed: Column) -> Column:
        return self.format.value(parsed.getField(VALUE))

    def faults(self, parsed: Column, text: Column) -> Iterator[Fault]:
        yield from self.format.faults(parsed.getField(VALUE), text)
        yield parsed.getField(FAULT).isNotNull(), parsed.getField(FAULT)


# -- what the arguments of decode say ------------------------------------------------------------------------


def registered_json(
    df: DataFrame, column: str, plain: Format, registry: SchemaRegistry, validate: bool
) -> tuple[Format, WireFormat]:
    """Raises OptionError, RegistryFailed, LoginRefused; so do the functions below."""
    if not validate:
        return plain, wire_format(df, column, registry, "JSON", lambda _schema: None)
    json_schema.library()
    wire = wire_format(df, column, registry, "JSON", json_schema.validator)
    check = over_columns(json_schema.checker(wire.schemas), StringType())
    return Validated(plain.schema, plain, schema_id(F.col(quoted(column))), check), wire


def registered_avro(
    df: DataFrame, column: str, schema: Any, registry: SchemaRegistry, subject: str | None
) -> tuple[Format, WireFormat]:
    if (schema is None) == (subject is None) or not isinstance(schema or subject, str):
        raise OptionError("avro with a registry needs a schema or a subject", "give one of them, as text")
    reader = (schema,) if subject is None else registry.latest(subject, "AVRO").texts
    columns = avro.columns_of(reader)
    _binary("Avro", columns, avro.decoder({}, reader))  # before the rows are read
    wire = wire_format(df, column, registry, "AVRO", lambda found: avro.AvroSchema.of(found.texts))
    writers = {number: found.texts for number, found in wire.schemas.items()}
    return _binary("Avro", columns, avro.decoder(writers, reader)), wire


def plain_avro(schema: object) -> Format:
    """Raises OptionError; so does the function below."""
    reader = (avro.text_of(schema),)
    return _binary("Avro", avro.columns_of(reader), avro.decoder({0: reader}, reader), header(0))


def plain_protobuf(schema: object) -> Format:
    own, indexes, columns = _message_of_set(schema)
    decoder = read.decoder({0: own}, columns)
    return _binary("Protobuf", columns, decoder, header(0) + written_indexes(indexes))


def registered_protobuf(
    df: DataFrame, column: str, schema: Any, registry: SchemaRegistry, subject: str | None
) -> tuple[Format, WireFormat]:
    library()
    own, allowed = None, None
    if isinstance(schema, tuple):
        if subject is not None:
            raise OptionError("decode of protobuf got a descriptor set and a subject", "give one of them")
        own, allowed, columns = _message_of_set(schema)
    elif schema is None and subject is None:
        raise OptionError(
            "protobuf with a registry needs a schema or a subject",
            "give the columns as schema, or (name of the message, descriptor set), or a subject",
        )
    else:
        columns = StructType() if schema is None else schema_of(schema)
        if subject is not None:
            columns = _columns_of_subject(registry, subject, columns)
    strange = read.unknown(columns, "")
    if strange is not None:
        raise OptionError(f"Protobuf has no type for {strange}", "give another type, and cast it")
    _binary("Protobuf", columns, read.decoder({}, columns))  # before the rows are read
    wire = wire_format(
        df,
        column,
        registry,
        "PROTOBUF",
        Descriptors.of if own is None else lambda _schema: None,
        serialized=own is None,
    )
    schemas = wire.schemas if own is None else dict.fromkeys(wire.schemas, own)
    return _binary("Protobuf", columns, read.decoder(schemas, columns, allowed)), wire


def _binary(
    name: str, columns: StructType, decoder: Callable[[object], object], prefix: bytes = b""
) -> Binary:
    found = schema_of(nullable(columns))
    kind = StructType([StructField(VALUE, found), StructField(FAULT, StringType())])
    return Binary(name, found, over_columns(decoder, kind), prefix)


def _message_of_set(source: object) -> tuple[RegisteredSchema, Indexes, StructType]:
    try:
        schema, indexes = of_set(*descriptor_of(source))
        return schema, indexes, read.columns_of(Descriptors.of(schema).at(indexes))
    except UnsupportedSchema as error:
        raise OptionError(f"the descriptor set {error}", "give another message, or another set") from None


def _columns_of_subject(registry: SchemaRegistry, subject: str, columns: StructType) -> StructType:
    """``columns``, which the first message of the newest schema has to have; if it is empty, all columns."""
    _, schema = registry.latest_serialized(subject)
    try:
        descriptor = Descriptors.of(schema).at(FIRST)
        if not columns.names:
            return read.columns_of(descriptor)
        missing = [name for name in columns.names if name not in descriptor.fields_by_name]
        if missing:
            raise SchemaMismatch(f"the message {descriptor.full_name} has no field {missing[0]!r}")
        read.reading(descriptor, columns)
    except UnsupportedSchema as error:
        raise OptionError(f"the newest schema of subject {subject!r} {error}", "or name another") from None
    except SchemaMismatch as error:
        raise OptionError(f"subject {subject!r} does not fit the schema: {error}", "change a type") from None
    return columns
