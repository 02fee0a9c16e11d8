"""Crash row 20: a driver is killed, and the engine loses what it knew of the app; the Delta ledger is left.

On a real Kafka, where the app's topic is deleted, and on txmq, where the data directory is lost and the messages
are sent again. One driver runs every pipeline to its failpoint; another one runs them again: first as they were,
then with resume and a new checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient
from pyspark.sql import SparkSession

from broker_core.engines import connect
from broker_core.kafka import names
from tests.spark.kafka_pipelines import KafkaPipeline, engine, hosts
from tests.spark.pipelines import Driver, Pipeline, Served
from tests.spark.successor import run_each

# test_spark_crash.py kills two of them, and tests/spark/test_resume.py between the same steps, before a change lands
pytestmark = [
    pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("spark-crash")
]  # fmt: skip

MESSAGES = ["a", "b", "c", "d"]
LATER = ["e", "f"]
TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}

# app -> failpoint of its second batch, and its hit
KILLED = {
    "staged": ("foreach.staged", 2),  # decided nothing
    "appended": ("ledger.appended", 2),  # the ledger has it, and the engine was not told
    "mirrored": ("foreach.mirrored", 2),  # Spark does not know it
}
MARKED = ("foreach.marked", 2)  # applied, and the ledger does not have it


Session = dict[str, str] | None
SESSIONS: dict[str, Session] = {"classic": None, "connect": {"connect": "true"}}


@dataclass
class Outcome:
    pipelines: dict[str, Pipeline]
    before: dict[str, str]  # the engines of before
    first: dict[str, str | None]  # errors of the first run after the loss
    last: dict[str, str | None]  # and of the one with resume


def _made(scratch: Path, url: str, kind: type[Pipeline]) -> dict[str, Pipeline]:
    return {
        app: kind.create(
            f"{scratch.name}-{app}",
            url,
            scratch,
            MESSAGES,
            options=TWO_BATCHES,
            ledger=str(scratch / f"{app}.ledger"),
            ledger_sync=True,
        )
        for app in (*KILLED, "marked")
    }


def identities(pipelines: dict[str, Pipeline]) -> dict[str, str]:
    (url,) = {pipeline.url for pipeline in pipelines.values()}
    with contextlib.closing(connect(url)) as made:
        return {app: made.identity(pipeline.app) for app, pipeline in pipelines.items()}


def runs_behind(pipelines: dict[str, Pipeline], before: dict[str, str]) -> list[Pipeline]:
    runs = list(pipelines.values())
    runs += [
        replace(
            pipeline,
            checkpoint=f"{pipeline.checkpoint}.new",
            on_new_checkpoint="resume",
            resume_from=before[app],
        )
        for app, pipeline in pipelines.items()
    ]
    return runs


def _outcome(
    spark: SparkSession,
    scratch: Path,
    pipelines: dict[str, Pipeline],
    before: dict[str, str],
    session: Session = None,
) -> Outcome:
    runs, half = runs_behind(pipelines, before), len(pipelines)
    if session is None:
        errors = run_each(spark, runs)
    else:  # the app goes on in a batch, whose source has begun
        errors = Driver(scratch, runs, session=session).require_done_each()
        assert all("had asked before where to begin" in str(error) for error in errors[half:]), errors
        again = [replace(each, checkpoint=f"{each.checkpoint}er") for each in runs[half:]]
        errors[half:] = Driver(scratch, again, session=session).require_done_each()
    return Outcome(
        pipelines, before, dict(zip(pipelines, errors[:half])), dict(zip(pipelines, errors[half:]))
    )


def lose_directory(served: Served, data: Path, pipelines: dict[str, Pipeline]) -> None:
    """And the messages are sent again, with later ones."""
    served.stop()
    shutil.rmtree(data)
    served.start()
    for pipeline in pipelines.values():
        pipeline.declare()
        pipeline.send([*MESSAGES, *LATER])


def _die(scratch: Path, pipelines: dict[str, Pipeline], session: Session = None) -> None:
    at = [KILLED.get(app, MARKED) for app in pipelines]
    Driver(scratch, list(pipelines.values()), at=at, session=session).require_killed()


@pytest.fixture(scope="module")
def on_kafka(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, kafka_url: str) -> Outcome:
    scratch = tmp_path_factory.mktemp("topics")
    pipelines = _made(scratch, kafka_url, KafkaPipeline)
    _die(scratch, pipelines)
    before = identities(pipelines)
    admin = KafkaAdminClient(bootstrap_servers=hosts(kafka_url))
    admin.delete_topics([names.app_topic(pipeline.app) for pipeline in pipelines.values()])
    admin.close()
    for pipeline in pipelines.values():
        pipeline.send(LATER)
    return _outcome(spark, scratch, pipelines, before)


@pytest.fixture(scope="module", params=SESSIONS)
def embedded(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcome]:
    scratch = tmp_path_factory.mktemp("directory")
    served = Served(scratch / "broker")
    try:
        pipelines = _made(scratch, served.url, Pipeline)
        session = SESSIONS[request.param]
        _die(scratch, pipelines, session)
        before = identities(pipelines)
        lose_directory(served, scratch / "broker", pipelines)
        yield _outcome(spark, scratch, pipelines, before, session)
    finally:
        served.stop()


def _require_rows_once(outcome: Outcome, app: str) -> Pipeline:
    assert outcome.last[app] is None, outcome.last[app]
    require_rows_once(outcome.pipelines[app], outcome.before[app])
    return outcome.pipelines[app]


def require_rows_once(pipeline: Pipeline, before: str) -> None:
    """``before``: the engine that was lost."""
    rows = pipeline.table("first")
    assert sorted(row["body"] for row in rows) == [*MESSAGES, *LATER]
    ledger = sorted(pipeline.ledger_rows(), key=lambda row: (row["sequence"], row["log"]))
    numbers = sorted({row["sequence"] for row in ledger})
    assert numbers == list(range(1, len(numbers) + 1)) and {row["sequence"] for row in rows} == set(numbers)
    engines = {row["engine"] for row in ledger}
    assert len(engines) == 2 and before in engines
    assert sum(row["end_offset"] - row["start_offset"] for row in ledger) >= len(MESSAGES + LATER)


@pytest.mark.parametrize("app", KILLED)
def test_row_20_on_kafka_an_app_whose_topic_was_deleted_goes_on_behind_its_ledger_each_message_once(
    on_kafka: Outcome, app: str
) -> None:
    assert "TXMQ_CHECKPOINT_MISMATCH" in str(on_kafka.first[app]), "the old checkpoint alone does not go on"
    pipeline = _require_rows_once(on_kafka, app)
    published = dict(text.split(":") for text in pipeline.published())
    assert sorted(published) == [*MESSAGES, *LATER] and len(pipeline.published()) == len(published)
    markers = {row["body"]: row["marker"] for row in pipeline.table("first")}
    assert markers == published, "a table has rows of another attempt than was published"
    with engine(pipeline.url) as made:
        last = made.last_entry(pipeline.app)
    assert last is not None and last.sequence == max(row["sequence"] for row in pipeline.ledger_rows())


@pytest.mark.parametrize("app", KILLED)
def test_row_20_an_app_whose_directory_was_lost_goes_on_behind_its_ledger_each_row_once(
    embedded: Outcome, app: str
) -> None:
    assert "TXMQ_CHECKPOINT_MISMATCH" in str(embedded.first[app])
    pipeline = _require_rows_once(embedded, app)
    assert pipeline.depth() == 0


def test_row_20_a_batch_that_its_table_has_and_the_ledger_not_is_an_error_and_nothing_comes_twice(
    embedded: Outcome,
) -> None:
    assert "the ledger ends with batch 1: its rows would come twice" in str(embedded.last["marked"])
    assert sorted(row["body"] for row in embedded.pipelines["marked"].table("first")) == MESSAGES


def test_row_20_on_kafka_a_batch_that_its_table_has_and_the_ledger_not_is_an_error(on_kafka: Outcome) -> None:
    assert "the ledger ends with batch 1: its rows would come twice" in str(on_kafka.last["marked"])
    pipeline = on_kafka.pipelines["marked"]
    assert sorted(row["body"] for row in pipeline.table("first")) == MESSAGES
    assert len(pipeline.published()) == len(MESSAGES)
