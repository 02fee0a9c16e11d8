"""The rows of staged files without Spark, for an operator who takes them out of an app.

Not here: appending them (``after/add_files.py``).
Invariant: the columns have the names and types of the rows that were appended, whatever names the table gives
them in its files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from connector.arrow_type import arrow_type
from connector.delta.before.staged_files import StagedFiles, physical
from connector.delta.table_files import TableFiles

_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2}))?")


class DeltaExportedFiles:
    """The files of one append to the table at ``location``; ``schema``: of its rows. Raises OSError,
    pyarrow.ArrowInvalid if this process cannot reach them.
    """

    def __init__(self, staged: StagedFiles, location: str, schema: StructType) -> None:
        self._files = TableFiles.at(location)
        table = StructType.fromJson(json.loads(staged.metadata["schemaString"]))
        self._fields = {column.name: column for column in table}
        self._schema = schema
        self._zone = staged.zone
        self._adds = dict(zip(staged.places, staged.files, strict=True))

    def __len__(self) -> int:
        return len(self._adds)

    def missing(self) -> list[str]:
        """Returns the paths of the files that are gone, in order."""
        return [str(self._files.path(place)) for place in self._files.missing(self._adds)]

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the files that are there."""
        lost = set(self._files.missing(self._adds))
        for place, add in self._adds.items():
            if place in lost:
                continue
            with pq.ParquetFile(self._files.path(place), coerce_int96_timestamp_unit="us") as file:
                for batch in file.iter_batches():
                    yield self._logical(batch, add["partitionValues"])

    def _logical(self, batch: pa.RecordBatch, partition: dict[str, str | None]) -> pa.RecordBatch:
        schema = pa.schema(arrow_type(self._schema))
        columns = []
        for column in schema:
            field = self._fields[column.name]
            name = physical(field)
            if name in partition and isinstance(field.dataType, TimestampType):
                values = pa.repeat(_instant(partition[name], self._zone), batch.num_rows)
            elif name in partition:
                values = pa.repeat(pa.scalar(partition[name], pa.string()), batch.num_rows)
            elif name in batch.schema.names:
                values = batch.column(name)
                values = values.view(_renamed(values.type, field.dataType))
            else:
                values = pa.nulls(batch.num_rows)
            columns.append(values.cast(column.type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _instant(text: str | None, zone: str) -> pa.Scalar:
    """A timestamp as Delta names a partition by it: in UTC, or as the clocks of ``zone`` show."""
    if text is None or text.endswith("Z"):
        return pa.scalar(text, pa.string()).cast(pa.timestamp("us", "UTC"))
    clock = pa.scalar(text).cast(pa.timestamp("us"))
    # Java takes the first one where the clocks show a time twice
    return pc.assume_timezone(
        clock, timezone=_arrow_zone(zone), ambiguous="earliest", nonexistent="latest"
    ).cast(pa.timestamp("us", "UTC"))


def _arrow_zone(zone: str) -> str:
    """Java's name of a zone as Arrow has it."""
    offset = _OFFSET.fullmatch(zone)
    if offset is None:
        return {"Z": "UTC"}.get(zone, zone)
    sign, hours, minutes = offset.groups(default="00")
    return f"{sign}{int(hours):02}:{minutes}"


def _renamed(stored: pa.DataType, logical: DataType) -> Any:
    """The type of a column in a file, with the names that the table has for its fields."""
    if isinstance(logical, StructType):
        fields = {physical(field): field for field in logical}
        return pa.struct(
            [
                pa.field(
                    fields[each.name].name, _renamed(each.type, fields[each.name].dataType), each.nullable
                )
                for each in stored
            ]
        )
    if isinstance(logical, ArrayType):
        return pa.list_(stored.value_field.with_type(_renamed(stored.value_type, logical.elementType)))
    if isinstance(logical, MapType):
        key, item = _renamed(stored.key_type, logical.keyType), _renamed(stored.item_type, logical.valueType)
        return pa.map_(stored.key_field.with_type(key), stored.item_field.with_type(item))
    return stored
