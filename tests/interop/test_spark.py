"""All together: a pika producer in transactions, a Spark stream that consumes them and publishes results,
aio-pika that reads these.

Not here: Spark's own guarantees (``tests/spark``, ``tests/crash``).
Invariant: numbers go in by whole transactions of 10, and every micro-batch holds whole transactions.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pytest
from pika.exceptions import ChannelClosedByBroker
from pyspark.sql import DataFrame, SparkSession

from tests.amqp_server import AmqpServed
from tests.progress import wait_until
from txmq import transactional

pytestmark = [pytest.mark.spark, pytest.mark.slow]

TRANSACTIONS = 60
SIZE = 10
TIMEOUT_S = 1_200.0


def produce(url: str) -> None:
    """Whole transactions of consecutive numbers, and now and then one that is rolled back."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.tx_select()
        for first in range(0, TRANSACTIONS * SIZE, SIZE):
            for number in range(first, first + SIZE):
                channel.basic_publish(
                    "numbers",
                    f"n.{number % 2}",
                    str(number),
                    pika.BasicProperties(delivery_mode=2, headers={"transaction": first // SIZE}),
                )
            if first // SIZE % 7 == 3:  # this attempt is dropped, and made again
                channel.tx_rollback()
                for number in range(first, first + SIZE):
                    channel.basic_publish(
                        "numbers", f"n.{number % 2}", str(number), pika.BasicProperties(delivery_mode=2)
                    )
            channel.tx_commit()


async def read(url: str, count: int) -> list[Any]:
    """``count`` results, as aio-pika delivers them."""
    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=50)
        queue = await channel.get_queue("squares")
        found: list[Any] = []
        async with queue.iterator() as results:
            async for result in results:
                found.append(result)
                await result.ack()
                if len(found) == count:
                    break
        assert (await queue.declare()).message_count == 0
        return found


def declare(url: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.exchange_declare("numbers", "topic", durable=True)
        for queue in ("even", "odd", "squares"):
            channel.queue_declare(queue, durable=True)
        channel.queue_bind("even", "numbers", "n.0")
        channel.queue_bind("odd", "numbers", "n.1")


def test_pika_transactions_go_through_a_spark_stream_to_aio_pika_once_each_and_are_never_torn(
    served: AmqpServed, spark: SparkSession, tmp_path: Path
) -> None:
    declare(served.amqp_url)
    batches: list[list[int]] = []

    def square(batch: DataFrame, tx: Any) -> None:
        batches.append(sorted(int(row.body) for row in batch.select("body").collect()))
        squares = batch.selectExpr(
            "CAST(CAST(CAST(body AS STRING) AS BIGINT) * CAST(CAST(body AS STRING) AS "
            "BIGINT) AS STRING) AS body"
        )
        tx.publish(squares, queue="squares")

    stream = (
        spark.readStream.format("txmq")
        .options(url=served.url, queue="even,odd", appId="squares", maxOffsetsPerTrigger=100)
        .load()
    )
    each = transactional(square, url=served.url, app_id="squares")
    query = (
        stream.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    producer = threading.Thread(target=produce, args=(served.amqp_url,))
    producer.start()
    try:
        results = asyncio.run(asyncio.wait_for(read(served.amqp_url, TRANSACTIONS * SIZE), TIMEOUT_S))
    finally:
        producer.join(TIMEOUT_S)
        query.stop()
    assert sorted(int(one.body) for one in results) == [
        number * number for number in range(TRANSACTIONS * SIZE)
    ]
    assert {(one.exchange, one.routing_key, one.redelivered) for one in results} == {("", "squares", False)}
    # Every batch is a whole number of transactions: both queues are cut at one commit.
    for batch in batches:
        assert len(batch) % SIZE == 0
        firsts = batch[::SIZE]
        assert batch == [number for first in firsts for number in range(first, first + SIZE)]
    assert len(batches) > 1


def test_a_queue_that_an_app_consumes_refuses_amqp_consumers_until_it_is_released(
    served: AmqpServed, spark: SparkSession, tmp_path: Path
) -> None:
    declare(served.amqp_url)
    with pika.BlockingConnection(pika.URLParameters(served.amqp_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for number in range(5):
            channel.basic_publish("numbers", "n.0", str(number), pika.BasicProperties(delivery_mode=2))
        stream = spark.readStream.format("txmq").options(url=served.url, queue="even", appId="owner").load()
        sink = (
            stream.select("body")
            .writeStream.format("txmq")
            .options(url=served.url, appId="owner", queue="squares")
        )
        sink.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
            availableNow=True
        ).start().awaitTermination()
        for action in (
            lambda one: one.basic_consume("even", lambda *_: None),
            lambda one: one.basic_get("even"),
            lambda one: one.queue_delete("even"),
            lambda one: one.queue_purge("even"),
        ):
            with pytest.raises(ChannelClosedByBroker) as refusal:
                action(connection.channel())
            assert refusal.value.reply_code == 405
            assert "owner" in refusal.value.reply_text
        results = [channel.basic_get("squares", auto_ack=True)[2] for _ in range(5)]
        assert results == [b"0", b"1", b"2", b"3", b"4"]
        with served.client() as client:
            client.release("owner", "even", force=True)
        channel.basic_publish("numbers", "n.0", "again", pika.BasicProperties(delivery_mode=2))
        got = wait_until(lambda: connection.channel().basic_get("even", auto_ack=True)[2])
        assert got == b"again"


def test_spark_reads_what_amqp_clients_set_and_they_read_what_spark_sets(
    served: AmqpServed, spark: SparkSession, tmp_path: Path
) -> None:
    declare(served.amqp_url)
    with pika.BlockingConnection(pika.URLParameters(served.amqp_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        properties = pika.BasicProperties(
            content_type="text/plain", headers={"source": "meter", "count": 3}, delivery_mode=2, priority=4, correlation_id="c",
            reply_to="r", message_id="m", timestamp=1_700_000_000, type="t", user_id="guest", app_id="a",
        )  # fmt: skip
        channel.basic_publish("numbers", "n.0", b"12", properties)
        (row,) = (
            spark.read.format("txmq")
            .options(url=served.url, queue="even", includeProperties="true")
            .load()
            .collect()
        )
        read = row.properties.asDict(recursive=True)
        assert (row.exchange, row.routing_key, bytes(row.body), row.redelivered) == (
            "numbers",
            "n.0",
            b"12",
            False,
        )
        assert read["headers"] == {"source": "meter", "count": "3"}
        assert (read["content_type"], read["priority"], read["correlation_id"], read["user_id"]) == (
            "text/plain",
            4,
            "c",
            "guest",
        )
        assert (read["message_id"], read["timestamp"].timestamp(), read["delivery_mode"]) == (
            "m",
            1_700_000_000,
            2,
        )
        rows = spark.createDataFrame(
            [("out", ("text/csv", {"made": "by spark"}, "id-1"))],
            "body string, properties struct<content_type string, headers map<string,string>, message_id "
            "string>",
        )
        rows.write.format("txmq").options(url=served.url, queue="squares").mode("append").save()
        method, back, body = channel.basic_get("squares", auto_ack=True)
        assert (method.routing_key, body) == ("squares", b"out")
        assert (back.content_type, back.headers, back.message_id) == (
            "text/csv",
            {"made": "by spark"},
            "id-1",
        )
