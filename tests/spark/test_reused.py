"""One object of ``transactional`` for several queries, and for several sessions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import ResourceLocked, cause
from broker_core.launcher import Broker
from connector.batch.foreach_batch import BatchTransaction, Transactional, transactional
from tests.progress import wait_until
from tests.spark.pipelines import delta_rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def publishing(batch: DataFrame, tx: BatchTransaction) -> None:
    tx.publish(batch.select("body"), queue="out")


def start(rig: Any, each: Transactional, checkpoint: str, **options: Any) -> Any:
    stream = rig.stream("in", onNewCheckpoint="resume", **options)
    writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", rig.checkpoint(checkpoint))
    return writer.trigger(availableNow=True).start()


@pytest.mark.soak  # test_ledger.py shows it of one query
def test_queries_after_one_another_are_complete_in_the_ledger_when_each_ends(
    rig: Any, tmp_path: Path
) -> None:
    rig.declare("in", "out")
    table = tmp_path / "ledger"
    each = transactional(
        publishing, url=rig.broker.url, app_id="app", ledger=str(table), on_new_checkpoint="resume"
    )
    queries = []
    for number, checkpoint in enumerate(("first", "second", "second"), 1):
        rig.publish("in", str(number))
        query = start(rig, each, checkpoint)
        query.awaitTermination()
        queries.append(query.id)
        wait_until(
            lambda: table.exists() and len(delta_rows(table)) == number,  # noqa: B023
            "the ledger has the batch, and nobody has called flush",
        )
    assert [
        row["query_id"] for row in sorted(delta_rows(table), key=lambda row: row["end_offset"])
    ] == queries
    assert rig.bodies("out") == ["1", "2", "3"] and rig.bodies("in") == []


def test_of_two_queries_at_the_same_time_one_fails_with_one_error_and_nothing_is_doubled(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    seconds: list[Any] = []

    def meeting(batch: DataFrame, tx: BatchTransaction) -> None:
        publishing(batch, tx)
        if not seconds:
            seconds.append(start(rig, each, "second"))
            claims = Path(rig.checkpoint("second")) / "offsets"
            wait_until(
                lambda: not seconds[0].isActive or (claims.is_dir() and any(claims.iterdir())), "it runs"
            )

    each = transactional(meeting, url=rig.broker.url, app_id="app", on_new_checkpoint="resume")
    found = [ended(start(rig, each, "first")), ended(seconds[0])]
    (failed,) = [error for error in found if error is not None]
    assert isinstance(cause(failed), ResourceLocked), failed
    assert rig.bodies("out") == ["a"] and rig.bodies("in") == []


def ended(query: Any) -> Exception | None:
    try:
        query.awaitTermination()
    except Exception as error:
        return error
    return None


@pytest.mark.soak
def test_a_new_session_goes_on_with_the_object_of_a_stopped_one(broker: Broker, tmp_path: Path) -> None:
    with broker.channel() as channel:
        channel.queue_declare("in")
        channel.queue_declare("out")
    command = [sys.executable, "-m", "tests.spark.stopped_session", broker.url, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "flush needs a Spark session" in found.stdout.splitlines()[-1]
    ledger = sorted(delta_rows(tmp_path / "ledger"), key=lambda row: row["batch_id"])
    assert [(row["start_offset"], row["end_offset"]) for row in ledger] == [(0, 1), (1, 2)]
    assert sorted(row["body"] for row in delta_rows(tmp_path / "lake")) == ["a", "b"]
    entry = broker.engine.last_entry("app")
    assert entry is not None and (entry.sequence, broker.engine.unmirrored("app")) == (2, [])
