"""Records as rows of plain SQL values, what a change writes of them, and small messages as Arrow: the mapping
that both stores share.

It uses the annotations of the record classes and has no code for a single class.
Not here: SQL.

Invariant: ``decode(cls, encode(record)) == record`` for a record whose dicts and lists are JSON, with
decimals and bytes, and two equal keys encode equally. Other values are refused here, before anything is
written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter, index, itemgetter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from broker_core.core import ids
from broker_core.core.change import ANY, Change, Drop, InboxRow
from broker_core.core.errors import OptionError, one_line
from broker_core.core.records import RECORDS, Record, canonical, parse
from broker_core.message.message import MERGED_SCHEMA

Value = int | str | bytes
Row = tuple[Value, ...]
Rows = dict[type[Record], dict[Row, Row | None]]  # by class and encoded key; None: dropped
Coder = Callable[[Any], Any]

_UNSIGNED = 1 << 64
_INBOX_NAMES = {"commit_sequence": "sequence"}  # of a column of MERGED_SCHEMA
_BIT_63 = 1 << 63


def to_signed(checksum: int) -> int:
    """Returns an unsigned 64-bit number as SQLite's signed INTEGER."""
    return checksum - _UNSIGNED if checksum >= _BIT_63 else checksum


def to_unsigned(value: int) -> int:
    return value & (_UNSIGNED - 1)


def _signed(value: Any) -> int:
    number = index(value)  # of numpy too; other types raise TypeError
    if -_BIT_63 <= number < _BIT_63:
        return number
    raise ValueError(f"{number} needs more than 64 bits")


def _unsigned(value: Any) -> int:
    number = index(value)
    if 0 <= number < _UNSIGNED:
        return to_signed(number)
    raise ValueError(f"{number} needs more than 64 bits")


def _flag(value: object) -> int:
    if value is True or value is False:
        return int(value)
    raise TypeError(f"{value!r} is neither True nor False")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    if not value.isascii():
        value.encode()  # a lone surrogate raises
    return value if type(value) is str else str(value)


def _blob(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{value!r} is not bytes")


def _has_text_keys(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_has_text_keys, value.values()))
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


def _json(kind: type[dict[object, object]] | type[list[object]]) -> Coder:
    def to_json(value: object) -> str:
        if not value and type(value) is kind:
            return "{}" if kind is dict else "[]"
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is not a {kind.__name__}")
        if not _has_text_keys(value):
            raise TypeError(f"{value!r} has a key that is not text")
        return canonical(value)

    return to_json


class _Codec(NamedTuple):
    values: Callable[[object], tuple[Any, ...]]  # of the fields of a record, in order
    # the types of a record that is its own row, if the class has such; texts and integers are checked
    plain: tuple[type, ...] | None
    texts: tuple[int, ...]
    numbers: Callable[[Row], tuple[object, ...]]  # the integers
    pack: Callable[..., bytes]  # raises if one of them needs more than 64 bits
    encoders: tuple[Coder, ...]
    decoders: tuple[tuple[int, Coder], ...]  # of the fields that are not stored as they are
    key: tuple[int, ...]  # places of the key fields
    key_of: Callable[[Sequence[Any]], tuple[Any, ...]]
    sql_types: tuple[str, ...]


def _coders(name: str, annotation: str) -> tuple[Coder, Coder, str]:
    if name == "checksum":
        return _unsigned, to_unsigned, "INTEGER"
    coders: dict[str, tuple[Coder, Coder, str]] = {
        "int": (_signed, int, "INTEGER"),
        "bool": (_flag, bool, "INTEGER"),
        "str": (_text, str, "TEXT"),
        "Literal": (_text, str, "TEXT"),
        "bytes": (_blob, bytes, "BLOB"),
        "dict": (_json(dict), parse, "TEXT"),
        "list": (_json(list), parse, "TEXT"),
    }
    kind = annotation.partition("[")[0]
    return coders["int" if hasattr(ids, kind) else kind]


# the types of values that are stored as they are, by their encoder
_PLAIN = {_signed: int, _text: str, _blob: bytes}


def _getter(places: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function for the values at these indexes, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda row: tuple([row[place] for place in places])


def _codec(cls: type[Record]) -> _Codec:
    names = cls.columns()
    encoders, decoders, types = zip(
        *(_coders(field.name, str(field.type)) for field in fields(cls)), strict=True
    )
    decoders = tuple(
        (place, decoder) for place, decoder in enumerate(decoders) if decoder not in (int, str, bytes)
    )
    key = tuple(names.index(name) for name in cls.KEY)
    places = {
        kind: tuple(place for place, encoder in enumerate(encoders) if encoder is kind) for kind in _PLAIN
    }
    return _Codec(
        attrgetter(*names),
        tuple(_PLAIN[encoder] for encoder in encoders)
        if all(encoder in _PLAIN for encoder in encoders)
        else None,
        places[_text],
        _getter(places[_signed]),
        struct.Struct(f"{len(places[_signed])}q").pack,
        encoders,
        decoders,
        key,
        _getter(key),
        types,
    )


_CODECS: dict[type[Record], _Codec] = {cls: _codec(cls) for cls in RECORDS}


def key_of(cls: type[Record], row: Row) -> Row:
    """Returns the key of an encoded record."""
    return _CODECS[cls].key_of(row)


def sql_types(cls: type[Record]) -> tuple[str, ...]:
    """Returns the SQL type of each column, in the order of ``cls.columns()``."""
    return _CODECS[cls].sql_types


def encode(record: Record) -> Row:
    """Returns ``record`` as SQL values in column order. Raises OptionError for a value that its column cannot
    hold.
    """
    codec = _CODECS[type(record)]
    values = codec.values(record)
    if tuple(map(type, values)) == codec.plain:  # nearly all: no conversion, and few calls to check
        for place in codec.texts:
            if not values[place].isascii():
                break
        else:
            try:
                codec.pack(*codec.numbers(values))
            except struct.error:
                pass
            else:
                return values
    return _encoded(type(record), range(len(values)), values)


def encode_key(cls: type[Record], key: Sequence[object]) -> Row:
    """Returns a key as SQL values. Raises OptionError."""
    return _encoded(cls, _CODECS[cls].key, key, is_key=True)


def _encoded(cls: type[Record], places: Sequence[int], values: Sequence[Any], *, is_key: bool = False) -> Row:
    """Encodes the values of these columns, one by one."""
    encoders = _CODECS[cls].encoders
    row: list[Value] = []
    for place, value in zip(places, values, strict=True):
        try:
            row.append(ANY if value is ANY and is_key else encoders[place](value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _not_storable(f"{cls.TABLE}.{cls.columns()[place]}", error) from error
    return tuple(row)


def _not_storable(what: str, error: Exception) -> OptionError:
    why = one_line(error)
    return OptionError(
        f"a value cannot be stored as {what}: {why[:200]}",
        "nothing of this transaction was written; give text that is UTF-8, whole numbers of at most 64 bits, "
        "and tables with text as keys",
    )


_INBOX_TYPES = (int, int, int, int, str, str, bytes, bytes, bytes)
_INBOX_CODERS = (_signed, _signed, _signed, _signed, _text, _text, _blob, _blob, _blob)


def check_message(message: InboxRow) -> None:
    """Raises OptionError for a message of small commits with a value that its column cannot hold."""
    for name, kind, coder, value in zip(InboxRow._fields, _INBOX_TYPES, _INBOX_CODERS, message, strict=True):
        try:
            if type(value) is not kind:
                raise TypeError(f"a value of type {type(value).__name__} is not of type {kind.__name__}")
            coder(value)
        except (TypeError, ValueError) as error:
            raise _not_storable(f"the {name} of a message", error) from error


def decode(cls: type[Record], row: Sequence[Value]) -> Record:
    """Raises TypeError or ValueError (JSON) for a row that :func:`encode` did not make."""
    decoders = _CODECS[cls].decoders
    if not decoders:
        return cls(*row)
    values: list[object] = list(row)
    for place, decoder in decoders:
        values[place] = decoder(values[place])
    return cls(*values)


def guard(values: Sequence[Value]) -> int:
    """Returns the signed checksum of one row of the catalog, because SQLite does not detect a flipped bit
    inside a value.

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
        elif kind is not int and kind is not str:  # SQLite would convert it
            raise TypeError(f"a value of type {kind.__name__} cannot be stored: {value!r}")
    return to_signed(xxhash.xxh3_64_intdigest(ascii(plain).encode(), seed))


# -- changes -------------------------------------------------------------------------------------------------
class Encoded(NamedTuple):
    """What a change writes: ``entries`` of its journal and ``messages`` of its rows were encoded."""

    entries: int
    messages: int
    records: Rows
    wide: bool = False  # some key has ``ANY``


_new = tuple.__new__  # takes a third of the time of a NamedTuple's own
_NOTHING: Rows = {}


def encode_change(change: Change) -> Encoded:
    """Encodes a change once; the result is in ``change.encoded``. Raises OptionError: nothing of the change
    may be written.
    """
    cached = change.encoded
    journal, messages = change.journal, change.rows
    if cached is not None:
        assert isinstance(cached, Encoded)
        if cached[0] == len(journal) and cached[1] == len(messages):
            return cached
    # of the message before, which is checked: in one transaction they often are the same objects
    number: int | None = None
    at: int | None = None
    name: str | None = None
    key: str | None = None
    flags: bytes | None = None
    for message in messages:
        _, _, sequence, committed_at, exchange, routing_key, properties, body, _ = message
        if not (
            type(body) is bytes
            and properties is flags
            and routing_key is key
            and exchange is name
            and committed_at is at
            and sequence is number
        ):
            if not (
                type(body) is bytes
                and type(properties) is bytes
                and type(routing_key) is str
                and type(exchange) is str
                and type(sequence) is int
                and type(committed_at) is int
                and routing_key.isascii()
                and exchange.isascii()
            ):
                check_message(message)
            number, at, name, key, flags = sequence, committed_at, exchange, routing_key, properties
    if not journal:
        encoded = change.encoded = _new(Encoded, (0, len(messages), _NOTHING, False))
        return encoded
    records: Rows = {}
    wide = any(isinstance(entry, Drop) and ANY in entry.key for entry in journal)
    for entry in journal:
        row: Row | None
        if isinstance(entry, Drop):
            kind, row, record_key = entry.kind, None, encode_key(*entry)
        else:
            kind, row = type(entry), encode(entry)
            record_key = key_of(kind, row)
        rows = records.get(kind)
        if rows is None:
            rows = records[kind] = {}
        if wide:
            rows.pop(record_key, None)  # it becomes the last one
        rows[record_key] = row
    encoded = change.encoded = _new(Encoded, (len(journal), len(messages), records, wide))
    return encoded


def merged(changes: Sequence[Encoded]) -> Rows:
    """Returns what the changes write together: the last entry of each key. If one of them is wide, the
    entries are in the order in which they must be written.
    """
    if len(changes) == 1:
        return changes[0].records
    wide = any(change.wide for change in changes)
    last: Rows = {}
    for change in changes:
        for kind, rows in change.records.items():
            found = last.setdefault(kind, {})
            if wide:
                for key in rows:
                    found.pop(key, None)
            found.update(rows)
    return last


def is_wide(key: Row) -> bool:
    return ANY in key


def is_covered(wide: Row, key: Row) -> bool:
    """Returns whether a wide key means the record with ``key``."""
    return all(part is ANY or part == value for part, value in zip(wide, key, strict=True))


# -- messages of a block -------------------------------------------------------------------------------------
def merged_block(rows: Sequence[InboxRow], names: Sequence[str] = MERGED_SCHEMA.names) -> pa.RecordBatch:
    """Returns messages of an open block, row by row, as MERGED_SCHEMA; ``names``: these columns of it."""
    fields = [MERGED_SCHEMA.field(name) for name in names]
    places = [InboxRow._fields.index(_INBOX_NAMES.get(name, name)) for name in names]
    arrays = [
        pa.array([row[place] for row in rows], field.type)
        for place, field in zip(places, fields, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def body_bytes(block: pa.RecordBatch) -> int:
    """Returns the size of the bodies, or of everything in a block without a column ``body``. O(1)."""
    place = block.schema.get_field_index("body")
    if place < 0 or block.schema.field(place).type != pa.binary():
        return int(block.nbytes)
    body = block.column(place)
    offsets = memoryview(body.buffers()[1]).cast("i") if len(body) else None
    return 0 if offsets is None else offsets[body.offset + len(body)] - offsets[body.offset]


def blank_bodies(block: pa.RecordBatch, live: bytes) -> pa.RecordBatch:
    """Returns ``block`` with empty bodies in rows whose bit in ``live`` (least significant first) is 0."""
    mask = pa.Array.from_buffers(pa.bool_(), block.num_rows, [None, pa.py_buffer(live)])
    place = block.schema.get_field_index("body")
    body = pc.if_else(mask, block.column(place), pa.scalar(b"", pa.binary()))
    return block.set_column(place, block.schema.field(place), body)
