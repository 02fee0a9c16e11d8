"""The first append of a driver: it is not known what the table has of the app. The checksum of the table's version may
say it; the state of the table is a job of Spark over its log.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker_core.core import failpoint
from tests.spark.pipelines import delta_rows, delta_transactions
from tests.spark.test_append_files import append_to, lake
from tests.spark.test_foreach_batch import run

__all__ = ["lake"]

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def checksum(table: Path) -> Path:
    """Of the newest version."""
    return max((table / "_delta_log").glob("*.crc"))


def test_it_computes_no_state_of_a_table_whose_checksum_names_the_app(rig: Any, lake: Path) -> None:
    rig.publish("in", "a")
    run(rig, append_to(lake))
    jobs: list[int] = []
    scheduler = rig.spark.sparkContext._jsc.sc().dagScheduler()
    for point in ("adding.started", "adding.checked"):
        failpoint.arm(point, lambda _name: jobs.append(scheduler.numTotalJobs()))
    rig.publish("in", "b")
    run(rig, append_to(lake))
    assert len(jobs) == 2 and jobs[1] == jobs[0]
    assert sorted(row["v"] for row in delta_rows(lake)) == ["a", "b"]


def test_a_checksum_that_does_not_name_the_app_is_no_proof(rig: Any, lake: Path) -> None:
    def die(_name: str) -> None:
        raise RuntimeError("the driver ends behind the commit of the table")

    rig.publish("in", "a")
    failpoint.arm("adding.committed", die)
    with pytest.raises(Exception, match="behind the commit"):
        run(rig, append_to(lake))
    failpoint.disarm()
    file = checksum(lake)
    found = json.loads(file.read_text())
    assert found["setTransactions"] and delta_transactions(lake)
    file.write_text(json.dumps({**found, "setTransactions": []}))
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)  # Hadoop's, of the file
    rig.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    run(rig, append_to(lake))
    assert [row["v"] for row in delta_rows(lake)] == ["a"]
    assert len(delta_transactions(lake)) == 1, "the files were added again"
