"""The topics of txmq, and what is refused as one."""

from __future__ import annotations

import pytest

from broker_core.core import errors
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.topics import topics
from tests.kafka.bench.fake_kafka import FakeKafka


def test_topics_are_made_on_first_use(kafka: FakeKafka, client: Client) -> None:
    for topic in (topics.app("a"), topics.stage("a"), topics.stage(""), topics.topology()):
        assert client.find_topic(topic.name) is None
        made = topics.ensure(client, topic)
        assert len(made.partitions) == topic.partitions and topics.ensure(client, topic).id == made.id
        assert topic.configs.items() <= kafka.topics[topic.name].configs.items()
    assert set(kafka.topics) == {names.app_topic("a"), names.stage_topic("a"), names.STAGE, names.TOPOLOGY}


@pytest.mark.parametrize(
    ("topic", "configs", "text"),
    [
        (topics.app("a"), {"cleanup.policy": "delete"}, "set cleanup.policy=compact"),
        (topics.app("a"), {"cleanup.policy": "compact,delete"}, "set cleanup.policy=compact"),
        (topics.stage("a"), {"retention.ms": "1000"}, "has retention.ms=1000.* set retention.ms=-1"),
        (topics.stage("a"), {"retention.bytes": "1"}, "set retention.bytes=-1"),
        (topics.stage("a"), {"max.message.bytes": "1000"}, "set max.message.bytes=16777216"),
        (topics.stage(""), {"cleanup.policy": "compact"}, "set cleanup.policy=delete"),
    ],
)
def test_a_topic_that_would_lose_records_is_refused(
    client: Client, topic: topics.OwnTopic, configs: dict[str, str], text: str
) -> None:
    client.create_topic(topic.name, topic.partitions, configs={**topic.configs, **configs})
    with pytest.raises(errors.PreconditionFailed, match=text):
        topics.ensure(client, topic)


def test_another_number_of_partitions_is_refused_where_it_has_a_meaning(client: Client) -> None:
    client.create_topic(topics.app("a").name, 3, configs=topics.app("a").configs)
    with pytest.raises(errors.PreconditionFailed, match="has 3 partitions, and needs 2"):
        topics.ensure(client, topics.app("a"))
    client.create_topic(names.STAGE, 2, configs=topics.stage("").configs)
    assert len(topics.ensure(client, topics.stage("")).partitions) == 2


def test_who_may_not_create_learns_the_command(kafka: FakeKafka, client: Client) -> None:
    kafka.fault = lambda node, request: (
        Code.TOPIC_AUTHORIZATION_FAILED if isinstance(request, port.CreateTopic) else None
    )
    with pytest.raises(
        errors.AccessRefused, match=r"kafka-topics.sh --create --topic _txmq.app.a --partitions 2"
    ):
        topics.ensure(client, topics.app("a"))


def test_a_compacted_topic_is_no_queue(client: Client) -> None:
    client.create_topic("orders", 1)
    client.create_topic("table", 1, configs={"cleanup.policy": "compact,delete"})
    assert topics.require_queue(client, "orders").id
    with pytest.raises(
        errors.PreconditionFailed, match=r"queue 'table' is a topic with cleanup.policy=compact,delete"
    ):
        topics.require_queue(client, "table")
    with pytest.raises(errors.QueueNotFound):
        topics.require_queue(client, "missing")
    with pytest.raises(errors.OptionError):
        topics.require_queue(client, "_txmq.app.a")
