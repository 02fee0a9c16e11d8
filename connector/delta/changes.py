"""Merges, deletes and overwrites before the decision: checked, and their rows made ready.

1. Delta analyses a merge on the table, without doing it, and rehearses an overwrite on a copy without rows.
2. The execution of the rows fails for a row that the table would refuse, and for a row outside of what an
   overwrite replaces.

Not here: two rows with equal keys (``connector/unique.py``), what happens after the decision
(``changing.py``).
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.errors import OptionError
from connector.delta.append import check_append, fitted
from connector.delta.isolated import isolated
from connector.delta.merge_values import Given, given
from connector.delta.rehearsal import refused, rehearse
from connector.fit import Fit, check_columns, nullable
from connector.merge import Merge
from connector.overwrite import Overwrite
from connector.staging import no_rows
from connector.table import Table, in_sql

_APPEND_ONLY = "delta.appendOnly"
_FAILED = "Error occurred during query planning"  # the first words of an EXPLAIN that fails


def check(spark: SparkSession, table: Table, schema: StructType, change: Merge | Overwrite) -> Fit | Given:
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
        return given(spark, table, schema, change)
    found = check_append(spark, table, schema, change.options, ())
    assert found is not None, "the table exists"
    fitting = nullable(fitted(no_rows(spark, schema), found).schema)
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
