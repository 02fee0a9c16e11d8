"""A query of Spark's own Kafka source is followed by one of txmq, at the offsets of its checkpoint, as
docs/from_kafka_source.md says.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.stream.spark_version import has_admission_control
from tests.progress import GUARD_S, wait_for_end, wait_until
from tests.spark.kafka_pipelines import PARTITIONS, hosts, make_topics, send
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


COLUMNS = ["CAST(body AS STRING) AS body", "key", "headers"]
BEFORE = [f"before {number}" for number in range(5)]
# what another client sends: the headers of a record, by its key
HEADERS = [("a", b"1"), ("b", b""), ("a", b"\xff"), ("txmq.exchange", b"x"), ("n", None)]
OF_ANOTHER = {b"": HEADERS, b"\xff\x00": HEADERS[:1], TOPIC.encode(): []}


def newest_committed(checkpoint: Path) -> str:
    """The offsets at which the newest committed batch ended: step 1 of the page."""
    batch = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    return (checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1]


def write_checkpoint(checkpoint: Path, *ends: dict[int, int]) -> None:
    """As Spark's Kafka source leaves it: where batches ended, by partition; the last one was not committed."""
    for name, batches in (("offsets", ends), ("commits", ends[:-1])):
        (checkpoint / name).mkdir(parents=True)
        for batch, of_partitions in enumerate(batches):
            offsets = json.dumps({TOPIC: of_partitions}, separators=(",", ":"))
            lines = ["v1", '{"batchWatermarkMs":0}', offsets] if name == "offsets" else ["v1", "{}"]
            (checkpoint / name / str(batch)).write_text("\n".join(lines))


class SparksQuery:
    """A query of Spark's own Kafka source, in a process with its jars."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self._errors, self._output = folder, folder / "stderr", folder / "stdout"
        folder.mkdir()
        module = [sys.executable, "-m", "tests.spark.kafka_source_query"]
        with self._output.open("w") as out, self._errors.open("w") as err:
            self._process = subprocess.Popen(
                [*module, ",".join(hosts(url)), TOPIC, str(folder)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True,
            )  # fmt: skip

    def wait_committed(self) -> None:
        """Of all that is there."""
        ended = self._process.poll
        wait_until(
            lambda: COMMITTED in self._output.read_text() or ended() is not None, "a batch is committed"
        )
        assert ended() is None, self._errors.read_text()[-3000:]

    def wait_failed(self) -> None:
        """In a batch that is in its offset log and is not committed."""
        assert self._process.stdin is not None
        with self._process.stdin:
            self._process.stdin.write("\n")
        assert wait_for_end(self._process, "the query fails") != 0
        assert "as told" in self._errors.read_text(), self._errors.read_text()[-3000:]
        offsets, commits = (self.folder / "checkpoint" / name / "1" for name in ("offsets", "commits"))
        assert offsets.exists() and not commits.exists()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.parametrize("live", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "live"])
def test_a_new_query_starts_at_the_offsets_of_a_checkpoint_of_sparks_kafka_source(
    spark: SparkSession, kafka_url: str, tmp_path: Path, live: bool
) -> None:
    """The checkpoint is one that Spark's source writes beside this test, or as that is known to write it."""
    old, table = tmp_path / "old", str(tmp_path / "table")
    make_topics(kafka_url, TOPIC)
    send(kafka_url, TOPIC, BEFORE)
    producer = Producer({"bootstrap.servers": ",".join(hosts(kafka_url))})
    for key, headers in OF_ANOTHER.items():
        producer.produce(TOPIC, b"of another", key=key, headers=headers)
    assert producer.flush(GUARD_S) == 0
    options = {"url": kafka_url, "queue": TOPIC, "includeKey": "true", "includeHeaders": "true"}
    batch = spark.read.format("txmq").options(**options).load()
    found = sorted(batch.selectExpr(*COLUMNS).collect(), key=repr)
    read = {
        bytes(row.key): [tuple(each) for each in row.headers or ()] for row in found if row.key is not None
    }
    assert read == OF_ANOTHER and sorted(row.body for row in found if row.key is None) == BEFORE
    if live:
        query = SparksQuery(kafka_url, old)
        try:
            query.wait_committed()
            theirs = spark.read.format("delta").load(str(old / "table"))
            assert batch.select("key", "headers").schema == theirs.select("key", "headers").schema
            assert found == sorted(theirs.selectExpr(*COLUMNS).collect(), key=repr)
            send(kafka_url, TOPIC, ["logged 0", "logged 1"])
            query.wait_failed()
        finally:
            query.end()
    else:
        rows = batch.groupBy("partition").agg(F.max("offset").alias("offset")).collect()
        ends = dict.fromkeys(range(PARTITIONS), 0)
        ends |= {row.partition: row.offset + 1 for row in rows}
        logged = {partition: end + 1 for partition, end in ends.items()}
        write_checkpoint(old / "checkpoint", ends, logged)
        send(kafka_url, TOPIC, ["logged 0", "logged 1"])
    send(kafka_url, TOPIC, ["after 0"])

    starts = newest_committed(old / "checkpoint")
    options |= {"appId": f"taken-{live}", "startingOffsets": starts}
    stream = spark.readStream.format("txmq").options(**options).load()

    def each(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr(*COLUMNS), table)

    writer = stream.writeStream.foreachBatch(transactional(each, url=kafka_url, app_id=f"taken-{live}"))
    writer = writer.option("checkpointLocation", str(tmp_path / "new")).trigger(availableNow=True)
    writer.start().awaitTermination()
    assert sorted(spark.read.format("delta").load(table).collect()) == [
        (body, None, None) for body in ("after 0", "logged 0", "logged 1")
    ], "nothing that was committed comes again, nothing is left out"
