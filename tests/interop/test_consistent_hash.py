"""Exchanges of type x-consistent-hash by a client of AMQP: what RabbitMQ's plugin answers, and this broker too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker

from broker_core.launcher import Broker
from tests.amqp_server import serving
from tests.interop.rabbitmq_node import rabbit

HASH = "x-consistent-hash"
WEIGHTS = {"a": "1", "b": "1", "c": "2"}
KEYS = [f"key {number}" for number in range(1_000)]
PERSISTENT = pika.BasicProperties(delivery_mode=2)
# arguments, what the refusal says, the code of RabbitMQ 3.10.8: a type that is wrong ends the connection there
REFUSED: list[tuple[dict[str, Any], str, int]] = [
    ({"hash-header": "a", "hash-property": "message_id"}, "mutually exclusive", 406),
    ({"hash-property": "priority"}, "Unsupported property: priority", 406),
    ({"hash-header": 5}, "invalid type", 541),
    ({"hash-property": True}, "invalid type", 541),
]
WRONG_WEIGHTS = [("red", "must be an integer"), ("0", "greater than 0"), ("-1", "greater than 0")]


class Found(NamedTuple):
    """``counts``: of each queue. ``halves``: that a message goes by the header or the property alone."""

    refused: list[int]
    counts: Counter[str]
    once: bool
    halves: dict[str, bool]
    after_unbind: set[str]
    unroutable: str


def _code(uri: str, work: Callable[[BlockingChannel], object], text: str) -> int:
    """The code that ends ``work``; of a channel only if its text has ``text``."""
    connection = pika.BlockingConnection(pika.URLParameters(uri))
    try:
        work(connection.channel())
    except ChannelClosedByBroker as closed:
        connection.close()
        return closed.reply_code if text in closed.reply_text else 0
    except ConnectionClosedByBroker as closed:
        return int(closed.reply_code)
    connection.close()
    return 0


def _drained(channel: BlockingChannel, queue: str) -> Iterator[str]:
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return
        yield body.decode()


def _refused(uri: str) -> Iterator[int]:
    for arguments, text, _ in REFUSED:
        yield _code(
            uri,
            partial(BlockingChannel.exchange_declare, exchange="x", exchange_type=HASH, arguments=arguments),
            text,
        )
    for weight, text in WRONG_WEIGHTS:
        yield _code(
            uri, partial(BlockingChannel.queue_bind, queue="a", exchange="h", routing_key=weight), text
        )


def _placed(channel: BlockingChannel, exchange: str, messages: list[tuple[str, Any]]) -> dict[str, set[str]]:
    """The queues of each body of these keys and properties, sent in one transaction."""
    for number, (key, properties) in enumerate(messages):
        channel.basic_publish(exchange, key, f"{number}".encode(), properties)
    channel.tx_commit()
    reached: dict[str, set[str]] = {f"{number}": set() for number in range(len(messages))}
    for queue in WEIGHTS:
        for body in _drained(channel, queue):
            reached[body].add(queue)
    return reached


def _parted(by: str, part: str) -> pika.BasicProperties:
    """``part`` where the exchange ``by`` looks for it, another text where it must not look."""
    header, message_id = (part, "same") if by == "header" else ("same", part)
    return pika.BasicProperties(headers={"part": header}, message_id=message_id, delivery_mode=2)


def _ask(uri: str) -> Found:
    with pika.BlockingConnection(pika.URLParameters(uri)) as connection:
        channel = connection.channel()
        by: dict[str, dict[str, Any]] = {
            "h": {},
            "header": {"hash-header": "part"},
            "property": {"hash-property": "message_id"},
        }
        for queue in WEIGHTS:
            channel.queue_declare(queue, durable=True)
        for exchange, arguments in by.items():
            channel.exchange_declare(exchange, HASH, durable=True, arguments=arguments)
            for queue, weight in WEIGHTS.items():
                channel.queue_bind(queue, exchange, weight)
        refused = list(_refused(uri))
        channel.tx_select()
        plain = [(key, PERSISTENT) for key in KEYS]
        first, again = (_placed(channel, "h", plain) for _ in range(2))
        halves = {}
        for exchange in ("header", "property"):
            one = _placed(channel, exchange, [(key, _parted(exchange, "p 1")) for key in KEYS[:40]])
            many = _placed(channel, exchange, [("same", _parted(exchange, key)) for key in KEYS[:40]])
            halves[exchange] = len(set().union(*one.values())) == 1 < len(set().union(*many.values()))
        channel.queue_unbind("c", "h", "2")
        after = set().union(*_placed(channel, "h", plain[:200]).values())
        for queue in ("a", "b"):
            channel.queue_unbind(queue, "h", "1")
        returned: list[str] = []
        channel.add_on_return_callback(lambda _, method, *__: returned.append(method.reply_text))
        channel.basic_publish("h", "k", b"", PERSISTENT, mandatory=True)
        channel.tx_commit()
        connection.process_data_events(0)
        once = first == again and {len(queues) for queues in first.values()} == {1}
        counts = Counter(queue for queues in first.values() for queue in queues)
        return Found(refused, counts, once, halves, after, *returned)


def _check(found: Found, codes: list[int]) -> None:
    """What both promise. The plugin takes 100 points of a ring for each weight, so its shares are rougher."""
    assert found.refused == codes + [406] * len(WRONG_WEIGHTS)
    assert found.once
    for queue, weight in WEIGHTS.items():
        assert abs(found.counts[queue] / len(KEYS) - int(weight) / 4) < 0.1, found.counts
    assert found.halves == {"header": True, "property": True}
    assert found.after_unbind == {"a", "b"}
    assert found.unroutable == "NO_ROUTE"


@pytest.mark.slow
@pytest.mark.soak  # asks a node of RabbitMQ, which a change here does not alter
def test_the_plugin_answers_what_this_file_says(tmp_path: Path) -> None:
    with rabbit(tmp_path, ["rabbitmq_consistent_hash_exchange"]) as running:
        _check(_ask(running.uri), [code for *_, code in REFUSED])


def test_a_client_of_the_plugin_finds_here_what_it_had(tmp_path: Path) -> None:
    with Broker.open(tmp_path, amqp=("127.0.0.1:0",)) as broker:
        _check(_ask(f"{broker.amqp_urls[0].replace('//', '//guest:guest@')}/%2f"), [406] * len(REFUSED))


def test_a_key_keeps_its_queue_when_the_broker_is_killed(tmp_path: Path) -> None:
    placed: list[dict[str, set[str]]] = []
    with serving(tmp_path) as served:
        for _ in range(2):
            connection = pika.BlockingConnection(pika.URLParameters(served.amqp_url))
            channel = connection.channel()
            channel.exchange_declare("h", HASH, durable=True)
            for queue, weight in WEIGHTS.items():
                channel.queue_declare(queue, durable=True)
                channel.queue_bind(queue, "h", weight)
            channel.tx_select()
            placed.append(_placed(channel, "h", [(key, PERSISTENT) for key in KEYS[:200]]))
            served.kill()
            served.start()
    assert placed[0] == placed[1]
