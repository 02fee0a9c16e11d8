"""``decode``: bodies as typed columns, and what happens to those that are broken.

Not here: the formats (``formats.py``), the way of rejected messages (``reject/dead_letters.py``).
Invariant: a row is good or rejected, and never both. A row that is not good has no decoded value anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Any, Literal, overload

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType, StructType

from broker_core.core.errors import DecodeError, OptionError
from connector.reject import rejected_metrics as metrics
from connector.reject.dead_letters import REASON
from connector.sql import quoted
from connector.tables.table import is_connect
from connector.typed.formats import (
    NO_UTF_8_REASONS,
    Csv,
    Fault,
    Format,
    Json,
    no_utf_8,
    one_clear_error,
    schema_of,
    with_sound_options,
)
from connector.typed.protobuf.descriptors import descriptor_of
from connector.typed.python_formats import (
    plain_avro,
    plain_protobuf,
    registered_avro,
    registered_json,
    registered_protobuf,
)
from connector.typed.registry.client import SchemaRegistry
from connector.typed.registry.wire_format import WireFormat, payload

Formats = Literal["json", "avro", "protobuf", "csv"]
Mode = Literal["deadLetter", "fail", "null"]

_ENCODED, _PARSED = "txmq_encoded", "txmq_parsed"
_KEPT = 64  # schemas whose columns are kept


class Decoded:
    """The result of ``decode``. ``good``: the columns of ``keep``, then the decoded ones. ``rejected``: the
    broken messages with all their columns, and ``reason`` (string).
    """

    def __init__(
        self, good: DataFrame, rejected: Callable[[], DataFrame], metric: metrics.Metric | None = None
    ) -> None:
        self.good = good
        self.metric = metric  # which an execution of ``good`` tells
        self._rejected = rejected

    @cached_property
    def rejected(self) -> DataFrame:
        frame = self._rejected()
        metrics.remember(frame, self.metric)
        return frame

    def __iter__(self) -> Iterator[DataFrame]:
        return iter((self.good, self.rejected))


@dataclass(frozen=True)
class _Columns:
    """What is computed of a message, whatever else its row has. To make them are thousands of calls of the
    JVM, so a stream makes them once.

    ``encoded`` of a row, ``parsed`` of that, and the others of what was parsed; ``notes`` of what was broken.
    """

    schema: StructType
    encoded: Column
    parsed: Column
    broken: Column
    reason: Column
    value: Column
    fields: list[Column]
    notes: metrics.Notes | None


@overload
def decode(
    df: DataFrame,
    schema: Any = ...,
    format: Formats = ...,
    mode: Literal["deadLetter"] = ...,
    *,
    column: str = ...,
    keep: Sequence[str] = ...,
    options: Mapping[str, str] | None = ...,
    registry: SchemaRegistry | str | None = ...,
    subject: str | None = ...,
    validate: bool = ...,
) -> Decoded: ...
@overload
def decode(
    df: DataFrame,
    schema: Any = ...,
    format: Formats = ...,
    mode: Literal["fail", "null"] = ...,
    *,
    column: str = ...,
    keep: Sequence[str] = ...,
    options: Mapping[str, str] | None = ...,
    registry: SchemaRegistry | str | None = ...,
    subject: str | None = ...,
    validate: bool = ...,
) -> DataFrame: ...
def decode(
    df: DataFrame,
    schema: object = None,
    format: Formats = "json",
    mode: Mode = "deadLetter",
    *,
    column: str = "body",
    keep: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    registry: SchemaRegistry | str | None = None,
    subject: str | None = None,
    validate: bool = False,
) -> Decoded | DataFrame:
    """Decodes ``column`` (binary or string) of ``df``: json and csv with Spark's from_json and from_csv, avro
    with fastavro, protobuf with the package protobuf.

    ``schema``: for json and csv a StructType or DDL (``not null`` is enforced); for avro the schema as JSON;
    for protobuf (message name, descriptor set as bytes or the path of its file). ``keep``: columns of ``df``
    to keep. ``options``: options of Spark's function, for json and csv.

    ``mode``: ``deadLetter`` returns :class:`Decoded`; ``fail`` a frame that raises DecodeError at the first
    broken message; ``null`` a frame with nulls in its place. A message is broken if it is null, empty, not
    UTF-8 or malformed, has a type other than the schema's, lacks a field that is not null, or has bytes
    after the value.

    ``registry`` (avro, json, protobuf): bodies are in Confluent's wire format, with ids of a
    :class:`SchemaRegistry`. A body with another first byte, or with an id that is unknown or of another
    format, is broken too. ``schema``: for protobuf the columns, as for json, or as without a registry.
    ``subject``: for avro and protobuf, use its newest schema in place of ``schema``; with both, the columns
    of protobuf must fit it. ``validate``: a json body that its JSON Schema rejects is broken. Raises
    OptionError, and RegistryFailed or LoginRefused from the registry.
    """
    names = _checked_names(df, column, keep, mode)
    rows = metrics.watchable(df) if mode == "deadLetter" else None
    parts = _columns(df, column, schema, format, options or {}, registry, subject, validate, rows)
    _require_new(parts.schema, names, mode)
    # two projections: Spark compiles the first, which it could not together with a parser
    first = df.select("*", parts.encoded.alias(_ENCODED))
    with one_clear_error(format):
        frame = first.select("*", parts.parsed.alias(_PARSED))
        _ = frame.schema if is_connect(df) else None  # where nothing is analysed before
    columns = [F.col(quoted(name)) for name in names]
    if mode == "deadLetter":
        whole = [F.col(quoted(name)) for name in df.columns]

        def rejected() -> DataFrame:
            return frame.where(parts.broken).select(*whole, parts.reason.alias(REASON))

        if parts.notes is None:
            return Decoded(frame.where(~parts.broken).select(*columns, *parts.fields), rejected)
        good, metric = metrics.watch(frame, [*columns, *parts.fields], parts.notes)
        return Decoded(good, rejected, metric)
    if mode == "fail":
        error = F.raise_error(_text(df, column, parts.reason)).cast("boolean")
        return frame.where(F.when(parts.broken, error).otherwise(F.lit(True))).select(*columns, *parts.fields)
    sound = frame.select(*columns, F.when(~parts.broken, parts.value).alias(_PARSED))
    return sound.select(*columns, *(F.col(_PARSED).getField(name).alias(name) for name in parts.schema.names))


def _once(column: Column) -> Column:
    """Spark moves filters below a projection and joins projections, and would evaluate it for each; not if it
    depends on the partition.
    """
    return F.when(F.spark_partition_id() >= 0, column)


def _any(faults: Sequence[Fault]) -> Column:
    """Whether a condition is true. It is evaluated for each row, and so without the reasons.

    Pairs of pairs: Spark recurses into expressions, and a chain of a thousand is too deep for its stack.
    """
    found = [condition for condition, _ in faults]
    while len(found) > 1:
        found = [reduce(or_, found[at : at + 2]) for at in range(0, len(found), 2)]
    return F.coalesce(found[0], F.lit(False))


def _first(faults: Sequence[Fault]) -> Column:
    """The reason of the first condition that is true."""
    cases: Any = F
    for condition, reason in faults:
        cases = cases.when(condition, F.lit(reason) if isinstance(reason, str) else reason)
    found: Column = cases.otherwise(F.lit(None).cast("string"))
    return found


def _text(df: DataFrame, column: str, reason: Column) -> Column:
    """The text of the error of the message in this row."""
    at = F.lit("a row")
    if {"queue", "partition", "offset"} <= set(df.columns):
        of = F.when(F.col("partition") > 0, F.concat(F.lit(", partition "), "partition"))
        at = F.concat(
            F.lit("message "), "offset", F.lit(" of queue '"), "queue", F.lit("'"), F.coalesce(of, F.lit(""))
        )
    advice = ", so nothing is decided: mend its sender, or decode with mode='deadLetter' or mode='null'\n"
    return F.concat(
        F.lit(f"[{DecodeError.code}] "),
        at,
        F.lit(f" cannot be decoded from {column!r} ("),
        reason,
        F.lit(")" + advice),
    )


# -- arguments -----------------------------------------------------------------------------------------------


def _checked_names(df: DataFrame, column: str, keep: Sequence[str], mode: str) -> list[str]:
    if mode not in ("deadLetter", "fail", "null"):
        raise OptionError(f"decode got the mode {mode!r}", "allowed are deadLetter, fail, null")
    types = {field.name: field.dataType for field in df.schema.fields}
    if not isinstance(types.get(column), (BinaryType, StringType)):
        found = types[column].simpleString() if column in types else "none"
        raise OptionError(
            f"decode needs the column {column!r} (binary or string), and the rows have {found}",
            "name the column that holds the encoded value with column=",
        )
    names = [keep] if isinstance(keep, str) else list(keep)
    for name in names:
        if name not in types:
            raise OptionError(
                f"keep names the column {name!r}, which the rows do not have",
                f"choose from {', '.join(df.columns)}",
            )
    own = {_ENCODED, _PARSED, *([REASON, *metrics.OWN_COLUMNS] if mode == "deadLetter" else [])}
    taken = sorted(own & {name.lower() for name in df.columns})
    if taken:
        raise OptionError(f"the rows have a column {taken[0]!r}, which decode adds", "rename yours first")
    return names


def _require_new(schema: StructType, names: Sequence[str], mode: Mode) -> None:
    old = {name.lower() for name in names}
    for name in schema.names:
        if name.lower() in old:
            raise OptionError(
                f"the decoded column {name!r} has the name of a column that is kept",
                "rename that of the message before decode, or leave it out of keep",
            )
        if mode == "deadLetter" and name.lower() in metrics.OWN_COLUMNS:
            raise OptionError(
                f"the decoded column {name!r} has the name of a column that decode adds",
                "rename that of the message before decode, or take mode='null'",
            )


# -- what is computed of a message ---------------------------------------------------------------------------

_cache: dict[tuple[Any, ...], _Columns] = {}


def _columns(
    df: DataFrame,
    column: str,
    schema: Any,
    format: str,
    options: Mapping[str, str],
    registry: SchemaRegistry | str | None,
    subject: str | None,
    validate: bool,
    rows: metrics.Watchable | None,
) -> _Columns:
    if validate and (format != "json" or registry is None):
        raise OptionError("decode got validate=True, which is for json with a registry", "leave it out")
    if options and format in ("avro", "protobuf"):
        raise OptionError(f"decode of {format} got options, but it has none", "leave them out")
    is_text = format in ("json", "csv")
    if registry is not None:
        chosen, wire = _registered(df, column, schema, format, options, registry, subject, validate)
        return _columns_of(chosen, wire, column, is_text, rows)
    if subject is not None:
        raise OptionError(f"decode got subject={subject!r}, but no registry", "give registry, or schema")
    # they depend on nothing else than the arguments
    if format == "protobuf":
        schema = descriptor_of(schema)  # the file may be another one now
    schema_text: object = schema.json() if isinstance(schema, StructType) else schema
    context = None if is_connect(df) else df.sparkSession.sparkContext
    key = (context, column, format, schema_text, *((str(name), str(options[name])) for name in options), rows)
    lasts = isinstance(format, str) and (isinstance(schema_text, str) or format == "protobuf")
    if not lasts or (found := _cache.get(key)) is None:
        found = _columns_of(_format(df, schema, format, options), None, column, is_text, rows)
    if lasts:
        _cache[key] = found
        if len(_cache) > _KEPT:
            _cache.pop(next(iter(_cache)), None)
    return found


def _columns_of(
    chosen: Format, wire: WireFormat | None, column: str, is_text: bool, rows: metrics.Watchable | None
) -> _Columns:
    def bytes_of(body: Column) -> Column:
        return payload(body) if wire and is_text else body

    def unread(body: Column) -> Iterator[Fault]:
        yield body.isNull(), "the body is null"
        yield F.length(body) == 0, "the body is empty"
        if wire:
            yield from wire.faults(body)
        if is_text:
            yield ~F.is_valid_utf8(bytes_of(body).cast("string")), no_utf_8(bytes_of(body).cast("binary"))

    def faults(body: Column, parsed: Column) -> list[Fault]:
        return list(chosen.faults(parsed, bytes_of(body).cast("string")))

    body, parsed = F.col(quoted(column)), F.col(_PARSED)
    raw = bytes_of(body)
    encoded = F.when(~_any([*unread(body)]), chosen.encoded(raw.cast("binary"), raw.cast("string")))
    after = faults(body, parsed)
    value = chosen.value(parsed)
    notes = None
    if rows is not None:
        marks = metrics.of_broken(column), metrics.of_broken(_PARSED)
        reasons = [*unread(marks[0]), *faults(*marks)]
        texts = [text for _, text in reasons if isinstance(text, str)] + chosen.reasons() + NO_UTF_8_REASONS
        notes = metrics.notes_of(_any(after), _first(reasons), texts, [column, _PARSED], rows)
    return _Columns(
        chosen.schema,
        _once(encoded),
        chosen.parsed(_once(F.col(_ENCODED))),
        _any(after),  # also what is unread, of which nothing was parsed
        _first([*unread(body), *after]),
        value,
        [value.getField(name).alias(name) for name in chosen.schema.names],
        notes,
    )


# -- the format that the arguments say -----------------------------------------------------------------------


def _registered(
    df: DataFrame,
    column: str,
    schema: Any,
    format: str,
    options: Mapping[str, str],
    registry: SchemaRegistry | str,
    subject: str | None,
    validate: bool,
) -> tuple[Format, WireFormat]:
    client = SchemaRegistry.of(registry)
    if format == "json":
        if subject is not None:
            raise OptionError("decode of json got a subject", "give the columns as schema")
        return registered_json(df, column, _format(df, schema, format, options), client, validate)
    if format not in ("avro", "protobuf"):
        raise OptionError(
            f"decode supports no registry for format {format!r}", "it has one for avro, json and protobuf"
        )
    registered = registered_avro if format == "avro" else registered_protobuf
    return registered(df, column, schema, client, subject)


def _format(df: DataFrame, schema: Any, format: str, options: Mapping[str, str]) -> Format:
    if format in ("json", "csv"):
        kind = Json if format == "json" else Csv
        return with_sound_options(df.sparkSession, kind(schema_of(schema), options))
    if format not in ("avro", "protobuf"):
        raise OptionError(f"decode got the format {format!r}", "allowed are json, avro, protobuf, csv")
    return plain_avro(schema) if format == "avro" else plain_protobuf(schema)
