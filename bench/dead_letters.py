"""dead_letter_rate, longest_silence_ms: 50,000 messages are rejected at once, and 50,000 expire at once.

Not here: the brokers (broker.py, rabbitmq.py). Both go to a dead-letter queue.
Invariant: client, messages and order are the same for both brokers. The silence is the time that another
client, on its own connection, waits for the confirm of one publish.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika

from bench.amqp import REPETITIONS
from bench.broker import serving
from bench.rabbitmq import installed, rabbitmq
from bench.report import Figure, against, note

MESSAGES = 50_000
TOGETHER = 500
TTL_MS = 1_000
BODY = b"x" * 100
PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Asking:
    """Another client, in a process of its own: it waits for the broker alone. ``longest_s``: its longest wait
    for an answer, once it has ended.
    """

    def __init__(self, uri: str) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._here, there = spawned.Pipe()
        self._process = spawned.Process(target=_ask, args=(uri, there), daemon=True)
        self.longest_s = 0.0

    def begin(self) -> None:
        self._process.start()
        self._answer()

    def end(self) -> None:
        self._here.send(None)
        self.longest_s = self._answer()
        self._process.join()

    def _answer(self) -> float:
        if not self._here.poll(60):
            raise SystemExit("the other client does not answer")
        return float(self._here.recv())


def _ask(uri: str, told: Any) -> None:
    """Until it is told something."""
    connection = pika.BlockingConnection(pika.URLParameters(uri))
    channel = connection.channel()
    channel.queue_declare("asking", durable=True)
    channel.confirm_delivery()
    longest = 0.0
    told.send(longest)
    while not told.poll(0.002):
        asked = time.monotonic()
        channel.basic_publish("", "asking", b"x", PERSISTENT)
        longest = max(longest, time.monotonic() - asked)
    channel.queue_delete("asking")
    told.send(longest)
    connection.close()


@contextlib.contextmanager
def asking(uri: str) -> Iterator[Asking]:
    """Another client asks meanwhile."""
    other = Asking(uri)
    other.begin()
    try:
        yield other
    finally:
        other.end()


def _fill(channel: Any) -> None:
    """``MESSAGES`` messages. Their bytes are written together: a call of pika for each would be most of the
    time.
    """
    one = b"".join(
        part.marshal()
        for part in (
            pika.frame.Method(
                channel.channel_number, pika.spec.Basic.Publish(exchange="", routing_key="source")
            ),
            pika.frame.Header(channel.channel_number, len(BODY), PERSISTENT),
            pika.frame.Body(channel.channel_number, BODY),
        )
    )
    connection = channel.connection._impl
    for _ in range(0, MESSAGES, TOGETHER):
        connection._output_marshaled_frames([one * TOGETHER])
        channel.connection._flush_output()


def _declared(uri: str, **arguments: Any) -> tuple[pika.BlockingConnection, Any]:
    connection = pika.BlockingConnection(pika.URLParameters(f"{uri}?heartbeat=0"))
    channel = connection.channel()
    channel.queue_declare("dead", durable=True)
    channel.queue_declare(
        "source",
        durable=True,
        arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead", **arguments},
    )
    return connection, channel


def _until(channel: Any, count: int) -> None:
    while channel.queue_declare("dead", durable=True, passive=True).method.message_count < count:
        time.sleep(0.02)


def _ended(connection: pika.BlockingConnection, channel: Any) -> None:
    for queue in ("source", "dead"):
        channel.queue_delete(queue)
    connection.close()


def rejected(uri: str) -> tuple[float, float]:
    """Messages per second that one nack dead-letters, and the longest silence in ms."""
    connection, channel = _declared(uri)
    _fill(channel)
    last = 0
    for method, _, _ in channel.consume("source", inactivity_timeout=60):
        if method is None:
            raise SystemExit(f"{MESSAGES - last} messages were not delivered: {uri}")
        last = method.delivery_tag
        if last == MESSAGES:
            break
    with asking(uri) as other:
        start = time.monotonic()
        channel.basic_nack(last, multiple=True, requeue=False)
        _until(channel, MESSAGES)
        took = time.monotonic() - start
    _ended(connection, channel)
    return MESSAGES / took, other.longest_s * 1000


def expired(uri: str) -> float:
    """The longest silence in ms while ``MESSAGES`` messages expire."""
    connection, channel = _declared(uri, **{"x-message-ttl": TTL_MS})
    with asking(uri) as other:
        for _ in range(MESSAGES):
            channel.basic_publish("", "source", BODY, PERSISTENT)
        _until(channel, MESSAGES)
    _ended(connection, channel)
    return other.longest_s * 1000


def dead_letters(folder: Path) -> list[Figure]:
    rates: dict[str, list[float]] = {}
    silences: dict[str, list[float]] = {}
    installed()
    with serving(folder / "txmq", amqp=True) as served, rabbitmq(folder / "rabbitmq") as reference:
        assert served.amqp is not None
        txmq = served.amqp
        for _ in range(REPETITIONS):
            for uri in (txmq, reference):
                rate, silence = rejected(uri)
                expiring = expired(uri)
                note(f"{rate:,.0f} messages/s; silence {silence:.0f} ms, {expiring:.0f} ms at expiry: {uri}")
                rates.setdefault(uri, []).append(rate)
                silences.setdefault(uri, []).append(max(silence, expiring))
    return [
        against("dead_letter_rate", rates[txmq], rates[reference], "msg/s"),
        against("longest_silence_ms", silences[txmq], silences[reference], "ms"),
    ]
