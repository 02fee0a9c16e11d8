"""The state of a broker as DataFrames: ``option("table", ...)``. What it is, docs/spark.md says.

Not here: who may see what (the engine), and reading messages (``stream/source.py``).
Invariants: nothing changes by a read. A list is that of the moment when the read is planned; the history and
the ledger are read page by page in a task.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from broker_core.admin import PAGE, Admin
from broker_core.engine import Engine
from broker_core.errors import OptionError
from broker_core.message.message import TIMESTAMP
from connector.options import TableOptions

Row = dict[str, Any]
_TEXT, _NUMBER, _SECONDS, _FLAG, _TIME = (
    StringType(),
    LongType(),
    DoubleType(),
    BooleanType(),
    TimestampType(),
)
_ARROW: dict[type[DataType], pa.DataType] = {
    StringType: pa.string(),
    LongType: pa.int64(),
    DoubleType: pa.float64(),
    BooleanType: pa.bool_(),
    TimestampType: TIMESTAMP,
}


def _struct(**fields: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in fields.items()])


_SPAN = _struct(start=_NUMBER, end=_NUMBER)  # offsets, the end is not in it
_TABLES = ArrayType(
    _struct(table=_TEXT, operation=_TEXT, rows=_NUMBER, applied=_FLAG, refused=_TEXT, version=_NUMBER)
)
_EFFECTS = ArrayType(
    _struct(effect=_TEXT, queue=_TEXT, entries=_NUMBER, ranges=ArrayType(_SPAN), exact=_FLAG, source=_TEXT)
)
SCHEMAS: dict[str, StructType] = {
    "transactions": _struct(
        sequence=_NUMBER,
        committed_at=_TIME,
        vhost=_TEXT,
        door=_TEXT,
        user=_TEXT,
        client=_TEXT,
        address=_TEXT,
        xid=_TEXT,
        app_id=_TEXT,
        query_id=_TEXT,
        batch_id=_NUMBER,
        ledger_sequence=_NUMBER,
        effects=_EFFECTS,
        tables=_TABLES,
        left_out=_NUMBER,
    ),
    "ledger": _struct(
        app_id=_TEXT,
        sequence=_NUMBER,
        query_id=_TEXT,
        batch_id=_NUMBER,
        transaction=_NUMBER,
        committed_at=_TIME,
        ranges=MapType(_TEXT, _SPAN),
        messages=_NUMBER,
        published=_NUMBER,
        applied=_FLAG,
        mirrored=_FLAG,
        tables=_TABLES,
    ),
    "queues": _struct(
        name=_TEXT,
        messages=_NUMBER,
        unacknowledged=_NUMBER,
        next_offset=_NUMBER,
        consumers=_NUMBER,
        owner=_TEXT,
        durable=_FLAG,
        arguments=MapType(_TEXT, _TEXT),
        logs=_NUMBER,
        oldest_s=_SECONDS,
    ),
    "apps": _struct(
        app_id=_TEXT,
        queues=ArrayType(_TEXT),
        sequence=_NUMBER,
        query_id=_TEXT,
        batch_id=_NUMBER,
        lag=_NUMBER,
        lag_s=_SECONDS,
        unapplied=_NUMBER,
        unmirrored=_NUMBER,
    ),
    "consumers": _struct(
        queue=_TEXT,
        tag=_TEXT,
        channel=_TEXT,
        user=_TEXT,
        address=_TEXT,
        client=_TEXT,
        acks=_FLAG,
        exclusive=_FLAG,
        active=_FLAG,
        prefetch=_NUMBER,
        unacknowledged=_NUMBER,
    ),
}
_LISTS: dict[str, Callable[[Engine, Admin], Sequence[object]]] = {
    "queues": lambda _engine, admin: admin.queues(),
    "apps": lambda engine, _admin: engine.apps(),
    "consumers": lambda _engine, admin: admin.consumers(),
}
# 0 and -1 in these stand for nothing
_NOTHING = {
    ("transactions", "sequence"): 0,
    ("transactions", "batch_id"): -1,
    ("transactions", "ledger_sequence"): 0,
    ("ledger", "transaction"): 0,
    ("apps", "sequence"): 0,
    ("apps", "batch_id"): -1,
}


def schema(table: str) -> StructType:
    return SCHEMAS[table]


def check_schema(table: str, given: StructType) -> None:
    """Raises OptionError if a user's ``.schema(...)`` differs from that of the table."""
    wanted = SCHEMAS[table]
    if given.simpleString() != wanted.simpleString():
        raise OptionError(
            f"the schema given by .schema() is {given.simpleString()}, but table {table!r} has the columns "
            f"{wanted.simpleString()}",
            "leave .schema() out and select columns afterwards",
        )


# -- rows ----------------------------------------------------------------------------------------------------


def _pages(table: str, admin: Admin) -> Iterator[list[Any]]:
    """Yields the history, the newest first, or the ledger, by app and sequence."""
    page: list[Any]
    if table == "transactions":
        page = admin.history(PAGE)
        while page:
            yield page
            oldest = page[-1].sequence  # 0 on Kafka, which has given all
            page = admin.history(PAGE, oldest) if oldest > 1 else []
    else:
        page = admin.ledger()
        while page:
            yield page
            page = admin.ledger(page[-1].app_id, page[-1].sequence)


def _batch(table: str, found: Iterable[Any]) -> pa.RecordBatch:
    wanted = SCHEMAS[table]
    rows = [_row(table, dataclasses.asdict(each), wanted) for each in found]
    columns = [
        pa.array([row[field.name] for row in rows], _arrow_type(field.dataType)) for field in wanted.fields
    ]
    return pa.RecordBatch.from_arrays(columns, names=wanted.names)


def _row(table: str, row: Row, wanted: StructType) -> Row:
    if "committed_at_us" in row:
        row["committed_at"] = row.pop("committed_at_us")
    for name, nothing in ((name, value) for (of, name), value in _NOTHING.items() if of == table):
        row[name] = None if row[name] == nothing else row[name]
    return {field.name: _value(row[field.name], field.dataType) for field in wanted.fields}


def _value(value: Any, kind: DataType) -> object:
    """What pyarrow takes as a value of this type. A text that is empty stands for none."""
    if isinstance(kind, StructType):
        given = dict(zip(kind.names, value, strict=True)) if isinstance(value, (tuple, list)) else value
        return {field.name: _value(given[field.name], field.dataType) for field in kind.fields}
    if isinstance(kind, ArrayType):
        return [_value(each, kind.elementType) for each in value]
    if isinstance(kind, MapType):
        return [(name, _value(each, kind.valueType)) for name, each in value.items()]
    if isinstance(kind, StringType):
        return (value or None) if isinstance(value, str) else json.dumps(value, default=str)
    return value


def _arrow_type(kind: DataType) -> pa.DataType:
    if isinstance(kind, StructType):
        return pa.struct([pa.field(field.name, _arrow_type(field.dataType)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return pa.list_(_arrow_type(kind.elementType))
    if isinstance(kind, MapType):
        return pa.map_(_arrow_type(kind.keyType), _arrow_type(kind.valueType))
    return _ARROW[type(kind)]


# -- the reader ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed(InputPartition):
    """The rows of a list; None: the pages of the history or the ledger are read in the task."""

    rows: Sequence[object] | None


class TableReader(DataSourceReader):
    """One partition: the state of a broker is small."""

    def __init__(self, options: TableOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Raises what the engine refuses here, in the driver."""
        address, table = self._options.address, self._options.table
        admin = address.admin()
        if table in _LISTS:
            return [Listed(_LISTS[table](address.engine(), admin))]
        if table == "ledger":
            admin.ledger(limit=1)
        else:
            admin.history(1)
        return [Listed(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Listed)
        table = self._options.table
        pages = _pages(table, self._options.address.admin()) if partition.rows is None else [partition.rows]
        for page in pages:
            yield _batch(table, page)
