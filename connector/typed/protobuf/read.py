"""Protobuf by the package protobuf: types of message as types of Spark, and bodies as values of Arrow.

Spark's own functions read a damaged body as a row of nulls, and take one descriptor for all rows of a frame.
With a schema registry, each body has the id and the message indexes of its own.
Not here: descriptors (``descriptors.py``), ids (``typed/registry/wire_format.py``), the way back
(``write.py``).
Invariant: a body is good only if it is a message of its type, and every column could be filled from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import types as T

from connector.arrow_type import arrow_type
from connector.sql import nullable
from connector.typed.decode_udf import (
    HEADER_BYTES,
    DecodedBody,
    UnsupportedSchema,
    decode_each,
    fault_text,
    once_in_task,
)
from connector.typed.protobuf.descriptors import Descriptor, Descriptors, library
from connector.typed.registry.client import RegisteredSchema
from connector.typed.registry.wire_format import Indexes, read_indexes

if TYPE_CHECKING:
    from google.protobuf.message import Message

Field = Any  # a FieldDescriptor of google.protobuf
Reading = Callable[[Any], Any]  # from a value of protobuf to one that Arrow takes

# numbers of FieldDescriptorProto.Type
DOUBLE, FLOAT, INT64, INT32, GROUP, MESSAGE, ENUM = 1, 2, 3, 5, 10, 11, 14
TYPES: dict[int, tuple[str, T.DataType]] = {
    DOUBLE: ("double", T.DoubleType()),
    FLOAT: ("float", T.FloatType()),
    INT64: ("int64", T.LongType()),
    4: ("uint64", T.DecimalType(20, 0)),
    INT32: ("int32", T.IntegerType()),
    6: ("fixed64", T.DecimalType(20, 0)),
    7: ("fixed32", T.LongType()),
    8: ("bool", T.BooleanType()),
    9: ("string", T.StringType()),
    12: ("bytes", T.BinaryType()),
    13: ("uint32", T.LongType()),
    ENUM: ("enum", T.StringType()),
    15: ("sfixed32", T.IntegerType()),
    16: ("sfixed64", T.LongType()),
    17: ("sint32", T.IntegerType()),
    18: ("sint64", T.LongType()),
}
_INTEGERS = (T.IntegerType, T.LongType, T.DecimalType)  # of the types above
WHOLE = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
LONGEST_DURATION_S = 315_576_000_000
_NANOS = 1_000_000_000
_KNOWN: dict[str, T.DataType] = {
    "google.protobuf.Timestamp": T.TimestampType(),
    "google.protobuf.Duration": T.DayTimeIntervalType(),
}
_WRAPPERS = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_MOST_COLUMNS = 10_000  # of a type of message, with those within them


class SchemaMismatch(ValueError):
    """A column that no message of a type has a value for; the text says which, and why."""


class _Null(ValueError):
    """A null in a column that allows none."""


def is_map(field: Field) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def wrapped(field: Field) -> Field | None:
    """The value within a wrapper, such as Int32Value; None if the field has no such type."""
    if field.type == MESSAGE and field.message_type.full_name in _WRAPPERS:
        value = field.message_type.fields_by_name.get("value")
        if value is not None and value.type in TYPES and not value.is_repeated:
            return value
    return None


def well_known_type(field: Field) -> T.DataType | None:
    """The type of Spark for a Timestamp or a Duration; None for others. A schema may declare its own of this
    name.
    """
    if field.type != MESSAGE:
        return None
    parts = {each.name: (each.type, each.is_repeated) for each in field.message_type.fields}
    is_whole = parts == {"seconds": (INT64, False), "nanos": (INT32, False)}
    return _KNOWN.get(field.message_type.full_name) if is_whole else None


# -- columns -------------------------------------------------------------------------------------------------


def columns_of(descriptor: Descriptor) -> T.StructType:
    """A column for each field of a type of message. Raises UnsupportedSchema."""
    try:
        columns = _Columns().struct(descriptor, ())
    except UnsupportedSchema:
        raise
    except Exception as error:  # of any class: a map without a key, for one
        raise UnsupportedSchema(
            f"has the message {descriptor.full_name}, which is damaged ({fault_text(error)})"
        ) from None
    if not columns.fields:
        raise UnsupportedSchema(f"has no field in the message {descriptor.full_name}")
    return columns


class _Columns:
    def __init__(self) -> None:
        self._left = _MOST_COLUMNS

    def struct(self, descriptor: Descriptor, within: tuple[str, ...]) -> T.StructType:
        if descriptor.full_name in within:
            raise UnsupportedSchema(f"has the type {descriptor.full_name} within itself: give the columns")
        fields = []
        for each in descriptor.fields:
            self._left -= 1
            if self._left < 0:
                raise UnsupportedSchema(f"has more than {_MOST_COLUMNS:,} columns: give those that you need")
            fields.append(T.StructField(each.name, self._field(each, (*within, descriptor.full_name))))
        return T.StructType(fields)

    def _field(self, field: Field, within: tuple[str, ...]) -> T.DataType:
        if is_map(field):
            entry = field.message_type.fields_by_name
            return T.MapType(self._one(entry["key"], within), self._one(entry["value"], within))
        return T.ArrayType(self._one(field, within)) if field.is_repeated else self._one(field, within)

    def _one(self, field: Field, within: tuple[str, ...]) -> T.DataType:
        field = wrapped(field) or field
        if field.type == GROUP:
            raise UnsupportedSchema(f"has the group {field.full_name}: give the columns without it")
        if field.type != MESSAGE:
            return TYPES[field.type][1]
        return well_known_type(field) or self.struct(field.message_type, within)


def unknown(kind: T.DataType, path: str) -> str | None:
    """The first column whose type no field of Protobuf can have; None if there is none."""
    if isinstance(kind, T.StructType):
        within = f"{path}." if path else ""
        found = (unknown(each.dataType, f"{within}{each.name}") for each in kind.fields)
        return next((each for each in found if each is not None), None)
    if isinstance(kind, T.ArrayType) and not isinstance(kind.elementType, (T.ArrayType, T.MapType)):
        return unknown(kind.elementType, f"{path}[]")
    if isinstance(kind, T.MapType) and not isinstance(kind.valueType, (T.ArrayType, T.MapType)):
        if isinstance(kind.keyType, (T.StringType, T.BooleanType, *WHOLE, T.DecimalType)):
            return unknown(kind.valueType, f"{path}{{}}")
    elif isinstance(kind, (*WHOLE, *map(type, (*_KNOWN.values(), *(each for _, each in TYPES.values()))))):
        return None
    return f"column {path!r} of type {kind.simpleString()}"


# -- values --------------------------------------------------------------------------------------------------


def reading(descriptor: Descriptor, columns: T.StructType) -> Callable[[bytes], dict[str, Any]]:
    """A function from a message to the values of ``columns``. Raises SchemaMismatch; the function raises
    ValueError or what the library raises.
    """
    kind = library().messages.GetMessageClass(descriptor)
    # of the class, because a field may have the name of a method
    parse, is_whole, lacks = kind.FromString, kind.IsInitialized, kind.FindInitializationErrors
    values = fitted(_struct, descriptor, columns)

    def read_message(data: bytes) -> dict[str, Any]:
        message = parse(data)
        if not is_whole(message):
            raise ValueError(f"it lacks the required field {lacks(message)[0]!r}")
        found: dict[str, object] = values(message)
        return found

    return read_message


def fitted(
    make: Callable[[Descriptor, T.StructType, str], object], descriptor: Descriptor, columns: T.StructType
) -> Any:
    """What is made of a type of message and columns. Raises SchemaMismatch."""
    try:
        return make(descriptor, columns, "")
    except SchemaMismatch:
        raise
    except Exception as error:  # of any class: a map without a key, for one
        raise SchemaMismatch(f"the message {descriptor.full_name} is damaged ({fault_text(error)})") from None


def _struct(descriptor: Descriptor, columns: T.StructType, within: str) -> Reading:
    has = library().messages.GetMessageClass(descriptor).HasField
    readings = []
    for column in columns.fields:
        path = f"{within}{column.name}"
        field = descriptor.fields_by_name.get(column.name)
        # a type of message without the field, such as an older one
        found: Reading = (
            (lambda message: None) if field is None else _field(field, column.dataType, path, has)
        )
        readings.append((column.name, found if column.nullable else _not_null(found, path)))
    return lambda message: {name: value(message) for name, value in readings}


def _not_null(value: Reading, path: str) -> Reading:
    def checked(message: Message) -> Any:
        found = value(message)
        if found is None:
            raise _Null(f"field {path!r} is missing or null")
        return found

    return checked


def _field(field: Field, kind: T.DataType, path: str, has: Callable[[object, str], bool]) -> Reading:
    name = field.name
    if is_map(field):
        if not isinstance(kind, T.MapType):
            raise misfit(field, kind, path)
        entry = field.message_type.fields_by_name
        key = _one(entry["key"], kind.keyType, f"{path}{{}}")
        value = _one(entry["value"], kind.valueType, f"{path}{{}}")
        return lambda message: [(key(each), value(of)) for each, of in getattr(message, name).items()]
    if field.is_repeated:
        if not isinstance(kind, T.ArrayType):
            raise misfit(field, kind, path)
        element = _one(field, kind.elementType, f"{path}[]")
        return lambda message: [element(each) for each in getattr(message, name)]
    one = _one(field, kind, path)
    if field.has_presence:
        return lambda message: one(getattr(message, name)) if has(message, name) else None
    return lambda message: one(getattr(message, name))


def _one(field: Field, kind: T.DataType, path: str) -> Reading:
    """A function over single values: those of the field, or of its elements."""
    within = wrapped(field)
    if isinstance(kind, T.StructType) and field.type == MESSAGE:
        return _struct(field.message_type, kind, f"{path}.")
    if within is not None:
        value = _one(within, kind, path)
        return lambda message: value(message.value)
    if well_known_type(field) == kind:
        # microseconds since 1970; the library raises ValueError outside the years 1 to 9999
        is_time = isinstance(kind, T.TimestampType)
        return (lambda message: int(message.ToMicroseconds())) if is_time else _duration
    if field.type == ENUM and isinstance(kind, T.StringType):
        names = {each.number: each.name for each in reversed(field.enum_type.values)}
        return lambda number: names.get(number) or str(number)
    if field.type not in TYPES or not _holds(kind, field.type):
        raise misfit(field, kind, path)
    return Decimal if isinstance(kind, T.DecimalType) else same


def same(value: object) -> Any:
    return value


def _duration(message: Message) -> int:
    """Microseconds."""
    seconds, nanos = message.seconds, message.nanos
    if abs(seconds) > LONGEST_DURATION_S or abs(nanos) >= _NANOS or seconds * nanos < 0:
        raise ValueError("a duration is longer than 10,000 years, or has two signs")
    return int(seconds * 1_000_000 + (abs(nanos) // 1_000) * (1 if nanos > 0 else -1))


def _holds(kind: T.DataType, number: int) -> bool:
    """Whether a column may have the values of this type. Arrow refuses an integer that is too large."""
    natural = TYPES[number][1]
    if number == ENUM:
        return isinstance(kind, WHOLE)
    if isinstance(natural, _INTEGERS):
        return isinstance(kind, (*WHOLE, T.DecimalType))
    return isinstance(kind, type(natural)) or (number == FLOAT and isinstance(kind, T.DoubleType))


def misfit(field: Field, kind: T.DataType, path: str) -> SchemaMismatch:
    return SchemaMismatch(f"field {path!r} is {name_of(field)}, not {kind.simpleString()}")


def name_of(field: Field) -> str:
    """The type of a field, as a .proto file has it."""
    if is_map(field):
        entry = field.message_type.fields_by_name
        return f"map<{name_of(entry['key'])}, {name_of(entry['value'])}>"
    if field.type == GROUP:
        return "a group"
    name = TYPES[field.type][0] if field.type in TYPES else field.message_type.full_name
    return f"repeated {name}" if field.is_repeated else str(name)


# -- bodies, in tasks ----------------------------------------------------------------------------------------


class _Decoder:
    """A function over bodies with an id: structs of ``value``, of ``columns``, and ``fault`` (string). Both
    are null for an id that is not in ``schemas``. ``allowed``: of the one message that bodies may be.
    """

    def __init__(
        self, schemas: Mapping[int, RegisteredSchema], columns: T.StructType, allowed: Indexes | None = None
    ) -> None:
        self._columns = columns
        self._type = arrow_type(nullable(columns))
        self._allowed = allowed
        self._files = {number: Descriptors.of(schema) for number, schema in schemas.items()}
        # by id and indexes, which are of types that exist; a text says why its messages cannot be read
        self._readings: dict[tuple[int, Indexes], Callable[[bytes], Any] | str] = {}

    def __call__(self, bodies: pa.Array) -> pa.Array:
        return decode_each(bodies, self._one, self._type)

    def _one(self, number: int, body: bytes) -> DecodedBody:
        if number not in self._files:
            return None, None
        try:
            indexes, at = read_indexes(body, HEADER_BYTES)
        except ValueError as error:
            return None, f"the body has no message indexes behind the id of its schema: {error}"
        try:
            found = self._readings.get((number, indexes)) or self._reading(number, indexes)
        except UnsupportedSchema as error:
            return None, f"schema id {number} {error}"
        if isinstance(found, str):
            return None, found
        try:
            return found(body[at:]), None
        except _Null as error:
            return None, str(error)
        except Exception as error:  # of any class, for any damage
            return None, f"the body is not Protobuf of the schema ({fault_text(error)})"

    def _reading(self, number: int, indexes: Indexes) -> Callable[[bytes], Any] | str:
        """Raises UnsupportedSchema if there is no such type."""
        if self._allowed not in (None, indexes):
            allowed = self._files[number].at(self._allowed).full_name
            return f"message {list(indexes)} of schema id {number} is not {allowed}"
        descriptor = self._files[number].at(indexes)
        found: Callable[[bytes], object] | str
        try:
            found = reading(descriptor, self._columns)
        except SchemaMismatch as error:
            found = f"the message {descriptor.full_name} of schema id {number} does not fit: {error}"
        self._readings[number, indexes] = found
        return found


decoder = once_in_task(_Decoder)
