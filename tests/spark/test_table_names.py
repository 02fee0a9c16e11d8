"""One table by several spellings in one micro-batch: one Delta commit, and every row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from connector.batch.foreach_batch import BatchTransaction
from connector.delta.resolve import resolve
from tests.spark.pipelines import delta_rows, delta_transactions
from tests.spark.test_foreach_batch import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def appended(rig: Any, spellings: list[str], app_id: str) -> list[str]:
    """A batch that appends a row by each spelling; the rows as (spelling) in the first table spelled."""
    rig.declare(app_id)
    rig.publish(app_id, "x")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for spelling in spellings:
            tx.append(batch.selectExpr(f"'{spelling.replace('`', '')}' AS how"), spelling)

    run(rig, fn, app_id=app_id, queue=app_id, checkpoint=app_id)
    assert rig.broker.engine.unapplied(app_id) == []
    location = resolve(rig.spark, spellings[0]).location.removeprefix("file:")
    assert len([app for app, _ in delta_transactions(Path(location)) if app.startswith(f"{app_id}@")]) == 1
    return sorted(row["how"] for row in delta_rows(Path(location)))


@pytest.mark.soak
def test_every_spelling_of_a_table_in_one_batch_is_one_commit_with_all_rows(rig: Any, tmp_path: Path) -> None:
    place = tmp_path / "lake" / "spelled out"
    place.parent.mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    rig.spark.sql(f"CREATE OR REPLACE TABLE spelled (how STRING) USING delta LOCATION '{place}'")
    paths = [
        str(place),
        f"{place}/",
        f"file:{place}",
        f"file://{place}",
        f"{tmp_path}/link//spelled out",
        os.path.relpath(place),
    ]
    names = [
        "spelled",
        "SPELLED",
        "default.Spelled",
        "spark_catalog.default.spelled",
        "`spelled`",
        f"delta.`{place}`",
    ]
    assert len({resolve(rig.spark, spelling).location for spelling in paths + names}) == 1
    spellings = [*paths[::2], *names[::2]]  # each append costs a second
    assert appended(rig, spellings, "existing") == sorted(spelling.replace("`", "") for spelling in spellings)
    assert rig.spark.table("spelled").count() == len(spellings)
    # a table that is not there yet, first by its path
    new = f"{rig.spark.conf.get('spark.sql.warehouse.dir')}/spelled_new".removeprefix("file:")
    spellings = [new, "spelled_new", f"{new}/", "default.SPELLED_NEW"]
    assert appended(rig, spellings, "new") == sorted(spellings)
    assert rig.spark.table("spelled_new").count() == len(spellings)


def test_what_is_no_delta_table_is_refused_by_its_name(rig: Any, tmp_path: Path) -> None:
    rig.spark.sql("CREATE OR REPLACE TEMP VIEW in_passing AS SELECT 1 AS v")
    rig.spark.sql("DROP VIEW IF EXISTS a_view")
    rig.spark.sql("DROP TABLE IF EXISTS of_parquet")
    rig.spark.sql("CREATE VIEW a_view AS SELECT 1 AS v")
    rig.spark.sql("CREATE TABLE of_parquet (v INT) USING parquet")
    for spelling, told in {
        "a_view": "is a view",
        "of_parquet": "a table of format parquet",
        "parquet.`/x`": "files of format parquet",
        "nowhere.t": "no database 'nowhere'",
        "no-name": "neither a path",
        "nosuchfs://x/y": "give a path that Spark can write to",
        "a.b.c.d": "name a Delta table",
    }.items():
        with pytest.raises(OptionError, match=told):
            resolve(rig.spark, spelling)
    assert not resolve(rig.spark, "in_passing").exists  # a temporary view is no table, and hides none
