"""The state of a broker as DataFrames: ``option("table", ...)``. What it is, docs/spark_reference.md says.

Not here: who may see what (the engine), and reading messages (``stream/source.py``).
Invariants: nothing changes by a read. A list is that of the moment when the read is planned; the history and
the ledger are read page by page in a task.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceReader, InputPartition

from broker_core.admin import PAGE, Admin, ConsumerInfo, LedgerInfo, QueueInfo, TransactionInfo
from broker_core.engine import AppInfo, Engine
from connector.arrow_type import arrow_type
from connector.options import TableOptions

Row = dict[str, Any]
_TEXT, _NUMBER = T.StringType(), T.LongType()
_KINDS: dict[object, T.DataType] = {int: _NUMBER, float: T.DoubleType(), bool: T.BooleanType()}
_SPAN = T.StructType().add("start", _NUMBER).add("end", _NUMBER)  # offsets, the end is not in it


def _type(kind: object) -> T.DataType:
    """The type of a value of the engine's ports, by its annotation."""
    origin, of = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _columns(kind)
    if origin is Union or origin is UnionType:  # or None
        return _type(of[0])
    if origin is tuple:
        return T.ArrayType(_type(of[0])) if of[-1] is Ellipsis else _SPAN
    return T.MapType(_TEXT, _type(of[1])) if origin is Mapping else _KINDS.get(kind, _TEXT)


def _columns(kind: type, *last: str) -> T.StructType:
    """A row of ``kind``, the columns ``last`` behind the others."""
    fields = [
        T.StructField("committed_at", T.TimestampType())
        if name == "committed_at_us"
        else T.StructField(name, _type(each))
        for name, each in get_type_hints(kind).items()
    ]
    return T.StructType(sorted(fields, key=lambda field: field.name in last))


SCHEMAS: dict[str, T.StructType] = {
    "transactions": _columns(TransactionInfo, "effects", "tables", "left_out"),
    "ledger": _columns(LedgerInfo),
    "queues": _columns(QueueInfo),
    "apps": _columns(AppInfo, "unapplied", "unmirrored"),
    "consumers": _columns(ConsumerInfo),
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


def batch_of(table: str, found: Iterable[Any]) -> pa.RecordBatch:
    schema = SCHEMAS[table]
    rows = [_row(table, dataclasses.asdict(each), schema) for each in found]
    return pa.RecordBatch.from_pylist(rows, pa.schema(arrow_type(schema)))


def _row(table: str, row: Row, schema: T.StructType) -> Row:
    if "committed_at_us" in row:
        row["committed_at"] = row.pop("committed_at_us")
    for name, nothing in ((name, value) for (of, name), value in _NOTHING.items() if of == table):
        row[name] = None if row[name] == nothing else row[name]
    return {field.name: _value(row[field.name], field.dataType) for field in schema.fields}


def _value(value: Any, kind: T.DataType) -> object:
    """What pyarrow takes as a value of this type. A text that is empty stands for none."""
    if isinstance(kind, T.StructType):
        fields = dict(zip(kind.names, value, strict=True)) if isinstance(value, (tuple, list)) else value
        return {field.name: _value(fields[field.name], field.dataType) for field in kind.fields}
    if isinstance(kind, T.ArrayType):
        return [_value(each, kind.elementType) for each in value]
    if isinstance(kind, T.MapType):
        return [(name, _value(each, kind.valueType)) for name, each in value.items()]
    if isinstance(kind, T.StringType):
        return (value or None) if isinstance(value, str) else json.dumps(value, default=str)
    return value


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
            yield batch_of(table, page)
