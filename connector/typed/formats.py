"""The formats of typed messages: how Spark's own functions parse a body, and what is then wrong with it.

Not here: what happens to a broken message (``decode.py``), what no parser checks (``violations.py``).
Invariant: a value is sound only if the whole body is one value of the schema. Spark's parsers of text stop at
the end of the first value, so the body is parsed together with a mark at its end, which must be there.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, IntegerType, StringType, StructField, StructType

from broker_core.core.errors import OptionError
from connector.errors import error_summary, first_line, without_logs
from connector.sql import has, mapped, nullable
from connector.typed.exponents import harmless
from connector.typed.violations import violations

Fault = tuple[Column, Column | str]  # a condition, and the reason where it is true
Parse = Callable[[Column, StructType, dict[str, str]], Column]  # of a text, with options

_PROBE = "2020-1-1"  # as a date, or in place of another type, what parsers disagree on
_MARK = "txmq_" + secrets.token_hex(8).replace("e", "x")  # no message has it, nor a number (``exponents.py``)
_CORRUPT = f"{_MARK}_corrupt"
_INFINITY = "allownonnumericnumbers"
_NO_OBJECT, _MISFIT = "the body is not one JSON object", "the body does not fit the schema"
_UTF_16, _UTF_32 = (f"the body is {name}, not UTF-8" for name in ("UTF-16", "UTF-32"))
NO_UTF_8 = "the body is not UTF-8"
_BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": _UTF_32,
    b"\0\0\xfe\xff": _UTF_32,
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
}
NO_UTF_8_REASONS = [NO_UTF_8, _UTF_16, _UTF_32]
# of text whose bytes are valid UTF-8
_ENCODINGS = (
    ("^\\uFEFF", "the body begins with a byte order mark"),
    ("(?s)^(?:\\x00{3}.|.\\x00{3})", _UTF_32),
    ("(?s)^(?:\\x00.|.\\x00)", _UTF_16),
)
# Why a body is no JSON object, by its first characters with its texts emptied. Only of those: Java's regular
# expressions recurse, and a body of another program must not overflow the stack of the task.
_CAUSES = (
    *_ENCODINGS,
    (r"(?:^|[:,\[\s])[-+]?(?:NaN|Inf(?:inity)?|INF)\b", "the body has NaN or infinity: JSON has neither"),
    (r"/\*|//", "the body has a comment, which JSON does not have"),
    (r"^\s*[^\s{]", "the body does not begin with {, as a JSON object does"),
    (r"\}\s*[^\s,}\]]", "something follows the JSON object in the body"),
)
_LOOKED_AT = 1_000  # characters
_TEXT = r"""(?s)"(?:[^"\\]|\\.)*\\?"?|'(?:[^'\\]|\\.)*\\?'?"""  # the last one may be cut off
# from_csv raises beyond the limits of its parser, even if it is to go on: these are txmq's, and never reached
_MAX_COLUMNS = 1_000_000
_ESCAPED = {"t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "'": "'", "\\": "\\"}
_sound_options: set[tuple[object, ...]] = set()


class Format(ABC):
    """``schema``: of the decoded columns."""

    schema: StructType

    @abstractmethod
    def encoded(self, body: Column, text: Column) -> Column:
        """What is parsed, of the body and the body as text. It is null instead if the bytes are broken."""

    @abstractmethod
    def parsed(self, encoded: Column) -> Column:
        """One value for the other methods."""

    def value(self, parsed: Column) -> Column:
        """The struct with the decoded columns."""
        return parsed

    @abstractmethod
    def faults(self, parsed: Column, text: Column) -> Iterator[Fault]:
        """What is wrong with the body; the first condition that is true says it. One is true if null was
        parsed.
        """

    def reasons(self) -> list[str]:
        """What a reason that is a column may be; [] if it may be anything."""
        return []


def schema_of(columns: StructType | str) -> StructType:
    """Raises OptionError unless ``columns`` is a struct, or its DDL (``id bigint not null, name string``)."""
    schema: Any = columns
    if isinstance(columns, str):
        try:
            schema = StructType.fromDDL(columns)
        except (ParseException, PySparkException) as error:
            raise OptionError(
                f"the schema {columns[:200]!r} is not DDL: {first_line(error)[:200]}",
                "write 'id bigint not null, name string', or give a StructType",
            ) from None
    if not isinstance(schema, StructType):
        raise OptionError(f"the schema is {schema!r:.200}", "give a StructType, or its columns as DDL")
    names = [each.name.lower() for each in schema.fields]
    if not names or len(set(names)) < len(names):
        raise OptionError(
            f"the schema has the columns {', '.join(schema.names) or 'none'}",
            "name at least one, and none twice (upper case and lower case are the same)",
        )
    return schema


@dataclass(frozen=True)
class TextFormat(Format):
    """A format that Spark's own function parses, of text. ``options``: of that function."""

    schema: StructType
    options: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def probes(self) -> list[str]:
        """Bodies that show whether Spark takes the options."""

    @property
    def function(self) -> str:
        return f"from_{type(self).__name__.lower()}"

    @property
    def _raw_options(self) -> dict[str, str]:
        """The options by name in lower case: Spark compares them without case."""
        return {name.lower(): str(value) for name, value in self.options.items()}

    def _parsed(
        self, text: Column, mark: DataType, parse: Parse, own: Mapping[str, str], *, grouped: bool = False
    ) -> Column:
        """What ``parse`` makes of a text: the columns, the mark, and the text if it is broken. ``own``:
        options in place of the user's. Raises OptionError for one that nobody may give.
        """
        for name in self.options:
            if name.lower() in ("mode", "columnnameofcorruptrecord"):
                raise OptionError(
                    f"option {name!r} of {self.function} is txmq's own: it finds the broken messages",
                    "leave it out; the argument mode says what happens to them",
                )
        options = {**self._raw_options, **own, "mode": "PERMISSIVE", "columnnameofcorruptrecord": _CORRUPT}
        marks = [StructField(_MARK, mark), StructField(_CORRUPT, StringType())]
        if has(self.schema, DecimalType):
            decimals = mapped(self.schema, lambda it: it if isinstance(it, DecimalType) else StringType())
            kind = StructType([*decimals.fields, *marks])
            text = harmless(text, lambda it: parse(it, kind, options)[_CORRUPT].isNotNull(), grouped=grouped)
        return parse(text, StructType([*self.schema.fields, *marks]), options)


class Json(TextFormat):
    """One JSON object, by ``from_json``."""

    def encoded(self, body: Column, text: Column) -> Column:
        """The object with a last member, the mark, in front of its closing brace. Only if the body is one
        object, that is a member of the object that Spark reads.
        """
        # most bodies end with the brace, and have a member; of rtrim Spark warns that it is deprecated
        trimmed = F.btrim(text, F.lit(" \t\r\n")).cast("binary")
        empty = text.rlike(r"^[ \t\r\n]*\{[ \t\r\n]*\}[ \t\r\n]*$")
        return (
            F.when(_is_closed(body) & (F.instr(text, '"') > 0), _marked(body))
            .when(empty, F.lit(f'{{"{_MARK}":1}}'))
            .when(_is_closed(trimmed), _marked(trimmed))
            .otherwise(text)
        )

    def parsed(self, encoded: Column) -> Column:
        own = {_INFINITY: "true" if self._allows_infinity else "false"}
        return self._parsed(encoded, IntegerType(), F.from_json, own)

    @property
    def _allows_infinity(self) -> bool:
        """JSON has no such number (RFC 8259), and Spark reads it by default."""
        return self._raw_options.get(_INFINITY, "").lower() == "true"

    def probes(self) -> list[str]:
        return [json.dumps(dict.fromkeys(self.schema.names, _PROBE))]

    def faults(self, parsed: Column, text: Column) -> Iterator[Fault]:
        corrupt, mark = parsed.getField(_CORRUPT).isNotNull(), parsed.getField(_MARK).isNull()
        yield corrupt | mark, self._misfit(parsed, text)
        yield from violations(parsed, self.schema, finite=not self._allows_infinity)

    def _misfit(self, value: Column, text: Column) -> Column:
        """The first field that is there and was not read; Spark keeps the others."""
        faults = [
            F.when(
                value.getField(each.name).isNull() & F.get_json_object(text, f"$['{each.name}']").isNotNull(),
                F.lit(_not_of_type(each)),
            )
            for each in self.schema.fields
            if "'" not in each.name
        ]
        begin = F.regexp_replace(F.substring(text, 1, _LOOKED_AT), _TEXT, '""')
        cause = _cause(begin, _CAUSES, _NO_OBJECT)
        # Spark reads the mark if only a member before it is wrong
        return F.when(value.getField(_MARK).isNull(), cause).otherwise(F.coalesce(*faults, F.lit(_MISFIT)))

    def reasons(self) -> list[str]:
        causes = [reason for _, reason in _CAUSES]
        return [_NO_OBJECT, _MISFIT, *causes, *map(_not_of_type, self.schema.fields)]


def no_utf_8(body: Column) -> Column:
    """Why the bytes are not UTF-8."""
    cause = F.lit(NO_UTF_8)
    for mark, reason in reversed(_BYTE_ORDER_MARKS.items()):
        cause = F.when(F.substring(body, 1, len(mark)) == F.lit(mark), F.lit(reason)).otherwise(cause)
    return cause


def _cause(text: Column, causes: Sequence[tuple[str, str]], otherwise: str) -> Column:
    """The reason of the first pattern that is found."""
    cause = F.lit(otherwise)
    for pattern, reason in reversed(causes):
        cause = F.when(text.rlike(pattern), F.lit(reason)).otherwise(cause)
    return cause


def _is_closed(body: Column) -> Column:
    return F.substring(body, -1, 1) == F.lit(b"}")


def _marked(body: Column) -> Column:
    # bytes, because Spark takes a part of a text by counting its characters
    opened = F.substring(body, F.lit(1), F.length(body) - 1)
    return F.concat(opened, F.lit(f',"{_MARK}":1}}'.encode())).cast("string")


def _not_of_type(field: StructField) -> str:
    return f"field {field.name!r} is not {field.dataType.simpleString()}"


class Csv(TextFormat):
    """One row, by ``from_csv``, which takes the end of a line for a character like others."""

    def encoded(self, body: Column, text: Column) -> Column:
        """``BODY,mark``: more columns, fewer, or an open quote, and the mark is not behind the last one. Null
        if the body may have more columns than the parser takes.
        """
        row = F.regexp_replace(text, r"\r?\n\z", "")
        between = F.lit(self._separator)
        # of the text, so that the row of a good body is made once
        separators = (F.length(text) - F.length(F.replace(text, between, F.lit("")))) / F.length(between)
        fits = (F.length(text) < _MAX_COLUMNS) | (separators <= _MAX_COLUMNS - 2)  # with the mark
        return F.when(fits, F.concat(row, between, F.lit(_MARK)))

    def parsed(self, encoded: Column) -> Column:
        def parse(text: Column, kind: StructType, options: dict[str, str]) -> Column:
            return F.from_csv(text, nullable(kind).toDDL(), options)

        own = {"maxcolumns": str(_MAX_COLUMNS), "maxcharspercolumn": "-1"}
        return self._parsed(encoded, StringType(), parse, own, grouped=self._separator != ",")

    @property
    def _separator(self) -> str:
        """As Spark reads the option: a backslash and a t are a tab."""
        raw = self._raw_options.get("sep", self._raw_options.get("delimiter", ","))
        return re.sub(r"\\(.)", lambda match: _ESCAPED.get(match[1], match[0]), raw)

    @property
    def _most(self) -> int | None:
        """``maxCharsPerColumn``: characters of a column; None: any number, which Spark writes as -1."""
        text = self._raw_options.get("maxcharspercolumn", "-1")
        try:
            most = int(text)
        except ValueError:
            raise OptionError(f"option 'maxCharsPerColumn' is {text!r:.200}", "give a whole number") from None
        return None if most < 0 else most

    def probes(self) -> list[str]:
        return [self._separator.join([each] * len(self.schema)) for each in ('"a"b', _PROBE)]

    def faults(self, parsed: Column, text: Column) -> Iterator[Fault]:
        mark = F.coalesce(parsed.getField(_MARK), F.lit(""))
        yield mark != _MARK, _cause(text, _ENCODINGS, self._no_row)
        most = self._most
        for each in self.schema.fields:
            if most is not None and isinstance(each.dataType, StringType):
                too_long = F.length(parsed.getField(each.name)) > most
                yield too_long, f"column {each.name!r} has more than {most} characters"
        yield parsed.getField(_CORRUPT).isNotNull(), _cause(text, _ENCODINGS, _MISFIT)
        finite = self._raw_options.keys().isdisjoint(("positiveinf", "negativeinf"))
        yield from violations(parsed, self.schema, finite=finite)

    @property
    def _no_row(self) -> str:
        return f"the body is not a row of {len(self.schema)} columns"

    def reasons(self) -> list[str]:
        return [self._no_row, _MISFIT, *(reason for _, reason in _ENCODINGS)]


def with_sound_options(spark: SparkSession, fmt: TextFormat) -> Format:
    """Returns ``fmt``. Raises OptionError for an option that Spark refuses, or with which it raises for a
    broken body: it says so only where a body is parsed, and stops the query.
    """
    key = (type(fmt), fmt.schema.json(), *sorted(fmt.options.items()))
    if not fmt.options or key in _sound_options:
        return fmt
    error = _refusal(spark, fmt)
    if error is not None and _refusal(spark, replace(fmt, options={})) is None:
        each = {name: replace(fmt, options={name: value}) for name, value in fmt.options.items()}
        found = [name for name, alone in each.items() if _refusal(spark, alone) is not None]
        options = ", ".join(f"{name}={fmt.options[name]!r:.100}" for name in found or fmt.options)
        raise OptionError(
            f"Spark refuses {options} of {fmt.function}: {error_summary(error)[:300]}",
            "correct it, or leave it out",
        ) from None
    _sound_options.add(key)
    return fmt


def _refusal(spark: SparkSession, fmt: TextFormat) -> Exception | None:
    """What Spark raises for bodies of text; on the driver, without a job."""
    try:
        with without_logs():
            parsed = [fmt.parsed(F.lit(text)) for text in fmt.probes()]
            spark.sql("VALUES (0)").select(*parsed).collect()
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def one_clear_error(format: str) -> Iterator[None]:
    """Spark's refusal of the columns or options of its function as OptionError."""
    try:
        with without_logs():
            yield
    except AnalysisException as error:
        text = f"Spark refuses the schema of format {format!r}: {first_line(error)[:300]}"
        raise OptionError(text, "correct it") from None
