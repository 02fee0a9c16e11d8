"""What is staged for publishing is what a consumer of Kafka reads: rows, keys, headers, partitions, sizes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from broker_core.arrow.parts import normalise
from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.engine import BranchHeader
from broker_core.kafka.protocol.port import Produce, Request, TopicPartition
from broker_core.kafka.record.decode import NO_HEADERS, decode, header_pairs
from broker_core.kafka.record.headers import to_message
from broker_core.kafka.record.record_batch import TRANSACTIONAL, Codec, read_head
from broker_core.kafka.sink.encoded_batches import Batch, Publisher
from broker_core.kafka.topics import routing, topics
from broker_core.kafka.topics.routing import ClusterTopology, Rules
from broker_core.message.properties import Properties
from tests.gates import examples
from tests.kafka.bench.sink_bench import APP, QUERY, Cluster, rows

NOW_MS = 1_700_000_000_123


def declared(cluster: Cluster) -> ClusterTopology:
    """Two queues bound to ``events`` by topic, and one of them to ``all``."""
    topology = ClusterTopology(cluster.client())

    def work(rules: Rules, change: Change) -> None:
        rules.declare_exchange(change, "events", "topic")
        rules.declare_exchange(change, "all", "fanout")
        rules.bind(change, "orders", "events", "order.#")
        rules.bind(change, "paid", "events", "*.paid")
        rules.bind(change, "paid", "all")

    topology.change(work, "orders", "paid")
    return topology


def encoded(
    topology: ClusterTopology, messages: Sequence[tuple[str, str, bytes, bytes]], **options: Any
) -> tuple[list[Batch], int]:
    """(exchange, routing key, body, properties) of one part as batches; and how many reach no queue."""
    names = ("exchange", "routing_key", "body", "properties")
    columns = dict(zip(names, ([*column] for column in zip(*messages)), strict=True))
    bodies = columns.pop("body")
    part = normalise(rows(*bodies, **columns), "", "")
    routed = topology.route(part)
    publisher = Publisher(
        options.pop("turn", 0), staged_bytes=options.pop("staged_bytes", 1 << 21), **options
    )
    return list(publisher.batches(part, routed, topology.target, NOW_MS)), routed.unroutable


def read(batch: Batch) -> list[tuple[bytes | None, bytes, str, bytes]]:
    """(key, body, exchange, properties) of its records."""
    records = decode(batch.data, 0, 1 << 62, log=str(batch.log)).records
    keys = [None] * len(records) if records.keys is None else records.keys.to_pylist()
    blocks = [NO_HEADERS] * len(records) if records.headers is None else records.headers.to_pylist()
    assert set(records.timestamps.tolist()) == {NOW_MS} and len(records) == batch.rows
    return [
        (key, body, *to_message(header_pairs(block)))
        for key, body, block in zip(keys, records.values.to_pylist(), blocks, strict=True)
    ]


def test_rows_of_the_default_exchange_have_no_key_and_each_part_has_a_partition() -> None:
    cluster = Cluster(partitions=3)
    topology = ClusterTopology(cluster.client())
    part = normalise(rows(b"a", b"b"), "", "orders")
    publisher = Publisher(5, staged_bytes=1 << 21)
    found = [
        batch
        for _ in range(4)
        for batch in publisher.batches(part, topology.route(part), topology.target, NOW_MS)
    ]
    assert [batch.log for batch in found] == [TopicPartition("orders", number) for number in (2, 0, 1, 2)]
    assert read(found[0]) == [(None, b"a", "", b""), (None, b"b", "", b"")]
    head = read_head(memoryview(found[0].data), 0, "orders/0")
    assert head is not None and head.attributes & TRANSACTIONAL


def test_batches_without_keys_go_to_the_partitions_in_turn_and_are_published_together() -> None:
    cluster = Cluster(partitions=3, nodes=1)
    driver = cluster.driver()
    published: list[list[int]] = []

    def note(node: int, request: Request[Any]) -> None:
        if isinstance(request, Produce) and request.transactional_id:
            published.append([log.partition for log in request.batches if log.topic == "orders"])

    token = driver.open(0).token
    staged = driver.stage(token, [bytes([number]) * 600_000 for number in range(6)])
    cluster.kafka.fault = note
    driver.commit(0, token, [staged])
    first, *later, decision = map(sorted, published)
    # with their first batches the logs join the transaction; those behind them have connections of their own
    assert first == [0, 1, 2] and sorted(later) == [[0, 2], [1]] and decision == []
    assert sorted(body[0] for body in cluster.bodies()) == list(range(6))


def test_rows_of_a_named_exchange_have_the_routing_key_and_its_partition() -> None:
    topology = declared(Cluster(partitions=7))
    messages = [("events", f"order.{number}", b"%d" % number, b"") for number in range(50)]
    batches, _ = encoded(topology, messages)
    found = {key: batch.log for batch in batches for key, *_ in read(batch)}
    assert len({batch.log for batch in batches}) == len(batches) > 3
    for key, log in found.items():
        assert key is not None and log == TopicPartition("orders", (murmur2(key) & 0x7FFFFFFF) % 7)
    assert sorted(body for batch in batches for _, body, *_ in read(batch)) == sorted(
        body for _, _, body, _ in messages
    )


def test_a_message_goes_to_every_queue_that_is_bound() -> None:
    topology = declared(Cluster(partitions=1))
    messages = [
        ("events", "order.paid", b"both", b""),
        ("events", "order.new", b"first", b""),
        ("all", "x", b"second", b""),
        ("", "orders", b"direct", b""),
        ("events", "nothing", b"lost", b""),
    ]
    batches, unroutable = encoded(topology, messages)
    found = {batch.log.topic: [body for _, body, *_ in read(batch)] for batch in batches}
    assert found == {"orders": [b"both", b"first", b"direct"], "paid": [b"both", b"second"]}
    assert unroutable == 1
    (orders,) = (batch for batch in batches if batch.log.topic == "orders")
    assert [(key, exchange) for key, _, exchange, _ in read(orders)] == [
        (b"order.paid", "events"), (b"order.new", "events"), (None, "")
    ]  # fmt: skip


@pytest.mark.parametrize("codec", list(Codec))
def test_properties_and_user_headers_arrive(codec: Codec) -> None:
    topology = declared(Cluster(partitions=1))
    known = Properties(
        content_type="text/plain", priority=3, headers={"n": 5, "t": "text", "b": b"\xff"}
    ).encode()
    messages = [
        ("events", "order.1", b"a" * 1000, known),
        ("", "orders", b"b", b""),
        ("", "orders", b"c", known),
    ]
    (batch,), _ = encoded(topology, messages, codec=codec)
    assert read(batch) == [
        (b"order.1", b"a" * 1000, "events", known),
        (None, b"b", "", b""),
        (None, b"c", "", known),
    ]


def test_what_kafka_cannot_carry_is_refused() -> None:
    topology = declared(Cluster())
    for properties, text in (
        (Properties(expiration="60000"), "expiration"),
        (Properties(headers={"txmq.exchange": "x"}), "txmq.exchange"),
    ):
        with pytest.raises(errors.OptionError, match=text):
            encoded(topology, [("", "orders", b"x", b""), ("", "orders", b"x", properties.encode())])


def test_batches_fit_into_their_topic_and_a_row_that_does_not_is_named() -> None:
    cluster = Cluster()
    cluster.reader.create_topic("small", 1, configs={"max.message.bytes": "2000"})
    topology = ClusterTopology(cluster.client())
    messages = [("", "small", b"%04d" % number * 50, b"") for number in range(100)]
    batches, _ = encoded(topology, messages)
    assert len(batches) > 10 and all(len(batch.data) <= 2000 for batch in batches)
    assert [body for batch in batches for _, body, *_ in read(batch)] == [body for _, _, body, _ in messages]
    largest = 2000 - 61 - 12
    (exact,), _ = encoded(topology, [("", "small", b"x" * (largest - 1), b"")])
    assert 1990 <= len(exact.data) <= 2000
    with pytest.raises(errors.TransactionTooLarge, match="topic small, which takes at most 2000"):
        encoded(topology, [("", "small", b"short", b""), ("", "small", b"x" * 2000, b"")])


def test_a_topic_that_takes_more_than_the_stage_topic_is_limited_by_it() -> None:
    cluster = Cluster()
    cluster.reader.create_topic("large", 1, configs={"max.message.bytes": str(64 << 20)})
    driver = cluster.driver()
    token = driver.open(0).token
    target = {"exchange": "", "routing_key": "large"}
    sizes = (2_000_000, 3_000_000, topics.MADE_BYTES - 20_000)
    driver.commit(0, token, [driver.stage(token, [b"x" * size for size in sizes], target=target)])
    assert [len(body) for body in cluster.bodies("large")] == list(sizes)
    with pytest.raises(errors.TransactionTooLarge, match="topic large"):
        driver.stage(token, [b"x" * topics.MADE_BYTES], target=target)
    with pytest.raises(errors.TransactionTooLarge, match="stage topic of app 'app'"):
        driver.stage(token, [random_bytes(topics.MADE_BYTES)], kind="append", target={"table": "t"})


def test_a_limit_that_is_raised_is_asked_for_again_after_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that has refused a message; so the advice of its error has an effect."""
    cluster, now = Cluster(), time.monotonic()
    monkeypatch.setattr(routing, "time", SimpleNamespace(monotonic=lambda: now))
    cluster.reader.create_topic("raised", 1)
    driver = cluster.driver()
    token = driver.open(0).token
    body, target = [b"x" * 2_000_000], {"exchange": "", "routing_key": "raised"}
    with pytest.raises(errors.TransactionTooLarge, match=r"raise max\.message\.bytes of raised"):
        driver.stage(token, body, target=target)
    topic = cluster.kafka.topics["raised"]
    topic.configs["max.message.bytes"] = "3000000"
    topic.logs[0].max_message_bytes = 3_000_000
    now += topics.ASKED_S + 1
    driver.commit(0, token, [driver.stage(token, body, target=target)])
    assert cluster.bodies("raised") == body


def test_a_record_without_a_value_is_published_as_one() -> None:
    """A tombstone of another producer is relayed as it is; an empty body is another thing."""
    cluster = Cluster()
    cluster.reader.create_topic("out", 1)
    driver = cluster.driver()
    token = driver.open(0).token
    target = {"exchange": "", "routing_key": "out"}
    staged = driver.stage(token, [b"a", None, b""], target=target)  # type: ignore[list-item]
    nothing = driver.stage(token, [None, None], target=target)  # type: ignore[list-item]
    driver.commit(0, token, [staged, nothing])
    assert cluster.bodies("out") == [b"a", None, b"", None, None]


def random_bytes(size: int) -> bytes:
    import random

    return random.Random(7).randbytes(size)


_messages = st.tuples(
    st.sampled_from(["", "events", "all"]),
    st.sampled_from(["orders", "paid", "order.new", "order.paid", "x.paid", "none"]),
    st.binary(max_size=40),
    st.sampled_from([b"", Properties(type="t").encode(), Properties(headers={"h": "v"}).encode()]),
)


@pytest.mark.slow
@examples(60)
@given(
    st.lists(_messages, min_size=1, max_size=60),
    st.integers(250, 800),
    st.integers(0, 9),
    st.sampled_from(Codec),
)
def test_every_row_reaches_each_of_its_queues_once_and_in_order(
    messages: list[tuple[str, str, bytes, bytes]], staged_bytes: int, turn: int, codec: Codec
) -> None:
    topology = _shared
    batches, unroutable = encoded(topology, messages, staged_bytes=staged_bytes, turn=turn, codec=codec)
    expected: Counter[tuple[str, bytes | None, bytes, str, bytes]] = Counter()
    lost = 0
    for exchange, key, body, properties in messages:
        queues = topology._rules.route(exchange, key)
        lost += not queues
        for queue in queues:
            expected[(queue.name, key.encode() if exchange else None, body, exchange, properties)] += 1
    assert Counter((batch.log.topic, *row) for batch in batches for row in read(batch)) == expected
    assert unroutable == lost
    for log in {batch.log for batch in batches}:
        found = [row for batch in batches if batch.log == log for row in read(batch)]
        order = iter([(key.encode() if exchange else None, body, exchange, properties)
                      for exchange, key, body, properties in messages])  # fmt: skip
        assert all(row in order for row in found), "in the order of the rows"


_shared = declared(Cluster(partitions=3))


# -- topology ------------------------------------------------------------------------------------------------


def test_what_one_process_declares_another_one_routes_by() -> None:
    cluster = Cluster(partitions=1)
    driver = cluster.driver()
    token = driver.open(0).token

    def stage(exchange: str, key: str, **headers: Any) -> None:
        header = BranchHeader(token, f"{exchange}-{key}", "publish", {}, APP, QUERY, 0)
        properties = Properties(headers=headers).encode()
        branches.append(
            driver.sink.stage(
                header, [rows(b"x", exchange=[exchange], routing_key=[key], properties=[properties])]
            )
        )

    branches: list[Any] = []
    with pytest.raises(errors.ExchangeNotFound, match="'late'"):
        stage("late", "k")
    admin = ClusterTopology(cluster.client())

    def first(rules: Rules, change: Change) -> None:
        rules.declare_exchange(change, "late", "direct", arguments={"alternate-exchange": "rest"})
        rules.declare_exchange(change, "rest", "fanout")
        rules.declare_exchange(change, "by-header", "headers")
        rules.bind(change, "orders", "late", "k")
        rules.bind(change, "paid", "rest")
        rules.bind(change, "orders", "by-header", "", {"x-match": "all", "kind": "a"})
        rules.bind_exchange(change, "late", "amq.fanout")

    admin.change(first, "orders", "paid")
    stage("late", "k")
    stage("late", "other")
    stage("by-header", "", kind="a")
    stage("amq.fanout", "k")
    driver.commit(0, token, branches)
    assert (len(cluster.bodies("orders")), len(cluster.bodies("paid"))) == (3, 1)

    admin.change(lambda rules, change: rules.unbind(change, "orders", "late", "k"), "orders")
    token, branches = driver.open(1).token, []
    header = BranchHeader(token, "moved", "publish", {}, APP, QUERY, 1)
    branches.append(driver.sink.stage(header, [rows(b"x", exchange=["late"], routing_key=["k"])]))
    driver.commit(1, token, branches)
    assert (len(cluster.bodies("orders")), len(cluster.bodies("paid"))) == (3, 2)
    admin.change(lambda rules, change: rules.delete_exchange(change, "late"))
    with pytest.raises(errors.ExchangeNotFound):
        stage("late", "k")


def test_a_declaration_is_checked_by_the_rules_and_changes_nothing_where_it_is_refused() -> None:
    cluster = Cluster()
    admin = declared(cluster)
    for work, error in (
        (lambda rules, change: rules.declare_exchange(change, "events", "fanout"), errors.PreconditionFailed),
        (lambda rules, change: rules.bind(change, "nowhere", "events", "k"), errors.QueueNotFound),
        (lambda rules, change: rules.bind(change, "orders", "", "k"), errors.AccessRefused),
    ):
        with pytest.raises(error):
            admin.change(work, "orders", "nowhere")
    other = ClusterTopology(cluster.client())
    _, lost = encoded(other, [("events", "k", b"x", b"")])
    assert lost == 1


def test_a_bound_queue_that_was_deleted_is_told_by_the_task() -> None:
    cluster = Cluster()
    topology = declared(cluster)
    assert encoded(topology, [("all", "k", b"x", b"")])[1] == 0
    cluster.reader.delete_topic("paid")
    fresh = ClusterTopology(cluster.client())
    with pytest.raises(errors.QueueNotFound, match="paid"):
        encoded(fresh, [("all", "k", b"x", b"")])


def test_a_queue_that_is_created_later_is_found() -> None:
    cluster = Cluster()
    topology = ClusterTopology(cluster.client())
    assert encoded(topology, [("", "new", b"x", b"")]) == ([], 1)
    cluster.reader.create_topic("new", 1)
    (batch,), lost = encoded(topology, [("", "new", b"x", b"")])
    assert batch.log == TopicPartition("new", 0) and lost == 0
