"""The pipelines of the crash tests on Kafka: topics instead of queues, kept by plain Kafka clients.

Not here: starting Kafka (``bench/kafka_server.py``); drivers (:mod:`tests.spark.pipelines`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import TopicAlreadyExistsError

from broker_core.engine import Engine
from broker_core.engines import connect
from tests.spark.pipelines import Pipeline

PARTITIONS = 2


def hosts(url: str) -> list[str]:
    return url.removeprefix("kafka://").split(",")


@contextlib.contextmanager
def engine(url: str) -> Iterator[Engine]:
    made = connect(url)
    try:
        yield made
    finally:
        made.close()


def make_topics(url: str, *names: str, partitions: int = PARTITIONS) -> None:
    admin = KafkaAdminClient(bootstrap_servers=hosts(url))
    admin.create_topics([NewTopic(name, partitions, -1) for name in names])
    admin.close()


def send(url: str, topic: str, bodies: Iterable[str]) -> None:
    """As any Kafka client does, in turn to the partitions."""
    producer = KafkaProducer(bootstrap_servers=hosts(url), acks="all")
    for number, body in enumerate(bodies):
        producer.send(topic, body.encode(), partition=number % PARTITIONS).get()
    producer.close()


def committed(url: str, topic: str) -> list[bytes | None]:
    """The values that a reader of committed records gets, of all partitions."""
    consumer = KafkaConsumer(bootstrap_servers=hosts(url), isolation_level="read_committed")
    logs = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic))]
    consumer.assign(logs)
    consumer.seek_to_beginning()
    ends = consumer.end_offsets(logs)
    found = []
    while any(consumer.position(log) < end for log, end in ends.items()):
        for records in consumer.poll(500).values():
            found += [record.value for record in records]
    consumer.close()
    return found


@dataclass
class KafkaPipeline(Pipeline):
    def declare(self) -> None:
        for name in (self.queue, self.out):
            with contextlib.suppress(TopicAlreadyExistsError):
                make_topics(self.url, name)

    def send(self, messages: Iterable[str]) -> None:
        send(self.url, self.queue, messages)

    def published(self) -> list[str]:
        return sorted(body.decode() for body in committed(self.url, self.out) if body is not None)

    def entries(self) -> int:
        with engine(self.url) as made:
            last = made.last_entry(self.app)
            return 0 if last is None else last.sequence

    def depth(self) -> int:
        with engine(self.url) as made:
            found = made.app(self.app)
            assert found is not None
            return found.lag
