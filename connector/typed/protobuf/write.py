"""Rows as messages of Protobuf, by the package protobuf: the way back from ``read.py``.

Not here: descriptors (``descriptors.py``), the registry (``typed/registry/client.py``).
Invariant: a body has every value of its row that is not null. A column without a field, or two values of one
oneof, are an error.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    FloatType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from connector.typed.decode_udf import OverArrays, encode_each, once_in_task
from connector.typed.protobuf.descriptors import Descriptor, Descriptors, library
from connector.typed.protobuf.read import (
    DOUBLE,
    ENUM,
    GROUP,
    LONGEST_DURATION_S,
    MESSAGE,
    TYPES,
    WHOLE,
    Field,
    SchemaMismatch,
    fitted,
    is_map,
    known,
    name_of,
    wrapped,
)
from connector.typed.registry.client import RegisteredSchema
from connector.typed.registry.message_indexes import Indexes

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

Scalar = Callable[[Any], Any]  # from a value of a row to one of protobuf
Fill = Callable[[Any, Any], None]  # a message with a value of a row


def _encoder(header: bytes, schema: RegisteredSchema, indexes: Indexes, columns: StructType) -> OverArrays:
    """A function over structs of ``columns``: bodies of ``header`` and the message. It raises OptionError for
    a row that does not fit.
    """
    message = writing(Descriptors.of(schema).at(indexes), columns)
    return partial(encode_each, body_of=lambda value: header + message(value), format="Protobuf")


encoder = once_in_task(_encoder)


def writing(descriptor: Descriptor, columns: StructType) -> Callable[[dict[str, Any]], bytes]:
    """A function from the values of ``columns`` to a message. Raises SchemaMismatch; the function raises
    ValueError or what the library raises.
    """
    kind = library().messages.GetMessageClass(descriptor)
    fill = fitted(_struct, descriptor, columns)

    def write(value: dict[str, object]) -> bytes:
        message = kind()
        fill(message, value)
        # the same bytes in each execution: maps have an order
        body: bytes = kind.SerializeToString(message, deterministic=True)
        return body

    return write


def _struct(descriptor: Descriptor, columns: StructType, within: str) -> Fill:
    fills: list[tuple[str, Fill]] = []
    choices: dict[str, list[str]] = {}
    for column in columns.fields:
        path = f"{within}{column.name}"
        field = descriptor.fields_by_name.get(column.name)
        if field is None:
            raise SchemaMismatch(f"the message {descriptor.full_name} has no field for the column {path!r}")
        fills.append((column.name, _field(field, column.dataType, path)))
        if field.containing_oneof is not None:
            choices.setdefault(field.containing_oneof.name, []).append(column.name)
    exclusive = [names for names in choices.values() if len(names) > 1]

    def fill(message: Message, value: dict[str, object]) -> None:
        for names in exclusive:
            given = [name for name in names if value[name] is not None]
            if len(given) > 1:
                raise ValueError(f"{within}{given[0]} and {within}{given[1]} are of one oneof")
        for name, each in fills:
            if value[name] is not None:
                each(message, value[name])

    return fill


def _field(field: Field, kind: DataType, path: str) -> Fill:
    name = field.name
    if is_map(field):
        if not isinstance(kind, MapType):
            raise _misfit(field, kind, path)
        entry = field.message_type.fields_by_name
        key = _scalar(entry["key"], kind.keyType, f"{path}{{}}")
        return _map(name, entry["value"], key, kind.valueType, f"{path}{{}}")
    if field.is_repeated:
        if not isinstance(kind, ArrayType):
            raise _misfit(field, kind, path)
        return _repeated(field, kind.elementType, f"{path}[]")
    if field.type == MESSAGE:
        fill, is_there = _message(field, kind, path), _class(field).SetInParent

        def one(message: Message, value: object) -> None:
            within = getattr(message, name)
            is_there(within)  # also without fields
            fill(within, value)

        return one
    scalar = _scalar(field, kind, path)
    return lambda message, value: setattr(message, name, scalar(value))


def _map(name: str, of: Field, key: Scalar, kind: DataType, path: str) -> Fill:
    if of.type == MESSAGE:
        fill = _message(of, kind, path)

        def messages(message: Message, value: Any) -> None:
            target = getattr(message, name)
            for each, item in value.items():
                fill(target[key(each)], _given(item, path))

        return messages
    scalar = _scalar(of, kind, path)

    def entries(message: Message, value: Any) -> None:
        target = getattr(message, name)
        for each, item in value.items():
            target[key(each)] = scalar(_given(item, path))

    return entries


def _repeated(field: Field, kind: DataType, path: str) -> Fill:
    name = field.name
    if field.type == MESSAGE:
        fill = _message(field, kind, path)

        def elements(message: Message, value: Any) -> None:
            target = getattr(message, name)
            for item in value:
                fill(target.add(), _given(item, path))

        return elements
    scalar = _scalar(field, kind, path)
    return lambda message, value: getattr(message, name).extend(
        [scalar(_given(item, path)) for item in value]
    )


def _given(item: object, path: str) -> Any:
    if item is None:
        raise ValueError(f"field {path!r} has a null")
    return item


def _class(field: Field) -> Any:
    return library().messages.GetMessageClass(field.message_type)


def _message(field: Field, kind: DataType, path: str) -> Fill:
    of = wrapped(field)
    if isinstance(kind, StructType):
        return _struct(field.message_type, kind, f"{path}.")
    if of is not None:
        scalar = _scalar(of, kind, path)
        return lambda message, value: setattr(message, "value", scalar(value))
    if known(field) == kind:
        return _timestamp if isinstance(kind, TimestampType) else _duration
    raise _misfit(field, kind, path)


def _timestamp(message: Timestamp, value: datetime.datetime) -> None:
    message.FromDatetime(value)


def _duration(message: Duration, value: datetime.timedelta) -> None:
    message.FromTimedelta(value)
    if abs(message.seconds) > LONGEST_DURATION_S:
        raise ValueError("a duration is longer than 10,000 years")


def _scalar(field: Field, kind: DataType, path: str) -> Scalar:
    """The library checks that a number is not too large."""
    if field.type in (MESSAGE, GROUP):
        raise _misfit(field, kind, path)
    natural = TYPES[field.type][1]
    if field.type == ENUM and isinstance(kind, StringType):
        return _enum(field, path)
    if isinstance(kind, (*WHOLE, DecimalType)) and (
        field.type == ENUM or isinstance(natural, (*WHOLE, DecimalType))
    ):
        return _whole
    if isinstance(kind, type(natural)) or (field.type == DOUBLE and isinstance(kind, FloatType)):
        return _same
    raise _misfit(field, kind, path)


def _same(value: object) -> Any:
    return value


def _whole(value: Any) -> int:
    if value != int(value):
        raise ValueError(f"{value} is not a whole number")
    return int(value)


def _enum(field: Field, path: str) -> Scalar:
    names = {name: each.number for name, each in field.enum_type.values_by_name.items()}
    is_closed = field.enum_type.is_closed

    def number(value: str) -> int:
        if value in names:
            return int(names[value])
        if not is_closed and value.lstrip("-").isdecimal():  # as it is read
            return int(value)
        raise ValueError(f"field {path!r} is not of the enum {field.enum_type.full_name}: {value[:100]!r}")

    return number


def _misfit(field: Field, kind: DataType, path: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {path!r} is {kind.simpleString()}, and the field is {name_of(field)}")
