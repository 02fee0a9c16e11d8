"""``python -m tests.spark.kafka_source_query HOSTS TOPIC FOLDER``: a query of Spark's own Kafka source to a table of Delta, until
it has read all that is there. Then it says so, waits for a line, and goes on with a batch that fails when it is in the offset
log.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.kafka_server import spark_kafka_jars
from bench.session import session

COMMITTED = "all that is there is committed"


def main(hosts: str, topic: str, folder: str) -> None:
    with session("kafka source", {"spark.jars": ",".join(spark_kafka_jars())}) as spark:
        stream = spark.readStream.format("kafka").option("kafka.bootstrap.servers", hosts)
        rows = stream.option("subscribe", topic).option("startingOffsets", "earliest")
        rows = rows.option("includeHeaders", "true").load()

        def each(batch: Any, batch_id: int) -> None:
            batch.selectExpr("CAST(value AS STRING) AS body", "key", "headers").write.format("delta").mode(
                "append"
            ).save(f"{folder}/table")
            if batch_id > 0:
                raise RuntimeError("as told")

        def go() -> None:
            writer = rows.writeStream.foreachBatch(each).option("checkpointLocation", f"{folder}/checkpoint")
            writer.trigger(availableNow=True).start().awaitTermination()

        go()
        print(COMMITTED, flush=True)
        sys.stdin.readline()
        go()


if __name__ == "__main__":
    main(*sys.argv[1:])
