"""Batch reads look and change nothing; a batch write is one transaction."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from broker_core.client.connection import CONNECT_S, RECONNECT_S
from connector.options import AddressOptions

pytestmark = pytest.mark.spark


def bodies(frame: Any) -> list[str]:
    return [bytes(row.body).decode() for row in frame.orderBy("queue", "offset").collect()]


def test_a_batch_read_only_looks(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "a", "b")
    frame = rig.look("q")
    assert bodies(frame) == bodies(frame) == ["a", "b"]
    (queue,) = rig.broker.queues()
    assert (queue.messages, queue.unacknowledged, queue.owner) == (2, 0, "")


def test_a_batch_read_sees_a_queue_that_a_stream_owns(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "a")
    rig.collect(rig.stream("q"))
    rig.publish("q", "b")
    assert "b" in bodies(rig.look("q"))


def test_offsets_cut_a_batch_read(rig: Any) -> None:
    rig.declare("a", "b")
    rig.publish("a", "a0", "a1", "a2")
    rig.publish("b", "b0", "b1")
    assert bodies(
        rig.look("a,b", startingOffsets='{"a": 1, "b": -2}', endingOffsets='{"a": 2, "b": -1}')
    ) == ["a1", "b0", "b1"]


def test_a_batch_read_of_an_empty_queue_is_empty(rig: Any) -> None:
    rig.declare("q")
    assert rig.look("q").collect() == []


def test_tasks_of_a_batch_read_follow_max_records_per_partition(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", *[str(number) for number in range(10)])
    frame = rig.look("q", maxRecordsPerPartition="4")
    assert frame.rdd.getNumPartitions() == 3
    assert bodies(frame) == [str(number) for number in range(10)]


def test_a_batch_write_is_one_transaction(rig: Any) -> None:
    rig.declare("q")
    rows = rig.spark.range(0, 20, 1, 4).selectExpr("cast(id AS string) AS body", "'q' AS routing_key")
    rows.write.format("txmq").option("url", rig.broker.url).mode("append").save()
    assert sorted(rig.bodies("q"), key=int) == [str(number) for number in range(20)]
    assert len({row.timestamp for row in rig.look("q").collect()}) == 1


def test_a_batch_write_that_fails_in_one_task_publishes_nothing(rig: Any) -> None:
    rig.declare("q")
    rows = rig.spark.range(0, 20, 1, 4).selectExpr(
        "if(id = 19, raise_error('broken row'), cast(id AS string)) AS body"
    )
    with pytest.raises(Exception, match="broken row"):
        rows.write.format("txmq").options(url=rig.broker.url, queue="q").mode("append").save()
    assert rig.bodies("q") == []


def test_a_data_directory_names_the_broker_that_has_it_open(rig: Any, tmp_path: Path) -> None:
    rig.declare("q")
    data = os.fspath(tmp_path / "broker")
    rig.spark.sql("SELECT 'a' AS body").write.format("txmq").options(data=data, queue="q").mode(
        "append"
    ).save()
    assert bodies(rig.spark.read.format("txmq").options(data=data, queue="q").load()) == ["a"]


def test_a_task_waits_for_a_broker_that_starts_again_as_long_as_its_driver_does(rig: Any) -> None:
    """A new worker process has not reached the broker itself, but its driver has."""
    address = AddressOptions(rig.broker.url, None)

    def connect_s(_row: object) -> float:
        return float(address.engine()._connection._connect_s)  # type: ignore[attr-defined]

    assert connect_s(None) == CONNECT_S
    assert rig.spark.sparkContext.parallelize([0], 1).map(connect_s).collect() == [RECONNECT_S]


def test_a_batch_write_that_is_repeated_reaches_its_queue_once(rig: Any) -> None:
    """By its own ids, without a token and without state in Spark; the stream behind it reads each row once."""
    arguments = {"x-message-deduplication": True, "x-cache-ttl": 3_600_000}
    with rig.broker.channel() as channel:
        channel.queue_declare("q", arguments=arguments)
    rows = rig.spark.range(0, 6, 1, 3).selectExpr(
        "cast(id % 4 AS string) AS body",
        "'q' AS routing_key",
        "named_struct('message_id', cast(id % 4 AS string)) AS properties",
    )
    for _ in range(2):
        rows.write.format("txmq").option("url", rig.broker.url).mode("append").save()
        assert sorted(rig.bodies("q")) == ["0", "1", "2", "3"]
    found = [bytes(row.body) for batch in rig.collect(rig.stream("q")) for row in batch]
    assert sorted(found) == [b"0", b"1", b"2", b"3"]
    rows.write.format("txmq").option("url", rig.broker.url).mode("append").save()
    assert rig.collect(rig.stream("q")) == []
