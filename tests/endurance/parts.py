"""The processes of a run of hours: clients of the broker and of Kafka, and Spark drivers.

``python -m tests.endurance.parts NAME FOLDER``. Each goes on, whatever server is killed, until SIGTERM, and where it was
killed. ``orders``: sent with confirms of pika, and by a producer of Kafka; the foreachBatch of each engine's driver
writes them to a table, each tenth also to queue ``large``, and rejects what does not parse. ``events``: sent in
transactions of pika, and by a producer; the sink of the driver brings them to ``notices``.

Not here: starts, kills, and the judgement of what came (``__main__.py``).
Invariant: a number is sent once. Where its fate is not known it is not sent again: it is there once, or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kafka
import numpy as np
import pika
from kafka.errors import KafkaError
from pika.exceptions import AMQPError

import txmq
from broker_core.client.accounts import RemoteVhosts

CHUNK = 20  # numbers that are sent, and become certain, together
RATE = {"orders": 50, "events": 30}  # numbers a second
TOPICS = {"orders": 2, "events": 2, "notices": 1, "large": 1, "broken": 1}  # with their partitions
TRIGGER = "5 seconds"
SLOW_S, PHASE_S = 0.1, 300  # the slow consumer: for each message, in every other phase
LOST = (AMQPError, KafkaError, txmq.TxmqError, OSError)
PERSISTENT = pika.BasicProperties(delivery_mode=2)
ENDED = threading.Event()
Publish = Callable[[list[bytes]], Any]


class Numbers:
    """A file of integers, in records of one size: each is there as a whole, or not, whatever is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        path.touch()

    def append(self, *record: int) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(array("q", record))

    def __len__(self) -> int:
        return self.path.stat().st_size // 8

    def read(self, start: int = 0) -> Any:
        return np.fromfile(self.path, "<i8", offset=8 * start)


class Place:
    """The folder of a run, and the addresses of its servers. ``engine`` is "" or "kafka-"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = json.loads((folder / "ports.json").read_text())
        self.kafka = f"127.0.0.1:{self.ports['kafka']}"
        self.urls = {"": f"txmq://127.0.0.1:{self.ports['flight']}", "kafka-": f"kafka://{self.kafka}"}

    def numbers(self, name: str) -> Numbers:
        return Numbers(self.folder / "numbers" / name)

    def table(self, engine: str) -> str:
        return str(self.folder / "tables" / f"{engine}orders")

    @contextlib.contextmanager
    def channel(self) -> Iterator[Any]:
        address = pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{self.ports['amqp']}/%2F")
        with pika.BlockingConnection(address) as connection:
            yield connection.channel()


def body(number: int) -> bytes:
    return b"broken %d" % number if number % 50 == 7 else b'{"id": %d}' % number


def number_of(body: bytes) -> int:
    return int(re.findall(rb"\d+", body)[0])


def again(session: Callable[[], None]) -> None:
    """A session with a server, and another one when it is lost."""
    while not ENDED.is_set():
        try:
            session()
        except LOST as error:
            print(repr(error), flush=True)
            ENDED.wait(0.5)


# -- clients -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def confirms(place: Place) -> Iterator[Publish]:
    """Each message waits for its confirm; the microseconds are noted."""
    waits = place.numbers("confirm")

    def publish(bodies: list[bytes]) -> None:
        for each in bodies:
            began = time.perf_counter()
            channel.basic_publish("", "orders", each, PERSISTENT, mandatory=True)
            waits.append(int((time.perf_counter() - began) * 1e6))

    with place.channel() as channel:
        channel.confirm_delivery()
        yield publish


@contextlib.contextmanager
def transactions(place: Place) -> Iterator[Publish]:
    def publish(bodies: list[bytes]) -> None:
        for each in bodies:
            channel.basic_publish("", "events", each, PERSISTENT)
        channel.tx_commit()

    with place.channel() as channel:
        channel.tx_select()
        yield publish


@contextlib.contextmanager
def producer(place: Place, topic: str) -> Iterator[Publish]:
    client = kafka.KafkaProducer(bootstrap_servers=place.kafka, acks="all", enable_idempotence=True)
    try:
        yield lambda bodies: [sent.get(60) for sent in [client.send(topic, each) for each in bodies]]
    finally:
        client.close(timeout=1)  # what it could not send, it must not send later


SENDERS = {"orders": confirms, "events": transactions} | {
    f"kafka-{topic}": partial(producer, topic=topic) for topic in RATE
}


def send(place: Place, stream: str) -> None:
    begun, certain = place.numbers(f"{stream}.begun"), place.numbers(f"{stream}.certain")

    def session() -> None:
        with SENDERS[stream](place) as publish:
            due = time.monotonic()
            while not ENDED.wait(max(0.0, due - time.monotonic())):
                first = CHUNK * len(begun)
                begun.append(first)
                publish([body(first + number) for number in range(CHUNK)])
                certain.append(first)
                due = max(due + CHUNK / RATE[stream.removeprefix("kafka-")], time.monotonic())

    again(session)


def consume(place: Place, queues: list[str], prefetch: int, take: Callable[[int], bool]) -> None:
    """Notes a number and acknowledges it, or rejects it, as ``take`` says; -1 is a new session."""

    def receive(channel: Any, method: Any, numbers: Numbers, number: int) -> None:
        if take(number):
            numbers.append(number)
            channel.basic_ack(method.delivery_tag)
        else:
            channel.basic_reject(method.delivery_tag, requeue=False)

    def session() -> None:
        with place.channel() as channel:
            channel.basic_qos(prefetch_count=prefetch)
            for queue in queues:
                (numbers := place.numbers(queue)).append(-1)
                channel.basic_consume(
                    queue, lambda c, m, _, body, numbers=numbers: receive(c, m, numbers, number_of(body))
                )
            while not ENDED.is_set():
                channel.connection.process_data_events(0.5)

    again(session)


def slow(place: Place) -> None:
    """Falls behind in every other phase, unless all is to be drained, and catches up in the next one."""

    def take(_: int) -> bool:
        if time.time() // PHASE_S % 2 and not (place.folder / "drain").exists():
            ENDED.wait(SLOW_S)
        return True

    consume(place, ["notices"], 1, take)


def receive_from_kafka(place: Place) -> None:
    """Pairs of an offset and a number, so that each comes once."""
    logs = {kafka.TopicPartition(topic, 0): place.numbers(f"kafka-{topic}") for topic in list(TOPICS)[2:]}

    def session() -> None:
        client = kafka.KafkaConsumer(bootstrap_servers=place.kafka, isolation_level="read_committed")
        with contextlib.closing(client):
            client.assign(list(logs))
            for log, numbers in logs.items():
                seen = numbers.read()
                client.seek(log, int(seen[-2]) + 1 if len(seen) else 0)
            while not ENDED.is_set():
                for log, records in client.poll(500).items():
                    for record in records:
                        logs[log].append(record.offset, number_of(record.value))

    again(session)


def churn(place: Place) -> None:
    """Connections, queues that expire, messages that expire and are returned, and a policy that comes and goes."""
    arguments = {"x-expires": 20_000, "x-message-ttl": 2_000}
    arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "expired"}

    def session() -> None:
        name = f"temporary.{time.time_ns()}"
        with place.channel() as channel:
            channel.queue_declare(name, durable=True, arguments=arguments)
            for number in range(20):
                channel.basic_publish("", name, body(number), PERSISTENT)
            for method in filter(None, [channel.basic_get(name)[0] for _ in range(10)]):
                channel.basic_nack(method.delivery_tag, requeue=bool(method.delivery_tag % 2))
        with txmq.BrokerClient(place.urls[""]) as client:
            RemoteVhosts(client).set_policy("short", r"^temporary\.", {"max-length": 15})
            RemoteVhosts(client).delete_policy("short")
        ENDED.wait(2)

    again(session)


# -- Spark ---------------------------------------------------------------------------------------------------
def session(place: Place, name: str) -> Any:
    from tests.jvm import AS_USERS_DO
    from tests.spark.jobs import session

    more = {"spark.driver.memory": "1g", "spark.databricks.delta.retentionDurationCheck.enabled": "false"}
    more |= {"spark.sql.streaming.minBatchesToRetain": "20", "spark.ui.showConsoleProgress": "false"}
    more["spark.sql.sources.parallelPartitionDiscovery.parallelism"] = (
        "1"  # tasks of a VACUUM: 10,000 by default
    )
    if "TXMQ_TEST_RUN" not in os.environ:  # a test of minutes compiles nothing
        more |= AS_USERS_DO
    return session(more, str(place.folder / f"{name}.scratch"))


def drive(place: Place, engine: str) -> None:
    spark = session(place, f"{engine}driver")
    url, table = place.urls[engine], place.table(engine)
    kept = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
    short = ", ".join(f"'{name}' = 'interval 1 hours'" for name in kept)
    spark.sql(f"CREATE TABLE IF NOT EXISTS delta.`{table}` (id BIGINT) USING delta TBLPROPERTIES ({short})")

    def book(batch: Any, tx: Any) -> None:
        decoded = txmq.decode(batch, "id BIGINT not null")
        tx.append(decoded.good.select("id"), table)
        large = decoded.good.where("id % 10 = 0").selectExpr("CAST(id AS STRING) AS body")
        tx.publish(large, queue="large")
        tx.reject(decoded, queue="broken" if engine else None)

    def writer(queue: str, app: str) -> Any:
        rows = spark.readStream.format("txmq").options(url=url, queue=queue, appId=app).load()
        place_of = str(place.folder / "checkpoints" / f"{engine}{app}")
        rows = rows.select("body") if app == "copy" else rows
        return rows.writeStream.option("checkpointLocation", place_of).trigger(processingTime=TRIGGER)

    books = writer("orders", "book").foreachBatch(txmq.transactional(book, url=url, app_id="book"))
    copies = writer("events", "copy").format("txmq").options(url=url, queue="notices", appId="copy")
    queries = [books.start(), copies.start()]
    heap, lang = place.numbers(f"{engine}driver.heap"), spark._jvm.java.lang
    while not ENDED.wait(30):
        for query in queries:
            if not query.isActive:
                raise query.exception() or SystemExit(f"{query.id} has ended")
        lang.System.gc()
        heap.append(lang.management.ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed())
    for query in queries:
        query.stop()


def look_after_tables(place: Place) -> None:
    """Compacts the tables beside their writers, and writes the numbers that are in them. A VACUUM retains what is
    younger than any append that it may run beside: it would take files of a commit that is newer than its snapshot.
    """
    spark = session(place, "tables")
    for engine in place.urls:
        if Path(place.table(engine), "_delta_log").exists():
            table = f"delta.`{place.table(engine)}`"
            for statement in (f"OPTIMIZE {table}", f"VACUUM {table} RETAIN 0.5 HOURS"):
                spark.sql(statement).collect()
            target = place.numbers(f"{engine}table").path
            spark.table(table).toArrow()["id"].to_numpy().tofile(target.with_suffix(".new"))
            target.with_suffix(".new").replace(target)


PARTS: dict[str, Callable[[Place], None]] = {
    **{f"send-{stream}": partial(send, stream=stream) for stream in SENDERS},
    "slow": slow,
    "picky": partial(consume, queues=["large"], prefetch=10, take=lambda number: number % 20 != 0),
    "dead": partial(consume, queues=["dead", "broken"], prefetch=50, take=lambda _: True),
    "kafka-receiver": receive_from_kafka,
    "churn": churn,
    "driver": partial(drive, engine=""),
    "kafka-driver": partial(drive, engine="kafka-"),
    "tables": look_after_tables,
}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: ENDED.set())
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    PARTS[sys.argv[1]](Place(Path(sys.argv[2])))
