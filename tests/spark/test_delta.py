"""Appends to Delta that happen once, and the guard against a sequence that starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker_core.errors import LineageConflict, OptionError
from connector import delta
from tests.spark.pipelines import delta_actions, delta_rows

pytestmark = pytest.mark.spark


def append(spark: SparkSession, table: str, version: int, app: str = "app", **more: Any) -> None:
    rows = spark.range(2).selectExpr("id", "CAST(id AS STRING) AS name").coalesce(1)
    delta.append(rows, table, txn_app_id=app, txn_version=version, metadata={"app_id": app, "sequence": version}, **more)


@pytest.mark.parametrize("kind", ["path", "name"])
def test_an_append_repeated_changes_nothing_and_the_next_one_follows(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    table = str(tmp_path / "table") if kind == "path" else delta.qualified(spark, "appended_once")
    for version in (1, 1, 2, 1):
        append(spark, table, version, partition_by=["name"])
    rows = spark.read.format("delta").load(table) if kind == "path" else spark.table(table)
    assert rows.count() == 4
    assert delta.stored_version(spark, table, "app") == 2 and delta.stored_version(spark, table, "other") == 0
    if kind == "path":
        metadata = [action["commitInfo"]["userMetadata"] for action in delta_actions(Path(table)) if "commitInfo" in action]
        assert metadata == ['{"app_id": "app", "sequence": 1}', '{"app_id": "app", "sequence": 2}']


def test_a_table_with_later_batches_than_the_broker_knows_stops_before_rows_are_skipped_silently(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")
    append(spark, table, 7)
    delta.refuse_a_restarted_sequence(spark, table, "app", 7)
    delta.refuse_a_restarted_sequence(spark, table, "another app", 1)
    with pytest.raises(LineageConflict, match=r"holds batch 7 of app 'app', and the broker has decided only 3"):
        delta.refuse_a_restarted_sequence(spark, table, "app", 3)


def test_an_append_that_does_not_fit_its_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    append(spark, table, 1)

    def check(columns: str, **options: str) -> None:
        delta.check_append(spark, table, spark.range(1).selectExpr(*columns.split(", ")).schema, options, [])

    check("id, CAST(id AS STRING) AS name")
    check("CAST(id AS INT) AS id")
    check("id, 1 AS added", mergeSchema="true")
    with pytest.raises(OptionError, match="no column 'added'; drop it, or set mergeSchema=True"):
        check("id, 1 AS added")
    with pytest.raises(OptionError, match="column 'name' is bigint and the table has string; cast it"):
        check("id AS name")
    with pytest.raises(OptionError, match="column 'id' stands twice"):
        delta.check_append(spark, table, spark.createDataFrame([(1, 2)], "ID int, id2 int").toDF("ID", "ID").schema, {}, [])
    assert len(delta_rows(Path(table))) == 2


@pytest.mark.parametrize(("table", "path"), [("lake/t", True), ("/lake/t", True), ("s3a://b/t", True), ("t", False), ("a.b.t", False)])
def test_paths_and_names_are_told_apart(table: str, path: bool) -> None:
    assert delta.is_path(table) is path
