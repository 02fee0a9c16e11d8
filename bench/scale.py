"""many_connections_ns, many_queues_*: what many connections, queues and bindings cost; the notes have the cost as
the number grows.

Not here: many messages (backlog.py).
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pika

from bench.broker import Served, serving
from bench.permissions import processor_ns
from bench.report import Figure, note

CONNECTIONS = 1_000
TURNS, COMMITS = 5, 1_000  # commits of a turn
QUEUES, BINDINGS = 10_000, 5  # of each queue
CONFIRMS = 5_000
EXCHANGE = "amq.direct"
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@contextlib.contextmanager
def connected(served: Served) -> Iterator[Any]:
    """A channel with confirms."""
    assert served.amqp is not None
    with pika.BlockingConnection(pika.URLParameters(f"{served.amqp}?heartbeat=0")) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def many_connections(folder: Path) -> list[Figure]:
    """Commits of 1,000 connections, each to its own queue and one after the other, beside those of one connection at
    a broker without others.
    """
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(serving(folder / name, amqp=True)) for name in ("one", "many")]
        channels: list[list[Any]] = [[], []]
        for count in (CONNECTIONS // 8, CONNECTIONS // 4, CONNECTIONS // 2, CONNECTIONS):
            for each, served, wanted in zip(channels, brokers, (1, count), strict=True):
                each += [_declared(stack.enter_context(connected(served)), n) for n in range(len(each), wanted)]
            costs = [[_commit_ns(*pair) for pair in zip(brokers, channels, strict=True)] for _ in range(TURNS)]
            reference, value = (statistics.median(column) for column in zip(*costs, strict=True))
            figure = Figure("many_connections_ns", round(value), "ns", round(reference), round(value / reference, 3))
            note(f"{count} connections and queues: {figure.value:,.0f} ns a commit, {figure.ratio} of one's")
    return [figure]


def _declared(channel: Any, number: int) -> tuple[Any, str]:
    channel.queue_declare(f"q{number}", durable=True)
    return channel, f"q{number}"


def _commit_ns(served: Served, channels: Sequence[tuple[Any, str]]) -> float:
    """The processor's time of the broker."""
    before = processor_ns(served.pid)
    for channel, queue in itertools.islice(itertools.cycle(channels), COMMITS):
        channel.basic_publish("", queue, b"m" * 100, PERSISTENT)
    return (processor_ns(served.pid) - before) / COMMITS


def many_queues(folder: Path) -> list[Figure]:
    """10,000 queues with 50,000 bindings: a declaration with its bindings at the end beside one at the beginning, a
    confirm, and the start of a broker that has them.
    """
    with serving(folder / "queues", amqp=True) as served, connected(served) as channel:
        declares = _times_ms(lambda number: _bound(channel, number), QUEUES)
        step = QUEUES // 8
        eighths = [statistics.median(declares[first : first + step]) for first in range(0, QUEUES, step)]
        note(f"a queue with {BINDINGS} bindings, ms by eighths of {QUEUES:,}: {', '.join(f'{e:.2f}' for e in eighths)}")
        drawn = random.Random(1)
        keys = [f"{drawn.randrange(QUEUES)}.{drawn.randrange(BINDINGS)}" for _ in range(CONFIRMS)]
        confirms = _times_ms(lambda n: channel.basic_publish(EXCHANGE, keys[n], b"m" * 100, PERSISTENT), CONFIRMS)
    started = time.perf_counter()
    with serving(folder / "queues", amqp=True):
        start_s = time.perf_counter() - started
    p50, p99 = (statistics.quantiles(confirms, n=100)[at] for at in (49, 98))
    note(f"a confirm: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    last, first = eighths[-1], eighths[0]
    return [
        Figure("many_queues_declare_ms", round(last, 3), "ms", round(first, 3), round(last / first, 3)),
        Figure("many_queues_confirm_p99_ms", round(p99, 2), "ms"),
        Figure("many_queues_start_s", round(start_s, 2), "s"),
    ]


def _bound(channel: Any, number: int) -> None:
    channel.queue_declare(f"q{number}", durable=True)
    for binding in range(BINDINGS):
        channel.queue_bind(f"q{number}", EXCHANGE, f"{number}.{binding}")


def _times_ms(call: Callable[[int], object], count: int) -> list[float]:
    times = []
    for number in range(count):
        started = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - started) * 1000)
    return times
