"""Types of Spark, values of them as SQL, and random columns of both: what a row may have.

Not here: what is done with the rows (``test_values.py``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from connector.sql import literal, quoted

# type -> values of it, without null; each is cast to the type
ATOMIC: dict[str, list[str]] = {
    "BOOLEAN": ["true", "false"],
    "TINYINT": ["-128", "127", "0"],
    "SMALLINT": ["-32768", "32767", "1"],
    "INT": ["-2147483648", "2147483647", "7"],
    "BIGINT": ["-9223372036854775808", "9223372036854775807", "12"],
    "FLOAT": ["'NaN'", "'-Infinity'", "'Infinity'", "-0.0D", "0.0D", "1.4e-45D", "3.4028235e38D", "0.1D"],
    "DOUBLE": ["'NaN'", "'-Infinity'", "'Infinity'", "-0.0D", "0.0D", "4.9e-324D", "1.7976931348623157e308D", "2.0D"],
    "DECIMAL(1,0)": ["9", "-9"],
    "DECIMAL(5,2)": ["999.99", "-999.99", "0.01", "1.00"],
    "DECIMAL(18,18)": ["0.999999999999999999", "0"],
    "DECIMAL(20,2)": ["123456789012345678.99", "-1"],
    "DECIMAL(38,0)": ["99999999999999999999999999999999999999", "-1"],
    "DECIMAL(38,18)": ["12345678901234567890.123456789012345678", "0.5"],
    "DECIMAL(38,38)": ["0.00000000000000000000000000000000000001"],
    "STRING": [
        "''", "' '", "'abc  '", "'1'", "' 7 '", "'true'", "'2024-02-29'", "'2024-02-29 10:00:00.5'", "'1e3'", "'NaN'", "'PT1S'",
        "'it\\'s'", "'\\\\n\\n\\t'", "'\\u0000x'", "'e\\u0301'", "'\\u00e9'", "'\\u05e9\\u05dc'", "'👩‍👩‍👧 𝒳'",
        "repeat('x', 5000)",
    ],
    "BINARY": ["X''", "X'00'", "X'ff00'", "'text'"],
    "DATE": [
        "'0001-01-01'", "'9999-12-31'", "'1582-10-04'", "'1582-10-15'", "'1900-01-01'", "'2024-02-29'", "'-0044-03-15'",
        "'+12345-06-07'",
    ],
    "TIMESTAMP": [
        "'0001-01-01 00:00:00'", "'9999-12-31 23:59:59.999999'", "'1582-10-10 00:00:00'", "'1969-12-31 23:59:59.999999'",
        "'2024-03-31 02:30:00'", "timestamp_micros(253402300800000001)", "timestamp_micros(-9223372036854775808)",
        "timestamp_micros(9223372036854775807)", "'1880-01-01 00:00:00'",
    ],
    "TIMESTAMP_NTZ": [
        "'0001-01-01 00:00:00'", "'9999-12-31 23:59:59.999999'", "'1582-10-10 00:00:00'", "'2024-03-31 02:30:00'",
        "'+12345-06-07 00:00:00.000001'", "'-0044-03-15 00:00:00'",
    ],
}  # fmt: skip
# types that only rows have: Delta's tables do not
GIVEN_ALONE: dict[str, list[str]] = {
    "INTERVAL YEAR TO MONTH": ["INTERVAL '1-2' YEAR TO MONTH", "INTERVAL '-178956970-8' YEAR TO MONTH"],
    "INTERVAL MONTH": ["INTERVAL '13' MONTH"],
    "INTERVAL DAY TO SECOND": ["INTERVAL '1 02:03:04.000005' DAY TO SECOND"],
    "INTERVAL HOUR": ["INTERVAL '25' HOUR"],
    "VOID": ["NULL"],
    "STRING COLLATE UTF8_LCASE": ["'Aa'", "'aA'", "''"],
    "STRING COLLATE UNICODE_CI": ["'É'", "'é'", "'1'"],
}
VARIANT = [
    'parse_json(\'{"a": [1, null, "é"], "b": 1.50}\')',
    "parse_json('null')",
    "'x'",
    "DATE '2024-02-29'",
]
TEXTS = {
    "CHAR(3)": ["'a'", "'abc'", "''", "'e\\u0301'", "'👩'"],
    "VARCHAR(3)": ["'a'", "'abc'", "''", "'𝒳𝒳𝒳'"],
}
VALUES = {**ATOMIC, **GIVEN_ALONE, **TEXTS, "VARIANT": VARIANT}

NAMES = [
    "plain", "With.Dot", "a.b.c", "sp ace", "UPPER", "miXed", "semi;colon,comma", "paren(1)", "été", "e\u0301te", "שלום",
    "👩\u200d👩\u200d👧", "ﬁ", "İ", "ß", "1st", "select", "a-b", "quo'te", 'dou"ble', "per%cent", "eq=ual", "brace{}", "new\nline",
    "t", "s", "c0", "_hidden", "body", "a/b", "back\\slash", "$", "#",
]  # fmt: skip
PLAIN = ["a", "b_c", "D", "x1", "Yy", "zz"]
DEPTHS = (0, 0, 0, 0, 1, 2, 4)  # of nested types
KEYS = ["INT", "STRING", "DATE", "DECIMAL(5,2)", "BINARY", "TIMESTAMP_NTZ"]


@dataclass(frozen=True)
class Kind:
    """A type: ``ddl``, and those within it by the names of fields (struct), or none (array, map). ``needed``: the
    fields that are NOT NULL.
    """

    ddl: str
    within: tuple[Kind, ...] = ()
    names: tuple[str, ...] = ()
    needed: frozenset[str] = frozenset()

    def needing(self, choice: random.Random) -> Kind:
        """The same type; some fields of a struct are NOT NULL."""
        if not self.names:
            return self
        needed = frozenset(name for name in self.names if choice.random() < 0.5)
        return replace(self, ddl=_struct(self.names, self.within, needed), needed=needed)

    def value(self, choice: random.Random, null: float = 0.2) -> str:
        """SQL of this type."""
        if choice.random() < null:
            return f"CAST(NULL AS {_castable(self.ddl)})"
        if not self.within:
            return f"CAST({choice.choice(VALUES[self.ddl])} AS {_castable(self.ddl)})"
        return f"CAST({self._made(choice)} AS {_castable(self.ddl)})"

    def _made(self, choice: random.Random) -> str:
        if self.names:
            pairs = [
                f"{literal(name)}, {kind.value(choice, null=0 if name in self.needed else 0.2)}"
                for name, kind in zip(self.names, self.within, strict=True)
            ]
            return f"named_struct({', '.join(pairs)})"
        if len(self.within) == 1:
            return f"array({', '.join(self.within[0].value(choice) for _ in range(choice.randrange(4)))})"
        key, value = self.within
        return choice.choice(["map()", f"map({key.value(choice, null=0)}, {value.value(choice)})"])


def _castable(ddl: str) -> str:
    """The type of a value for a column of CHAR or VARCHAR is a text; it may be null."""
    return re.sub(r"\b(VAR)?CHAR\(\d+\)", "STRING", ddl.replace(" NOT NULL", ""))


def _struct(names: Sequence[str], kinds: Sequence[Kind], needed: frozenset[str] = frozenset()) -> str:
    fields = [
        f"{quoted(name)}: {kind.ddl}{' NOT NULL' if name in needed else ''}"
        for name, kind in zip(names, kinds, strict=True)
    ]
    return f"STRUCT<{', '.join(fields)}>"


def nested(choice: random.Random, depth: int, names: Sequence[str] = NAMES) -> Kind:
    """A type of exactly this depth. Spark takes CHAR and VARCHAR only beside fields with ``PLAIN`` names."""
    if depth == 0:
        return Kind(choice.choice([*ATOMIC, "VARIANT", *(TEXTS if names is PLAIN else ())]))
    inner = nested(choice, depth - 1, names)
    shape = choice.choice(["array", "map", "struct"])
    if shape == "array":
        return Kind(f"ARRAY<{inner.ddl}>", (inner,))
    if shape == "map":
        key = Kind(choice.choice(KEYS))
        return Kind(f"MAP<{key.ddl}, {inner.ddl}>", (key, inner))
    chosen = tuple(_distinct(choice, choice.randint(1, 3), names))
    kinds = (inner, *(nested(choice, choice.randrange(depth), names) for _ in chosen[1:]))
    return Kind(_struct(chosen, kinds), kinds, chosen)


@dataclass(frozen=True)
class Column:
    """``held``: the type in the table, and ``given`` that of the rows; ``values``: one for each row, of it."""

    name: str
    held: Kind
    given: Kind
    values: tuple[str, ...]
    before: tuple[str, ...] = field(default=())  # what the table has
    needed: bool = False  # NOT NULL

    @property
    def ddl(self) -> str:
        return f"{quoted(self.name)} {self.held.ddl}{' NOT NULL' if self.needed else ''}"


def columns(
    choice: random.Random,
    count: int,
    rows: int,
    depths: Sequence[int] = DEPTHS,
    names: Sequence[str] = NAMES,
) -> list[Column]:
    """Columns with different names, given in the types of the table."""
    found = []
    for name in _distinct(choice, count, names):
        kind = nested(choice, choice.choice(depths), choice.choice([NAMES, NAMES, PLAIN]))
        values = tuple(kind.value(choice) for _ in range(rows))
        found.append(Column(name, kind, kind, values, tuple(kind.value(choice) for _ in range(2))))
    return found


def needed(choice: random.Random, column: Column) -> Column:
    """The column of the table is NOT NULL, and so may be fields of it; the rows may have nulls."""
    kind = column.held.needing(choice)
    before = tuple(kind.value(choice, null=0) for _ in column.before)
    values = column.values
    if choice.random() < 0.5:  # otherwise most rows are refused
        values = tuple(kind.value(choice, null=0) for _ in values)
    return replace(column, held=kind, given=kind, values=values, before=before, needed=True)


def partitions(column: Column) -> bool:
    """Whether a table may be partitioned by it."""
    return column.held.ddl in ATOMIC


def in_another_type(choice: random.Random, column: Column) -> Column:
    """The column of the table, and rows that have another type for it."""
    given = given_for(choice, column.held)
    return replace(column, given=given, values=tuple(given.value(choice) for _ in column.values))


def given_for(choice: random.Random, held: Kind) -> Kind:
    """Another type; of a nested one, the same with another one within."""
    if not held.within or choice.random() < 0.2:
        return Kind(choice.choice([*VALUES]))
    inner = tuple(given_for(choice, kind) if choice.random() < 0.5 else kind for kind in held.within)
    if held.names:
        pairs = list(zip(held.names, inner, strict=True))
        choice.shuffle(pairs)  # fields are taken by name
        names, kinds = tuple(name for name, _ in pairs), tuple(kind for _, kind in pairs)
        return Kind(_struct(names, kinds), kinds, names)
    if len(inner) == 1:
        return Kind(f"ARRAY<{inner[0].ddl}>", inner)
    return Kind(f"MAP<{inner[0].ddl}, {inner[1].ddl}>", inner)


def _distinct(choice: random.Random, count: int, of: Sequence[str] = NAMES) -> list[str]:
    names: dict[str, str] = {}
    while len(names) < count:
        name = choice.choice(of)
        if count > len(of) // 2:
            name += f"{' ' if of is NAMES else '_'}{len(names)}"
        names.setdefault(name.lower(), name)
    return list(names.values())


def select(columns: Sequence[Column], first_id: int = 1, *, before: bool = False) -> str:
    """The rows as SQL: ``id``, and the columns."""
    count = len((columns[0].before if before else columns[0].values) if columns else ("",))
    rows: list[Any] = []
    for number in range(count):
        values = [
            f"{(each.before if before else each.values)[number]} AS {quoted(each.name)}" for each in columns
        ]
        rows.append(f"SELECT {', '.join([f'{first_id + number} AS id', *values])}")
    return "\nUNION ALL ".join(rows)
