"""The stream source: what arrives, in which batches and tasks, from where, and what a restart changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pyspark.sql.functions import spark_partition_id
from pyspark.sql.types import StructField, StructType

from broker_core.core.errors import ResourceLocked, cause
from broker_core.message.properties import Properties
from connector.datasource import TxmqDataSource
from connector.stream.schema import PROPERTIES_TYPE, read_schema
from connector.stream.spark_version import has_admission_control
from tests.progress import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

ADMITTED = pytest.mark.skipif(not has_admission_control(), reason="needs Spark 4.2")
UNADMITTED = pytest.mark.skipif(has_admission_control(), reason="only on Spark 4.1")


def bodies(rows: list[Any]) -> list[str]:
    return [bytes(row.body).decode() for row in rows]


def test_format_txmq_is_found_with_nothing_registered(rig: Any) -> None:
    rig.declare("q")
    stream = rig.stream("q")
    assert stream.isStreaming
    assert stream.schema == read_schema()


def test_format_txmq_works_when_registered(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "a")
    rig.spark.dataSource.register(TxmqDataSource)
    assert bodies(rig.look("q").collect()) == ["a"]


def test_a_message_arrives_with_all_its_columns(rig: Any) -> None:
    rig.declare("q")
    before = time.time()
    rig.publish("q", "a", "b")
    ((first, second),) = rig.collect(rig.stream("q"))
    assert (first.queue, first.offset, first.exchange, first.routing_key) == ("q", 0, "", "q")
    assert (bytes(first.body), first.redelivered) == (b"a", False)
    assert (second.offset, bytes(second.body)) == (1, b"b")
    assert before - 1 < first.timestamp.timestamp() < time.time() + 1


def test_include_properties_gives_the_struct_and_null_where_a_message_has_none(rig: Any) -> None:
    rig.declare("q")
    rig.publish(
        "q", "a", properties=Properties(content_type="text/plain", headers={"n": 1}, priority=3).encode()
    )
    rig.publish("q", "b")
    stream = rig.stream("q", includeProperties="true")
    assert stream.schema == StructType([*read_schema().fields, StructField("properties", PROPERTIES_TYPE)])
    ((first, second),) = rig.collect(stream)
    assert (first.properties.content_type, first.properties.headers, first.properties.priority) == (
        "text/plain",
        {"n": "1"},
        3,
    )
    assert (first.properties.message_id, second.properties) == (None, None)


@ADMITTED
def test_available_now_reads_what_is_there_under_the_limit_and_ends(rig: Any) -> None:
    rig.declare("q")
    for number in range(6):
        rig.publish("q", str(number))
    batches = rig.collect(rig.stream("q", maxOffsetsPerTrigger=2))
    assert [bodies(batch) for batch in batches] == [["0", "1"], ["2", "3"], ["4", "5"]]


@ADMITTED
def test_trigger_once_reads_all_in_one_batch_whatever_the_limit(rig: Any) -> None:
    rig.declare("q")
    for number in range(3):
        rig.publish("q", str(number))
    assert [bodies(batch) for batch in rig.collect(rig.stream("q", maxOffsetsPerTrigger=1), once=True)] == [
        ["0", "1", "2"]
    ]


@UNADMITTED
@pytest.mark.parametrize("trigger", ["availableNow", "once"])
def test_on_spark_4_1_available_now_and_once_are_one_batch_under_the_limit(rig: Any, trigger: str) -> None:
    rig.declare("q")
    for number in range(3):
        rig.publish("q", str(number))
    runs = [rig.collect(rig.stream("q", maxOffsetsPerTrigger=2), **{trigger: True}) for _ in range(3)]
    assert [[bodies(batch) for batch in batches] for batches in runs] == [[["0", "1"]], [["2"]], []]


def test_a_limit_never_splits_a_transaction(rig: Any) -> None:
    rig.declare("q")
    for number in range(4):
        rig.publish("q", *[f"{number}{row}" for row in range(4)])
    batches = rig.collect(rig.stream("q", maxOffsetsPerTrigger=5))
    assert len(batches) > 1
    assert [len(batch) % 4 for batch in batches] == [0] * len(batches)
    assert sum(map(len, batches)) == 16


def test_a_limit_of_bytes_cuts_micro_batches(rig: Any) -> None:
    rig.declare("q")
    for _ in range(4):
        rig.publish("q", "x" * 1000)
    batches = rig.collect(rig.stream("q", maxBytesPerTrigger="2k"))
    assert sum(map(len, batches)) == 4
    assert len(batches) >= 2


def test_several_queues_arrive_in_one_stream_each_in_order(rig: Any) -> None:
    rig.declare("a", "b", "c")
    for queue in "abc":
        rig.publish(queue, *[f"{queue}{number}" for number in range(3)])
    (rows,) = rig.collect(rig.stream("a, b, c"))
    assert sorted(bodies(rows)) == [f"{queue}{number}" for queue in "abc" for number in range(3)]
    for queue in "abc":
        assert [row.offset for row in rows if row.queue == queue] == [0, 1, 2]


@pytest.mark.parametrize("queues", [["a"], ["a", "b", "c", "d", "e"]])
def test_the_number_of_tasks_does_not_depend_on_the_number_of_queues(rig: Any, queues: list[str]) -> None:
    rig.declare(*queues)
    for queue in queues:
        rig.publish(queue, *[str(number) for number in range(60 // len(queues))])
    (rows,) = rig.collect(
        rig.stream(",".join(queues), minPartitions=3).select("body", spark_partition_id().alias("task"))
    )
    assert len(rows) == 60
    tasks = [row.task for row in rows]
    assert [tasks.count(task) for task in range(3)] == [20, 20, 20]


def test_a_running_query_reads_what_comes_later_and_goes_on_from_its_checkpoint(rig: Any) -> None:
    rig.declare("q")
    seen = rig.notes()

    def start() -> Any:
        writer = rig.stream("q").writeStream.foreachBatch(
            lambda batch, _id: seen.append(bodies(batch.collect()))
        )
        return (
            writer.option("checkpointLocation", rig.checkpoint()).trigger(processingTime="0 seconds").start()
        )

    query = start()
    rig.publish("q", "a")
    query.processAllAvailable()
    rig.publish("q", "b")
    query.processAllAvailable()
    query.stop()
    rig.publish("q", "c")
    query = start()
    query.processAllAvailable()
    query.stop()
    assert [body for batch in seen for body in batch] == ["a", "b", "c"]


def test_a_stream_that_starts_on_an_empty_queue_loses_nothing_over_a_restart(rig: Any) -> None:
    rig.declare("q")
    assert [row for batch in rig.collect(rig.stream("q")) for row in batch] == []
    rig.publish("q", "a")
    assert [bodies(batch) for batch in rig.collect(rig.stream("q")) if batch] == [["a"]]


def test_a_stream_from_latest_reads_only_what_comes_after_its_start(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "old")
    assert not any(rig.collect(rig.stream("q", startingOffsets="latest")))
    rig.publish("q", "new")
    assert [bodies(batch) for batch in rig.collect(rig.stream("q", startingOffsets="latest")) if batch] == [
        ["new"]
    ]


def test_a_stream_starts_at_the_given_offsets(rig: Any) -> None:
    rig.declare("a", "b")
    rig.publish("a", "a0", "a1", "a2")
    rig.publish("b", "b0", "b1")
    (rows,) = rig.collect(rig.stream("a,b", startingOffsets='{"a": 2, "b": -2}'))
    assert sorted(bodies(rows)) == ["a2", "b0", "b1"]


def test_a_stream_starts_at_the_first_message_committed_at_or_after_a_time(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "old")
    (old,) = rig.look("q").collect()
    committed_ms = int(old.timestamp.timestamp() * 1000) + 1
    while time.time() * 1000 <= committed_ms + 1:
        pass
    rig.publish("q", "new")
    ((row,),) = rig.collect(rig.stream("q", startingTimestamp=str(committed_ms)))
    assert bodies([row]) == ["new"]


def test_too_few_messages_wait_for_more_and_no_longer_than_the_delay(rig: Any) -> None:
    rig.declare("q")
    seen = rig.notes()

    def start(delay: str) -> Any:
        stream = rig.stream("q", minOffsetsPerTrigger=2, maxTriggerDelay=delay)
        writer = stream.writeStream.foreachBatch(lambda batch, _id: seen.append(bodies(batch.collect())))
        return writer.option("checkpointLocation", rig.checkpoint()).start()

    def read(rows: int) -> bool:
        query.processAllAvailable()
        return sum(map(len, seen)) >= rows

    query = start("1h")
    rig.publish("q", "a")
    query.processAllAvailable()
    rig.publish("q", "b")
    wait_until(lambda: read(2))
    query.stop()
    query = start("2s")
    query.processAllAvailable()
    waited = time.monotonic()
    rig.publish("q", "c")
    wait_until(lambda: read(3))
    waited = time.monotonic() - waited
    query.stop()
    assert [batch for batch in seen if batch] == [["a", "b"], ["c"]]
    assert waited >= 1.9


def test_a_finished_micro_batch_is_gone_when_the_query_starts_again(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "a", "b")
    rig.collect(rig.stream("q"))
    rig.publish("q", "c")
    rig.collect(rig.stream("q"))
    assert rig.bodies("q") in (["c"], [])
    assert "a" not in rig.bodies("q")


@ADMITTED
def test_progress_reports_the_latest_offsets(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "a", "b")
    query = (
        rig.stream("q")
        .writeStream.format("noop")
        .option("checkpointLocation", rig.checkpoint())
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    (source,) = query.lastProgress.sources
    assert (source.endOffset, source.latestOffset) == ('{"q": 2}', '{"q": 2}')


def test_two_readstreams_of_a_queue_are_refused_and_one_that_is_used_twice_is_not(
    rig: Any, rounds: int
) -> None:
    """A message between the questions of two sources would put them out of step for ever; nothing is
    consumed.
    """
    rig.declare("q")
    rig.publish("q", "a", "b")
    for _ in range(2 if rounds else 1):  # started again, it is refused again; each time waits ten seconds
        with pytest.raises(Exception, match="use one readStream and its DataFrame twice") as refused:
            rig.collect(rig.stream("q").union(rig.stream("q")))
        assert isinstance(cause(refused.value), ResourceLocked)
    assert rig.bodies("q") == ["a", "b"]
    stream = rig.stream("q")
    (rows,) = rig.collect(stream.union(stream))  # on the same checkpoint
    assert sorted(bodies(rows)) == ["a", "a", "b", "b"]


def test_include_transaction_names_the_commit_of_each_message(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "a", "b")
    rig.publish("q", "c")
    frame = rig.look("q", includeTransaction="true", includeProperties="true")
    assert frame.schema.names[-2:] == ["properties", "transaction"]
    first, second, third = [row.transaction for row in frame.orderBy("offset").collect()]
    assert first == second < third
    state = rig.spark.read.format("txmq").options(url=rig.broker.url, table="transactions").load()
    published = [row for row in state.collect() if row.sequence == third]
    assert [(each.queue, each.entries) for each in published[0].effects] == [("q", 1)]
    (rows,) = rig.collect(rig.stream("q", includeTransaction="true"))
    assert [row.transaction for row in rows] == [first, second, third]
    assert rig.look("q").schema == read_schema()


@ADMITTED  # Spark 4.1 has no trigger `realTime` in Python
@pytest.mark.parametrize("function", [True, False])
def test_spark_refuses_a_python_source_and_foreach_batch_in_real_time_mode(rig: Any, function: bool) -> None:
    rig.declare("q")
    rig.publish("q", "a")
    writer = rig.stream("q").writeStream
    writer = writer.foreachBatch(lambda batch, number: None) if function else writer.format("console")
    writer = writer.outputMode("update").trigger(realTime="5 seconds")
    with pytest.raises(Exception, match=r"\[STREAMING_REAL_TIME_MODE\.") as refusal:
        writer.option("checkpointLocation", rig.checkpoint()).start().processAllAvailable()
    assert ("ForeachBatchSink" if function else "PythonMicroBatchStream") in str(refusal.value)
    assert bodies(rig.look("q").collect()) == ["a"]
