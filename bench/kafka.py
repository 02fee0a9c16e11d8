"""``make bench-kafka``: Spark's Kafka source and sink and those of txmq, in one session, with the same rows.

Both: 100-byte bodies, two partitions or tasks, a stream to the noop sink and a stream of ready rows to the
sink; medians of addBatch, warm, in turns. Kafka runs with its defaults: unlike txmq, it does not fsync before
it answers. Spark's Kafka sink is at least once, that of txmq exactly once. Before them, the codec of record
batches alone (``kafka_codec.py``).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import txmq
from bench.broker import fanout, fill, serving
from bench.kafka_codec import codec_figures
from bench.kafka_server import cluster, spark_kafka_jars
from bench.report import Figure, against, emit, table
from bench.session import session
from bench.streams import rate, ready, run
from txmq import BrokerClient

ROWS = 4_000_000
SINK_ROWS = 2_000_000
REPETITIONS = 3


def compare(folder: Path) -> list[Figure]:
    jars = ",".join(spark_kafka_jars())
    queues = [f"orders-{number}" for number in range(REPETITIONS + 1)]
    with (
        cluster(folder) as kafka,
        serving(folder / "data") as served,
        session("bench-kafka", {**txmq.recommended_conf(), "spark.jars": jars}) as spark,
    ):
        with BrokerClient(served.url) as client:
            fanout(client, "orders", queues)
            fill(client, "orders", "", ROWS)
            with client.channel() as channel:
                channel.queue_declare("sink")
        bodies = spark.range(ROWS).selectExpr("lpad(cast(id AS string), 100, 'x') AS value")
        bodies.write.format("kafka").options(
            **{"kafka.bootstrap.servers": kafka.bootstrap, "topic": "orders"}
        ).save()
        ours_read, theirs_read, ours_written, theirs_written = [], [], [], []
        for number, queue in enumerate(queues):
            source = spark.readStream.format("kafka").options(
                **{
                    "kafka.bootstrap.servers": kafka.bootstrap,
                    "subscribe": "orders",
                    "startingOffsets": "earliest",
                }
            )
            theirs_read.append(rate(run(source.load().writeStream.format("noop"), folder, ROWS)))
            mine = spark.readStream.format("txmq").options(
                url=served.url, queue=queue, appId=f"read-{number}"
            )
            ours_read.append(rate(run(mine.load().writeStream.format("noop"), folder, ROWS)))

            rows = ready(spark, SINK_ROWS, SINK_ROWS, 2).select("body")
            sink = rows.withColumnRenamed("body", "value").writeStream.format("kafka")
            theirs_written.append(
                rate(
                    run(
                        sink.options(**{"kafka.bootstrap.servers": kafka.bootstrap, "topic": "sink"}),
                        folder,
                        SINK_ROWS,
                    )
                )
            )
            target = rows.writeStream.format("txmq").options(
                url=served.url, queue="sink", appId=f"write-{number}"
            )
            ours_written.append(rate(run(target, folder, SINK_ROWS)))
    return [
        against("source_rows_kafka", ours_read[1:], theirs_read[1:], "rows/s"),
        against("sink_rows_kafka", ours_written[1:], theirs_written[1:], "rows/s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.kafka",
        description="Compare with Spark's Kafka source and sink, in one session.",
    )
    parser.add_argument("--dir", type=Path, help="measure the disk that holds this directory")
    parser.add_argument("--codec", action="store_true", help="only the figures that need no Kafka")
    options = parser.parse_args()
    figures = codec_figures()
    if not options.codec:
        figures += against_spark(options.dir)
    for figure in figures:
        emit(figure)
    print("\n" + table(figures, {}))


def against_spark(parent: Path | None) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="txmq-bench-", dir=parent) as folder:
        return compare(Path(folder))


if __name__ == "__main__":
    main()
