"""What the tests ask of a broker through pika, in one word each.

Not here: rules; a question changes nothing but what its name says.
Invariant: nothing sleeps; ``wait_until`` awaits a condition.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, ConnectionClosedByBroker

from tests.progress import GUARD_S, wait_until

TIMEOUT_S = GUARD_S
PERSISTENT = BasicProperties(delivery_mode=2)


class Got(NamedTuple):
    """One delivery."""

    tag: int
    body: bytes
    redelivered: bool
    properties: BasicProperties
    exchange: str
    routing_key: str
    left: int | None = None


def publish(
    channel: BlockingChannel, queue: str, *bodies: bytes | str, exchange: str = "", **properties: Any
) -> None:
    for body in bodies:
        channel.basic_publish(exchange, queue, body, BasicProperties(**{"delivery_mode": 2, **properties}))


def counts(channel: BlockingChannel, queue: str) -> tuple[int, int]:
    """Ready messages and consumers."""
    answer = channel.queue_declare(queue, passive=True).method
    return answer.message_count, answer.consumer_count


def get(channel: BlockingChannel, queue: str, auto_ack: bool = False) -> Got | None:
    method, properties, body = channel.basic_get(queue, auto_ack=auto_ack)
    if method is None or properties is None or body is None:
        return None
    return Got(
        method.delivery_tag,
        body,
        method.redelivered,
        properties,
        method.exchange,
        method.routing_key,
        method.message_count,
    )


def get_one(channel: BlockingChannel, queue: str, auto_ack: bool = False) -> Got:
    """The next message, waiting for it."""
    found: Got = wait_until(lambda: get(channel, queue, auto_ack), f"a message in {queue}")
    return found


def drain(channel: BlockingChannel, queue: str) -> list[bytes]:
    """All that is ready, acknowledged."""
    found = []
    while (one := get(channel, queue, auto_ack=True)) is not None:
        found.append(one.body)
    return found


class Inbox:
    """A consumer that keeps what it is given."""

    def __init__(self, channel: BlockingChannel, queue: str, **consume: Any) -> None:
        self.channel = channel
        self.received: list[Got] = []
        self.tag = channel.basic_consume(queue, self._receive, **consume)

    def _receive(self, _channel: Any, method: Any, properties: BasicProperties, body: bytes) -> None:
        self.received.append(
            Got(
                method.delivery_tag, body, method.redelivered, properties, method.exchange, method.routing_key
            )
        )

    @property
    def bodies(self) -> list[bytes]:
        return [one.body for one in self.received]

    def wait(self, count: int) -> list[Got]:
        """The first ``count`` deliveries; more is an error."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.received) < count:
            assert time.monotonic() < deadline, (
                f"{len(self.received)} of {count} deliveries within {TIMEOUT_S} s"
            )
            self.channel.connection.process_data_events(0.05)
        assert len(self.received) == count
        return self.received

    def settled(self) -> list[Got]:
        """What has come when the broker has answered once more: whatever it was able to send before that is
        here.
        """
        self.channel.basic_qos(0)
        self.channel.connection.process_data_events(0)
        return self.received


def lose(connection: BlockingConnection) -> None:
    """The socket goes without a word, as when the machine of the client does."""
    connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(AMQPConnectionError):
        connection.process_data_events(TIMEOUT_S)
    assert connection.is_closed


def channel_refuses(channel: BlockingChannel, action: Callable[[], Any], code: int, text: str) -> None:
    """``action`` closes the channel with exactly this code and text, and the connection goes on."""

    def ask() -> None:
        action()
        channel.queue_declare("", exclusive=True)  # the answer comes after whatever was refused

    with pytest.raises(ChannelClosedByBroker) as refusal:
        ask()
    assert (refusal.value.reply_code, refusal.value.reply_text) == (code, text)
    assert channel.is_closed
    assert channel.connection.channel().is_open


def connection_refuses(
    connection: BlockingConnection, action: Callable[[], Any], code: int, text: str
) -> None:
    """``action`` closes the connection with exactly this code and text."""

    def ask() -> None:
        action()
        connection.process_data_events(TIMEOUT_S)

    with pytest.raises(ConnectionClosedByBroker) as refusal:
        ask()
    assert (refusal.value.reply_code, refusal.value.reply_text) == (code, text)
    assert connection.is_closed
