"""Records as rows of plain SQL values, and small messages as Arrow: the mapping both stores share.

It knows the annotations of the record classes and nothing of any single class. Not here: SQL.

Invariant: ``decode(cls, encode(record)) == record`` for a record whose dicts and lists are JSON, and two equal keys encode equally.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from broker_core.broker.change import InboxRow
from broker_core.broker.records import RECORDS, Record
from broker_core.message import MERGED_SCHEMA

Value = int | str | bytes
Coder = Callable[[Any], Any]

_UNSIGNED = 1 << 64
_BIT_63 = 1 << 63


def to_signed(checksum: int) -> int:
    """An unsigned 64-bit number as SQLite's signed INTEGER."""
    return checksum - _UNSIGNED if checksum >= _BIT_63 else checksum


def to_unsigned(value: int) -> int:
    return value & (_UNSIGNED - 1)


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class _Codec(NamedTuple):
    values: Callable[[Any], tuple[Any, ...]]  # of the fields of a record, in order
    encoders: tuple[Coder, ...]
    decoders: tuple[tuple[int, Coder], ...]  # of the places whose value is not the SQL value itself
    key: tuple[int, ...]  # places of the key fields
    sql_types: tuple[str, ...]


def _coders(name: str, annotation: str) -> tuple[Coder, Coder, str]:
    if name == "checksum":
        return lambda value: to_signed(int(value)), to_unsigned, "INTEGER"
    coders: dict[str, tuple[Coder, Coder, str]] = {
        "int": (int, int, "INTEGER"),
        "bool": (int, bool, "INTEGER"),
        "str": (str, str, "TEXT"),
        "Literal": (str, str, "TEXT"),
        "bytes": (bytes, bytes, "BLOB"),
        "dict": (_to_json, json.loads, "TEXT"),
        "list": (_to_json, json.loads, "TEXT"),
    }
    return coders[annotation.partition("[")[0]]


def _codec(cls: type[Record]) -> _Codec:
    names = cls.columns()
    encoders, decoders, types = zip(*(_coders(field.name, str(field.type)) for field in fields(cls)), strict=True)
    decoders = tuple((place, decoder) for place, decoder in enumerate(decoders) if decoder not in (int, str, bytes))
    return _Codec(attrgetter(*names), encoders, decoders, tuple(names.index(name) for name in cls.KEY), types)


_CODECS: dict[type[Record], _Codec] = {cls: _codec(cls) for cls in RECORDS}


def sql_types(cls: type[Record]) -> tuple[str, ...]:
    """The SQL type of each column, in the order of ``cls.columns()``."""
    return _CODECS[cls].sql_types


def encode(record: Record) -> tuple[Value, ...]:
    """``record`` as SQL values in column order. Raises TypeError or ValueError for a value that its column cannot hold."""
    codec = _CODECS[type(record)]
    return tuple([coder(value) for coder, value in zip(codec.encoders, codec.values(record), strict=True)])


def encode_key(cls: type[Record], key: Sequence[Any]) -> tuple[Value, ...]:
    codec = _CODECS[cls]
    return tuple([codec.encoders[place](value) for place, value in zip(codec.key, key, strict=True)])


def row_key(cls: type[Record], row: Sequence[Value]) -> tuple[Value, ...]:
    """The encoded key of an encoded row."""
    return tuple([row[place] for place in _CODECS[cls].key])


def decode(cls: type[Record], row: Sequence[Value]) -> Record:
    """Raises TypeError or ValueError (JSON) for a row that :func:`encode` did not make."""
    decoders = _CODECS[cls].decoders
    if not decoders:
        return cls(*row)
    values: list[Any] = list(row)
    for place, decoder in decoders:
        values[place] = decoder(values[place])
    return cls(*values)


def guard(values: Sequence[Value]) -> int:
    """The checksum, signed, of one row of the catalog: SQLite itself does not notice a flipped bit inside a value.

    Raises TypeError for a value that is not exactly an int, a str or bytes.
    """
    seed = 0
    plain: list[Any] = list(values)
    for place, value in enumerate(plain):
        kind = type(value)
        if kind is bytes:
            plain[place] = len(value)
            if value:
                seed = xxhash.xxh3_64_intdigest(value, seed)
        elif kind is not int and kind is not str:  # SQLite would store it, as something else
            raise TypeError(f"a value of type {kind.__name__} cannot be stored: {value!r}")
    return to_signed(xxhash.xxh3_64_intdigest(ascii(plain).encode(), seed))


_PLAIN = frozenset((int, str, bytes))


def guarded_inbox(values: Sequence[Any]) -> tuple[Value, ...]:
    """``values`` of a row of the table inbox with its :func:`guard`, which every small commit waits for."""
    if not _PLAIN.issuperset(map(type, values)):
        return (*values, guard(values))
    key, sequence, committed_at, exchange, routing_key, properties, body, routes = values
    seed = 0
    for value in (properties, body, routes):
        if value:
            seed = xxhash.xxh3_64_intdigest(value, seed)
    text = f"[{key}, {sequence}, {committed_at}, {exchange!a}, {routing_key!a}, {len(properties)}, {len(body)}, {len(routes)}]"
    checksum = xxhash.xxh3_64_intdigest(text.encode(), seed)
    return (*values, checksum - _UNSIGNED if checksum >= _BIT_63 else checksum)


def merged_batch(rows: Sequence[InboxRow]) -> pa.RecordBatch:
    """The messages of an open batch, row by row, as MERGED_SCHEMA."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True)) if rows else [()] * len(InboxRow._fields)
    place = InboxRow._fields.index
    names = {"commit_sequence": "sequence"}
    arrays = [pa.array(columns[place(names.get(field.name, field.name))], field.type) for field in MERGED_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=MERGED_SCHEMA)


def body_bytes(batch: pa.RecordBatch) -> int:
    """The size of the bodies; of everything, where a batch has no column ``body``. O(1)."""
    place = batch.schema.get_field_index("body")
    if place < 0 or batch.schema.field(place).type != pa.binary():
        return int(batch.nbytes)
    body = batch.column(place)
    offsets = memoryview(body.buffers()[1]).cast("i") if len(body) else None
    return 0 if offsets is None else offsets[body.offset + len(body)] - offsets[body.offset]


def blank_bodies(batch: pa.RecordBatch, live: bytes) -> pa.RecordBatch:
    """``batch`` with empty bodies in the rows whose bit in ``live`` (least significant first) is 0."""
    mask = pa.Array.from_buffers(pa.bool_(), batch.num_rows, [None, pa.py_buffer(live)])
    place = batch.schema.get_field_index("body")
    body = pc.if_else(mask, batch.column(place), pa.scalar(b"", pa.binary()))
    return batch.set_column(place, batch.schema.field(place), body)
