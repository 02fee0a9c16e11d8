"""The volume of a table, of a checkpoint or of both turns read-only between the decision of a batch and its append: the
query ends with the reason, and each row is there once when the volume is writable again.

Not here: the volume of the broker (``tests/server/test_volume_turns_read_only.py``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from broker_core.core.files import sync
from tests.failing_volume import FailingVolume, failing_volume
from tests.spark.pipelines import APPENDED, Driver, Pipeline, Served, empty_table
from tests.spark.successor import run_each

# test_spark_crash.py has two of the cases before a change lands
pytestmark = [
    pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("spark-crash")
]  # fmt: skip

MESSAGES = ["a", "b", "c", "d"]
TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}
# app -> what is on the volume
ON_VOLUME = {
    "table": ("lake",),
    "table-by-files": ("lake",),  # it is there before, so its rows are files that are staged and then named
    "checkpoint": ("checkpoint",),
    "both": ("lake", "checkpoint"),
}
DECIDED = ("foreach.decided", 1)  # where the driver is when the volume turns read-only


@dataclass
class Outcome:
    pipeline: Pipeline
    decided: int  # batches when the query had ended
    failed: str | None  # its error
    repaired: str | None  # and that of the next start, on a writable volume


def made_on(volume: FailingVolume, scratch: Path, url: str, apps: Iterable[str]) -> dict[str, Pipeline]:
    pipelines = {app: Pipeline.create(app, url, scratch, MESSAGES, options=TWO_BATCHES) for app in apps}
    for app, pipeline in pipelines.items():
        if "lake" in ON_VOLUME[app]:
            pipeline.lake = str(volume.path / app)
        if "checkpoint" in ON_VOLUME[app]:
            pipeline.checkpoint = str(volume.path / f"{app}.checkpoint")
        if app == "table-by-files":
            for table in pipeline.tables:
                empty_table(Path(pipeline.lake) / table, APPENDED)
            make_durable(Path(pipeline.lake))
    return pipelines


def make_durable(folder: Path) -> None:
    """Spark leaves that to the volume: of a checkpoint, without it the offsets of the first batch are gone, as in row
    13; of a table, its protocol.
    """
    for path in [folder, *folder.rglob("*")]:
        sync(path)


def require_appended_once(app: str, outcome: Outcome) -> None:
    assert ("[TXMQ_NOT_APPLIED]" in str(outcome.failed)) == ("lake" in ON_VOLUME[app]), outcome.failed
    # Delta has an error of its own where it cannot make a table
    assert "Read-only file system" in str(outcome.failed) or "Cannot create file" in str(outcome.failed)
    assert outcome.decided == 1, "nothing is decided after the volume has failed"
    assert outcome.repaired is None, outcome.repaired
    outcome.pipeline.require_once(MESSAGES)


@pytest.fixture(scope="module")
def outcomes(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    scratch = tmp_path_factory.mktemp("volume")
    served = Served(scratch / "broker")
    first = None
    try:
        with failing_volume(scratch) as volume:
            pipelines = made_on(volume, scratch, served.url, ON_VOLUME)
            first = Driver(scratch, list(pipelines.values()), at=[DECIDED] * len(pipelines), how="stop")
            first.wait_stopped()
            for pipeline in pipelines.values():
                make_durable(Path(pipeline.checkpoint))
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


@pytest.mark.parametrize("app", ON_VOLUME)
def test_row_7_a_decided_batch_is_appended_once_after_its_volume_was_read_only(
    outcomes: dict[str, Outcome], app: str
) -> None:
    require_appended_once(app, outcomes[app])
