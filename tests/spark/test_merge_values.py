"""Values of a merge that Delta casts or computes: what passes the check before the decision, Delta merges,
and as a plain MERGE of the same rows does; what is refused, a plain MERGE refuses.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from connector.delta.format import Delta
from connector.sql import nullable
from connector.tables.change import Merge
from connector.tables.checks import unique
from connector.tables.when import Clause, When
from tests.spark.conftest import settings

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

# column of the table: its type, a value that it takes, and some that it may not take
COLUMNS: dict[str, tuple[str, list[str]]] = {
    "i": ("INT", ["'12'", "'abc'", "1e300D", "5L", "1099511627776L", "CAST(NULL AS STRING)", "true"]),
    "l": ("BIGINT NOT NULL", ["1", "'7'", "''", "1e300D", "2.5D", "CAST(1 AS DECIMAL(30,0))"]),
    "y": ("DATE", ["'2026-01-01'", "'2026-02-30'", "TIMESTAMP '2026-01-01 10:00:00'", "DATE '2026-01-01'"]),
    "x": ("TIMESTAMP", ["'2026-01-01'", "'no'", "TIMESTAMP_NTZ '2026-01-01 00:00:00'"]),
    "b": ("BOOLEAN", ["'true'", "'perhaps'", "0"]),
    "d": ("DECIMAL(6,2)", ["CAST(123456789.5 AS DECIMAL(20,2))", "1.5D", "'1.5'", "'1e9'", "CAST('NaN' AS DOUBLE)"]),
    "c": ("VARCHAR(3)", ["'abc'", "'abc  '", "12", "1234", "CAST(NULL AS INT)"]),
    "`o.d d`": ("SMALLINT", ["1", "100000", "'1'", "'x'"]),
    "e": ("STRUCT<a: INT, `B.b`: ARRAY<INT>>", [
        "named_struct('a', 1L, 'B.b', array(1L))", "named_struct('a', 1099511627776L, 'B.b', array(1))",
        "named_struct('B.b', array('1', 'z'), 'a', 1)", "named_struct('B.b', array('1', NULL), 'a', 1)",
    ]),
    "m": ("MAP<STRING, STRUCT<p: INT, q: INT>>", [
        "map('k', named_struct('q', 1L, 'p', 2))", "map('k', named_struct('p', 1099511627776L, 'q', 2))",
        "map(1, named_struct('p', 1, 'q', 2))",
    ]),
}  # fmt: skip
# SQL over s alone, which may fail under ANSI; ``w`` is a text of the row
FAILING = ["CAST(s.w AS INT)", "1 div CAST(s.w AS INT)", "element_at(array(1), CAST(s.w AS INT))"]
# in each, s.k excludes a row whose w is no number; Delta computes the side of an equality all the same, where
# it keeps the rows without a match
GUARDED = [
    "s.k AND CAST(s.w AS INT) = t.id",
    "CAST(s.w AS INT) = t.id AND s.k",
    "s.k AND CAST(s.w AS INT) < t.id",
    "s.k AND t.id = s.id AND CAST(s.w AS INT) = 1",
]
POLICIES = ["ANSI", "ANSI", "LEGACY", "STRICT"]


def case(random: random.Random) -> tuple[str, str, Merge]:
    """The rows, those of the table, and a merge."""
    name = random.choice(list(COLUMNS))
    values = random.choice(["1", "1", "'1'", "'01'", "'x'", "2"])
    given = random.choice(COLUMNS[name][1])
    word = random.choice(["'1'", "'1'", "'0'", "'no'"])
    rows = f"SELECT {values} AS id, {given} AS {name}, {word} AS w, {random.choice(['true', 'false'])} AS k"
    if name != "l":
        rows = rows.replace(" AS w", " AS w, 5L AS l")
    on = random.choice(["t.id = s.id", "t.id = s.id", "t.id = s.id AND CAST(s.w AS INT) = 1", *GUARDED])
    condition = random.choice(["", "", "s.k", f"{random.choice(FAILING)} = 1"])
    assigned = {"id": "1", "l": "s.l", name: f"s.{name}"}
    if name == "i":
        assigned[name] = random.choice([f"s.{name}", f"t.id + {random.choice(FAILING)}"])
    if name == "e" and random.random() < 0.4:
        assigned = {"e.a": "s.e.a"}
    clauses = [When.matched(condition).update(assigned)]
    if not any("t." in sql for sql in assigned.values()) and "e.a" not in assigned:
        clauses.append(When.not_matched(condition).insert(assigned))
    if random.random() < 0.2:
        clauses = [When.matched(condition).delete()]
    return rows, name, Merge.parse(on, clauses=clauses)


def attempt(spark: SparkSession, rows: DataFrame, merge: Merge, table: str) -> list[str]:
    """The rows of the table after the merge."""
    rows.createOrReplaceTempView("given_values")
    spark.sql(merge.sql(table, "given_values")).collect()
    return sorted(map(str, spark.table(table).collect()))


def made(spark: SparkSession, place: Path) -> Path:
    """A table with one row, to copy."""
    columns = ", ".join(f"{column} {kind}" for column, (kind, _) in COLUMNS.items())
    properties = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    spark.sql(f"CREATE TABLE delta.`{place}` (id INT, {columns}) USING delta {properties}")
    row = "1, 1, named_struct('a', 1, 'B.b', array(1))"
    spark.sql(f"INSERT INTO delta.`{place}` (id, l, e) VALUES ({row})")
    return place


def try_once(random: random.Random, spark: SparkSession, template: Path, number: int) -> str:
    rows, name, merge = case(random)
    ansi, policy = random.choice(["true", "false"]), random.choice(POLICIES)
    tables = [
        f"delta.`{shutil.copytree(template, f'{template}-{number}-{kind}')}`" for kind in ("ours", "plain")
    ]
    told = f"{name} <- {rows}, {asdict(merge)}, ANSI {ansi}, policy {policy}"
    for setting, value in (("ansi.enabled", ansi), ("storeAssignmentPolicy", policy)):
        spark.conf.set(f"spark.sql.{setting}", value)
    try:
        given = spark.sql(rows)
        try:
            plain = attempt(spark, given, merge, tables[1])
        except Exception as error:
            plain = [f"refused: {error}"[:300]]
        refused = False
        try:
            checked = Delta().check_change(
                spark, Delta().resolve(spark, tables[0]), nullable(given.schema), merge
            )
            ready = checked.ready(given)
            staged = spark.createDataFrame(ready.collect(), ready.schema)
        except Exception as error:
            refused, told = True, f"{told}: {error}"[:900]
        if refused:
            exact = policy != "LEGACY"  # docs/merge.md: under LEGACY with ANSI mode, what both casts take
            assert not exact or plain[0].startswith("refused"), f"refused without need: {told}"
            return "refused"
        try:
            ours = attempt(spark, staged, merge, tables[0])
        except Exception as error:
            raise AssertionError(f"passed the check and failed: {told}: {error}"[:900]) from error
        assert ours == plain, told
        return "merged"
    finally:
        for setting in ("ansi.enabled", "storeAssignmentPolicy"):
            spark.conf.unset(f"spark.sql.{setting}")


@pytest.mark.soak
def test_what_passes_the_check_of_values_is_merged_as_by_delta(spark: SparkSession, tmp_path: Path) -> None:
    template = made(spark, tmp_path / "table")
    outcomes = [try_once(random.Random(number), spark, template, number) for number in range(6)]
    assert {"merged", "refused"} <= set(outcomes)


@pytest.mark.soak
def test_what_passes_the_check_of_values_is_merged_as_by_delta_soak(
    spark: SparkSession, tmp_path: Path, rounds: int
) -> None:
    template = made(spark, tmp_path / "table")
    for number in range(rounds):
        try_once(random.Random(number), spark, template, number)


UPDATE, INSERT = When.matched().update({"l": "2"}), When.not_matched().insert({"id": "s.id", "l": "2"})


COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
NO_ANSI = {"spark.sql.ansi.enabled": "false"}
VECTORS = {"spark.databricks.delta.properties.defaults.enableDeletionVectors": "true"}


CHOSEN: dict[str, dict[str, str]] = {
    "plain": {},
    "all-three": {**NO_ANSI, **COMPILED, **VECTORS},
    "no-ansi": NO_ANSI,
    "compiled": COMPILED,
    "vectors": VECTORS,
}
CLAUSES = {"matched": (UPDATE,), "all": (UPDATE, INSERT)}
OFTEN = {("all-three", "all")}  # the others only in ``make soak``


@pytest.mark.parametrize(
    ("chosen", "clauses"),
    [
        pytest.param(
            chosen,
            clauses,
            id=f"{told}-{which}",
            marks=[] if (told, which) in OFTEN else pytest.mark.soak,
        )
        for told, chosen in CHOSEN.items()
        for which, clauses in CLAUSES.items()
    ],
)
def test_what_on_excludes_is_evaluated_before_where_delta_evaluates_it(
    spark: SparkSession, tmp_path: Path, clauses: tuple[Clause, ...], chosen: dict[str, str]
) -> None:
    """A row that a plain MERGE evaluates is refused, and one that it leaves out is not."""
    with settings(spark, chosen):
        what_on_excludes(spark, tmp_path, clauses, ansi=chosen.keys().isdisjoint(NO_ANSI))


def what_on_excludes(spark: SparkSession, tmp_path: Path, clauses: tuple[Clause, ...], ansi: bool) -> None:
    template = made(spark, tmp_path / "table")
    without = "IF(s.w = 'no', CAST(raise_error('CAST_INVALID_INPUT') AS INT), CAST(s.w AS INT))"
    given = [on if ansi else on.replace("CAST(s.w AS INT)", without) for on in GUARDED]
    rows = spark.sql("SELECT 7 AS id, 'no' AS w, false AS k UNION ALL SELECT 1, '1', true")
    rows.createOrReplaceTempView("given_values")

    def fails(act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:
            if "CAST_INVALID_INPUT" in str(error) or "a value cannot be cast" in str(error):
                return True
            raise
        return False

    refused: dict[str, bool] = {}
    plain: dict[str, bool] = {}
    for number, on in enumerate(given):
        table = f"delta.`{shutil.copytree(template, f'{template}-{number}')}`"
        merge = Merge.parse(on, clauses=clauses)
        found = Delta().check_change(spark, Delta().resolve(spark, table), nullable(rows.schema), merge)
        refused[on] = fails(found.ready(rows).collect)
        plain[on] = fails(lambda: spark.sql(merge.sql(table, "given_values")))  # noqa: B023
    assert refused == plain
    assert list(plain.values()) == [len(clauses) > 1, len(clauses) > 1, False, False]


# type of the table's key, two keys of the rows that are equal there
EQUAL = {
    "INT": ("'1'", "'01'"),
    "DATE": ("'2026-01-01'", "'2026-1-1'"),
    "DOUBLE": ("'1'", "'1.0'"),
    "TIMESTAMP": ("'2026-01-01'", "'2026-01-01 00:00:00'"),
}


@pytest.mark.soak
def test_keys_are_compared_as_on_compares_them(spark: SparkSession) -> None:
    spark.sql("DROP TABLE IF EXISTS keyed")
    keys = ", ".join(f"k{kind} {kind}" for kind in EQUAL)
    spark.sql(f"CREATE TABLE keyed ({keys}, n INT) USING delta")
    table = Delta().resolve(spark, "keyed")

    def failing(kind: str, keys: Any, on: str) -> str:
        rows = spark.sql(f"SELECT {keys[0]} AS id, 1 AS n UNION ALL SELECT {keys[1]}, 2")
        checked = Delta().check_change(spark, table, nullable(rows.schema), Merge.parse(on, {"n": "s.n"}))
        try:
            unique(checked.ready(rows), ["ID"], "keyed", checked.compared).collect()
        except Exception as error:
            return str(error)
        return ""

    for (kind, equal), ansi in itertools.product(EQUAL.items(), ("true", "false")):
        spark.conf.set("spark.sql.ansi.enabled", ansi)
        try:
            assert "several rows of the batch have the same ID" in failing(
                kind, equal, f"t.k{kind} = s.id"
            ), kind
        finally:
            spark.conf.unset("spark.sql.ansi.enabled")
    # what `on` does not cast, and what differs after the cast, is not equal
    assert failing("DOUBLE", ("0.1D", "CAST(CAST(0.1 AS FLOAT) AS DOUBLE)"), "t.kDOUBLE = s.id") == ""
    assert failing("INT", ("'1'", "'2'"), "t.kINT = s.id AND s.n = 1") == ""
    assert failing("INT", ("'1'", "'01'"), "CAST(t.kINT AS STRING) = s.id") == ""


def test_an_expression_over_the_row_of_the_table_is_asked_about_without_an_error_in_the_log(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """PySpark logs an error of an analysis when it is made: 20 kB for a merge that is right."""
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    logger.addHandler(caplog.handler)
    spark.sql("CREATE TABLE asked (k STRING, n INT) USING delta")
    given = StructType.fromDDL("k STRING, n STRING")
    merge = Merge.parse("t.k = s.k AND t.n > 1", {"n": "t.n + s.n"})
    try:
        checked = Delta().check_change(spark, Delta().resolve(spark, "asked"), given, merge)
        assert checked and not caplog.records
        with pytest.raises(AnalysisException):
            spark.sql("SELECT missing FROM VALUES (1) AS v(n)")
        assert len(caplog.records) == 1
    finally:
        logger.removeHandler(caplog.handler)
        spark.sql("DROP TABLE asked")
