"""Typed messages with topics of a real Kafka: the good and the broken of both partitions, in one query."""

from __future__ import annotations

from pathlib import Path

import pytest
from kafka import KafkaProducer
from pyspark.sql import DataFrame, SparkSession

from broker_core.core.errors import OptionError, cause
from broker_core.message.properties import Properties
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.typed.decode import decode
from tests.spark.kafka_pipelines import PARTITIONS, committed, engine, hosts, make_topics, send
from tests.spark.test_decode import FOLLOWED, NO_BRACE

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

BODIES = ['{"id": 1}', "x", '{"id": 2}', '{"id": "y"}', '{"id": 3} {}', '{"id": 4}']


def test_broken_messages_of_topics_are_dead_letters_where_they_are_sent(
    spark: SparkSession, kafka_url: str, tmp_path: Path
) -> None:
    topics = [f"typed.{name}" for name in ("in", "out", "dead", "again")]
    make_topics(kafka_url, *topics)
    send(kafka_url, "typed.in", BODIES)
    seen = []

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        with pytest.raises(Exception) as raised:
            tx.reject(batch, "without a place")
        seen.append(cause(raised.value))
        decoded = decode(batch, "id bigint not null")
        tx.reject(decoded, "before", queue="typed.again")  # by tasks: nothing is known yet
        tx.publish(decoded.good.selectExpr("CAST(id AS STRING) AS body"), queue="typed.out")
        seen.append(tx._seen.broken(decoded.rejected))
        tx.reject(decoded, queue="typed.dead")  # by the driver

    each = transactional(fn, url=kafka_url, app_id="typed")
    stream = spark.readStream.format("txmq").options(url=kafka_url, queue="typed.in", appId="typed").load()
    writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert type(seen[0]) is OptionError and "has no dead-letter exchange" in str(seen[0])
    assert seen[1] is not None and seen[1].num_rows == 3
    found = {}
    with engine(kafka_url) as made:
        for topic in topics[1:]:
            slices = [(log, one.start, one.end) for log, one in made.available(made.logs([topic])).items()]
            found[topic] = [row for batch in made.browse(slices) for row in batch.to_pylist()]
    assert sorted(row["body"] for row in found["typed.out"]) == [b"1", b"2", b"4"]
    for topic, reasons in (
        ("typed.dead", {NO_BRACE, FOLLOWED, "field 'id' is not bigint"}),
        ("typed.again", {"before"}),
    ):
        assert sorted(row["body"].decode() for row in found[topic]) == sorted(
            [BODIES[1], BODIES[3], BODIES[4]]
        )
        headers = [Properties.decode(row["properties"]).headers for row in found[topic]]
        assert {each["x-reject-reason"] for each in headers} == reasons
        assert {(each["x-death"][0]["queue"], each["x-death"][0]["reason"]) for each in headers} == {
            ("typed.in", "rejected")
        }


def test_a_record_without_a_value_is_rejected_and_relayed_as_it_is(
    spark: SparkSession, kafka_url: str, tmp_path: Path
) -> None:
    topics = [f"nulls.{name}" for name in ("in", "relayed", "dead", "again", "good")]
    make_topics(kafka_url, *topics)
    producer = KafkaProducer(bootstrap_servers=hosts(kafka_url), acks="all")
    for number, (key, value) in enumerate([(b"k", None), (b"", None), (None, b""), (b"k", b'{"id": 1}')]):
        producer.send("nulls.in", value, key=key, partition=number % PARTITIONS).get()
    producer.close()
    seen = []

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        decoded = decode(batch, "id bigint not null")
        tx.reject(decoded, "before", queue="nulls.again")
        tx.publish(batch.select("body"), queue="nulls.relayed")
        tx.publish(decoded.good.selectExpr("CAST(id AS STRING) AS body"), queue="nulls.good")
        seen.append(tx._seen.broken(decoded.rejected))
        tx.reject(decoded, queue="nulls.dead")

    each = transactional(fn, url=kafka_url, app_id="nulls")
    stream = spark.readStream.format("txmq").options(url=kafka_url, queue="nulls.in", appId="nulls").load()
    writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert seen[0] is not None and seen[0].num_rows == 3  # without reading them again
    values = {topic: sorted(map(repr, committed(kafka_url, topic))) for topic in topics[1:]}
    rejected = sorted(map(repr, [None, None, b""]))
    assert values["nulls.dead"] == values["nulls.again"] == rejected
    assert values["nulls.good"] == [repr(b"1")]
    assert values["nulls.relayed"] == sorted([*rejected, repr(b'{"id": 1}')])
