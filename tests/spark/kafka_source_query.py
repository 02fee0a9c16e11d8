"""``python -m tests.spark.kafka_source_query HOSTS TOPIC FOLDER [fails]``: a query of Spark's own Kafka source to a table of
Delta, until it has read all that is there; ``fails``: in its batch, when that is in the offset log.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.kafka_server import spark_kafka_jars
from bench.session import session


def main(hosts: str, topic: str, folder: str, *how: str) -> None:
    with session("kafka source", {"spark.jars": ",".join(spark_kafka_jars())}) as spark:
        stream = spark.readStream.format("kafka").option("kafka.bootstrap.servers", hosts)
        rows = stream.option("subscribe", topic).option("startingOffsets", "earliest")
        rows = rows.option("includeHeaders", "true").load()

        def each(batch: Any, _batch_id: int) -> None:
            batch.selectExpr("CAST(value AS STRING) AS body", "key", "headers").write.format("delta").mode(
                "append"
            ).save(f"{folder}/table")
            if how:
                raise RuntimeError("as told")

        writer = rows.writeStream.foreachBatch(each).option("checkpointLocation", f"{folder}/checkpoint")
        writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
