"""The native stream sink: each micro-batch arrives exactly once, whatever is restarted, replayed or
retried.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.functions import col, expr

from broker_core.message.properties import Properties
from tests.spark.jobs import to_the_end

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


def forward(rig: Any, columns: list[str] | None = None, **options: Any) -> None:
    """txmq to txmq, until all that is there has been read."""
    stream = rig.stream(
        "in", **{name: value for name, value in options.items() if name == "maxOffsetsPerTrigger"}
    )
    rows = stream.selectExpr(*(columns or ["body"]))
    target = {name: value for name, value in options.items() if name != "maxOffsetsPerTrigger"} or {
        "queue": "out"
    }
    to_the_end(rig.sink(rows, **target))


def test_every_message_arrives_once_and_is_consumed_over_restarts_from_the_checkpoint(rig: Any) -> None:
    rig.declare("in", "out")
    for first in (0, 3, 6):
        rig.publish("in", *[str(first + number) for number in range(3)])
        forward(rig)
    assert rig.bodies("out") == [str(number) for number in range(9)]
    assert rig.bodies("in") == []


def test_a_batch_that_is_replayed_because_sparks_commit_log_lost_it_is_answered_already(rig: Any) -> None:
    rig.declare("in", "out")
    for body in "ab":
        rig.publish("in", body)
        forward(rig)  # it asks once more, and so acks, before it ends
    commits = Path(rig.checkpoint()) / "commits"
    (commits / "1").unlink()
    (commits / ".1.crc").unlink(missing_ok=True)
    rig.publish("in", "c")
    forward(rig)
    assert (commits / "1").exists()
    assert rig.bodies("out") == ["a", "b", "c"]
    assert rig.broker.engine.last_entry("app").sequence == 3


def test_a_query_that_starts_on_an_empty_queue_commits_what_comes_later(rig: Any) -> None:
    rig.declare("in", "out")
    forward(rig)
    rig.publish("in", "a")
    forward(rig)
    forward(rig)
    assert rig.bodies("out") == ["a"]


def test_the_publishes_of_a_batch_and_what_it_consumed_belong_to_one_ledger_entry(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b", "c")
    forward(rig, ["explode(array(body, body)) AS body"])
    entry = rig.broker.engine.last_entry("app")
    assert (entry.ranges, entry.messages, entry.published, entry.batch_id) == ({"in": (0, 3)}, 3, 6, 0)


def test_a_task_that_fails_once_after_half_its_rows_publishes_each_row_once(rig: Any, tmp_path: Path) -> None:
    rig.declare("in", "out")
    rig.publish("in", *[str(number) for number in range(2000)])
    mark = tmp_path / "failed"

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        written = 0
        for batch in batches:
            half = batch.num_rows // 2
            yield batch.slice(0, half)
            written += half
            context = TaskContext.get()
            if context is not None and context.attemptNumber() == 0:
                mark.write_text(str(written))
                raise RuntimeError("fails once")
            yield batch.slice(half)

    rows = rig.stream("in", minPartitions=1).select("body")
    rig.sink(rows.mapInArrow(fail_once, rows.schema), queue="out").trigger(
        availableNow=True
    ).start().awaitTermination()
    assert mark.read_text() == "1000"
    assert sorted(rig.bodies("out"), key=int) == [str(number) for number in range(2000)]


def test_a_batch_that_fails_publishes_and_consumes_nothing(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    with pytest.raises(Exception, match="broken row"):
        forward(rig, ["CASE WHEN offset = 1 THEN raise_error('broken row') ELSE body END AS body"])
    assert rig.bodies("out") == []
    assert rig.broker.engine.last_entry("app") is None
    forward(rig)
    assert rig.bodies("out") == ["a", "b"]


def test_a_column_wins_over_the_option_and_null_takes_the_option(rig: Any) -> None:
    rig.declare("in", "out", "other")
    rig.publish("in", "a", "b")
    forward(rig, ["body", "if(offset = 0, 'other', null) AS routing_key"], routingKey="out")
    assert (rig.bodies("other"), rig.bodies("out")) == (["a"], ["b"])


def test_a_body_of_type_string_is_published_as_utf_8(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    forward(rig, ["'grün' AS body"])
    assert rig.bodies("out") == ["grün"]


def test_properties_of_the_rows_arrive_with_the_messages(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", properties=Properties(priority=3, headers={"k": "v"}, timestamp=5).encode())
    stream = rig.stream("in", includeProperties="true").select("body", "properties")
    rig.sink(stream, queue="out").trigger(availableNow=True).start().awaitTermination()
    with rig.broker.channel() as channel:
        delivery = channel.get("out", no_ack=True)
    assert Properties.decode(delivery.message.properties) == Properties(
        priority=3, headers={"k": "v"}, timestamp=5
    )


def test_output_mode_complete_publishes_the_whole_result_of_every_batch(rig: Any) -> None:
    rig.declare("in", "out")
    counts = rig.stream("in").groupBy("queue").count().select(expr("concat(queue, '=', count)").alias("body"))
    for _ in range(2):
        rig.publish("in", "x")
        rig.sink(counts, queue="out").outputMode("complete").trigger(
            availableNow=True
        ).start().awaitTermination()
    assert rig.bodies("out") == ["in=1", "in=2"]


def test_source_and_sink_may_have_different_app_ids(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    rig.sink(rig.stream("in", app_id="reader").select("body"), app_id="writer", queue="out").trigger(
        availableNow=True
    ).start().awaitTermination()
    assert rig.bodies("out") == ["a"]
    assert rig.broker.engine.last_entry("writer").ranges == {"in": (0, 1)}


def test_unroutable_messages_are_dropped_where_the_option_says_so(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    forward(rig, ["body", "if(offset = 0, 'nowhere', 'out') AS routing_key"], onUnroutable="drop")
    assert rig.bodies("out") == ["b"]
    assert rig.bodies("in") == []


def test_a_source_that_is_not_txmq_is_published_exactly_once_too(rig: Any, tmp_path: Path) -> None:
    rig.declare("out")
    (tmp_path / "files").mkdir()
    lines = (
        rig.spark.readStream.schema("value string")
        .text(str(tmp_path / "files"))
        .select(col("value").alias("body"))
    )
    for number in range(2):
        (tmp_path / "files" / f"{number}.txt").write_text(f"line {number}\n")
        rig.sink(lines, queue="out").trigger(availableNow=True).start().awaitTermination()
    assert rig.bodies("out") == ["line 0", "line 1"]


def test_a_new_checkpoint_resumes_where_the_last_decided_batch_ended_when_told_so(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    forward(rig)
    rig.publish("in", "b")
    stream = rig.stream("in", onNewCheckpoint="resume").select("body")
    rig.sink(stream, checkpoint="new", queue="out", onNewCheckpoint="resume").trigger(
        availableNow=True
    ).start().awaitTermination()
    assert rig.bodies("out") == ["a", "b"]
