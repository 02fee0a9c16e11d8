"""Confluent's wire format: a byte 0 and the id of a schema, four bytes big-endian, in front of a body.

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
    known = WireFormat()
    for number in sorted(row["ids"]):
        schema = registry.serialized(number) if serialized else registry.schema(number)
        if schema is None:
            continue
        try:
            if schema.kind != kind:
                raise UnsupportedSchema(f"is {schema.kind}, not {kind}")
            check(schema)
            known.schemas[number] = schema
        except UnsupportedSchema as error:
            known.refused[number] = str(error)
    return known
