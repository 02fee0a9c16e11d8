"""What a MERGE computes from the given row alone: the parts of its expressions over ``s`` that may fail.

Spark inserts casts into ``t.id = s.id`` if the types differ. Only its analysis shows them, so the parts are
read from the analysed plan. Not on Spark Connect, where a client has no plan.

What stands behind an AND is evaluated where what stands before it is not false. Of ``on`` Spark makes a join:
it computes the sides of an equality for every row, or, where no other row is kept, for those that pass what
``on`` asks of the given row alone.

Not here: the casts of what a clause assigns (``merge_values.py``).
Invariant: a part that is left out, or that a guard excludes, is not evaluated, cannot fail, or depends on the
row of the table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import StructType

from connector.delta.before.cast import evaluated
from connector.errors import without_logs
from connector.sql import nullable
from connector.stream.staging import no_rows
from connector.tables.change import SOURCE, TARGET
from connector.tables.table import is_connect

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

RowCheck = tuple[str, str]  # SQL over ``s`` that must be true, error text

# expressions that do not fail if their children do not
_TOTAL = {
    "And", "Or", "Not", "IsNull", "IsNotNull", "Coalesce", "EqualTo", "EqualNullSafe", "LessThan",
    "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "AttributeReference", "Literal", "Alias",
    "GetStructField", "In", "InSet", "CaseWhen", "If", "Upper", "Lower", "Concat", "StringTrim",
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """``checks``: of each given row. ``compared``: column of the rows, in lower case -> SQL over ``s`` of
    what is compared with the table in its place, where Spark casts it.
    """

    checks: tuple[RowCheck, ...] = ()
    compared: dict[str, str] = field(default_factory=dict)


class Order(enum.Enum):
    """When the parts of an expression that AND joins are evaluated."""

    WRITTEN = enum.auto()
    JOINED = enum.auto()  # equalities first: a row without a match is kept, for an insert or the table
    FILTERED = enum.auto()  # what is asked of the given row alone first


class SourceParts:
    """The parts of expressions over a table and rows of one schema."""

    def __init__(self, spark: SparkSession, table: str, target: StructType, rows: StructType) -> None:
        self._spark = spark
        self._table = table
        self._connect = is_connect(spark)
        self._rows = no_rows(spark, rows).alias(SOURCE)
        self._both = no_rows(spark, nullable(target)).alias(TARGET).crossJoin(self._rows)

    def of(self, what: str, sql: str, order: Order = Order.WRITTEN) -> Parts:
        """``what`` the expression is, for an error."""
        if self._connect or not sql:
            return Parts()
        try:
            with without_logs():
                root = self._plan(self._both.select(expr(sql))).projectList().head()
        except PySparkException:
            return Parts()  # Delta's analysis has judged it
        own = self._plan(self._rows).outputSet()
        found: dict[RowCheck, None] = {}
        for part, guard in self._guarded(_conjuncts(root), own, order):
            for each in _largest(part, own):
                found.update(dict.fromkeys(guarded(check, guard) for check in self._checks(what, each)))
        return Parts(tuple(found), {name: sql for name, sql in _compared(root, own) if sql})

    def _guarded(
        self, conjuncts: list[JavaObject], own: JavaObject, order: Order
    ) -> Iterator[tuple[JavaObject, str]]:
        """Each with SQL over ``s`` without which it is not evaluated; "" if there is none."""
        guards = [(each, self._readable(each)) for each in conjuncts if each.references().subsetOf(own)]
        every = " AND ".join(f"coalesce({sql}, false)" for _, sql in guards if sql)
        before: list[str] = []
        for part in conjuncts:
            if part.references().subsetOf(own):
                yield part, " AND ".join(before)
                if sql := self._readable(part):
                    before.append(f"coalesce({sql}, true)")  # of null AND x, Spark evaluates x
            elif order is Order.FILTERED:
                yield part, every
            else:
                # what a join may sort or hash the rows by
                first = (
                    order is Order.JOINED
                    and _kind(part) in ("EqualTo", "EqualNullSafe")
                    and any(side.references().subsetOf(own) for side in _children(part))
                )
                yield part, "" if first else " AND ".join(before)

    def _readable(self, part: JavaObject) -> str:
        """The SQL of a part over ``s``; "" where Spark does not read it."""
        sql = str(part.sql())
        try:
            with without_logs():
                self._rows.select(expr(sql))
        except PySparkException:
            return ""
        return sql

    def _checks(self, what: str, part: JavaObject) -> Iterator[RowCheck]:
        if not self._may_fail(part):
            return
        sql = part.sql()
        text = f"table {self._table!r}: {what} computes {sql}"
        if _kind(part) == "Cast" and not self._may_fail(part.child()):
            value, kind = part.child().sql(), part.dataType().sql()
            check = f"{value} IS NULL OR try_cast({value} AS {kind}) IS NOT NULL"
            text += ", and a value cannot be cast; cast it in the query, for example with try_cast"
        else:
            try:
                with without_logs():
                    check = evaluated(sql, self._rows.select(expr(sql)).schema[0].dataType)
            except PySparkException:  # no text that Spark reads, such as a part of a lambda
                for each in _children(part):
                    yield from self._checks(what, each)
                return
        try:
            with without_logs():
                self._rows.select(expr(check))
        except PySparkException:
            return
        yield check, text

    def _may_fail(self, part: JavaObject) -> bool:
        if any(map(self._may_fail, _children(part))):
            return True
        kind = _kind(part)
        if kind == "Cast":
            if part.evalMode().toString() != "ANSI":
                return False
            cast: Any = self._spark._jvm
            cast = cast.org.apache.spark.sql.catalyst.expressions.Cast
            return not cast.canUpCast(part.child().dataType(), part.dataType())
        return kind not in _TOTAL

    def _plan(self, frame: Any) -> JavaObject:
        return frame._jdf.queryExecution().analyzed()


def guarded(check: RowCheck, guard: str) -> RowCheck:
    """The check, limited to the rows for which ``guard`` is true."""
    sql, text = check
    return (f"CASE WHEN {guard} THEN {sql} ELSE true END" if guard else sql), text


def _kind(part: JavaObject) -> str:
    return str(part.getClass().getSimpleName())


def _conjuncts(part: object) -> list[JavaObject]:
    """What AND joins, in order."""
    if _kind(part) not in ("Alias", "And"):
        return [part]
    return [each for side in _children(part) for each in _conjuncts(side)]


def _children(part: JavaObject) -> list[JavaObject]:
    return [part.children().apply(number) for number in range(part.children().size())]


def _largest(part: JavaObject, own: JavaObject) -> Iterator[JavaObject]:
    """The largest parts over ``own`` columns alone."""
    if _kind(part) != "Alias" and part.references().subsetOf(own):
        yield part
        return
    for each in _children(part):
        yield from _largest(each, own)


def _compared(part: object, own: object) -> Iterator[tuple[str, str]]:
    """The columns of the rows that must equal a value of the row of the table, where they are cast."""
    sides = _children(part)
    if _kind(part) in ("Alias", "And"):
        found = [pair for side in sides for pair in _compared(side, own)]
        plain = {name for name, sql in found if not sql}
        yield from ((name, sql) for name, sql in found if name not in plain or not sql)
        return
    if _kind(part) not in ("EqualTo", "EqualNullSafe"):
        return
    for side, other in (sides, sides[::-1]):
        inner = side
        while _kind(inner) == "Cast":
            inner = inner.child()
        if _kind(inner) != "AttributeReference" or not side.references().subsetOf(own):
            continue
        if other.references().nonEmpty() and not other.references().intersect(own).nonEmpty():
            yield inner.name().lower(), side.sql() if side is not inner else ""
