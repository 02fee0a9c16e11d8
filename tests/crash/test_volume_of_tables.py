"""The volume of a table, of a checkpoint or of both turns read-only between the decision of a batch and its append: the
query ends with the reason, and each row is there once when the volume is writable again.

Not here: the volume of the broker (``tests/server/test_volume_turns_read_only.py``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker_core.core.files import sync
from tests.crash.test_spark_crash import COLUMNS
from tests.failing_volume import failing_volume
from tests.gates import seldom
from tests.spark.pipelines import Driver, Pipeline, Served, empty_table
from tests.spark.successor import run_each

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.xdist_group("spark-crash")]

MESSAGES = ["a", "b", "c", "d"]
TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}
# app -> what is on the volume
ON_VOLUME = {
    "table": ("lake",),
    "table-by-files": ("lake",),  # it is there before, so its rows are files that are staged and then named
    "checkpoint": ("checkpoint",),
    "both": ("lake", "checkpoint"),
}
SELDOM = {"table", "both"}  # only in ``make soak``


@dataclass
class Outcome:
    pipeline: Pipeline
    decided: int  # batches when the query had ended
    failed: str | None  # its error
    repaired: str | None  # and that of the next start, on a writable volume


def _make_durable(folder: Path) -> None:
    """Spark leaves that to the volume: of a checkpoint, without it the offsets of the first batch are gone, as in row
    13; of a table, its protocol.
    """
    for path in [folder, *folder.rglob("*")]:
        sync(path)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Outcome]]:
    scratch = tmp_path_factory.mktemp("volume")
    left_out = set() if request.config.getoption("--soak-rounds") else SELDOM
    served = Served(scratch / "broker")
    first = None
    try:
        with failing_volume(scratch) as volume:
            pipelines = {
                app: Pipeline.create(app, served.url, scratch, MESSAGES, options=TWO_BATCHES)
                for app in ON_VOLUME
                if app not in left_out
            }
            for app, pipeline in pipelines.items():
                if "lake" in ON_VOLUME[app]:
                    pipeline.lake = str(volume.path / app)
                if "checkpoint" in ON_VOLUME[app]:
                    pipeline.checkpoint = str(volume.path / f"{app}.checkpoint")
            files = pipelines["table-by-files"]
            for table in files.tables:
                empty_table(Path(files.lake) / table, COLUMNS)
            _make_durable(Path(files.lake))
            at = [("foreach.decided", 1)] * len(pipelines)
            first = Driver(scratch, list(pipelines.values()), at=at, how="stop")
            first.wait_stopped()
            for pipeline in pipelines.values():
                _make_durable(Path(pipeline.checkpoint))
            volume.turn_read_only()
            os.kill(first.process.pid, signal.SIGCONT)
            failed = first.require_done()
            decided = {app: pipeline.entries() for app, pipeline in pipelines.items()}
            volume.repair()
            repaired = dict(zip(pipelines, run_each(spark, pipelines.values()), strict=True))
            yield {
                app: Outcome(pipeline, decided[app], failed[app], repaired[app])
                for app, pipeline in pipelines.items()
            }
    finally:
        if first is not None:
            first.end()
        served.stop()


@pytest.mark.parametrize("app", seldom(ON_VOLUME, SELDOM.__contains__))
def test_row_7_a_decided_batch_is_appended_once_after_its_volume_was_read_only(
    outcomes: dict[str, Outcome], app: str
) -> None:
    outcome = outcomes[app]
    assert ("[TXMQ_NOT_APPLIED]" in str(outcome.failed)) == ("lake" in ON_VOLUME[app]), outcome.failed
    # Delta has an error of its own where it cannot make a table
    assert "Read-only file system" in str(outcome.failed) or "Cannot create file" in str(outcome.failed)
    assert outcome.decided == 1, "nothing is decided after the volume has failed"
    assert outcome.repaired is None, outcome.repaired
    outcome.pipeline.require_once(MESSAGES)
