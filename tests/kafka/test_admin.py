"""The operator's port on FakeKafka: topics, exchanges, bindings and messages by hand."""

from __future__ import annotations

from typing import Any

import pytest

from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.kafka.admin import KafkaAdmin
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.topics.routing import Rules
from tests.kafka.bench.fake_kafka import FakeKafka

URL = "kafka://fake:1,fake:2,fake:3"


class Bench:
    def __init__(self) -> None:
        self.fake = FakeKafka()
        self.admin = self.process()

    def process(self) -> KafkaAdmin:
        """The operator's port in another process."""
        return KafkaAdmin(self.engine())

    def engine(self) -> KafkaEngine:
        return KafkaEngine(URL, None, lambda _: self.fake.wire())

    def bodies(self, queue: str) -> list[bytes]:
        engine = self.engine()
        slices = [(log, one.start, one.end) for log, one in engine.available(engine.logs([queue])).items()]
        return sorted(body for rows in engine.browse(slices) for body in rows.column("body").to_pylist())


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    for name in ("orders", "paid"):
        made.admin.declare_queue(name, arguments={"x-partitions": 2})
    return made


def test_a_message_to_an_exchange_reaches_every_bound_queue_once(bench: Bench) -> None:
    bench.admin.declare_exchange("events", "topic")
    bench.admin.bind("orders", "events", "order.#")
    bench.admin.bind("paid", "events", "*.paid")
    other = bench.process()
    assert other.publish([b"1", b"2"], "events", "order.paid") == 2
    assert other.publish([b"3"], "events", "order.new") == 1
    assert other.publish([b"4"], "", "paid") == 1
    assert bench.bodies("orders") == [b"1", b"2", b"3"]
    assert bench.bodies("paid") == [b"1", b"2", b"4"]


def test_an_unroutable_message_is_an_error_and_nothing_of_the_call_is_published(bench: Bench) -> None:
    bench.admin.declare_exchange("events", "direct")
    with pytest.raises(errors.Unroutable):
        bench.admin.publish([b"1"], "events", "nobody")
    bench.admin.bind("orders", "events", "known")
    bench.admin.unbind("orders", "events", "known")
    with pytest.raises(errors.Unroutable):
        bench.admin.publish([b"1"], "events", "known")
    assert bench.bodies("orders") == []


def test_queues_are_the_topics_of_users(bench: Bench) -> None:
    bench.admin.publish([b"1", b"2", b"3"], "", "orders")
    found = {queue.name: (queue.messages, queue.logs) for queue in bench.process().queues()}
    assert found.keys() == {"orders", "paid"}
    assert found["orders"][0] >= 3 and found["orders"][1] == 2 and found["paid"] == (0, 2)


def test_a_deleted_queue_takes_its_bindings_with_it(bench: Bench) -> None:
    bench.admin.declare_exchange("events", "fanout")
    for queue in ("orders", "paid"):
        bench.admin.bind(queue, "events")
    bench.admin.delete_queue("paid")
    bench.admin.delete_queue("paid")
    assert bench.process().publish([b"1"], "events") == 1
    assert [queue.name for queue in bench.process().queues()] == ["orders"]
    bench.admin.declare_queue("paid")
    assert bench.process().publish([b"2"], "events") == 1
    assert (bench.bodies("orders"), bench.bodies("paid")) == ([b"1", b"2"], [])


def test_a_deleted_exchange_is_gone_for_every_process(bench: Bench) -> None:
    bench.admin.declare_exchange("events", "fanout")
    bench.admin.bind("orders", "events")
    other = bench.process()
    assert other.publish([b"1"], "events") == 1
    bench.admin.delete_exchange("events")
    with pytest.raises(errors.ExchangeNotFound):
        other.publish([b"2"], "events")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"x-message-ttl": 1000}, "retention.ms"),
        ({"x-max-length": 10}, "retention.bytes"),
        ({"x-message-deduplication": True}, "idempotent producer"),
        ({"x-dead-letter-exchange": "dead"}, "rejected rows"),
        ({"x-partitions": 0.5}, "x-partitions=0.5"),
        ({"x-partitions": True}, "x-partitions=True"),
        ({"x-partitions": -1}, "x-partitions=-1"),
        ({"x-replication": "two"}, "x-replication='two'"),
        ({"partitions": 3}, "x-partitions"),
    ],
)
def test_an_argument_that_kafka_does_not_have_is_refused_and_nothing_is_made(
    bench: Bench, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(errors.PreconditionFailed) as refused:
        bench.admin.declare_queue("new", arguments=arguments)
    assert says in str(refused.value) and "'new'" in str(refused.value)
    assert [queue.name for queue in bench.admin.queues()] == ["orders", "paid"]


@pytest.mark.parametrize(
    ("type", "arguments", "says"),
    [
        ("x-delayed-message", {"x-delayed-type": "topic"}, "keeps no message back"),
        ("x-message-deduplication", {"x-cache-size": 10}, "an idempotent producer"),
    ],
)
def test_an_exchange_in_which_messages_would_wait_is_refused(
    bench: Bench, type: str, arguments: dict[str, object], says: str
) -> None:
    with pytest.raises(errors.PreconditionFailed, match=says):
        bench.admin.declare_exchange("later", type, arguments)
    assert "later" not in [exchange.name for exchange in bench.admin.exchanges()]


def test_a_key_of_a_consistent_hash_goes_to_one_topic_in_every_process(bench: Bench) -> None:
    bench.admin.declare_exchange("h", "x-consistent-hash")
    for queue, weight in (("orders", "1"), ("paid", "3")):
        bench.admin.bind(queue, "h", weight)
    with pytest.raises(errors.PreconditionFailed, match="must be an integer"):
        bench.admin.bind("orders", "h", "red")
    for number in range(40):
        assert bench.process().publish([b"%d" % number], "h", f"key {number}") == 1
    reached = {queue: bench.bodies(queue) for queue in ("orders", "paid")}
    assert 0 < len(reached["orders"]) < len(reached["paid"]), "by weight; keys never change their topic"
    assert bench.process().publish([b"again"], "h", "key 7") == 1
    (queue,) = (queue for queue, before in reached.items() if bench.bodies(queue) != before)
    assert b"7" in reached[queue]


def test_a_binding_that_the_new_type_of_its_exchange_cannot_have_stops_nobody(bench: Bench) -> None:
    """Two processes at once: one binds, another has made the exchange anew in the meantime, of another type."""
    bench.admin.declare_exchange("h", "direct")
    bench.admin.bind("paid", "h", "red")
    other, late = bench.process(), bench.engine().topology

    def bind(rules: Rules, change: Change) -> None:
        other.delete_exchange("h")
        other.declare_exchange("h", "x-consistent-hash")
        other.bind("orders", "h", "2")
        rules.bind(change, "paid", "h", "red")

    late.change(bind, "paid")
    for process in (bench.admin, other, bench.process()):
        assert process.publish([b"x"], "h", "red") == 1
    assert (len(bench.bodies("orders")), bench.bodies("paid")) == (3, [])


def test_a_queue_is_declared_again_with_what_it_has_and_with_nothing_else(bench: Bench) -> None:
    bench.admin.declare_queue("orders")
    bench.admin.declare_queue("orders", arguments={"x-partitions": 2})
    with pytest.raises(errors.PreconditionFailed, match="has 2 partitions, but 3"):
        bench.admin.declare_queue("orders", arguments={"x-partitions": 3})
    with pytest.raises(errors.PreconditionFailed, match="durable"):
        bench.admin.declare_queue("transient", durable=False)


@pytest.mark.parametrize("name", ["_txmq.app.x", "a/b", "", "ä", "."])
def test_a_name_that_no_topic_may_have_is_refused(bench: Bench, name: str) -> None:
    for refused in (bench.admin.declare_queue, bench.admin.delete_queue):
        with pytest.raises(errors.OptionError):
            refused(name)


def test_what_is_not_there_cannot_be_bound(bench: Bench) -> None:
    bench.admin.declare_exchange("events", "fanout")
    with pytest.raises(errors.QueueNotFound):
        bench.admin.bind("nothing", "events")
    with pytest.raises(errors.ExchangeNotFound):
        bench.admin.bind("orders", "nothing")
