"""The rows of the crash table on Kafka: real drivers, a real Kafka, real Delta tables.

As in ``test_spark_crash.py``, one driver is killed while the pipelines of many rows are at their failpoints,
and then another one restarts all of them; the tests look at what is left. Row numbers are those of the crash table in
docs/transactions.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.crash.test_spark_crash import MESSAGES, TWO_BATCHES, Killed, Outcome, dying, require_once
from tests.spark.kafka_pipelines import KafkaPipeline
from tests.spark.pipelines import Driver

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.xdist_group("kafka-crash")]

# app -> failpoint, its hit, what is special about the pipeline
KILLED: Killed = {
    "decided": ("foreach.decided", 2, {"options": TWO_BATCHES}),
    "state": ("foreach.mirrored", 1, {"fn": "counts"}),
    "lost-decided": ("foreach.decided", 1, {}),
    "files-copied": ("adding.copied", 1, {"options": TWO_BATCHES}),
    "unlogged": ("connector.latest_offset.claimed", 1, {"options": TWO_BATCHES, "tables": []}),
}
STOPPED: Killed = {"zombie": ("foreach.staged", 1, {"options": TWO_BATCHES})}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, kafka_url: str) -> Iterator[Outcome]:
    scratch = tmp_path_factory.mktemp("kafka-crash")
    overtaken, stopped = dying(scratch, kafka_url, STOPPED, "stop", KafkaPipeline)
    try:
        killed, driver = dying(scratch, kafka_url, KILLED, "group", KafkaPipeline)
        driver.require_killed()
        killed |= overtaken
        stopped.wait_stopped()
        shutil.rmtree(killed["lost-decided"].checkpoint)
        killed["state"].send(["a", "z"])
        runs = [*killed.values(), replace(killed["lost-decided"], on_new_checkpoint="resume")]
        runs.append(KafkaPipeline.create("task-fails", kafka_url, scratch, MESSAGES, fn="fail_once"))
        runs += [KafkaPipeline.create("batch-fails", kafka_url, scratch, MESSAGES, fn="fail_batch_once")] * 2
        runs.append(KafkaPipeline.create("nothing", kafka_url, scratch, MESSAGES, fn="nothing"))
        errors = Driver(scratch, runs).require_done_each()
        stopped.resume()
        stopped.wait()
        first = {run.app: error for run, error in reversed(list(zip(runs, errors, strict=True)))}
        last = {run.app: error for run, error in zip(runs, errors, strict=True)}
        yield Outcome({run.app: run for run in runs}, first, last)
    finally:
        stopped.end()


@pytest.mark.parametrize("app", ["decided", "files-copied", "unlogged", "zombie"])
def test_a_driver_killed_or_overtaken_leaves_everything_exactly_once(outcome: Outcome, app: str) -> None:
    require_once(outcome, app)


def test_a_task_that_fails_after_its_rows_and_is_retried_publishes_once(outcome: Outcome) -> None:
    assert outcome.last["task-fails"] is None
    pipeline = outcome.pipelines["task-fails"]
    assert pipeline.published() == [f"{message}:x" for message in MESSAGES]
    assert Path(f"{pipeline.lake}.failed").exists()


def test_a_batch_whose_function_fails_leaves_nothing_and_its_replay_everything_once(outcome: Outcome) -> None:
    assert "the function fails after it has staged everything" in str(outcome.first["batch-fails"])
    require_once(outcome, "batch-fails")


def test_a_lost_checkpoint_stops_loudly_and_resumes_without_loss_or_duplicates(outcome: Outcome) -> None:
    assert "[TXMQ_LINEAGE]" in str(outcome.first["lost-decided"])
    require_once(outcome, "lost-decided")


def test_state_of_a_replayed_batch_is_kept(outcome: Outcome) -> None:
    assert outcome.last["state"] is None, outcome.last["state"]
    rows = sorted(
        (row["sequence"], row["body"], row["count"]) for row in outcome.pipelines["state"].table("counts")
    )
    assert sum(1 for _, body, _ in rows if body == "z") == 1
    assert {body: max(count for _, name, count in rows if name == body) for _, body, _ in rows} == {
        **dict.fromkeys("bcd", 1),
        "a": 2,
        "z": 1,
    }


def test_a_function_that_never_executes_the_batch_consumes_it_all_the_same(outcome: Outcome) -> None:
    assert outcome.last["nothing"] is None
    assert outcome.pipelines["nothing"].depth() == 0
    assert outcome.pipelines["nothing"].entries() == 1
