"""RabbitMQ's shovel and federation, of a real RabbitMQ, with txmq at the other end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from bench.rabbitmq import Node
from broker_core.launcher import Broker
from tests.amqp_server import AmqpServed, serving
from tests.interop.rabbitmq_node import rabbit
from tests.progress import wait_until

pytestmark = pytest.mark.slow

COUNT = 500


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with rabbit(tmp_path_factory.mktemp("rabbit"), ("rabbitmq_shovel", "rabbitmq_federation")) as node:
        node.ctl("await_startup")
        yield node


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data", amqp=("127.0.0.1:0",)) as opened:
        yield opened


def _uri(broker: Broker) -> str:
    return f"{broker.amqp_urls[0].replace('//', '//guest:guest@')}/%2f"


def _publish(uri: str, queue: str, first: int = 0) -> None:
    with pika.BlockingConnection(pika.URLParameters(uri)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.confirm_delivery()
        properties = pika.BasicProperties(
            delivery_mode=2,
            headers={"number": 5, "nested": {"list": [1, "x", None]}},
            content_type="text/plain",
        )
        for number in range(first, first + COUNT):
            channel.basic_publish("", queue, str(number).encode(), properties)


def _taken(uri: str, queue: str, count: int) -> list[tuple[bytes, pika.BasicProperties]]:
    """Consumes ``count`` messages; the queue is empty behind them."""
    with pika.BlockingConnection(pika.URLParameters(uri)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        found = []
        for method, properties, body in channel.consume(queue, inactivity_timeout=120):
            assert method is not None, f"{len(found)} of {count} came"
            found.append((body, properties))
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                break
        channel.cancel()
        assert channel.queue_declare(queue, passive=True, durable=True).method.message_count == 0
        return found


def _shovel(running: Node, name: str, **value: object) -> None:
    running.ctl("set_parameter", "shovel", name, json.dumps({"ack-mode": "on-confirm", **value}))


def _whole(found: list[tuple[bytes, pika.BasicProperties]]) -> None:
    assert [body for body, _ in found] == [b"%d" % number for number in range(len(found))], "in order, once"
    for _, properties in found:
        assert properties.content_type == "text/plain" and properties.delivery_mode == 2
        assert properties.headers["number"] == 5 and properties.headers["nested"] == {"list": [1, "x", None]}


@pytest.mark.soak
def test_a_shovel_brings_a_queue_of_rabbitmq_to_txmq(running: Node, broker: Broker) -> None:
    _publish(running.uri, "out")
    _shovel(running, "in", **{
        "src-protocol": "amqp091", "src-uri": running.uri, "src-queue": "out",
        "dest-protocol": "amqp091", "dest-uri": _uri(broker), "dest-queue": "in",
    })  # fmt: skip
    try:
        _whole(_taken(_uri(broker), "in", COUNT))
        # it goes on with what comes
        _publish(running.uri, "out", COUNT)
        assert len(_taken(_uri(broker), "in", COUNT)) == COUNT
    finally:
        running.ctl("clear_parameter", "shovel", "in")


@pytest.mark.soak
def test_a_shovel_into_a_queue_without_duplicates_brings_each_message_once_over_kills_of_both_sides(
    running: Node, tmp_path: Path
) -> None:
    """A message without an id may come twice, and none is lost."""
    kills, each = 20, 100
    with serving(tmp_path / "data") as served:
        with pika.BlockingConnection(pika.URLParameters(served.amqp_url)) as connection:
            connection.channel().queue_declare(
                "in", durable=True, arguments={"x-message-deduplication": True, "x-cache-size": 10_000}
            )
        _shovel(running, "once", **{
            "src-protocol": "amqp091", "src-uri": running.uri, "src-queue": "source", "reconnect-delay": 1,
            "dest-protocol": "amqp091", "dest-uri": served.amqp_url, "dest-queue": "in",
        })  # fmt: skip
        found: Counter[str] = Counter()
        for kill in range(kills):
            _publish_with_ids(running.uri, kill, each)
            before = len(found)
            wait_until(lambda: _come(served, found) > before, "it goes on")  # noqa: B023
            if kill % 2:
                running.kill()
                running.start()
            else:
                served.restart()
        expected = {
            f"{kill} {kind} {number}"
            for kill in range(kills)
            for kind in ("id", "none")
            for number in range(each)
        }
        wait_until(lambda: _come(served, found) == len(expected), "all come")
        running.ctl("clear_parameter", "shovel", "once")
        _come(served, found)
    assert found.keys() == expected
    assert {body: count for body, count in found.items() if count > 1 and " id " in body} == {}


def _publish_with_ids(uri: str, kill: int, count: int) -> None:
    """To ``source``: so many with an id, and as many without."""
    with pika.BlockingConnection(pika.URLParameters(uri)) as connection:
        channel = connection.channel()
        channel.queue_declare("source", durable=True)
        channel.confirm_delivery()
        for number in range(count):
            one = pika.BasicProperties(delivery_mode=2, message_id=f"{kill}-{number}")
            channel.basic_publish("", "source", f"{kill} id {number}".encode(), one)
            none = pika.BasicProperties(delivery_mode=2)
            channel.basic_publish("", "source", f"{kill} none {number}".encode(), none)


def _come(served: AmqpServed, found: Counter[str]) -> int:
    """How many have come; what is in ``in`` now is taken, and counted in one transaction."""
    with pika.BlockingConnection(pika.URLParameters(served.amqp_url)) as connection:
        channel = connection.channel()
        channel.tx_select()
        taken: Counter[str] = Counter()
        while (delivery := channel.basic_get("in"))[0] is not None:
            taken[delivery[2].decode()] += 1
            channel.basic_ack(delivery[0].delivery_tag)
        channel.tx_commit()
    found += taken
    return len(found)


def test_a_shovel_brings_a_queue_of_txmq_to_rabbitmq_and_survives_a_restart_of_txmq(
    running: Node, tmp_path: Path
) -> None:
    with Broker.open(tmp_path / "data", amqp=("127.0.0.1:0",)) as broker:
        address, uri = broker.amqp_urls[0].removeprefix("amqp://"), _uri(broker)
        _publish(uri, "back")
        _shovel(running, "back", **{
            "src-protocol": "amqp091", "src-uri": uri, "src-queue": "back",
            "dest-protocol": "amqp091", "dest-uri": running.uri, "dest-queue": "home", "reconnect-delay": 1,
        })  # fmt: skip
        try:
            _whole(_taken(running.uri, "home", COUNT))
            broker.close()
            with Broker.open(tmp_path / "data", amqp=(address,)) as again:
                _publish(uri, "back", COUNT)
                found = Counter(body for body, _ in _taken(running.uri, "home", COUNT))
                assert found == {b"%d" % number: 1 for number in range(COUNT, 2 * COUNT)}
                wait_until(lambda: [queue.messages for queue in again.queues()] == [0])
        finally:
            running.ctl("clear_parameter", "shovel", "back")


def test_a_federated_queue_of_rabbitmq_takes_from_txmq(running: Node, broker: Broker) -> None:
    _publish(_uri(broker), "shared")
    running.ctl("set_parameter", "federation-upstream", "txmq", json.dumps({"uri": _uri(broker)}))
    running.ctl("set_policy", "shared", "^shared$", '{"federation-upstream": "txmq"}', "--apply-to", "queues")
    try:
        found = _taken(running.uri, "shared", COUNT)
        assert Counter(body for body, _ in found) == {b"%d" % number: 1 for number in range(COUNT)}
    finally:
        running.ctl("clear_policy", "shared")
        running.ctl("clear_parameter", "federation-upstream", "txmq")


def test_a_federated_exchange_of_rabbitmq_gets_what_is_published_to_txmq(
    running: Node, broker: Broker
) -> None:
    """Its link declares queue and exchange with ``x-internal-purpose``, and falls back to a fanout
    exchange.
    """
    running.ctl("set_parameter", "federation-upstream", "txmq", json.dumps({"uri": _uri(broker)}))
    running.ctl("set_policy", "news", "^news$", '{"federation-upstream": "txmq"}', "--apply-to", "exchanges")
    try:
        with pika.BlockingConnection(pika.URLParameters(running.uri)) as connection:
            channel = connection.channel()
            channel.exchange_declare("news", "topic", durable=True)
            channel.queue_declare("readers", durable=True)
            channel.queue_bind("readers", "news", "eu.#")
        topology = broker.local.state.virtual_hosts.get("/")
        wait_until(lambda: "news" in topology.exchanges and topology.exchanges["news"].bound)
        with pika.BlockingConnection(pika.URLParameters(_uri(broker))) as connection:
            sender = connection.channel()
            for key, body in (("eu.de", b"first"), ("us", b"elsewhere"), ("eu.fr", b"second")):
                sender.basic_publish("news", key, body)
        assert [body for body, _ in _taken(running.uri, "readers", 2)] == [b"first", b"second"]
    finally:
        running.ctl("clear_policy", "news")
        running.ctl("clear_parameter", "federation-upstream", "txmq")
