"""Appends to Delta that happen once, and the guard against a sequence that starts again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker_core.errors import LineageConflict, OptionError
from connector import delta, delta_log
from connector.table import resolve, snapshot_at
from tests.spark.pipelines import delta_actions, delta_rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


def append(
    spark: SparkSession,
    table: str,
    version: int,
    app: str = "app",
    token: str = "",
    decided_at_us: int = 0,
    **more: Any,
) -> None:
    rows = spark.range(2).selectExpr("id", "CAST(id AS STRING) AS name").coalesce(1)
    batch = {
        "app_id": app,
        "sequence": version,
        "token": token or f"t{version}",
        "query_id": "q",
        "batch_id": version,
    }
    delta.append(
        rows,
        resolve(spark, table),
        txn_app_id=app,
        txn_version=version,
        batch=batch,
        decided_at_us=decided_at_us,
        **more,
    )


def stored(spark: SparkSession, table: str, app: str) -> int:
    return delta_log.stored_version(spark, resolve(spark, table), app)


def tokens(table: Path) -> list[str]:
    """Of the commits, in order."""
    told = [
        json.loads(action["commitInfo"].get("userMetadata", "{}"))
        for action in delta_actions(table)
        if "commitInfo" in action
    ]
    return [metadata["token"] for metadata in told if metadata]


@pytest.mark.parametrize("kind", ["path", "name"])
def test_an_append_repeated_changes_nothing_and_the_next_one_follows(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    table = str(tmp_path / "table") if kind == "path" else resolve(spark, "appended_once").name
    for version in (1, 1, 2, 1):
        append(spark, table, version, partition_by=["name"])
    rows = spark.read.format("delta").load(table) if kind == "path" else spark.table(table)
    assert rows.count() == 4
    assert stored(spark, table, "app") == 2 and stored(spark, table, "other") == 0
    if kind == "path":
        assert tokens(Path(table)) == ["t1", "t2"]


def test_a_batch_that_delta_skips_for_another_ones_number_is_an_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")
    append(spark, table, 1)
    append(spark, table, 2)
    for version in (2, 1):
        with pytest.raises(
            LineageConflict, match=f"skipped batch {version} of app 'app'.*txmq unapplied APP"
        ):
            append(spark, table, version, token="of a restored data directory")
    assert len(delta_rows(Path(table))) == 4


def test_a_table_that_forgets_its_transactions_takes_a_repeated_append_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    append(spark, str(table), 1)
    spark.sql(
        f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.setTransactionRetentionDuration' = "
        "'interval 0 seconds')"
    )
    time.sleep(0.01)  # the retention is over one tick of Delta's clock later
    assert stored(spark, str(table), "app") == 0  # Delta would append it again
    append(spark, str(table), 1)
    assert tokens(table) == ["t1"] and len(delta_rows(table)) == 2
    append(spark, str(table), 2)
    assert len(delta_rows(table)) == 4
    snapshot_at(spark, str(table)).deltaLog().checkpoint()
    # its log is cleaned: nobody can tell, so nobody appends
    (table / "_delta_log" / f"{0:020d}.json").unlink()
    with pytest.raises(LineageConflict, match="forgets which batches it has"):
        append(spark, str(table), 1)


def test_a_table_with_later_batches_than_the_broker_knows_stops_before_rows_are_skipped_silently(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")
    append(spark, table, 7)
    delta.refuse_a_restarted_sequence(spark, resolve(spark, table), "app", "app", lambda: 7)
    delta.refuse_a_restarted_sequence(spark, resolve(spark, table), "another app", "another app", lambda: 1)
    with pytest.raises(
        LineageConflict,
        match=r"holds batch 7 of app 'app', and the broker has decided only "
        r"3",
    ):
        delta.refuse_a_restarted_sequence(spark, resolve(spark, table), "app", "app", lambda: 3)


def test_an_append_that_does_not_fit_its_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    append(spark, table, 1)

    def check(columns: str, **options: str) -> None:
        delta.check_append(
            spark, resolve(spark, table), spark.range(1).selectExpr(*columns.split(", ")).schema, options, []
        )

    check("id, CAST(id AS STRING) AS name")
    check("CAST(id AS INT) AS id")
    check("id, 1 AS added", mergeSchema="true")
    with pytest.raises(OptionError, match="no column 'added': drop it, or set mergeSchema=True"):
        check("id, 1 AS added")
    with pytest.raises(OptionError, match="column 'name' is bigint, not string: cast it"):
        check("id AS name")
    with pytest.raises(OptionError, match="column 'id' occurs twice"):
        delta.check_append(
            spark,
            resolve(spark, table),
            spark.createDataFrame([(1, 2)], "ID int, id2 int").toDF("ID", "ID").schema,
            {},
            [],
        )
    assert len(delta_rows(Path(table))) == 2
