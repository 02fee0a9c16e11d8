"""Merges, deletes and overwrites before the decision: checked, and their rows made ready.

1. Delta analyses a merge on the table, without doing it. An overwrite, and a merge that may change the
   schema, are rehearsed on a copy without rows.
2. The execution of the rows fails for a row that the table would refuse, and for a row outside of what an
   overwrite replaces.

Not here: two rows with equal keys (``connector/tables/checks.py``), what happens after the decision
(``after/make_change.py``).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from connector.delta.before.append_rows import check_append, fit_rows
from connector.delta.before.fit import Shape, check_columns
from connector.delta.before.merge_values import asserted, merge_values
from connector.delta.before.rehearsal import AUTO_MERGE, merges_schema, refused, rehearse, rehearse_merge
from connector.delta.isolated_session import isolated_session
from connector.sql import nullable
from connector.stream.staging import no_rows
from connector.tables.change import Change, Merge, Overwrite
from connector.tables.table import Table, in_sql
from connector.tables.table_format import CheckResult, Writing
from connector.tables.when import enclosed

T = TypeVar("T")

_APPEND_ONLY = "delta.appendOnly"
_FAILED = "Error occurred during query planning"  # the first words of an EXPLAIN that fails


def settled(table: Table, columns: Sequence[str], change: Change, context: Mapping[str, Any]) -> Change:
    """The change with the names of the columns of the table, if it sets all of them and adds none."""
    merges = context["settings"].get(AUTO_MERGE, "false").lower() == "true"
    if isinstance(change, Overwrite) or merges or not table.metadata:
        return change
    return change.of_columns(Shape.of(table.metadata).schema.names, columns)


def check(
    spark: SparkSession,
    table: Table,
    schema: StructType,
    change: Change,
    context: Mapping[str, object] | None = None,
) -> CheckResult:
    """See ``TableFormat.check_change``."""
    check_columns(table.name, schema, ())
    removes = not (isinstance(change, Merge) and all(clause.action == "insert" for clause in change.clauses))
    if removes and table.properties.get(_APPEND_ONLY, "false").lower() == "true":
        raise OptionError(
            f"table {table.name!r} is append-only ({_APPEND_ONLY})",
            "append to it, or use a merge that inserts",
        )
    if isinstance(change, Merge):
        wide = _try(spark, context, lambda session: analyse(session, table, schema, change))
        values = merge_values(spark, table, schema, change, wide)
        return CheckResult(lambda rows: asserted(rows, values.written), compared=values.compared)
    writing = Writing(change.options)
    found = check_append(spark, table, schema, writing, rehearses=False)
    assert found is not None, "the table exists"
    fitting = nullable(fit_rows(no_rows(spark, schema), found).schema)
    _try(spark, context, lambda session: rehearse(session, table, fitting, writing, change.where))
    outside = f"table {table.name!r}: a row is outside of what is overwritten ({change.where})"
    within = replace(found, conditions=(*found.conditions, (change.where, outside)))
    return CheckResult(lambda rows: fit_rows(rows, within))


def _try(spark: SparkSession, context: Mapping[str, object] | None, act: Callable[[SparkSession], T]) -> T:
    """What ``act`` returns in a session that applies the change, which has no temporaries. Raises
    OptionError if it does there.
    """
    try:
        with isolated_session(spark, None, context) as session:
            return act(session)
    except OptionError as error:
        try:
            # a clone would not have its variables; what is left there is a view that ends with the session
            act(spark)
        except OptionError:
            raise error from error.__cause__
        raise OptionError(
            f"{error.summary}. The SQL uses a temporary function or variable of this session, which the "
            "process that applies the change may not have",
            "compute the value as a column of the rows, or use a function of the catalog",
        ) from None


def analyse(spark: SparkSession, table: Table, schema: StructType, merge: Merge) -> StructType | None:
    """The schema that the table has afterwards, if the merge may change it. Raises OptionError with Delta's
    text if the merge cannot be done on the table. ``spark``: a session of its own.
    """
    view = f"txmq_{uuid.uuid4().hex}"
    no_rows(spark, schema).createOrReplaceTempView(view)
    clauses = tuple(replace(clause, condition=_boolean(clause.condition)) for clause in merge.clauses)
    strict = replace(merge, on=_boolean(merge.on), clauses=clauses)
    try:
        explained = spark.sql(f"EXPLAIN {strict.sql(in_sql(table.name), view)}").collect()
    except Exception as error:
        raise refused(table.name, error, view) from error
    plan = "\n".join(str(row[0]) for row in explained)
    if _FAILED in plan:
        raise refused(table.name, ValueError(plan.partition(_FAILED)[2].strip(" :\n")), view)
    return rehearse_merge(spark, table, merge, view) if merge.evolves or merges_schema(spark, {}) else None


def _boolean(condition: str) -> str:
    """The condition, of which Spark's analysis refuses another type; in a MERGE, only its execution does."""
    return f"CASE WHEN {enclosed(condition)} THEN true END" if condition else ""
