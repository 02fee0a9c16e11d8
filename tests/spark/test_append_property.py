"""Random tables and random rows: what passes the check before the decision, Delta appends, and the same from
files as from rows.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr

from broker_core.core.errors import OptionError
from connector.delta.after.add_files import Adding
from connector.delta.before import staged_files
from connector.delta.before.append_rows import append, check_append, fit_rows, why_rows
from connector.delta.last_commit import LastCommits
from connector.delta.resolve import resolve
from connector.delta.table_files import TableFiles
from connector.sql import nullable
from connector.tables.commit_id import CommitId
from connector.tables.table import Table
from connector.tables.table_format import Writing

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

# type: expressions of it, some of which some tables refuse
VALUES: dict[str, list[str]] = {
    "TINYINT": ["CAST(1 AS TINYINT)", "CAST(NULL AS TINYINT)", "CAST(-128 AS TINYINT)"],
    "INT": ["1", "CAST(NULL AS INT)", "2147483647", "-7"],
    "BIGINT": ["1L", "CAST(NULL AS BIGINT)", "5000000000L", "-2147483648L"],
    "STRING": ["'a'", "'abcdef'", "''", "CAST(NULL AS STRING)"],
    "DOUBLE": ["1.5D", "CAST('NaN' AS DOUBLE)"],
    "DATE": ["DATE '2020-01-01'", "CAST(NULL AS DATE)"],
    "TIMESTAMP": ["TIMESTAMP '2020-01-01 00:00:00'"],
    "DECIMAL(10,2)": ["CAST(1.25 AS DECIMAL(10,2))", "CAST(NULL AS DECIMAL(10,2))"],
    "ARRAY<INT>": ["array(1, NULL)", "CAST(NULL AS ARRAY<INT>)"],
    "STRUCT<a: INT, b: STRING>": [
        "named_struct('a', 1, 'b', 'x')",
        "named_struct('b', 'x')",
        "named_struct('a', CAST(NULL AS INT), 'b', 'y')",
    ],
    "MAP<STRING, INT>": ["map('k', 1)", "map('k', CAST(NULL AS INT))"],
}
KINDS = list(VALUES)
COLUMNS = ("a", "B", "c_d", "e")


def random_table(random: random.Random) -> str:
    """The columns and clauses of a CREATE TABLE."""
    columns: list[str] = []
    kinds: dict[str, str] = {}
    for name in random.sample(COLUMNS, random.randint(1, 4)):
        kind = kinds[name] = random.choice([*KINDS, "INT", "INT", "CHAR(3)", "VARCHAR(2)"])
        columns.append(f"{name} {kind}{random.choice(['', '', ' NOT NULL'])}")
    integers = [name for name, kind in kinds.items() if kind in ("INT", "TINYINT")]
    if integers and random.random() < 0.3:
        columns.append(f"g BIGINT GENERATED ALWAYS AS (CAST({integers[0]} + 1 AS BIGINT))")
    if random.random() < 0.15:
        columns.append(f"id BIGINT GENERATED {random.choice(['ALWAYS', 'BY DEFAULT'])} AS IDENTITY")
    plain = [name for name, kind in kinds.items() if kind in ("INT", "STRING", "DATE")]
    clauses = f" PARTITIONED BY ({plain[0]})" if plain and len(columns) > 1 and random.random() < 0.3 else ""
    if random.random() < 0.2:
        clauses += " TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    return f"({', '.join(columns)}) USING delta{clauses}"


def random_rows(random: random.Random, spark: SparkSession, table: str) -> Any:
    """Mostly what the table has, now and then something else."""
    columns: dict[str, list[str]] = {}
    for field in spark.table(table).schema:
        if random.random() < 0.15 and columns:
            continue
        kind = field.dataType.simpleString().upper()
        values = next((values for name, values in VALUES.items() if name.replace(" ", "") == kind), ["1L"])
        values = random.choice(list(VALUES.values())) if random.random() < 0.15 else values
        columns[random.choice([field.name, field.name.upper()])] = values
    if random.random() < 0.15:
        columns["other"] = VALUES["INT"]
    return spark.range(1).select(
        *[expr(random.choice(values)).alias(name) for name, values in columns.items()]
    )


def try_once(random: random.Random, spark: SparkSession, number: int) -> str:
    table = f"tried_{number}"
    ddl = random_table(random)
    spark.sql(f"DROP TABLE IF EXISTS {table}")
    spark.sql(f"CREATE TABLE {table} {ddl}")
    if "a INT" in ddl and random.random() < 0.5:
        spark.sql(f"ALTER TABLE {table} ADD CONSTRAINT low CHECK (a < 100)")
    rows = random_rows(random, spark, table)
    options = {"mergeSchema": "true"} if random.random() < 0.3 else {}
    spelled = table if random.random() < 0.5 else resolve(spark, table).location
    found = resolve(spark, spelled)
    told = f"{ddl} <- {rows.schema.simpleString()} {options} as {found.name}"
    try:
        rows = fit_rows(rows, check_append(spark, found, nullable(rows.schema), Writing(options)))
        values = [tuple(row) for row in rows.collect()]
    except OptionError:
        return "refused"
    except Exception as error:  # a value that the table refuses
        if "TXMQ_OPTION" not in str(error) and "OVERFLOW" not in str(error):
            raise AssertionError(told) from error
        return "refused value"
    staged = spark.createDataFrame(values, nullable(rows.schema))
    try:
        append(staged, found, once(1, table), Writing(options))
    except Exception as error:
        raise AssertionError(f"passed the check and failed: {told}, values {values}: {error}") from error
    assert spark.table(table).count() == 1
    if not why_rows(spark, found, nullable(rows.schema), options):
        append_files(spark, rows, found, options, told)
        first, second, third = (str(row) for row in spark.table(table).collect())
        assert first == second == third, told
    return "appended"


def once(sequence: int, token: str) -> CommitId:
    batch = {"app_id": "app", "sequence": sequence, "token": token, "query_id": "q", "batch_id": 0}
    return CommitId("app", sequence, batch, 0)


def append_files(spark: SparkSession, rows: Any, found: Table, options: dict[str, str], told: str) -> None:
    files = TableFiles.at(found.location)
    commits = LastCommits()
    adding = Adding(commits, 60.0)
    for sequence in (2, 3):  # the second time, the last commit is that of the first
        staged = staged_files.write(rows, found, options, files, f"_txmq/tried/{sequence}", commits)
        assert staged is not None and staged.rows == 1, told
        assert adding.add(spark, found, files, [staged], once(sequence, f"{found.name} {sequence}"), options)


@pytest.mark.soak  # test_values.py tries random tables
def test_what_passes_the_check_before_the_decision_is_appended(spark: SparkSession) -> None:
    outcomes = [try_once(random.Random(number), spark, number) for number in range(4)]
    assert "appended" in outcomes


@pytest.mark.soak
def test_what_passes_the_check_before_the_decision_is_appended_soak(spark: SparkSession, rounds: int) -> None:
    for number in range(rounds):
        try_once(random.Random(number), spark, 100 + number)
