"""Rows as messages of Protobuf, by the package protobuf: the way back from ``read.py``.

Not here: descriptors (``descriptors.py``), the registry (``typed/registry/client.py``).
Invariant: a body has every value of its row that is not null. A column without a field, or two values of one
oneof, are an error.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

from pyspark.sql import types as T

from connector.typed.decode_udf import OverArrays, encode_each, once_in_task
from connector.typed.protobuf import read
from connector.typed.protobuf.descriptors import Descriptor, Descriptors, library
from connector.typed.registry.client import RegisteredSchema
from connector.typed.registry.wire_format import Indexes

Conversion = Callable[[Any], Any]  # from a value of a row to one that a message is made of

_STRUCT = "google.protobuf.Struct"
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_US = datetime.timedelta(microseconds=1)


def _encoder(header: bytes, schema: RegisteredSchema, indexes: Indexes, columns: T.StructType) -> OverArrays:
    """A function over structs of ``columns``: bodies of ``header`` and the message. It raises OptionError for
    a row that does not fit.
    """
    message = writing(Descriptors.of(schema).at(indexes), columns)
    return partial(encode_each, body_of=lambda value: header + message(value), format="Protobuf")


encoder = once_in_task(_encoder)


def writing(descriptor: Descriptor, columns: T.StructType) -> Callable[[dict[str, Any]], bytes]:
    """A function from the values of ``columns`` to a message. Raises SchemaMismatch; the function raises
    ValueError or what the library raises.
    """
    kind = library().messages.GetMessageClass(descriptor)
    fields = read.fitted(_struct, descriptor, columns)

    def write(value: dict[str, object]) -> bytes:
        # the same bytes in each execution: maps have an order
        body: bytes = kind.SerializeToString(kind(**fields(value)), deterministic=True)
        return body

    return write


def _struct(descriptor: Descriptor, columns: T.StructType, within: str) -> Conversion:
    conversions: list[tuple[str, Conversion]] = []
    choices: dict[str, list[str]] = {}
    for column in columns.fields:
        path = f"{within}{column.name}"
        field = descriptor.fields_by_name.get(column.name)
        if field is None:
            raise read.SchemaMismatch(
                f"the message {descriptor.full_name} has no field for the column {path!r}"
            )
        conversions.append((column.name, _field(field, column.dataType, path)))
        if field.containing_oneof is not None:
            choices.setdefault(field.containing_oneof.name, []).append(column.name)
    exclusive = [names for names in choices.values() if len(names) > 1]

    def fields(row: dict[str, object]) -> dict[str, Any]:
        for names in exclusive:
            set_ = [name for name in names if row[name] is not None]
            if len(set_) > 1:
                raise ValueError(f"{within}{set_[0]} and {within}{set_[1]} are of one oneof")
        return {name: convert(row[name]) for name, convert in conversions if row[name] is not None}

    return fields


def _field(field: read.Field, kind: T.DataType, path: str) -> Conversion:
    if read.is_map(field):
        if not isinstance(kind, T.MapType):
            raise read.misfit(field, kind, path)
        entry, path = field.message_type.fields_by_name, f"{path}{{}}"
        key, value = _scalar(entry["key"], kind.keyType, path), _one(entry["value"], kind.valueType, path)
        return lambda row: {key(each): value(_not_null(item, path)) for each, item in row.items()}
    if field.is_repeated:
        if not isinstance(kind, T.ArrayType):
            raise read.misfit(field, kind, path)
        path = f"{path}[]"
        element = _one(field, kind.elementType, path)
        return lambda row: [element(_not_null(item, path)) for item in row]
    return _one(field, kind, path)


def _not_null(item: object, path: str) -> Any:
    if item is None:
        raise ValueError(f"field {path!r} has a null")
    return item


def _one(field: read.Field, kind: T.DataType, path: str) -> Conversion:
    if field.type != read.MESSAGE:
        return _scalar(field, kind, path)
    of = read.wrapped(field)
    if isinstance(kind, T.StructType):
        fields = _struct(field.message_type, kind, f"{path}.")
        if field.message_type.full_name != _STRUCT:
            return fields
        message = library().messages.GetMessageClass(field.message_type)
        return lambda row: message(**fields(row))  # a dict would be what it is to hold
    if of is not None:
        scalar = _scalar(of, kind, path)
        return lambda value: {"value": scalar(value)}
    if read.well_known_type(field) == kind:
        return _timestamp if isinstance(kind, T.TimestampType) else _duration
    raise read.misfit(field, kind, path)


def _timestamp(value: datetime.datetime) -> dict[str, int]:
    seconds, us = divmod((value - _EPOCH) // _US, 1_000_000)
    return {"seconds": seconds, "nanos": us * 1_000}


def _duration(value: datetime.timedelta) -> dict[str, int]:
    seconds, us = divmod(abs(value) // _US, 1_000_000)
    if seconds > read.LONGEST_DURATION_S:
        raise ValueError("a duration is longer than 10,000 years")
    sign = -1 if value.days < 0 else 1
    return {"seconds": sign * seconds, "nanos": sign * us * 1_000}


def _scalar(field: read.Field, kind: T.DataType, path: str) -> Conversion:
    """The library checks that a number is not too large."""
    if field.type in (read.MESSAGE, read.GROUP):
        raise read.misfit(field, kind, path)
    natural = read.TYPES[field.type][1]
    if field.type == read.ENUM and isinstance(kind, T.StringType):
        return _enum(field, path)
    if isinstance(kind, (*read.WHOLE, T.DecimalType)) and (
        field.type == read.ENUM or isinstance(natural, (*read.WHOLE, T.DecimalType))
    ):
        return _whole
    if isinstance(kind, type(natural)) or (field.type == read.DOUBLE and isinstance(kind, T.FloatType)):
        return read.same
    raise read.misfit(field, kind, path)


def _whole(value: Any) -> int:
    if value != int(value):
        raise ValueError(f"{value} is not a whole number")
    return int(value)


def _enum(field: read.Field, path: str) -> Conversion:
    names = {name: each.number for name, each in field.enum_type.values_by_name.items()}
    is_closed = field.enum_type.is_closed

    def number(value: str) -> int:
        if value in names:
            return int(names[value])
        if not is_closed and value.lstrip("-").isdecimal():  # as it is read
            return int(value)
        raise ValueError(f"field {path!r} is not of the enum {field.enum_type.full_name}: {value[:100]!r}")

    return number
