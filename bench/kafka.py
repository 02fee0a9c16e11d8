"""``make bench-kafka``: Spark's Kafka source and sink and those of txmq, in one session, with the same rows.

txmq is measured twice: on the same Kafka (``kafka_...``), and on its embedded broker
(``..._beside_kafka``). Bodies have 100 bytes, topics two partitions; medians of warm repetitions in turns.
Kafka runs with its defaults: unlike the embedded broker, it does not fsync before it answers. Spark's Kafka
sink is at least once, that of txmq exactly once. Before them, the codec of record batches alone
(``kafka_codec.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from kafka import KafkaConsumer, KafkaProducer
from pyspark.sql import DataFrame

from bench import readme
from bench.broker import fanout, fill, serving
from bench.kafka_codec import codec_figures
from bench.kafka_partitions import partitions
from bench.kafka_rig import Rig, rigged
from bench.kafka_server import cluster
from bench.latency import table_latency
from bench.report import Figure, against, emit, note, piped, table
from bench.streams import rate, ready, run
from broker_core.engine import BranchHeader
from broker_core.engines import connect
from txmq import BrokerClient, transactional

ROWS = 4_000_000
SINK_ROWS = 2_000_000
FOREACH_ROWS, FOREACH_BATCH = 2_000_000, 500_000
REPETITIONS = 5
DECIDED_ROWS, DECIDED = 1_000, 100
CHAINED = 40


def source_rows(rig: Rig) -> Iterator[Figure]:
    for name, compression in (("kafka_source_rows", "none"), ("kafka_source_rows_lz4", "lz4")):
        topic = f"orders-{compression}"
        rig.fill(topic, ROWS, compression)
        ours, theirs = [], []
        for number in range(REPETITIONS + 1):
            theirs.append(rate(run(rig.theirs(topic).writeStream.format("noop"), rig.folder, ROWS)))
            mine = rig.ours(topic, f"{name}-{number}", minPartitions=2)
            ours.append(rate(run(mine.writeStream.format("noop"), rig.folder, ROWS)))
        yield against(name, ours[1:], theirs[1:], "rows/s")


def sink_rows(rig: Rig) -> Iterator[Figure]:
    rig.topics("sink")
    ours, theirs = [], []
    for _ in range(REPETITIONS + 1):
        rows = ready(rig.spark, SINK_ROWS, SINK_ROWS, 2).select("body")
        theirs.append(rate(run(rig.to_theirs(rows, "sink"), rig.folder, SINK_ROWS)))
        # one app, whose topics exist since the first repetition, which does not count
        mine = rig.to_ours(rows, "sink", "write").option("onNewCheckpoint", "resume")
        ours.append(rate(run(mine, rig.folder, SINK_ROWS)))
    yield against("kafka_sink_rows", ours[1:], theirs[1:], "rows/s")


def decide(rig: Rig) -> Iterator[Figure]:
    """The decision alone: 1,000 staged rows become visible, with their entry of the ledger. ``tv1``: on a
    node with transaction.version 1, as Kafka before 4.0 has.
    """
    rig.topics("decided")
    yield Figure("kafka_decide_ms", _decided_ms(rig.url), "ms")
    folder = rig.folder / "tv1"
    folder.mkdir()
    with cluster(folder, features=["transaction.version=1"]) as old:
        older = Rig(rig.spark, old.bootstrap, folder)
        older.topics("decided")
        yield Figure("kafka_decide_tv1_ms", _decided_ms(older.url), "ms")


def _decided_ms(url: str) -> float:
    engine = connect(url)
    rows = pa.record_batch({"body": pa.array([b"x" * 100] * DECIDED_ROWS, pa.binary())})
    times = []
    try:
        for batch in range(DECIDED):
            opened = engine.open_batch("decide", "query", batch, "fail")
            target = {"exchange": "", "routing_key": "decided"}
            header = BranchHeader(opened.token, uuid.uuid4().hex, "publish", target, "decide", "query", batch)
            staged = engine.stage(header, [rows])
            began = time.perf_counter()
            engine.commit_batch("decide", "query", batch, opened.token, [staged])
            times.append((time.perf_counter() - began) * 1000)
    finally:
        engine.close()
    return round(statistics.median(times[DECIDED // 5 :]), 2)


def chain(rig: Rig) -> Iterator[Figure]:
    """From the send of a message to its arrival at a reader of committed messages, through one stream; at
    last with the embedded broker on both sides (``latency``).
    """
    names = [f"{name}-{side}" for name in ("chain-in", "chain-out") for side in ("ours", "theirs")]
    rig.topics(*names)

    def streams(side: str) -> Any:
        if side == "ours":
            rows = rig.ours("chain-in-ours", "chain").select("body")
            return rig.to_ours(rows, "chain-out-ours", "chain")
        rows = rig.theirs("chain-in-theirs").selectExpr("value AS body")
        return rig.to_theirs(rows, "chain-out-theirs")

    found = {}
    for side in ("theirs", "ours"):
        with _kafka_ends(rig, side) as ends:
            found[side] = _latencies(rig, side, streams(side), *ends)
    with serving(rig.folder / "chain") as served, _broker_ends(served.url) as ends:
        at = {"url": served.url, "appId": "chain"}
        mine = rig.spark.readStream.format("txmq").options(queue="chain-in", **at).load().select("body")
        writer = mine.writeStream.format("txmq").options(queue="chain-out", **at)
        found["embedded"] = _latencies(rig, "embedded", writer, *ends)
    for name, side in (("kafka_chain", "ours"), ("latency", "embedded")):
        for percent in (50, 95):
            ours, theirs = (
                sorted(found[each])[percent * len(found[each]) // 100] * 1000 for each in (side, "theirs")
            )
            figure = f"{name}_p{percent}_ms"
            yield Figure(figure, round(ours, 1), "ms", round(theirs, 1), round(ours / theirs, 3))


Send = Callable[[bytes], object]
Receive = Callable[[], list[bytes]]  # what has arrived; it waits a little for more


@contextlib.contextmanager
def _kafka_ends(rig: Rig, side: str) -> Iterator[tuple[Send, Receive]]:
    consumer = KafkaConsumer(
        f"chain-out-{side}",
        bootstrap_servers=rig.bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    producer = KafkaProducer(bootstrap_servers=rig.bootstrap, acks="all")

    def receive() -> list[bytes]:
        return [record.value for records in consumer.poll(200).values() for record in records]

    try:
        yield lambda body: producer.send(f"chain-in-{side}", body).get(), receive
    finally:
        consumer.close()
        producer.close()


@contextlib.contextmanager
def _broker_ends(url: str) -> Iterator[tuple[Send, Receive]]:
    with (
        BrokerClient(url) as sender,
        sender.channel() as publishing,
        BrokerClient(url) as reader,
        reader.channel() as reading,
    ):
        for queue in ("chain-in", "chain-out"):
            publishing.queue_declare(queue)

        def receive() -> list[bytes]:
            delivery = reading.get("chain-out", no_ack=True)
            if delivery is None:
                time.sleep(0.001)
            return [delivery.body] if delivery else []

        yield lambda body: publishing.publish(body, routing_key="chain-in"), receive


def _latencies(rig: Rig, side: str, writer: Any, send: Send, receive: Receive) -> list[float]:
    sent: dict[bytes, float] = {}
    found: list[float] = []
    arrived = threading.Semaphore(0)
    ended = threading.Event()

    def receiving() -> None:
        while not ended.is_set():
            bodies = receive()
            now = time.perf_counter()
            for body in bodies:
                found.append(now - sent[body])
                arrived.release()

    thread = threading.Thread(target=receiving)
    thread.start()
    query = writer.option("checkpointLocation", str(rig.folder / f"chain-{side}")).start()
    try:
        for number in range(CHAINED):
            body = b"%d" % number
            sent[body] = time.perf_counter()
            send(body)
            if not arrived.acquire(timeout=120):
                raise query.exception() or TimeoutError(f"message {number} does not arrive ({side})")
            time.sleep(0.05 * (number % 4))  # so that messages do not march with the triggers
    finally:
        query.stop()
        ended.set()
        thread.join()
    return found[CHAINED // 4 :]


def foreach_batch(rig: Rig) -> Iterator[Figure]:
    """A topic to a Delta table that exists and to another topic: exactly once, beside a plain append and
    Spark's sink. As in ``append_rows``: 500,000 rows a batch, and without the first one of each query,
    where txmq rehearses the append.
    """
    rig.fill("foreach-in", FOREACH_ROWS)
    rig.topics("foreach-out")

    def plain(lake: str) -> Callable[[DataFrame, int], None]:
        def both(batch: DataFrame, _batch_id: int) -> None:
            batch.persist()
            batch.select("value").write.format("delta").mode("append").save(lake)
            writer = batch.select("value").write.format("kafka")
            writer.options(**{"kafka.bootstrap.servers": rig.bootstrap, "topic": "foreach-out"}).save()
            batch.unpersist()

        return both

    def exactly_once(lake: str, app: str) -> Any:
        def both(batch: DataFrame, tx: Any) -> None:
            tx.append(batch.select("body"), lake)
            tx.publish(batch.select("body"), queue="foreach-out")

        # persisted: Spark's count of rows, on which the rate rests, counts those of every reading
        return transactional(both, url=rig.url, app_id=app, persist=True)

    def full(progress: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # Spark's source rounds down for each partition, so that a few rows are left for a last batch
        return [each for each in progress[1:] if each["numInputRows"] > FOREACH_BATCH // 2]

    ours, theirs = [], []
    for number in range(REPETITIONS + 1):
        lake = str(rig.folder / f"lake-{number}")
        for side, column in (("ours", "body"), ("theirs", "value")):
            empty = rig.spark.createDataFrame([], f"{column} binary")
            empty.write.format("delta").save(f"{lake}-{side}")
        reference = rig.theirs("foreach-in", maxOffsetsPerTrigger=FOREACH_BATCH)
        writer = reference.writeStream.foreachBatch(plain(f"{lake}-theirs"))
        theirs.append(rate(full(run(writer, rig.folder, FOREACH_ROWS))))
        app = f"foreach-{number}"
        mine = rig.ours("foreach-in", app, maxOffsetsPerTrigger=FOREACH_BATCH, minPartitions=2)
        writer = mine.writeStream.foreachBatch(exactly_once(f"{lake}-ours", app))
        ours.append(rate(full(run(writer, rig.folder, FOREACH_ROWS))))
    yield against("kafka_foreach_batch_rows", ours[1:], theirs[1:], "rows/s")


def embedded(rig: Rig) -> Iterator[Figure]:
    """The embedded broker beside Spark's Kafka source and sink."""
    queues = [f"orders-{number}" for number in range(REPETITIONS + 1)]
    with serving(rig.folder / "data") as served:
        with BrokerClient(served.url) as client:
            fanout(client, "orders", queues)
            fill(client, "orders", "", ROWS)
            with client.channel() as channel:
                channel.queue_declare("sink")
        rig.fill("orders", ROWS)
        rig.topics("sink-beside")
        ours_read, theirs_read, ours_written, theirs_written = [], [], [], []
        for number, queue in enumerate(queues):
            theirs_read.append(rate(run(rig.theirs("orders").writeStream.format("noop"), rig.folder, ROWS)))
            mine = rig.spark.readStream.format("txmq").options(
                url=served.url, queue=queue, appId=f"read-{number}"
            )
            ours_read.append(rate(run(mine.load().writeStream.format("noop"), rig.folder, ROWS)))
            rows = ready(rig.spark, SINK_ROWS, SINK_ROWS, 2).select("body")
            theirs_written.append(rate(run(rig.to_theirs(rows, "sink-beside"), rig.folder, SINK_ROWS)))
            target = rows.writeStream.format("txmq").options(
                url=served.url, queue="sink", appId=f"write-{number}"
            )
            ours_written.append(rate(run(target, rig.folder, SINK_ROWS)))
    yield against("source_rows_beside_kafka", ours_read[1:], theirs_read[1:], "rows/s")
    yield against("sink_rows_beside_kafka", ours_written[1:], theirs_written[1:], "rows/s")


MEASURES: Mapping[str, Callable[[Rig], Iterator[Figure]]] = {
    "source_rows": source_rows,
    "sink_rows": sink_rows,
    "decide": decide,
    "chain": chain,
    "foreach_batch": foreach_batch,
    "embedded": embedded,
    "table_latency": table_latency,
    "partitions": partitions,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.kafka",
        description="Compare with Spark's Kafka source and sink, in one session.",
    )
    parser.add_argument("--dir", type=Path, help="measure the disk that holds this directory")
    parser.add_argument("--only", action="append", choices=["codec", *MEASURES], help="may be repeated")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures to this file, as JSON")
    options = parser.parse_args()
    wanted = options.only or ["codec", *MEASURES]
    figures = codec_figures() if "codec" in wanted else []
    for figure in figures:
        emit(figure)
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(rigged(options.dir)) if set(wanted) & set(MEASURES) else None
        for name in wanted:
            if rig is not None and name in MEASURES:
                note(name)
                for figure in MEASURES[name](rig):
                    emit(figure)
                    figures.append(figure)
    print("\n" + table(figures, {}))
    if options.write:
        readme.write(figures, options.write)


if __name__ == "__main__":
    piped(main)
