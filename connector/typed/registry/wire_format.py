"""Confluent's wire format: a byte 0 and the id of a schema, four bytes big-endian, in front of a body.

Of Protobuf, the indexes of a message follow, which say what type of the schema it is: zigzag varints, first
how many follow, then the index of a top-level message, of one that is nested in it, and so on. The one byte 0
stands for the first message.
Not here: the registry (``client.py``), the formats.
Invariant: the driver asks for the ids of a frame once, before anything is staged. So each execution of the
frame judges a body alike, whatever becomes of the registry meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType

from broker_core.core.errors import OptionError
from connector.sql import quoted
from connector.typed.decode_udf import HEADER_BYTES, UnsupportedSchema
from connector.typed.registry.client import RegisteredSchema, SchemaRegistry

NO_HEADER = "the body does not begin with the id of a schema (a byte 0 and four bytes)"
_LONGEST = (1 << 31) - 1

Indexes = tuple[int, ...]

FIRST: Indexes = (0,)
_MOST_BYTES = 5  # of a varint: an index is an int of Java
_DEEPEST = 100  # messages within each other, as the parser of Protobuf limits them


@dataclass(frozen=True)
class WireFormat:
    """``schemas``: what may be read, by id. ``refused``: why others may not."""

    schemas: dict[int, RegisteredSchema] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def faults(self, body: Column) -> Iterator[tuple[Column, Column | str]]:
        number = schema_id(body)
        yield number.isNull(), NO_HEADER
        reason = F.concat(F.lit("schema id "), number.cast("string"), F.lit(" is not in the schema registry"))
        for refused, why in self.refused.items():
            reason = F.when(number == refused, F.lit(f"schema id {refused} {why}")).otherwise(reason)
        yield ~number.isin(*self.schemas) if self.schemas else F.lit(True), reason


def payload(body: Column) -> Column:
    """What follows the id."""
    return F.substring(body, HEADER_BYTES + 1, _LONGEST)


def schema_id(body: Column) -> Column:
    """The id in front of a body (bigint); null where there is none."""
    is_there = (F.length(body) >= HEADER_BYTES) & (F.substring(body, 1, 1) == F.lit(b"\0"))
    return F.when(is_there, F.conv(F.hex(F.substring(body, 2, 4)), 16, 10).cast("bigint"))


def header(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")


def wire_format(
    frame: DataFrame,
    column: str,
    registry: SchemaRegistry,
    kind: str,
    check: Callable[[RegisteredSchema], object],
    *,
    serialized: bool = False,
) -> WireFormat:
    """Reads the ids in ``column``, and asks for their schemas. ``check`` raises UnsupportedSchema.
    ``serialized``: those of Protobuf as descriptors. Raises OptionError, RegistryFailed, LoginRefused.
    """
    if frame.isStreaming:
        raise OptionError(
            "decode with a registry got a stream, whose ids are not known before it runs",
            "decode in foreachBatch, or a batch read",
        )
    if not isinstance(frame.schema[column].dataType, BinaryType):
        raise OptionError(
            f"decode with a registry needs a binary column, and {column!r} is a string", "give the bytes"
        )
    (row,) = frame.agg(F.collect_set(schema_id(F.col(quoted(column)))).alias("ids")).collect()
    form = WireFormat()
    for number in sorted(row["ids"]):
        schema = registry.serialized(number) if serialized else registry.schema(number)
        if schema is None:
            continue
        try:
            if schema.kind != kind:
                raise UnsupportedSchema(f"is {schema.kind}, not {kind}")
            check(schema)
            form.schemas[number] = schema
        except UnsupportedSchema as error:
            form.refused[number] = str(error)
    return form


def read_indexes(body: bytes, at: int) -> tuple[Indexes, int]:
    """The indexes at ``at``, and where the message begins. Raises ValueError."""
    count, at = _varint(body, at)
    if count == 0:
        return FIRST, at
    if not 0 < count <= _DEEPEST:
        raise ValueError(f"there are {count}")
    found = []
    for _ in range(count):
        index, at = _varint(body, at)
        if index < 0:
            raise ValueError(f"one is {index}")
        found.append(index)
    return tuple(found), at


def written_indexes(indexes: Indexes) -> bytes:
    return b"\0" if indexes == FIRST else b"".join(map(_bytes, (len(indexes), *indexes)))


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A zigzag varint of an int of Java, and where it ends."""
    value = 0
    for number, byte in enumerate(body[at : at + _MOST_BYTES]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            if value >> 32:
                break
            return (value >> 1) ^ -(value & 1), at + number + 1
    raise ValueError("one has no end")


def _bytes(number: int) -> bytes:
    rest = number << 1  # none is negative
    found = bytearray()
    while rest > 0x7F:
        found.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((*found, rest))
