"""What a MERGE computes from the given row alone: the parts of its expressions over ``s`` that may fail.

Spark inserts casts into ``t.id = s.id`` if the types differ. Only its analysis shows them, so the parts are
read from the analysed plan. Not on Spark Connect, where a client has no plan.

Not here: the casts of what a clause assigns (``merge_values.py``).
Invariant: a part that is left out cannot fail, or depends on the row of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr
from pyspark.sql.types import StructType

from connector.cast import evaluated
from connector.fit import nullable
from connector.merge import SOURCE, TARGET
from connector.staging import no_rows
from connector.table import is_connect

Asked = tuple[str, str]  # SQL over ``s`` that must be true, error text

# expressions that do not fail if their children do not
_TOTAL = {
    "And", "Or", "Not", "IsNull", "IsNotNull", "Coalesce", "EqualTo", "EqualNullSafe", "LessThan",
    "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "AttributeReference", "Literal", "Alias",
    "GetStructField", "In", "InSet", "CaseWhen", "If", "Upper", "Lower", "Concat", "StringTrim",
}  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """``asked``: of each given row. ``compared``: column of the rows, in lower case -> SQL over ``s`` of what
    is compared with the table in its place, where Spark casts it.
    """

    asked: tuple[Asked, ...] = ()
    compared: dict[str, str] = field(default_factory=dict)


class GivenParts:
    """The parts of expressions over a table and rows of one schema."""

    def __init__(self, spark: SparkSession, table: str, held: StructType, given: StructType) -> None:
        self._spark = spark
        self._table = table
        self._connect = is_connect(spark)
        self._given = no_rows(spark, given).alias(SOURCE)
        self._both = no_rows(spark, nullable(held)).alias(TARGET).crossJoin(self._given)

    def of(self, what: str, sql: str) -> Parts:
        """``what`` the expression is, for an error."""
        if self._connect or not sql:
            return Parts()
        try:
            root = self._root(self._both.select(expr(sql)))
        except PySparkException:
            return Parts()  # Delta's analysis has judged it
        own = self._plan(self._given).outputSet()
        found = dict.fromkeys(asked for each in _largest(root, own) for asked in self._asked(what, each))
        return Parts(tuple(found), {name: sql for name, sql in _compared(root, own) if sql})

    def _asked(self, what: str, part: Any) -> Iterator[Asked]:
        if not self._may_fail(part):
            return
        sql = part.sql()
        told = f"table {self._table!r}: {what} computes {sql}"
        if _kind(part) == "Cast" and not self._may_fail(part.child()):
            value, wanted = part.child().sql(), part.dataType().sql()
            asked = f"{value} IS NULL OR try_cast({value} AS {wanted}) IS NOT NULL"
            told += ", and a value cannot be cast; cast it in the query, for example with try_cast"
        else:
            try:
                asked = evaluated(sql, self._given.select(expr(sql)).schema[0].dataType)
            except PySparkException:  # no text that Spark reads, such as a part of a lambda
                for number in range(part.children().size()):
                    yield from self._asked(what, part.children().apply(number))
                return
        try:
            self._given.select(expr(asked))
        except PySparkException:
            return
        yield asked, told

    def _may_fail(self, part: Any) -> bool:
        children = [part.children().apply(number) for number in range(part.children().size())]
        if any(map(self._may_fail, children)):
            return True
        kind = _kind(part)
        if kind == "Cast":
            if part.evalMode().toString() != "ANSI":
                return False
            cast: Any = self._spark._jvm
            cast = cast.org.apache.spark.sql.catalyst.expressions.Cast
            return not cast.canUpCast(part.child().dataType(), part.dataType())
        return kind not in _TOTAL

    def _plan(self, frame: Any) -> Any:
        return frame._jdf.queryExecution().analyzed()

    def _root(self, frame: Any) -> Any:
        return self._plan(frame).projectList().head()


def _kind(part: Any) -> str:
    return str(part.getClass().getSimpleName())


def _largest(part: Any, own: Any) -> Iterator[Any]:
    """The largest parts over ``own`` columns alone."""
    if _kind(part) != "Alias" and part.references().subsetOf(own):
        yield part
        return
    for number in range(part.children().size()):
        yield from _largest(part.children().apply(number), own)


def _compared(part: Any, own: Any) -> Iterator[tuple[str, str]]:
    """The columns of the rows that must equal a value of the row of the table, where they are cast."""
    sides = [part.children().apply(number) for number in range(part.children().size())]
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
