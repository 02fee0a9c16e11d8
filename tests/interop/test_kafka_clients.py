"""Clients of Kafka beside the Kafka engine: kafka-python, librdkafka and the Java client read what it publishes,
and it reads what they send.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from bench.kafka_server import resolve
from broker_core.engine import BranchHeader, Engine
from broker_core.engines import connect
from broker_core.message.properties import Properties
from tests.gates import seldom
from tests.spark.kafka_pipelines import hosts, make_topics

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
ROWS = 200
PROPERTIES = Properties(content_type="text/plain", headers={"origin": "txmq"})
JAVA = Path(__file__).parent / "kafka" / "Client.java"
JAVA_CLIENT = ("org.apache.kafka:kafka-clients:4.3.1", "org.slf4j:slf4j-nop:2.0.17")

Found = list[tuple[str | None, str | None, dict[str, str]]]  # key, value, headers


@pytest.fixture(scope="module")
def engine(kafka_url: str) -> Iterator[Engine]:
    made = connect(kafka_url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs the program; returns its output."""
    if not shutil.which("javac"):
        pytest.skip("there is no JDK on this machine (javac)")
    try:
        classpath = os.pathsep.join(resolve(JAVA_CLIENT))
    except SystemExit as error:
        pytest.skip(f"Kafka's Java client is neither cached nor to be had from Maven Central: {error}")
    classes = tmp_path_factory.mktemp("classes")
    subprocess.run(["javac", "--release", "17", "-d", classes, "-cp", classpath, JAVA], check=True)

    def run(*arguments: str) -> str:
        command = ["java", "-cp", f"{classpath}{os.pathsep}{classes}", "Client", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def published(engine: Engine, topic: str) -> None:
    """A micro-batch of ROWS rows, and an attempt that is never decided."""
    rows = pa.record_batch(
        {
            "body": pa.array([b"row %d" % number for number in range(ROWS)], pa.binary()),
            "properties": pa.array([PROPERTIES.encode()] * ROWS, pa.binary()),
        }
    )
    app = f"app-{topic}"
    opened = engine.open_batch(app, "query", 0, "fail")

    def stage() -> Any:
        target = {"exchange": "", "routing_key": topic}
        header = BranchHeader(opened.token, uuid.uuid4().hex, "publish", target, app, "query", 0)
        return engine.stage(header, [rows])

    stage()
    engine.commit_batch(app, "query", 0, opened.token, [stage()])


def of_kafka_python(url: str, topic: str, count: int) -> Found:
    consumer = KafkaConsumer(bootstrap_servers=hosts(url), isolation_level="read_committed")
    logs = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic)]
    consumer.assign(logs)
    consumer.seek_to_beginning()
    found: Found = []
    while len(found) < count:
        for records in consumer.poll(1000).values():
            for record in records:
                headers = {name: value.decode() for name, value in record.headers}
                key = None if record.key is None else record.key.decode()
                found.append((key, record.value.decode(), headers))
    consumer.close()
    return found


def of_librdkafka(url: str, topic: str, count: int) -> Found:
    settings = {
        "bootstrap.servers": ",".join(hosts(url)),
        "group.id": "librdkafka",
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = confluent_kafka.Consumer(settings)
    numbers = consumer.list_topics(topic).topics[topic].partitions
    consumer.assign(
        [
            confluent_kafka.TopicPartition(topic, number, confluent_kafka.OFFSET_BEGINNING)
            for number in numbers
        ]
    )
    found: Found = []
    while len(found) < count:
        for record in consumer.consume(count, 1):
            assert record.error() is None, record.error()
            headers = {name: value.decode() for name, value in record.headers() or ()}
            key = None if record.key() is None else record.key().decode()
            found.append((key, record.value().decode(), headers))
    consumer.close()
    return found


@pytest.mark.parametrize("read", [of_kafka_python, of_librdkafka])
def test_a_python_client_reads_each_published_row_once_and_none_that_was_not_decided(
    kafka_url: str, engine: Engine, read: Callable[[str, str, int], Found]
) -> None:
    topic = f"to-{read.__name__}"
    make_topics(kafka_url, topic)
    published(engine, topic)
    found = read(kafka_url, topic, ROWS)
    assert sorted(str(value) for _, value, _ in found) == sorted(f"row {number}" for number in range(ROWS))
    assert {key for key, _, _ in found} == {None}
    assert [headers for _, _, headers in found] == [
        {"origin": "txmq", "txmq.content_type": "text/plain"}
    ] * ROWS


@pytest.mark.soak  # two Python clients read them below
def test_the_java_client_reads_each_published_row_once(
    kafka_url: str, engine: Engine, java: Callable[..., str]
) -> None:
    make_topics(kafka_url, "to-java")
    published(engine, "to-java")
    found = java("receive", ",".join(hosts(kafka_url)), "to-java", str(ROWS)).splitlines()
    assert sorted(line.split("\t")[1] for line in found) == sorted(f"row {number}" for number in range(ROWS))
    assert {tuple(sorted(line.split("\t")[2:])) for line in found} == {
        ("origin=txmq", "txmq.content_type=text/plain")
    }


def read_rows(engine: Engine, topic: str) -> list[dict[str, Any]]:
    logs = engine.logs([topic])
    slices = [(log, found.start, found.end) for log, found in engine.available(logs).items()]
    return [row for rows in engine.browse(slices) for row in rows.to_pylist()]


def expected(name: str) -> list[tuple[str, bytes | None]]:
    return [
        (f"key {number % 7}", None if number % 10 == 9 else b"%s %d" % (name.encode(), number))
        for number in range(ROWS)
    ]


def by_kafka_python(url: str, topic: str, codec: str) -> None:
    producer = KafkaProducer(
        bootstrap_servers=hosts(url), compression_type=None if codec == "none" else codec, linger_ms=20
    )
    sent = [
        producer.send(
            topic,
            None if number % 10 == 9 else b"python %d" % number,
            key=b"key %d" % (number % 7),
            headers=[("origin", b"python"), ("txmq.content_type", b"text/plain")],
        )
        for number in range(ROWS)
    ]
    producer.flush()
    assert all(each.succeeded() for each in sent)
    producer.close()


def by_librdkafka(url: str, topic: str, codec: str) -> None:
    settings = {"bootstrap.servers": ",".join(hosts(url)), "compression.type": codec, "linger.ms": 20}
    producer = confluent_kafka.Producer(settings)
    for number in range(ROWS):
        value = None if number % 10 == 9 else b"python %d" % number
        headers = [("origin", b"python"), ("txmq.content_type", b"text/plain")]
        producer.produce(topic, value, b"key %d" % (number % 7), headers=headers)
    assert producer.flush(120) == 0


@pytest.mark.product
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("send", [by_kafka_python, by_librdkafka])
def test_rows_of_a_python_client_arrive_whole_in_every_codec(
    kafka_url: str, engine: Engine, send: Callable[[str, str, str], None], codec: str
) -> None:
    if send is by_kafka_python and codec in ("snappy", "lz4", "zstd"):
        pytest.importorskip({"snappy": "snappy", "lz4": "lz4", "zstd": "zstandard"}[codec])
    topic = f"{send.__name__}-{codec}"
    make_topics(kafka_url, topic)
    send(kafka_url, topic, codec)
    require_rows(read_rows(engine, topic), "python")


# the others before a change lands: by the same code in Kafka's node, tests/contract/test_kafka_contract.py
@pytest.mark.parametrize("codec", seldom(CODECS, lambda codec: codec != "lz4"))
def test_committed_rows_of_the_java_client_arrive_whole_in_every_codec_and_aborted_ones_do_not(
    kafka_url: str, engine: Engine, java: Callable[..., str], codec: str
) -> None:
    topic = f"by-java-{codec}"
    make_topics(kafka_url, topic)
    java("send", ",".join(hosts(kafka_url)), topic, codec, str(ROWS))
    require_rows(read_rows(engine, topic), "java")


def require_rows(rows: list[dict[str, Any]], name: str) -> None:
    found = [(row["routing_key"], row["body"]) for row in rows]
    assert sorted(found, key=str) == sorted(expected(name), key=str)
    assert {row["exchange"] for row in rows} == {""}
    assert len({(row["partition"], row["offset"]) for row in rows}) == ROWS
    decoded = [Properties.decode(row["properties"]) for row in rows]
    assert {(each.content_type, str((each.headers or {})["origin"])) for each in decoded} <= {
        ("text/plain", name),
        ("text/plain", repr(name.encode())),
    }
