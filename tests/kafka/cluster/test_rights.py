"""Which right each request needs, what a refusal says, and what it leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker_core.core import errors
from broker_core.kafka import names
from broker_core.kafka.cluster import acls
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import Producer, TopicPartition
from broker_core.kafka.protocol.request_codecs import codec_of
from broker_core.kafka.sink.decisions import Decisions
from tests.kafka.bench.fake_kafka import FakeKafka
from tests.kafka.bench.sink_bench import APP, QUERY, Cluster

LOG = TopicPartition("orders", 1)
NOBODY = Producer(-1, -1)


def test_every_request_of_the_port_says_what_it_needs() -> None:
    requests = {
        value for value in vars(port).values() if isinstance(value, type) and issubclass(value, port.Request)
    } - {port.Request}
    assert set(acls.NEEDED) == requests


def test_who_may_read_may_describe() -> None:
    assert acls.operations_of([port.Metadata, port.Fetch], acls.TOPIC) == ("Read",)
    assert acls.operations_of([port.Metadata, port.DescribeTopic], acls.TOPIC) == (
        "Describe",
        "DescribeConfigs",
    )
    assert acls.operations_of([port.FindCoordinator, port.InitProducer], acls.TRANSACTIONAL_ID) == ("Write",)


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (
            port.ListOffsets({LOG: -1}),
            Code.TOPIC_AUTHORIZATION_FAILED,
            "topic orders: this user may not Describe it, or there is none of that name (Kafka answers "
            "TOPIC_AUTHORIZATION_FAILED): allow it with kafka-acls.sh --add --allow-principal User:NAME "
            "--operation Describe --topic orders ; `txmq broker setup` prints all rights that are needed",
        ),
        (port.Fetch({LOG: 0}), Code.TOPIC_AUTHORIZATION_FAILED, "topic orders: this user may not Read it"),
        (port.Produce({LOG: b""}), Code.TOPIC_AUTHORIZATION_FAILED, "--operation Write --topic orders"),
        (
            port.Produce({LOG: b""}, "txmq.shop"),
            Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            "transactional id txmq.shop: this user may not Write it",
        ),
        (
            port.FindCoordinator("txmq.shop"),
            Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            "--operation Describe --transactional-id txmq.shop",
        ),
        (
            port.FindCoordinator("txmq.shop", group=True),
            Code.GROUP_AUTHORIZATION_FAILED,
            "--operation Describe --group txmq.shop",
        ),
        (port.LogSizes((LOG,)), Code.CLUSTER_AUTHORIZATION_FAILED, "--operation Describe --cluster"),
        (
            port.InitProducer("it's mine"),
            Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            "--transactional-id 'it'\"'\"'s mine'",
        ),
    ],
)
def test_a_refusal_names_the_operation_the_resource_and_the_line_that_allows_it(
    request_: port.Request[Any], code: Code, says: str
) -> None:
    error = acls.error(request_, code, f"log {LOG}", topic=LOG.topic)
    assert type(error) is errors.AccessRefused and says in str(error)


def test_every_refusal_of_a_client_names_its_topic() -> None:
    """Also those of requests about a coordinator, whose answers have a code for each log."""
    kafka = FakeKafka()
    client = Client(kafka.wire(), list(kafka.nodes.values()), reconnect_s=1.0)
    client.create_topic(LOG.topic, 2)
    asked = {
        port.Fetch: lambda: client.fetch({LOG: 0}),
        port.ListOffsets: lambda: client.offsets({LOG: -1}),
        port.Produce: lambda: client.produce({LOG: b""}),
        port.DeleteRecords: lambda: client.delete_records({LOG: 0}),
        port.DescribeTopic: lambda: client.configs(LOG.topic),
        port.DeleteTopic: lambda: client.delete_topic(LOG.topic),
        port.AddPartitions: lambda: client.add_partitions("t", NOBODY, [LOG]),
        port.CommitOffsets: lambda: client.commit_offsets("g", {LOG: 0}),
        port.CreateTopic: lambda: client.create_topic(LOG.topic),
        port.Metadata: lambda: client.topic(LOG.topic, fresh=True),
    }
    assert {kind for kind, needed in acls.NEEDED.items() if acls.TOPIC in needed} == set(asked)
    for kind, ask in asked.items():
        kafka.fault = lambda node, request, kind=kind: (
            Code.TOPIC_AUTHORIZATION_FAILED
            if isinstance(request, kind) and getattr(request, "topics", True)
            else None
        )
        with pytest.raises(errors.AccessRefused) as refused:
            ask()
        operation = acls.NEEDED[kind][acls.TOPIC]
        assert f"topic orders: this user may not {operation} it" in str(refused.value)


@pytest.mark.parametrize("error_code", [Code.CLUSTER_AUTHORIZATION_FAILED, Code.NONE], ids=["v3", "v2"])
def test_sizes_that_are_refused_are_told_by_an_answer_without_directories(error_code: Code) -> None:
    answer = SimpleNamespace(error_code=int(error_code), results=[])
    found = codec_of(port.LogSizes((LOG,))).read(answer)
    assert found == {LOG: port.SizeAnswer(Code.CLUSTER_AUTHORIZATION_FAILED, 0)}


# -- what a refusal leaves -----------------------------------------------------------------------------------


def refuse(cluster: Cluster, kind: acls.Kind, topic: str) -> None:
    def fault(node: int, request: Any) -> Code | None:
        about = {log.topic for log in getattr(request, "offsets", ()) or getattr(request, "before", ())}
        about |= set(getattr(request, "topics", None) or ())
        return Code.TOPIC_AUTHORIZATION_FAILED if isinstance(request, kind) and topic in about else None

    cluster.kafka.fault = fault


def test_a_queue_that_may_not_be_seen_is_no_message_without_a_queue() -> None:
    """Else onUnroutable=drop would drop it."""
    cluster = Cluster()
    driver = cluster.driver()
    token = driver.open(0).token
    refuse(cluster, port.Metadata, "hidden")
    with pytest.raises(errors.AccessRefused, match="topic hidden: this user may not Describe it"):
        driver.stage(token, [b"x"], target={"exchange": "", "routing_key": "hidden"})


@pytest.mark.parametrize("name", ["", ".", "a/b", "\u00e9", "_txmq.stage", "x" * 250])
def test_a_routing_key_that_no_queue_can_have_is_a_message_without_a_queue(name: str) -> None:
    cluster = Cluster()
    driver = cluster.driver()
    token = driver.open(0).token
    cluster.kafka.fault = lambda node, request: (
        Code.TOPIC_AUTHORIZATION_FAILED
        if isinstance(request, port.Metadata) and name in (request.topics or ())
        else None
    )
    branch = driver.stage(token, [b"x"], target={"exchange": "", "routing_key": name})
    assert driver.commit(0, token, [branch], on_unroutable="drop").entry.published == 0


def test_a_driver_that_may_not_free_what_it_stages_is_refused_when_it_starts() -> None:
    cluster = Cluster()
    refuse(cluster, port.DeleteRecords, names.stage_topic(APP))
    driver = cluster.driver()
    for _ in range(2):
        with pytest.raises(errors.AccessRefused, match="this user may not Delete it"):
            driver.open(0)
    cluster.kafka.fault = lambda node, request: None
    driver.run(0, [b"a", b"b"])
    assert sorted(cluster.bodies()) == [b"a", b"b"]


def test_a_driver_that_may_no_longer_free_what_it_stages_decides_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster()
    driver = cluster.driver()
    driver.run(0, [b"a", b"b"])
    refuse(cluster, port.DeleteRecords, names.stage_topic(APP))
    driver.run(1, [b"c", b"d"])
    assert sorted(cluster.bodies()) == [b"a", b"b", b"c", b"d"]
    assert "staged rows are not freed" in caplog.text and "may not Delete it" in caplog.text


def test_a_rollback_does_not_ask_for_apps_of_others_that_may_be_seen_but_not_read() -> None:
    cluster = Cluster()
    other = cluster.driver()
    other.sink.open_batch("other", QUERY, 0, "fail")
    driver = cluster.driver()
    token = driver.open(0).token
    refuse(cluster, port.Fetch, names.app_topic("other"))
    decisions = Decisions(cluster.client(), "other")
    with pytest.raises(errors.AccessRefused):
        decisions.replay()
    driver.sink.rollback_batch(token)
    # its own app must be read
    refuse(cluster, port.Fetch, names.app_topic(APP))
    driver2 = cluster.driver()
    with pytest.raises(errors.AccessRefused):
        driver2.open(0)
