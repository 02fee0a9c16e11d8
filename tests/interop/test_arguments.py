"""Arguments that programs declare: what RabbitMQ 3.10.8 answers, and what this broker answers, in one table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest

from broker_core.launcher import Broker
from tests.interop.rabbitmq_node import rabbit

QUORUM = {"x-queue-type": "quorum"}
DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
OK, REFUSED, EFFECT = "ok", "406", "without effect"
# what has the arguments, the arguments, RabbitMQ 3.10.8, here
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    ("queue", {**QUORUM, "x-quorum-initial-group-size": 3}, OK, EFFECT),
    ("queue", {"x-quorum-initial-group-size": 3}, REFUSED, REFUSED),
    ("queue", {**QUORUM, "x-quorum-initial-group-size": 0}, REFUSED, REFUSED),
    ("queue", {**QUORUM, "x-quorum-target-group-size": 3}, OK, EFFECT),
    (
        "queue",
        {**QUORUM, **DEAD, "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"},
        OK,
        OK,
    ),
    ("queue", {**QUORUM, **DEAD, "x-dead-letter-strategy": "at-most-once"}, OK, OK),
    ("queue", {**QUORUM, "x-dead-letter-strategy": "never"}, REFUSED, REFUSED),
    ("queue", {"x-dead-letter-strategy": "at-least-once"}, REFUSED, REFUSED),
    ("queue", {**QUORUM, "x-delivery-limit": -1}, OK, OK),
    ("queue", {**QUORUM, "x-delivery-limit": 5}, OK, OK),
    ("queue", {"x-delivery-limit": 5}, REFUSED, OK),  # every queue counts here
    ("queue", {**QUORUM, "x-max-in-memory-length": 0}, OK, EFFECT),
    ("queue", {**QUORUM, "x-max-in-memory-bytes": 5}, OK, EFFECT),
    ("queue", {**QUORUM, "x-max-in-memory-length": -1}, REFUSED, REFUSED),
    ("queue", {"x-consumer-timeout": 3_600_000}, OK, OK),
    ("queue", {"x-queue-master-locator": "client-local"}, OK, EFFECT),
    ("queue", {**QUORUM, "x-queue-master-locator": "client-local"}, REFUSED, REFUSED),
    ("queue", {**QUORUM, "x-queue-leader-locator": "balanced"}, OK, EFFECT),
    ("queue", {**QUORUM, "x-queue-leader-locator": "here"}, REFUSED, REFUSED),
    ("queue", {"x-queue-leader-locator": "balanced"}, REFUSED, EFFECT),  # RabbitMQ 4 takes it
    ("queue", {"x-ha-policy": "all"}, OK, EFFECT),
    ("queue", {"x-ha-policy-params": ["a"]}, OK, EFFECT),
    ("queue", {"x-queue-type": "classic", "x-cancel-on-ha-failover": True}, OK, EFFECT),
    ("queue", {"x-queue-mode": "lazy"}, OK, EFFECT),
    ("queue", {"x-queue-version": 2}, OK, EFFECT),
    ("queue", {"x-nonsense": {"a": 1}}, OK, EFFECT),
    ("queue", {"nonsense": {"a": 1}}, OK, OK),
    ("queue", {"x-max-age": "7D"}, REFUSED, REFUSED),
    ("queue", {**QUORUM, "x-initial-cluster-size": 3}, REFUSED, REFUSED),
    ("queue", {"x-stream-filter-size-bytes": 16}, OK, REFUSED),  # there are no streams
    ("queue", {"x-message-deduplication": True}, OK, OK),  # without its plugin, RabbitMQ keeps duplicates
    ("queue", {"x-message-deduplication": True, "x-cache-persistence": "memory"}, OK, EFFECT),
    ("queue", {**QUORUM, "x-max-priority": 5}, REFUSED, REFUSED),
    ("exchange", {"x-nonsense": 1}, OK, EFFECT),
    ("exchange", {"alternate-exchange": "other"}, OK, OK),
    ("exchange", {"x-delayed-type": "direct"}, OK, EFFECT),
    ("consumer", {"x-consumer-timeout": 60_000}, OK, OK),
    ("consumer", {"x-transaction-id": True}, OK, OK),  # of txmq alone
    ("consumer", {"x-credit": {"credit": 10, "drain": False}}, OK, EFFECT),
    ("consumer", {"x-cancel-on-ha-failover": True}, OK, EFFECT),
    ("consumer", {"x-nonsense": 1}, OK, EFFECT),
    ("consumer", {"x-priority": "high"}, REFUSED, REFUSED),
    ("consumer", {"x-stream-offset": "first"}, REFUSED, REFUSED),
    ("consumer", {"x-stream-filter": "a"}, OK, REFUSED),
]


def _declare(channel: Any, kind: str, name: str, arguments: dict[str, Any]) -> None:
    if kind == "exchange":
        channel.exchange_declare(name, "direct", durable=True, arguments=arguments)
        channel.exchange_declare(name, "direct", durable=True, arguments=arguments)
    elif kind == "queue":
        channel.queue_declare(name, durable=True, arguments=arguments)
        channel.queue_declare(name, durable=True, arguments=arguments)
    else:
        channel.queue_declare(name, durable=True)
        channel.basic_consume(name, lambda *_: None, arguments=arguments)


def _answers(uri: str) -> Iterator[str]:
    """Of each row."""
    with pika.BlockingConnection(pika.URLParameters(uri)) as connection:
        for number, (kind, arguments, *_) in enumerate(ROWS):
            channel = connection.channel()
            try:
                _declare(channel, kind, f"row {number}", arguments)
                channel.close()
                yield OK
            except pika.exceptions.ChannelClosedByBroker as closed:
                named = list(arguments)[-1] in closed.reply_text
                yield str(closed.reply_code) if named else closed.reply_text


@pytest.mark.slow
@pytest.mark.soak  # asks a node of RabbitMQ, which a change here does not alter
def test_the_table_says_what_rabbitmq_answers(tmp_path: Path) -> None:
    with rabbit(tmp_path) as running:
        found = list(_answers(running.uri))
    assert [(row[:2], answer) for row, answer in zip(ROWS, found, strict=True)] == [
        (row[:2], row[2]) for row in ROWS
    ]


def _uri(broker: Broker) -> str:
    return f"{broker.amqp_urls[0].replace('//', '//guest:guest@')}/%2f"


def test_what_programs_declare_is_taken_and_what_has_no_effect_is_still_there_after_a_restart(
    tmp_path: Path,
) -> None:
    with Broker.open(tmp_path, amqp=("127.0.0.1:0",)) as broker:
        found = list(_answers(_uri(broker)))
    wanted = [OK if row[3] == EFFECT else row[3] for row in ROWS]
    assert list(zip(ROWS, found, strict=True)) == list(zip(ROWS, wanted, strict=True))
    with Broker.open(tmp_path, amqp=("127.0.0.1:0",)) as broker:
        there = {queue.name: dict(queue.arguments) for queue in broker.queues()}
        for number, (kind, arguments, _, here) in enumerate(ROWS):
            if kind == "queue" and here != REFUSED:
                assert there[f"row {number}"] == arguments
        assert list(_answers(_uri(broker))) == found  # declared again


def test_a_strict_broker_refuses_what_has_no_effect(tmp_path: Path) -> None:
    with Broker.open(tmp_path, amqp=("127.0.0.1:0",), strict=True) as broker:
        broker.vhosts.add_vhost("later")
        for uri in (_uri(broker), _uri(broker).replace("%2f", "later")):
            for (kind, arguments, _, here), found in zip(ROWS, _answers(uri), strict=True):
                named = list(arguments)[-1]
                mark = named in ("x-queue-mode", "x-queue-version", "x-delayed-type")
                mark |= kind == "consumer" and named == "x-cancel-on-ha-failover"
                assert found == (REFUSED if here == REFUSED or (here == EFFECT and not mark) else OK), (
                    kind,
                    arguments,
                )


@pytest.mark.parametrize("on", ["queue", "consumer", "get", "transaction"])
def test_a_delivery_that_is_held_too_long_closes_its_channel_and_comes_again(on: str, tmp_path: Path) -> None:
    limit = {"x-consumer-timeout": 1000}
    with (
        Broker.open(tmp_path, amqp=("127.0.0.1:0",)) as broker,
        pika.BlockingConnection(pika.URLParameters(_uri(broker))) as connection,
    ):
        holder, other = connection.channel(), connection.channel()
        holder.queue_declare("q", durable=True, arguments=None if on == "consumer" else limit)
        holder.queue_declare("free", durable=True)
        for queue in ("q", "free"):
            holder.basic_publish("", queue, b"1")
        other.basic_consume("free", lambda *_: None)  # holds its message for ever
        if on == "get":
            assert holder.basic_get("q")[0] is not None
        else:
            if on == "transaction":
                holder.tx_select()
            said: list[int] = []
            holder.basic_consume(
                "q",
                lambda _channel, method, *_: said.append(method.delivery_tag),
                arguments=limit if on == "consumer" else None,
            )
            while not said:
                connection.process_data_events(1)
            if on == "transaction":  # what a rollback gives back is held as before
                holder.basic_ack(said[0])
                holder.tx_rollback()
        while holder.is_open:
            connection.process_data_events(1)
        closed = holder._closing_reason
        assert (closed.reply_code, closed.reply_text) == (
            406,
            f"PRECONDITION_FAILED - delivery acknowledgement on channel {holder.channel_number} timed out. "
            "Timeout value used: 1000 ms. This timeout value can be configured, see consumers doc guide to "
            "learn more",
        )
        assert other.is_open
        again, _, body = other.basic_get("q", auto_ack=True)
        assert again is not None and again.redelivered and body == b"1"
