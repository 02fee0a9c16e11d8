"""Changes of the schema of a table by a merge with ``merge_schema``, beside plain Delta: what Delta refuses is refused
before the decision, what it takes gives the same schema and rows.

Not here: wider types in every operation (``test_type_widening.py``).
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker_core.core.errors import OptionError
from connector.batch.foreach_batch import BatchTransaction
from connector.tables.when import When
from tests.spark.test_foreach_batch import run
from tests.spark.test_type_widening import attempted
from tests.spark.test_values import Operation, append, merge_all, merged

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("planned_once")]

WIDENS = "'delta.enableTypeWidening' = 'true'"
MAPPED = "'delta.columnMapping.mode' = 'name'"
NTZ = "TIMESTAMP_NTZ'2020-01-01 01:00:00'"


class Cell(NamedTuple):
    """A table, the rows that are merged into it, and what follows the definition of the table."""

    columns: str
    rows: str
    properties: str = ""
    then: str = ""
    partitions: str = ""
    act: Operation = merge_all(schema=True)


def clauses(told: str, *chosen: Any) -> Operation:
    """A merge of these clauses that may change the schema."""
    text = " ".join(clause.sql() for clause in chosen)
    return Operation(
        told,
        lambda tx, rows, table: tx.merge(rows, table, "t.id = s.id", clauses=chosen, merge_schema=True),
        lambda rows, table: merged(rows, table, "t.id = s.id", text, "WITH SCHEMA EVOLUTION"),
    )


INSERTS = clauses("insert all", When.not_matched().insert())
BY_SOURCE = clauses(
    "all, and of others", When.matched().update(), When.not_matched_by_source().update({"n": "t.n + 1"})
)
NESTED = clauses("a field", When.matched().update({"s.x": "s.s.x"}), When.not_matched().insert())
NAMED = clauses("a new column by its name", When.matched().update({"extra": "s.extra"}))
APPEND = append(mergeSchema=True)

REFUSED = {
    "a TIMESTAMP_NTZ without its feature": Cell("id INT", f"1 AS id, {NTZ} AS at"),
    "a DATE as TIMESTAMP_NTZ without its feature": Cell("id INT, d DATE", f"1 AS id, {NTZ} AS d", WIDENS),
    "a blank in a name": Cell("id INT", "1 AS id, 2 AS `a b`"),
    "a blank in the name of a field": Cell(
        "id INT, s STRUCT<x: INT>", "1 AS id, named_struct('x', 1, 'a b', 2) AS s"
    ),
    "a column of the change data feed": Cell(
        "id INT", "1 AS id, 'x' AS _change_type", "'delta.enableChangeDataFeed' = 'true'"
    ),
    "an interval": Cell("id INT", "1 AS id, INTERVAL '1' DAY AS v"),
    "a wider column under a CHECK": Cell(
        "id INT, a TINYINT", "1 AS id, 70000 AS a", WIDENS, "ADD CONSTRAINT c CHECK (a > 0)"
    ),
    "a wider field under a CHECK": Cell(
        "id INT, s STRUCT<x: INT>",
        "1 AS id, named_struct('x', 5L) AS s",
        WIDENS,
        "ADD CONSTRAINT c CHECK (s.x > 0)",
    ),
    "a wider column that partitions by what is generated of it": Cell(
        "id INT, d DATE, y INT GENERATED ALWAYS AS (YEAR(d))",
        f"1 AS id, {NTZ} AS d",
        f"{WIDENS}, 'delta.feature.timestampNtz' = 'supported'",
        partitions="y",
    ),
    "an INT as DOUBLE under IcebergCompatV2": Cell(
        "id INT, n INT",
        "1 AS id, 5.5D AS n",
        f"{WIDENS}, {MAPPED}, 'delta.enableIcebergCompatV2' = 'true'",
    ),
    "an interval, where rows are only inserted": Cell(
        "id INT", "1 AS id, INTERVAL '1' DAY AS v", act=INSERTS
    ),
    "an interval, in an update of rows that the batch has not": Cell(
        "id INT, n INT", "1 AS id, 2 AS n, INTERVAL '1' DAY AS v", act=BY_SOURCE
    ),
    "a NOT NULL column that is absent": Cell("id INT, v STRING NOT NULL", "2 AS id, 3 AS extra"),
    "a null in a NOT NULL column": Cell(
        "id INT, v STRING NOT NULL", "2 AS id, CAST(NULL AS STRING) AS v, 3 AS extra"
    ),
    "a null in a NOT NULL field beside a new one": Cell(
        "id INT, s STRUCT<x: INT NOT NULL>", "2 AS id, named_struct('x', CAST(NULL AS INT), 'y', 3) AS s"
    ),
    "a wider column that partitions, under a CHECK": Cell(
        "id INT, p INT", "1 AS id, 9999999999 AS p", WIDENS, "ADD CONSTRAINT c CHECK (p > 0)", "p"
    ),
}
ACCEPTED = {
    "a TIMESTAMP_NTZ with its feature": Cell(
        "id INT", f"1 AS id, {NTZ} AS at", "'delta.feature.timestampNtz' = 'supported'"
    ),
    "a blank in a mapped name": Cell("id INT", "1 AS id, 2 AS `a b`", MAPPED),
    "a wider column beside a CHECK": Cell(
        "id INT, a TINYINT, b INT", "1 AS id, 70000 AS a, 1 AS b", WIDENS, "ADD CONSTRAINT c CHECK (b > 0)"
    ),
    "a new field, and a wider one": Cell(
        "id INT, s STRUCT<x: INT>", "1 AS id, named_struct('y', 'new', 'x', 9999999999) AS s", WIDENS
    ),
    "beside NOT NULL": Cell("id INT, v STRING NOT NULL", "2 AS id, 'x' AS v, 3 AS extra"),
    "beside a partition": Cell("id INT, p STRING", "2 AS id, 'a b/ü=1' AS p, 3 AS extra", partitions="p"),
    "beside an identity": Cell("id INT, k BIGINT GENERATED ALWAYS AS IDENTITY", "1 AS id, 'x' AS extra"),
    "where rows are only inserted": Cell("id INT", "1 AS id, 2 AS extra", act=INSERTS),
    "in an update of rows that the batch has not": Cell(
        "id INT, n INT", "1 AS id, 2 AS n, 3 AS v", act=BY_SOURCE
    ),
    "by its name": Cell("id INT", "1 AS id, 2 AS extra", act=NAMED),
}
CELLS = {**REFUSED, **ACCEPTED}
# what one of Delta's rules, or one of txmq, has a neighbour for; ``make soak`` has all
SELDOM = {
    "a TIMESTAMP_NTZ without its feature", "a blank in the name of a field", "a wider field under a CHECK", "a wider column that partitions, under a CHECK",
    "a NOT NULL column that is absent", "a null in a NOT NULL column", "an interval",
    "an interval, in an update of rows that the batch has not", "a wider column beside a CHECK", "by its name",
    "a blank in a mapped name", "beside an identity", "where rows are only inserted",
    "in an update of rows that the batch has not",
}  # fmt: skip


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_change_of_schema_that_delta_refuses_is_refused_before_the_decision_and_others_are_deltas(
    rig: Any, tmp_path: Path, every: bool
) -> None:
    """All cells in one micro-batch, each in a table of its own and in one of plain Delta."""
    spark: SparkSession = rig.spark
    cells = CELLS.keys() if every else CELLS.keys() - SELDOM
    places = {cell: str(tmp_path / f"{number}") for number, cell in enumerate(sorted(cells))}
    for name, place in places.items():
        _create(spark, place, CELLS[name])
        shutil.copytree(place, f"{place}-plain")
    told = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for name, place in places.items():
            rows = batch.sparkSession.sql(f"SELECT {CELLS[name].rows}")
            told.append((name, attempted(lambda: CELLS[name].act.ours(tx, rows, place))))  # noqa: B023

    rig.declare("in")
    rig.publish("in", "a")
    run(rig, fn)
    ours = dict(told)
    wrong = {}
    for name, place in places.items():
        rows = spark.sql(f"SELECT {CELLS[name].rows}")
        delta = attempted(lambda: CELLS[name].act.plain(rows, f"{place}-plain"))  # noqa: B023
        assert bool(delta) == (name in REFUSED), (name, delta)
        look = _versions if delta else partial(_look, spark)  # what is refused leaves the copies alike
        looks = [look(table) for table in (place, f"{place}-plain")]
        if bool(ours[name]) != bool(delta) or looks[0] != looks[1]:
            wrong[name] = ours[name][:150], delta[:150], looks
        elif delta:
            assert OptionError.code in ours[name], ours[name]
    assert wrong == {}


def test_a_refused_change_of_schema_consumes_nothing_and_goes_on_as_its_error_says(
    rig: Any, tmp_path: Path
) -> None:
    table = tmp_path / "lake"
    _create(rig.spark, str(table), Cell("id INT", ""))
    rig.declare("in")
    rig.publish("in", "a")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        rows = batch.selectExpr("1 AS id", f"{NTZ} AS at")
        tx.merge(rows, str(table), "t.id = s.id", update=True, insert=True, merge_schema=True)

    with pytest.raises(Exception) as raised:
        run(rig, fn)
    advice = "ALTER TABLE table_name SET TBLPROPERTIES ('delta.feature.feature_name' = 'supported')"
    assert OptionError.code in str(raised.value) and advice in str(raised.value), str(raised.value)[:2000]
    assert rig.bodies("in") == ["a"] and rig.broker.engine.last_entry("app") is None
    assert [path.name for path in (table / "_delta_log").glob("*.json")] == [f"{0:020d}.json"]
    rig.spark.sql(advice.replace("table_name", f"delta.`{table}`").replace("feature_name", "timestampNtz"))
    run(rig, fn)
    assert _look(rig.spark, str(table)) == (
        "struct<id:int,at:timestamp_ntz>",
        ["Row(id=1, at=datetime.datetime(2020, 1, 1, 1, 0))"],
    )
    assert rig.bodies("in") == []


def _create(spark: SparkSession, table: str, cell: Cell) -> None:
    partitions = f"PARTITIONED BY ({cell.partitions})" if cell.partitions else ""
    properties = f"TBLPROPERTIES ({cell.properties})" if cell.properties else ""
    spark.sql(f"CREATE TABLE delta.`{table}` ({cell.columns}) USING delta {partitions} {properties}")
    if cell.then:
        spark.sql(f"ALTER TABLE delta.`{table}` {cell.then}")


def _versions(table: str) -> list[str]:
    return sorted(path.name for path in Path(table, "_delta_log").glob("*.json"))


def _look(spark: SparkSession, table: str) -> tuple[str, list[str]]:
    found = spark.read.format("delta").load(table)
    return found.schema.simpleString(), sorted(map(str, found.collect()))
