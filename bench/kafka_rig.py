"""A Kafka, and a session of Spark that reads and writes it: by Spark's own source and sink, and by txmq.

Not here: what is measured with it (``kafka.py``, ``kafka_partitions.py``, ``latency.py``).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka.admin import KafkaAdminClient, NewTopic
from pyspark.sql import DataFrame, SparkSession

import txmq
from bench.kafka_server import cluster, spark_kafka_jars
from bench.session import session


@dataclass(frozen=True)
class Rig:
    spark: SparkSession
    bootstrap: str
    folder: Path

    @property
    def url(self) -> str:
        return f"kafka://{self.bootstrap}"

    def topics(self, *names: str, partitions: int = 2) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self.bootstrap)
        admin.create_topics([NewTopic(name, partitions, 1) for name in names])
        admin.close()

    def fill(self, topic: str, rows: int, compression: str = "none") -> None:
        self.topics(topic)
        bodies = self.spark.range(rows).selectExpr(
            "CAST(lpad(CAST(id AS STRING), 100, 'x') AS BINARY) AS value"
        )
        writer = bodies.write.format("kafka").option("kafka.bootstrap.servers", self.bootstrap)
        writer.option("topic", topic).option("kafka.compression.type", compression).save()

    def theirs(self, topic: str, **options: object) -> DataFrame:
        reader = self.spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.bootstrap)
        return reader.options(subscribe=topic, startingOffsets="earliest", **options).load()  # type: ignore[arg-type]

    def ours(self, topic: str, app: str, **options: object) -> DataFrame:
        reader = self.spark.readStream.format("txmq").options(url=self.url, queue=topic, appId=app)
        return reader.options(**options).load()  # type: ignore[arg-type]

    def to_theirs(self, rows: DataFrame, topic: str) -> Any:
        writer = rows.withColumnRenamed("body", "value").writeStream.format("kafka")
        return writer.options(**{"kafka.bootstrap.servers": self.bootstrap, "topic": topic})

    def to_ours(self, rows: DataFrame, topic: str, app: str) -> Any:
        return rows.writeStream.format("txmq").options(url=self.url, queue=topic, appId=app)


@contextlib.contextmanager
def rigged(parent: Path | None) -> Iterator[Rig]:
    jars = ",".join(spark_kafka_jars())
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="txmq-bench-", dir=parent)))
        kafka = stack.enter_context(cluster(folder))
        settings = {**txmq.recommended_conf(), "spark.jars": jars}
        spark = stack.enter_context(session("bench-kafka", settings))
        yield Rig(spark, kafka.bootstrap, folder)
