"""Merges, deletes and overwrites of one app before the decision: checked, and their rows made ready.

1. Delta analyses a merge on the table, without doing it, and rehearses an overwrite on a copy without rows.
2. The execution of the rows fails for a row that the table would refuse, for a row outside of what an
   overwrite replaces, and for two rows with equal keys.

Not here: what happens after the decision (``changing.py``).
Invariant: each check of 1 is made once in a process for each shape of rows, table and change.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core.errors import OptionError
from connector import delta
from connector.fit import Fit, check_columns, nullable
from connector.isolated import isolated
from connector.merge import Merge
from connector.merge_values import Written, asserted, written
from connector.overwrite import Overwrite
from connector.rehearsal import no_rows, refused, rehearse
from connector.table import Table, in_sql
from connector.unique import check_keys, unique

_APPEND_ONLY = "delta.appendOnly"
_FAILED = "Error occurred during query planning"  # the first words of an EXPLAIN that fails


_checked: dict[tuple[str, ...], Fit | tuple[Written, ...]] = {}


def ready(rows: DataFrame, table: Table, change: Merge | Overwrite, keys: Sequence[str] = ()) -> DataFrame:
    """The rows as they are staged; their execution fails if the table would refuse one, or if two have the
    same ``keys``. Raises OptionError if the change would fail after the decision, whatever its rows.
    """
    spark, schema = rows.sparkSession, nullable(rows.schema)
    if not table.exists:
        raise OptionError(f"table {table.name!r} does not exist", "create it before the query starts")
    shape = (*table.shape, schema.json(), json.dumps(change.told(), sort_keys=True))
    if shape not in _checked:
        _checked[shape] = check(spark, table, schema, change)
    check_keys(table.name, rows.columns, keys)
    found = _checked[shape]
    try:
        rows = delta.fitted(rows, found) if isinstance(found, Fit) else asserted(rows, found)
        return unique(rows, keys, table.name)
    except PySparkException as error:  # keys that cannot be compared, such as a map
        raise refused(table.name, error) from error


def check(
    spark: SparkSession, table: Table, schema: StructType, change: Merge | Overwrite
) -> Fit | tuple[Written, ...]:
    """How the rows of an overwrite are converted, or what a merge writes of them. Raises OptionError."""
    check_columns(table.name, schema, ())
    removes = not (isinstance(change, Merge) and change.only_inserts)
    if removes and table.properties.get(_APPEND_ONLY, "false").lower() == "true":
        raise OptionError(
            f"table {table.name!r} is append-only ({_APPEND_ONLY})",
            "append to it, or use a merge that inserts",
        )
    if isinstance(change, Merge):
        analyse(spark, table, schema, change)
        return written(spark, table, schema, change)
    found = delta.check_append(spark, table, schema, change.options, ())
    assert found is not None, "the table exists"
    fitting = nullable(delta.fitted(no_rows(spark, schema), found).schema)
    rehearse(spark, table, fitting, change.options, (), where=change.where)
    outside = f"table {table.name!r}: a row is outside of what is overwritten ({change.where})"
    return replace(found, conditions=(*found.conditions, (change.where, outside)))


def analyse(spark: SparkSession, table: Table, schema: StructType, merge: Merge) -> None:
    """Raises OptionError with Delta's text if the merge cannot be done on the table."""
    view = f"txmq_{uuid.uuid4().hex}"
    text = merge.sql(in_sql(table.name), view)
    with isolated(spark) as session:
        no_rows(session, schema).createOrReplaceTempView(view)
        try:
            plan = "\n".join(str(row[0]) for row in session.sql(f"EXPLAIN {text}").collect())
        except Exception as error:
            raise refused(table.name, error, view) from error
    if _FAILED in plan:
        raise refused(table.name, ValueError(plan.partition(_FAILED)[2].strip(" :\n")), view)
