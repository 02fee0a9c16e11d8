"""The formats of bodies whose schemas a registry has: Avro, Protobuf, and JSON that is validated.

Not here: formats without a registry (``formats.py``), the registry (``typed/registry/client.py``).
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
from connector.sql import quoted
from connector.typed import avro, json_schema
from connector.typed.decode_udf import FAULT, VALUE, over_columns
from connector.typed.formats import Fault, Format, FromPackage, schema_of
from connector.typed.protobuf import read
from connector.typed.protobuf.descriptors import Descriptors, UnsupportedSchema, descriptor_of, library
from connector.typed.protobuf.read import OwnType, SchemaMismatch, nullable
from connector.typed.registry.client import RegisteredSchema, SchemaRegistry
from connector.typed.registry.message_indexes import FIRST
from connector.typed.registry.wire_format import WireFormat, schema_id, wire_format

_TEXT = "text"
_ID, _BODY = "id", "body"


class Registered(FromPackage):
    """``parse``: bodies with an id to structs of ``decode_udf.py``."""

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
    wire = wire_format(df, column, registry, "JSON", json_schema.unusable)
    check = over_columns(json_schema.checker(wire.schemas), StringType())
    return Validated(plain.schema, plain, schema_id(F.col(quoted(column))), check), wire


def registered_avro(
    df: DataFrame, column: str, schema: Any, registry: SchemaRegistry, subject: str | None
) -> tuple[Format, WireFormat]:
    if (schema is None) == (subject is None) or not isinstance(schema or subject, str):
        raise OptionError("avro with a registry needs a schema or a subject", "give one of them, as text")
    reader = (schema,) if subject is None else registry.latest(subject, "AVRO").texts
    columns = avro.columns_of(reader)
    _registered("Avro", columns, avro.decoder({}, reader))  # before the rows are read
    wire = wire_format(df, column, registry, "AVRO", lambda found: avro.unreadable(found.texts))
    writers = {number: found.texts for number, found in wire.schemas.items()}
    return _registered("Avro", columns, avro.decoder(writers, reader)), wire


def registered_protobuf(
    df: DataFrame, column: str, schema: Any, registry: SchemaRegistry, subject: str | None
) -> tuple[Format, WireFormat]:
    library()
    own: OwnType | None = None
    if isinstance(schema, tuple):
        if subject is not None:
            raise OptionError("decode of protobuf got a descriptor set and a subject", "give one of them")
        own = OwnType(*descriptor_of(schema))
        columns = _columns_of_set(own)
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
    _registered("Protobuf", columns, read.decoder({}, columns, own))  # before the rows are read
    wire = wire_format(
        df,
        column,
        registry,
        "PROTOBUF",
        _undescribed if own is None else lambda _schema: None,
        serialized=own is None,
    )
    return _registered("Protobuf", columns, read.decoder(wire.schemas, columns, own)), wire


def _registered(name: str, columns: StructType, decoder: Callable[[object], object]) -> Registered:
    found = schema_of(nullable(columns))
    kind = StructType([StructField(VALUE, found), StructField(FAULT, StringType())])
    return Registered(name, over_columns(decoder, kind), found)


def _columns_of_set(own: OwnType) -> StructType:
    try:
        files, indexes = own.found()
        return read.columns_of(files.at(indexes))
    except UnsupportedSchema as error:
        raise OptionError(f"the descriptor set {error}", "give another message, or another set") from None


def _columns_of_subject(registry: SchemaRegistry, subject: str, given: StructType) -> StructType:
    """``given``, which the first message of the newest schema has to have; if it is empty, all columns."""
    _, schema = registry.latest_serialized(subject)
    try:
        descriptor = Descriptors.of(schema.texts[-1], schema.named).at(FIRST)
        if not given.names:
            return read.columns_of(descriptor)
        missing = [name for name in given.names if name not in descriptor.fields_by_name]
        if missing:
            raise SchemaMismatch(f"the message {descriptor.full_name} has no field {missing[0]!r}")
        read.reading(descriptor, given)
    except UnsupportedSchema as error:
        raise OptionError(f"the newest schema of subject {subject!r} {error}", "or name another") from None
    except SchemaMismatch as error:
        raise OptionError(f"subject {subject!r} does not fit the schema: {error}", "change a type") from None
    return given


def _undescribed(schema: RegisteredSchema) -> str | None:
    """Why bodies of a schema of Protobuf cannot be read; None if they can."""
    try:
        Descriptors.of(schema.texts[-1], schema.named)
    except UnsupportedSchema as error:
        return str(error)
    return None
