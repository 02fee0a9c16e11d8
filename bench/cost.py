"""loop_hold_ms: the processor time of the request that costs the broker most, which is how long it can hold
the loop; and how long another client waits for a confirm meanwhile.

Each case is sent at 1, 2, 4 and 8 times its size. The figure is the time of the largest size of any case; the
notes have all. The waits are those of the machine too: they say something on a quiet one.
Not here: counted steps (``tests/broker/test_cost.py``).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika

from bench.broker import Backend, serving
from bench.dead_letters import asking
from bench.permissions import processor_ns
from bench.report import Figure, note
from broker_core.core.errors import TxmqError
from txmq import BrokerClient

TIMES = (1, 2, 4, 8)
REPEATED = 10
KEY = ".".join(["a"] * 127)
Request = Callable[[], None]
Case = Callable[[pika.BlockingConnection, BrokerClient, int], Callable[[], Request]]


def _channel(connection: pika.BlockingConnection, kind: str) -> Any:
    channel = connection.channel()
    channel.queue_declare("cost", auto_delete=False)
    channel.exchange_delete("cost")
    channel.exchange_declare("cost", kind)
    return channel


def wildcards(
    connection: pika.BlockingConnection, _client: BrokerClient, times: int
) -> Callable[[], Request]:
    """Patterns that the key matches in countless ways until their last word."""
    channel = _channel(connection, "topic")
    for number in range(25 * times):
        words = [("a", "*", "a.#")[number * place * place % 7 % 3] for place in range(1, 61)]
        channel.queue_bind("cost", "cost", ".".join(["#", *words, "z"]))
    numbers = itertools.count(100)
    return lambda: lambda: channel.basic_publish("cost", f"{KEY[:-3]}.{next(numbers)}", b"")  # none is cached


def copies(connection: pika.BlockingConnection, _client: BrokerClient, times: int) -> Callable[[], Request]:
    channel = _channel(connection, "topic")
    for at in range(120):
        channel.queue_bind("cost", "cost", ".".join(["a"] * at + ["*"] + ["a"] * (120 - at) + ["#", "z"]))
    headers = {"CC": [f"{KEY[:-3]}.{number}" for number in range(8 * times)]}
    return lambda: lambda: channel.basic_publish("cost", "k", b"", pika.BasicProperties(headers=headers))


def chains(connection: pika.BlockingConnection, _client: BrokerClient, times: int) -> Callable[[], Request]:
    """Keys that each exchange passes on to the next one."""
    channel = _channel(connection, "fanout")
    channel.queue_bind("cost", "cost")
    for number in range(25 * times):
        channel.exchange_declare(f"chain{number}", "topic")
        after = f"chain{number - 1}" if number else "cost"
        channel.exchange_bind(after, f"chain{number}", "#.b.#")
    headers = {"CC": [f"{KEY[:-5]}.b.{number}" for number in range(2 * times)]}
    properties, first = pika.BasicProperties(headers=headers), f"chain{25 * times - 1}"
    return lambda: lambda: channel.basic_publish(first, "b", b"", properties)


def headers(connection: pika.BlockingConnection, _client: BrokerClient, times: int) -> Callable[[], Request]:
    channel = _channel(connection, "headers")
    for number in range(250 * times):
        channel.queue_bind("cost", "cost", "", {"kind": "order", "number": number})
    sent = {"kind": "order", **{f"other{number}": number for number in range(100 * times)}}
    return lambda: lambda: channel.basic_publish("cost", "", b"", pika.BasicProperties(headers=sent))


def bindings(connection: pika.BlockingConnection, _client: BrokerClient, times: int) -> Callable[[], Request]:
    channel = _channel(connection, "topic")
    for number in range(500 * times):
        channel.queue_bind("cost", "cost", f"user.{number}.#")

    def change() -> None:
        channel.queue_bind("cost", "cost", "new.#")
        channel.basic_publish("cost", "user.1.a", b"")
        channel.queue_unbind("cost", "cost", "new.#")

    return lambda: change


def arguments(
    connection: pika.BlockingConnection, _client: BrokerClient, times: int
) -> Callable[[], Request]:
    channel = _channel(connection, "direct")
    given = {f"name{number}": {"a": [number] * 10} for number in range(50 * times)}

    def declare() -> None:
        channel.queue_declare("argued", arguments=given)
        channel.queue_delete("argued")

    return lambda: declare


def exclusive(
    connection: pika.BlockingConnection, _client: BrokerClient, times: int
) -> Callable[[], Request]:
    """Beside as many exchanges, its queues end with a connection."""
    channel = connection.channel()
    for number in range(100 * times):
        channel.exchange_declare(f"beside{number}", "fanout")

    def declared() -> Request:
        own = pika.BlockingConnection(connection._impl.params)
        channel = own.channel()
        for number in range(20 * times):
            channel.queue_declare(f"own{number}", exclusive=True)
        return lambda: own.close()

    return declared


def names(_connection: pika.BlockingConnection, client: BrokerClient, times: int) -> Callable[[], Request]:
    ends = {f"{'q' * 240}{number}": 0 for number in range(500 * times)}
    return lambda: lambda: _refused(lambda: client.wait(list(ends), ends, 0.0))


def _refused(call: Callable[[], object]) -> None:
    try:
        call()
    except TxmqError:
        return


CASES: tuple[Case, ...] = (wildcards, copies, chains, headers, bindings, arguments, exclusive, names)


def _measured(served: Backend, client: BrokerClient, case: Case, times: int) -> tuple[float, float]:
    """The processor time of one request in ms, and the longest wait of another client beside some."""
    assert served.amqp is not None
    connection = pika.BlockingConnection(pika.URLParameters(f"{served.amqp}?heartbeat=0"))
    prepare = case(connection, client, times)
    taken = []
    for _ in range(REPEATED):
        request = prepare()
        before = processor_ns(served.pid)
        request()
        connection.channel().close()  # answered after it
        taken.append((processor_ns(served.pid) - before) / 1e6)
    with asking(served.amqp) as other:
        for _ in range(REPEATED):
            prepare()()
            connection.channel().close()
    connection.close()
    return statistics.median(taken), other.longest_s * 1000


def loop_hold_ms(folder: Path) -> list[Figure]:
    worst = []
    with serving(folder / "txmq", amqp=True) as served, BrokerClient(served.url) as client:
        for case in CASES:
            found = [_measured(served, client, case, times) for times in TIMES]
            taken, waits = (
                ", ".join(f"{each:.1f}" for each in column) for column in zip(*found, strict=True)
            )
            note(f"{case.__name__}: {taken} ms; another client waited {waits} ms")
            worst.append(found[-1][0])
    return [Figure("loop_hold_ms", round(max(worst), 1), "ms")]
