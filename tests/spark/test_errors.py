"""Bad input in Spark: one clear error with its code, which reaches the user's process as the same class, and
nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, StructField, StructType

from bench.ports import free_ports
from broker_core.core.errors import (
    CheckpointMismatch,
    ConnectionFailed,
    OptionError,
    QueueNotFound,
    ResourceLocked,
    TransactionTooLarge,
    TxmqError,
    Unroutable,
    cause,
)
from broker_core.launcher import Broker
from broker_core.message.message import MAX_BODY_BYTES
from connector.datasource import TxmqDataSource
from connector.errors import error_summary, first_line

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def failure(action: Callable[[], Any]) -> TxmqError:
    with pytest.raises(Exception) as caught:
        action()
    found = cause(caught.value)
    assert found is not None, caught.value
    return found


def refused(action: Callable[[], Any], kind: type[TxmqError], *texts: str) -> None:
    found = failure(action)
    assert type(found) is kind, found
    for text in texts:
        assert text in str(found)


def run(writer: Any) -> Callable[[], Any]:
    return lambda: writer.trigger(availableNow=True).start().awaitTermination()


def test_an_unknown_option_of_a_read_is_refused_by_load(rig: Any) -> None:
    """On Connect by whatever asks the server first."""
    refused(
        lambda: rig.stream("q", maxOffsetPerTrigger="5").schema,
        OptionError,
        "unknown option 'maxoffsetpertrigger'",
        "did you mean 'maxOffsetsPerTrigger'?",
    )
    refused(
        lambda: rig.spark.read.format("txmq").options(url="txmq://h:1", queue="q").load("orders").schema,
        OptionError,
        ".load() takes no path",
    )


def test_an_unknown_or_contradictory_option_of_a_sink_is_refused_in_the_first_batch(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    refused(
        run(rig.sink(rig.stream("in").select("body"), exchnge="x")), OptionError, "did you mean 'exchange'?"
    )
    refused(
        run(rig.sink(rig.stream("in").select("body"), queue="out", exchange="x")),
        OptionError,
        "exclude each other",
    )
    assert rig.bodies("in") == ["a"]


def test_a_differing_schema_is_refused(rig: Any) -> None:
    rig.declare("q")
    frame = (
        rig.spark.readStream.format("txmq")
        .options(url=rig.broker.url, queue="q", appId="a")
        .schema("a int")
        .load()
    )
    refused(lambda: rig.collect(frame), OptionError, "the schema given by .schema() is struct<a:int>")


def test_batch_overwrite_is_refused(rig: Any) -> None:
    rig.declare("q")
    writer = rig.spark.sql("SELECT 'a' AS body").write.format("txmq").options(url=rig.broker.url, queue="q")
    refused(lambda: writer.mode("overwrite").save(), OptionError, "mode 'overwrite' is not supported")


def test_a_queue_that_does_not_exist_is_named(rig: Any) -> None:
    refused(lambda: rig.collect(rig.stream("missing")), QueueNotFound, "missing")
    refused(lambda: rig.look("missing").collect(), QueueNotFound, "missing")


def test_a_body_of_the_wrong_type_is_refused(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    refused(
        run(rig.sink(rig.stream("in").selectExpr("offset AS body"), queue="out")),
        OptionError,
        "column 'body' has the type bigint",
    )
    assert rig.bodies("in") == ["a"]


def test_a_null_body_is_refused_and_nothing_is_published_or_consumed(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    rows = rig.stream("in").selectExpr("if(offset = 1, null, body) AS body")
    refused(run(rig.sink(rows, queue="out")), OptionError, "row 1 has no body (null)")
    assert (rig.bodies("in"), rig.bodies("out")) == (["a", "b"], [])


def test_a_message_to_no_queue_fails_the_whole_transaction_with_a_count_and_examples(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    rows = rig.stream("in").selectExpr("body", "if(offset = 1, 'nowhere', 'out') AS routing_key")
    refused(run(rig.sink(rows)), Unroutable, "1", "nowhere")
    assert (rig.bodies("in"), rig.bodies("out")) == (["a", "b"], [])


def test_a_message_over_the_size_limit_is_refused(broker: Broker) -> None:
    with broker.channel() as channel:
        channel.queue_declare("q")
    # what a task does, without the gigabytes that a JVM needs for such a row
    source = TxmqDataSource({"url": broker.url, "queue": "q"})
    writer = source.writer(StructType([StructField("body", BinaryType())]), False)
    rows = pa.RecordBatch.from_arrays([pa.array([b"small", bytes(MAX_BODY_BYTES + 1)])], names=["body"])
    refused(
        lambda: writer.write(iter([rows])),
        TransactionTooLarge,
        "the body of row 1 has 134217729 bytes",
        "the limit is 134217728",
    )
    assert broker.queues()[0].messages == 0


def test_a_queue_that_another_app_has_claimed_is_refused(rig: Any) -> None:
    rig.declare("q")
    rig.publish("q", "a")
    rig.collect(rig.stream("q", app_id="first"))
    rig.publish("q", "b")
    refused(lambda: rig.collect(rig.stream("q", app_id="second"), "other"), ResourceLocked, "'first'", "q")


def test_a_new_checkpoint_under_a_used_app_id_is_refused(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    run(rig.sink(rig.stream("in").select("body"), queue="out"))()
    rig.publish("in", "b")
    refused(
        run(rig.sink(rig.stream("in").select("body"), checkpoint="new", queue="out")),
        CheckpointMismatch,
        "app",
        "onNewCheckpoint",
    )
    assert rig.bodies("out") == ["a"]


def test_a_url_where_nothing_listens_fails_within_seconds_and_names_the_address(rig: Any) -> None:
    url = f"txmq://127.0.0.1:{free_ports(1)[0]}"
    started = time.monotonic()
    refused(
        lambda: rig.spark.read.format("txmq").options(url=url, queue="q").load().collect(),
        ConnectionFailed,
        url.removeprefix("txmq://"),
    )
    assert time.monotonic() - started < 20


def test_an_error_of_delta_that_pyspark_cannot_render_names_the_column(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.range(1).write.format("delta").save(str(tmp_path / "lake"))
    spark.range(1).createOrReplaceTempView("given_rows")
    merge = f"MERGE INTO delta.`{tmp_path / 'lake'}` t USING given_rows s ON t.id = s.id WHEN MATCHED THEN UPDATE SET "
    with pytest.raises(Exception) as raised:
        spark.sql(merge + "missing = s.id").collect()
    text = error_summary(raised.value)
    assert "missing" in text and "main error class" not in text and "\tat " not in text


def test_an_error_behind_wrappers_of_spark_is_the_one_that_is_told(
    spark: SparkSession, tmp_path: Path
) -> None:
    jvm: Any = spark._jvm
    within = jvm.java.lang.IllegalStateException("the storage is full\nand stays so")
    job = jvm.org.apache.spark.SparkException("Job aborted due to stage failure", within)
    waited = jvm.java.util.concurrent.ExecutionException("a future failed", job)
    wrapped = Py4JJavaError("An error occurred while calling o1.save", waited)
    assert first_line(wrapped) == "java.lang.IllegalStateException: the storage is full"
    alone = jvm.org.apache.spark.SparkException("nothing is behind it", None)
    assert first_line(Py4JJavaError("", alone)) == "org.apache.spark.SparkException: nothing is behind it"
    mute = jvm.org.apache.spark.SparkException("it says more", jvm.java.lang.RuntimeException())
    assert first_line(Py4JJavaError("", mute)) == "org.apache.spark.SparkException: it says more"
    table = tmp_path / "narrow"
    spark.sql(f"CREATE TABLE delta.`{table}` (v INT) USING delta")
    spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT small CHECK (v < 10)")
    with pytest.raises(Exception) as raised:
        spark.range(20).selectExpr("CAST(id AS INT) AS v").write.format("delta").mode("append").save(
            str(table)
        )
    line = first_line(raised.value)
    assert "CHECK constraint small" in line and "\n" not in line and "Job aborted" not in line
    with pytest.raises(Exception) as parsed:
        spark.sql("SELEKT 1")
    assert first_line(parsed.value).startswith("[PARSE_SYNTAX_ERROR]")
    assert first_line(ValueError()) == "ValueError"
