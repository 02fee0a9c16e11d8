"""`txmq skip --rows`: what a table refuses after the decision goes to a file, and the rest to the table, each
row once, wherever the driver dies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from broker_core import failpoint
from broker_core.errors import NotApplied, OptionError, cause
from connector.foreach_batch import BatchTransaction
from tests.spark.test_append_checks import run
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.slow]

STEPS = ["rows.evaluated", "rows.written", "rows.applied", "foreach.applied.1"]


def require_stopped(rig: Any, fn: Any, kind: type[Exception]) -> str:
    with pytest.raises(Exception) as raised:
        run(rig, fn)
    error = cause(raised.value)
    assert isinstance(error, kind), raised.value
    return str(error)


def require_dead(rig: Any, fn: Any, step: str) -> None:
    """The driver reaches this step, and dies there."""
    failpoint.arm(step, "raise")
    try:
        with pytest.raises(Exception, match=f"failpoint {step}"):
            run(rig, fn)
    finally:
        failpoint.disarm()


def refused(directory: Path) -> list[tuple[str, str]]:
    """(value, reason) of the rows in the files."""
    rows = [row for file in sorted(directory.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert not list(directory.glob(".*")), "nothing unfinished is left"
    return sorted((row["v"], row["__txmq_reason"]) for row in rows)


def test_only_the_rows_that_a_table_refuses_are_skipped_each_once_wherever_the_driver_dies(
    rig: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An append of files and a merge of rows, of which each table refuses other rows after the decision."""
    files, merged, skipped = "kept_files", "kept_merge", tmp_path / "skipped"
    for table in (files, merged):
        rig.spark.sql(f"CREATE OR REPLACE TABLE {table} (v STRING) USING delta")
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        rows = batch.selectExpr("CAST(body AS STRING) AS v")
        tx.append(rows, files)
        tx.merge(rows, merged, "t.v = s.v", insert=True)

    def altered(batch: DataFrame, tx: BatchTransaction) -> None:
        fn(batch, tx)
        rig.spark.sql(f"ALTER TABLE {files} ADD CONSTRAINT one CHECK (v NOT IN ('b', 'g'))")
        rig.spark.sql(f"ALTER TABLE {merged} ADD CONSTRAINT two CHECK (v <> 'c')")

    rig.publish("in", *"abcdefg")
    assert "does not take its rows" in require_stopped(rig, altered, NotApplied)
    told = main(["skip", "app", "1", "--rows", "--to", str(skipped), "--url", rig.broker.url, "--json"])
    assert told == 0 and json.loads(capsys.readouterr().out.splitlines()[-1])["rows_to"] == str(skipped)
    rig.publish("in", "h")
    for step in STEPS:
        require_dead(rig, fn, step)
        if step == "rows.written":  # what is in the file stays there, whatever becomes of the table
            rig.spark.sql(f"ALTER TABLE {files} DROP CONSTRAINT one")
    run(rig, fn)
    assert sorted(row["v"] for row in rig.spark.table(files).collect()) == list("acdefh")
    assert sorted(row["v"] for row in rig.spark.table(merged).collect()) == list("abdefgh")
    found = refused(skipped)
    assert [value for value, _ in found] == ["b", "c", "g"]
    assert "CHECK constraint one" in found[0][1] and "CHECK constraint two" in found[1][1]
    assert rig.broker.engine.unapplied("app") == [] and rig.bodies("in") == []


def test_no_row_of_an_overwrite_is_left_out_because_that_would_delete_what_it_replaces(
    rig: Any, tmp_path: Path
) -> None:
    rig.spark.sql("CREATE OR REPLACE TABLE kept_over (v STRING, w STRING) USING delta")
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.overwrite(batch.selectExpr("CAST(body AS STRING) AS v", "'w' AS w"), "kept_over", "w = 'w'")

    def altered(batch: DataFrame, tx: BatchTransaction) -> None:
        fn(batch, tx)
        rig.spark.sql("ALTER TABLE kept_over ADD CONSTRAINT one CHECK (v <> 'b')")

    rig.publish("in", "a", "b")
    require_stopped(rig, altered, NotApplied)
    (part,) = rig.broker.engine.unapplied("app")[0].to_apply
    rig.broker.engine.note("app", 1, part.branches, "rows_to", str(tmp_path / "skipped"))
    assert "deletes rows that are not given" in require_stopped(rig, fn, OptionError)
    assert not (tmp_path / "skipped").exists()
