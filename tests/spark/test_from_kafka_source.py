"""A query of Spark's own Kafka source is followed by one of txmq, at the offsets of its checkpoint, as
docs/from_kafka_source.md says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.stream.spark_version import has_admission_control
from tests.progress import GUARD_S, wait_for_end, wait_until
from tests.spark.kafka_pipelines import hosts, make_topics, send
from tests.spark.kafka_source_query import COMMITTED

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_admission_control(), reason="the jars of Spark's Kafka source are those of 4.2"
    ),
    pytest.mark.usefixtures("interpreted"),
]

ROOT = Path(__file__).resolve().parents[2]
TOPIC = "taken.over"


def newest_committed(checkpoint: Path) -> str:
    """The offsets at which the newest committed batch ended: step 1 of the page."""
    batch = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    return (checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1]


def test_a_new_query_starts_at_the_offsets_of_a_checkpoint_of_sparks_kafka_source(
    spark: SparkSession, kafka_url: str, tmp_path: Path
) -> None:
    old, table = tmp_path / "old", str(tmp_path / "table")
    make_topics(kafka_url, TOPIC)
    command = [
        sys.executable,
        "-m",
        "tests.spark.kafka_source_query",
        ",".join(hosts(kafka_url)),
        TOPIC,
        str(old),
    ]
    send(kafka_url, TOPIC, [f"before {number}" for number in range(5)])
    producer = Producer({"bootstrap.servers": ",".join(hosts(kafka_url))})
    of_another = [("a", b"1"), ("b", b""), ("a", b"\xff"), ("txmq.exchange", b"x"), ("n", None)]
    for key, headers in ((b"", of_another), (b"\xff\x00", of_another[:1]), (TOPIC.encode(), [])):
        producer.produce(TOPIC, b"of another", key=key, headers=headers)
    assert producer.flush(GUARD_S) == 0
    options = {"url": kafka_url, "queue": TOPIC, "includeKey": "true", "includeHeaders": "true"}
    columns = ["CAST(body AS STRING) AS body", "key", "headers"]
    output, errors = tmp_path / "stdout", tmp_path / "stderr"
    with output.open("w") as out, errors.open("w") as err:
        query = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True)
    try:
        wait_until(
            lambda: COMMITTED in output.read_text() or query.poll() is not None, "a batch is committed"
        )
        assert query.poll() is None, errors.read_text()[-3000:]
        batch = spark.read.format("txmq").options(**options).load()
        theirs = spark.read.format("delta").load(str(old / "table"))
        assert batch.select("key", "headers").schema == theirs.select("key", "headers").schema
        found = [sorted(frame.selectExpr(*columns).collect(), key=repr) for frame in (batch, theirs)]
        assert found[0] == found[1] and len(found[0]) == 8 and None in {row.key for row in found[0]}
        # a batch that is in the offset log and was not committed
        send(kafka_url, TOPIC, ["logged 0", "logged 1"])
        assert query.stdin is not None
        with query.stdin:
            query.stdin.write("\n")
        assert wait_for_end(query, "the query fails") != 0
    finally:
        query.kill()
        query.wait()
    assert "as told" in errors.read_text(), errors.read_text()[-3000:]
    assert (old / "checkpoint" / "offsets" / "1").exists() and not (
        old / "checkpoint" / "commits" / "1"
    ).exists()
    send(kafka_url, TOPIC, ["after 0"])

    starts = newest_committed(old / "checkpoint")
    options |= {"appId": "taken", "startingOffsets": starts}
    stream = spark.readStream.format("txmq").options(**options).load()

    def each(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr(*columns), table)

    writer = stream.writeStream.foreachBatch(transactional(each, url=kafka_url, app_id="taken"))
    writer = writer.option("checkpointLocation", str(tmp_path / "new")).trigger(availableNow=True)
    writer.start().awaitTermination()
    rows = sorted(spark.read.format("delta").load(table).collect())
    assert rows == [(body, None, None) for body in ("after 0", "logged 0", "logged 1")], (
        "nothing that was committed comes again, nothing is left out"
    )
