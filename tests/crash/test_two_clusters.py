"""Two clusters run the same app on the same queue, each with a checkpoint of its own, on txmq and on Kafka. Until a batch
is decided both have the same first batch, and the one that decides it goes on. Then the one that comes later is refused
unless it is told to resume, and if it is, the first one is.

The first driver is suspended with each of its pipelines at a failpoint, and goes on when the other one has taken over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from pyspark.sql import SparkSession

from tests.spark.kafka_pipelines import KafkaPipeline
from tests.spark.pipelines import Driver, Pipeline, Served
from tests.spark.successor import run_each

# test_spark_crash.py has two clusters on txmq, and overtakes a driver on Kafka, before a change lands
pytestmark = [
    pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("spark-crash")
]  # fmt: skip

MESSAGES = ["a", "b", "c", "d"]
TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}
ENGINES: dict[str, type[Pipeline]] = {"txmq": Pipeline, "kafka": KafkaPipeline}
# where the first cluster is suspended in its first batch -> whether the second one is refused
SUSPENDED = {"foreach.decided": True, "foreach.staged": False}
CASES = [(engine, step) for engine in ENGINES for step in SUSPENDED]


@dataclass
class Outcome:
    pipeline: Pipeline
    second: str | None  # the error of the second cluster
    last: str | None  # of its last run: told to resume, if it was refused
    woken: str | None  # and of the first one afterwards


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[tuple[str, str], Outcome]]:
    scratch = tmp_path_factory.mktemp("clusters")
    served = Served(scratch / "broker")
    urls = {"txmq": served.url, "kafka": request.getfixturevalue("kafka")}
    first = None
    try:
        ones = {
            (engine, step): kind.create(f"{engine}.{step}", url, scratch, MESSAGES, options=TWO_BATCHES)
            for engine, kind in ENGINES.items()
            if (url := urls[engine]) is not None
            for step in SUSPENDED
        }
        first = Driver(scratch, list(ones.values()), at=[(step, 1) for _, step in ones], how="stop")
        first.wait_stopped()
        others = [replace(one, checkpoint=f"{one.checkpoint}.other") for one in ones.values()]
        resumed = [
            replace(one, checkpoint=f"{one.checkpoint}.resumed", on_new_checkpoint="resume")
            for (_, step), one in ones.items()
            if SUSPENDED[step]
        ]
        runs = [*others, *resumed]
        errors = list(zip(runs, run_each(spark, runs), strict=True))
        second = {run.app: error for run, error in errors[: len(ones)]}
        last = {run.app: error for run, error in errors}
        os.kill(first.process.pid, signal.SIGCONT)
        woken = first.require_done()
        yield {
            case: Outcome(one, second[one.app], last[one.app], woken[one.app]) for case, one in ones.items()
        }
    finally:
        if first is not None:
            first.end()
        served.stop()


@pytest.mark.parametrize(("engine", "step"), CASES)
def test_of_two_clusters_with_one_app_one_goes_on_and_everything_is_there_once(
    outcomes: dict[tuple[str, str], Outcome], engine: str, step: str
) -> None:
    if (engine, step) not in outcomes:
        pytest.skip("a real Kafka needs its jars from Maven")
    outcome = outcomes[engine, step]
    if SUSPENDED[step]:
        assert "[TXMQ_CHECKPOINT_MISMATCH]" in str(outcome.second) and "onNewCheckpoint=resume" in str(
            outcome.second
        )
    assert outcome.last is None, outcome.last
    assert "[TXMQ_CHECKPOINT_MISMATCH]" in str(outcome.woken), (
        "the first one is told that another one has gone on"
    )
    assert outcome.pipeline.entries() == 2, "who is refused has decided nothing"
    outcome.pipeline.require_once(MESSAGES)
