"""``decode``: bodies as typed columns, and what happens to those that are broken.

Not here: the formats (``formats.py``), the way of rejected messages (``dead_letters.py``).
Invariant: a row is good or rejected, and never both. A row that is not good has no decoded value anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, Literal, overload

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType, StructType

from broker_core.errors import DecodeError, OptionError
from connector.dead_letters import REASON
from connector.descriptors import descriptor_of
from connector.fit import quoted
from connector.formats import Csv, Fault, Format, Json, from_package, schema_of
from connector.observed import remember, watched
from connector.registered import registered_avro, registered_json, registered_protobuf
from connector.registry import SchemaRegistry
from connector.wire_format import WireFormat, payload

Formats = Literal["json", "avro", "protobuf", "csv"]
Mode = Literal["deadLetter", "fail", "null"]

_ENCODED, _PARSED = "txmq_encoded", "txmq_parsed"


@dataclass(frozen=True)
class Decoded:
    """``good``: the decoded columns behind those of ``keep``. ``rejected``: the broken messages, with all
    columns that they had, and ``reason`` (string).
    """

    good: DataFrame
    rejected: DataFrame

    def __iter__(self) -> Iterator[DataFrame]:
        return iter((self.good, self.rejected))


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
    schema: Any = None,
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
    """Decode ``column`` (binary or string) of ``df`` by Spark's own from_json, from_csv, from_avro or
    from_protobuf.

    ``schema``: for json and csv a StructType or DDL, whose ``not null`` is checked; for avro the schema in
    JSON; for protobuf (name of the message, descriptor set as bytes or the path of its file). ``keep``: the
    columns of ``df`` that stay. ``options``: of Spark's function.

    ``mode``: ``deadLetter`` returns :class:`Decoded`; ``fail`` a frame that raises DecodeError at the first
    broken message; ``null`` a frame with nulls for it. Broken is: null or empty, not UTF-8, malformed, of
    another type than the schema, without a field that is not null, or with something behind the value.

    ``registry`` (avro, json, protobuf): the bodies are in Confluent's wire format, with the ids of a
    :class:`SchemaRegistry`. A body with another first byte, or with an id that the registry does not have or
    has for another format, is broken too. ``schema``: for protobuf the columns, as for json, or as without a
    registry. ``subject``: for avro and protobuf, in place of ``schema``: its newest one. With both, the
    columns of protobuf have to fit it. ``validate``: a body of json that its JSON Schema refuses is broken.
    Raises OptionError; RegistryFailed and LoginRefused of the registry.
    """
    kept = _kept(df, column, keep, mode)
    body = F.col(quoted(column))
    chosen, wire = _chosen(df, column, schema, format, dict(options or {}), registry, subject, validate)
    _require_new(chosen.schema, kept)
    bytes_ = payload(body) if wire and format == "json" else body
    text = bytes_.cast("string")
    unread = [*_of_bytes(body), *(wire.faults(body) if wire else ())]
    if format in ("json", "csv"):
        unread.append((~F.is_valid_utf8(text), "the body is not UTF-8"))
    encoded = F.when(~_any(unread), chosen.encoded(bytes_.cast("binary"), text))
    # two projections: Spark compiles the first, which it could not together with a parser
    first = df.select("*", _once(encoded).alias(_ENCODED))
    frame = first.select("*", chosen.parsed(_once(F.col(_ENCODED))).alias(_PARSED))
    parsed = F.col(_PARSED)
    faults = [*chosen.faults(parsed, text)]
    broken = _any(faults)  # also what is unread, of which nothing was parsed
    columns = [F.col(quoted(name)) for name in kept]
    value = chosen.value(parsed)
    fields = [value.getField(name).alias(name) for name in chosen.schema.names]
    faults = [*unread, *faults]
    reason = _first(faults)
    if mode == "deadLetter":
        whole = [F.col(quoted(name)) for name in df.columns]
        rejected = frame.where(broken).select(*whole, reason.alias(REASON))
        known = [text for _, text in faults if isinstance(text, str)] + chosen.reasons()
        told, is_good, metric = watched(frame, df.schema, broken, reason, known)
        remember(rejected, metric)
        return Decoded(told.where(is_good).select(*columns, *fields), rejected)
    if mode == "fail":
        error = F.raise_error(_text(df, column, reason)).cast("boolean")
        return frame.where(F.when(broken, error).otherwise(F.lit(True))).select(*columns, *fields)
    sound = frame.select(*columns, F.when(~broken, value).alias(_PARSED))
    return sound.select(
        *columns, *(F.col(_PARSED).getField(name).alias(name) for name in chosen.schema.names)
    )


def _once(column: Column) -> Column:
    """Spark moves filters below a projection and joins projections, and would evaluate it for each; not if it
    depends on the partition.
    """
    return F.when(F.spark_partition_id() >= 0, column)


def _any(faults: Sequence[Fault]) -> Column:
    """Whether a condition is true. It is evaluated for each row, and so without the reasons."""
    return F.coalesce(reduce(or_, (condition for condition, _ in faults)), F.lit(False))


def _first(faults: Sequence[Fault]) -> Column:
    """The reason of the first condition that is true."""
    cases: Any = F
    for condition, reason in faults:
        cases = cases.when(condition, F.lit(reason) if isinstance(reason, str) else reason)
    found: Column = cases.otherwise(F.lit(None).cast("string"))
    return found


def _of_bytes(body: Column) -> Iterator[Fault]:
    yield body.isNull(), "the body is null"
    yield F.length(body) == 0, "the body is empty"


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


def _kept(df: DataFrame, column: str, keep: Sequence[str], mode: str) -> list[str]:
    if mode not in ("deadLetter", "fail", "null"):
        raise OptionError(f"decode has the mode {mode!r}", "allowed are deadLetter, fail, null")
    types = {field.name: field.dataType for field in df.schema.fields}
    if not isinstance(types.get(column), (BinaryType, StringType)):
        found = types[column].simpleString() if column in types else "none"
        raise OptionError(
            f"decode needs the column {column!r} (binary or string), and the rows have {found}",
            "name the column that holds the encoded value with column=",
        )
    kept = [keep] if isinstance(keep, str) else list(keep)
    for name in kept:
        if name not in types:
            raise OptionError(
                f"keep names the column {name!r}, which the rows do not have",
                f"there are {', '.join(df.columns)}",
            )
    own = {_ENCODED, _PARSED, *([REASON] if mode == "deadLetter" else [])}
    taken = sorted(own & {name.lower() for name in df.columns})
    if taken:
        raise OptionError(f"the rows have a column {taken[0]!r}, which decode adds", "rename yours first")
    return kept


def _require_new(schema: StructType, kept: Sequence[str]) -> None:
    names = {name.lower() for name in kept}
    both = [name for name in schema.names if name.lower() in names]
    if both:
        raise OptionError(
            f"the decoded column {both[0]!r} has the name of a column that is kept",
            "rename that of the message before decode, or leave it out of keep",
        )


def _chosen(
    df: DataFrame,
    column: str,
    schema: Any,
    format: str,
    options: dict[str, str],
    registry: SchemaRegistry | str | None,
    subject: str | None,
    validate: bool,
) -> tuple[Format, WireFormat | None]:
    if validate and (format != "json" or registry is None):
        raise OptionError("decode got validate=True, which is for json with a registry", "leave it out")
    if registry is None:
        if subject is not None:
            raise OptionError(f"decode got subject={subject!r}, but no registry", "give registry, or schema")
        return _format(df, schema, format, options), None
    asked = SchemaRegistry.of(registry)
    if format == "json":
        if subject is not None:
            raise OptionError("decode of json got a subject", "give the columns as schema")
        return registered_json(df, column, Json(schema_of(schema), options), asked, validate)
    if format not in ("avro", "protobuf"):
        raise OptionError(
            f"decode has no registry for format {format!r}", "it has one for avro, json and protobuf"
        )
    if options:
        raise OptionError(
            f"decode of {format} with a registry got options, but it has none", "leave them out"
        )
    if format == "protobuf":
        return registered_protobuf(df, column, schema, asked, subject)
    return registered_avro(df, column, schema, asked, subject)


def _format(df: DataFrame, schema: Any, format: str, options: dict[str, str]) -> Format:
    if format == "json":
        return Json(schema_of(schema), options)
    if format == "csv":
        return Csv(schema_of(schema), options)
    if format == "avro":
        from pyspark.sql.avro.functions import from_avro

        if not isinstance(schema, str):
            raise OptionError(f"format 'avro' got the schema {schema!r:.200}", "give it as JSON text")
        return from_package(
            df, format, partial(from_avro, jsonFormatSchema=schema, options={**options, "mode": "PERMISSIVE"})
        )
    if format == "protobuf":
        from pyspark.sql.protobuf.functions import from_protobuf

        message, descriptor = descriptor_of(schema)
        return from_package(
            df,
            format,
            partial(
                from_protobuf,
                messageName=message,
                options={**options, "mode": "PERMISSIVE"},
                binaryDescriptorSet=descriptor,
            ),
        )
    raise OptionError(f"decode has the format {format!r}", "allowed are json, avro, protobuf, csv")
