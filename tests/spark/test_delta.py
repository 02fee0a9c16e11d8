"""A Delta table that forgets its transactions. What every table does: ``tests/contract/tables``."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker_core.core.errors import CheckpointMismatch
from connector.delta.before.append_rows import append
from connector.delta.log import stored_versions
from connector.delta.resolve import resolve
from connector.tables.commit_id import CommitId
from tests.spark.pipelines import delta_actions, delta_rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def tokens(table: Path) -> list[str]:
    """Of the commits, in order."""
    told = [
        json.loads(action["commitInfo"].get("userMetadata", "{}"))
        for action in delta_actions(table)
        if "commitInfo" in action
    ]
    return [metadata["token"] for metadata in told if metadata]


def test_a_table_that_forgets_its_transactions_takes_a_repeated_append_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = tmp_path / "table"

    def appended(sequence: int) -> None:
        batch = {"app_id": "app", "sequence": sequence, "token": f"t{sequence}", "query_id": "q"}
        once = CommitId("app", sequence, {**batch, "batch_id": sequence}, 0)
        append(spark, resolve(spark, str(table)), lambda session: session.range(2).coalesce(1), once)

    appended(1)
    spark.sql(
        f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.setTransactionRetentionDuration' = "
        "'interval 0 seconds')"
    )
    time.sleep(0.01)  # the retention is over one tick of Delta's clock later
    assert stored_versions(spark, resolve(spark, str(table)), "app") == {}  # Delta would append it again
    appended(1)
    assert tokens(table) == ["t1"] and len(delta_rows(table)) == 2
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")
    appended(2)
    assert len(delta_rows(table)) == 4 and list((table / "_delta_log").glob("*.checkpoint.parquet"))
    # its log is cleaned: nobody can tell, so nobody appends
    (table / "_delta_log" / f"{0:020d}.json").unlink()
    with pytest.raises(CheckpointMismatch, match="forgets the batches that it has"):
        appended(1)
