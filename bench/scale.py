"""many_connections_ns, many_queues_*, many_apps_ns, large_batch_mb: what many connections, queues, bindings
and apps cost, and rows of one micro-batch; the notes have the cost as the number grows.

Not here: many messages (backlog.py).
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pika
import psutil

from bench.broker import Backend, fill, serving
from bench.permissions import processor_ns
from bench.report import Figure, note
from bench.streams import open_spark, run
from broker_core.engine import START, Limit, Origin, ReadTicket
from txmq import BrokerClient

CONNECTIONS = 1_000
COMMITS = 1_000  # of a turn
APPS = 200
MICRO_BATCHES = 400  # of a turn
TURNS = 5
QUEUES, BINDINGS = 10_000, 5  # of each queue
CONFIRMS = 5_000
BATCH_ROWS = 10_000_000
EXCHANGE = "amq.direct"
BODY = b"m" * 100
PERSISTENT = pika.BasicProperties(delivery_mode=2)
T = TypeVar("T")


def growing(largest: int) -> tuple[int, ...]:
    """The numbers at which a cost is measured."""
    return largest // 8, largest // 4, largest // 2, largest


# -- the broker with many, beside a broker with one ----------------------------------------------------------


def many_connections(folder: Path) -> list[Figure]:
    """Commits of 1,000 connections, each to its own queue and one after the other."""
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(serving(folder / name, amqp=True)) for name in ("one", "many")]

        def connect(side: int, number: int) -> tuple[Any, str]:
            channel = stack.enter_context(connected(brokers[side]))
            channel.queue_declare(f"q{number}", durable=True)
            return channel, f"q{number}"

        def commit(channels: Sequence[tuple[Any, str]]) -> None:
            for channel, queue in channels:
                channel.basic_publish("", queue, BODY, PERSISTENT)

        return beside_one("many_connections_ns", brokers, CONNECTIONS, COMMITS, connect, commit)


def many_apps(folder: Path) -> list[Figure]:
    """Micro-batches of one row of 200 apps, each with its own queue and one after the other."""
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(serving(folder / name)) for name in ("one", "many")]
        clients = [stack.enter_context(BrokerClient(each.url)) for each in brokers]

        def run_all(apps: Sequence[App]) -> None:
            for app in apps:
                app.run()

        return beside_one(
            "many_apps_ns",
            brokers,
            APPS,
            MICRO_BATCHES,
            lambda side, number: App(clients[side], number),
            run_all,
        )


def beside_one(
    name: str,
    brokers: Sequence[Backend],
    largest: int,
    steps: int,
    one: Callable[[int, int], T],
    work: Callable[[Sequence[T]], None],
) -> list[Figure]:
    """The processor's time of the broker for a step. ``one``: at a broker, the one of a number. ``work``: a
    step of each of these, in turn.
    """
    actors: list[list[T]] = [[one(0, 0)], []]
    for count in growing(largest):
        actors[1] += [one(1, number) for number in range(len(actors[1]), count)]
        costs_ns: list[list[float]] = [[], []]
        for turn, side in itertools.product(range(-1, TURNS), (0, 1)):
            before = processor_ns(brokers[side].pid)
            work([*itertools.islice(itertools.cycle(actors[side]), steps)])
            if turn >= 0:
                costs_ns[side].append((processor_ns(brokers[side].pid) - before) / steps)
        reference, value = map(statistics.median, costs_ns)
        figure = Figure(name, round(value), "ns", round(reference), round(value / reference, 3))
        note(f"{name} of {count}: {value:,.0f}, {figure.ratio} of one's")
    return [figure]


@contextlib.contextmanager
def connected(served: Backend) -> Iterator[Any]:
    """A channel with confirms."""
    assert served.amqp is not None
    with pika.BlockingConnection(pika.URLParameters(f"{served.amqp}?heartbeat=0")) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


class App:
    """What the source and the sink of a query ask of the broker, without Spark."""

    def __init__(self, client: BrokerClient, number: int) -> None:
        self._client, self._queue = client, f"in-{number}"
        self._app = self._query = f"app-{number}"
        self._end: Any = {self._queue: START}
        self._batch = 0
        with client.channel() as channel:
            channel.queue_declare(self._queue)

    def run(self) -> None:
        client, app, start = self._client, self._app, self._end
        fill(client, "", self._queue, 1)
        self._end = client.claim(app, [self._queue], start, Limit(max_rows=1), Origin(), "fail")
        ranges = client.resolve(app, start, self._end)
        token = client.open_batch(app, self._query, self._batch, "fail").token
        slices = tuple((log, *span) for log, span in ranges.items())
        (rows,) = client.read(ReadTicket(app, self._query, self._batch, ranges, slices))
        assert rows.num_rows == 1
        client.commit_batch(app, self._query, self._batch, token, [])
        self._batch += 1


# -- queues and bindings -------------------------------------------------------------------------------------


def many_queues(folder: Path) -> list[Figure]:
    """10,000 queues with 50,000 bindings: a declaration with its bindings at the end beside one at the
    beginning, a confirm, and the start of a broker that has them.
    """
    with serving(folder / "queues", amqp=True) as served, connected(served) as channel:

        def declare(number: int) -> None:
            channel.queue_declare(f"q{number}", durable=True)
            for binding in range(BINDINGS):
                channel.queue_bind(f"q{number}", EXCHANGE, f"{number}.{binding}")

        declares = _times_ms(declare, QUEUES)
        keys = [f"{number * 7_919 % QUEUES}.{number % BINDINGS}" for number in range(CONFIRMS)]
        send = channel.basic_publish
        confirms = _times_ms(lambda number: send(EXCHANGE, keys[number], BODY, PERSISTENT), CONFIRMS)
    started = time.perf_counter()
    with serving(folder / "queues", amqp=True):
        start_s = time.perf_counter() - started
    eighth = QUEUES // 8
    found = [statistics.median(declares[first : first + eighth]) for first in range(0, QUEUES, eighth)]
    note(f"a queue with {BINDINGS} bindings, ms: {', '.join(f'{each:.2f}' for each in found)}")
    p50, p99 = (statistics.quantiles(confirms, n=100)[at] for at in (49, 98))
    note(f"a confirm: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    last, first = found[-1], found[0]
    return [
        Figure("many_queues_declare_ms", round(last, 3), "ms", round(first, 3), round(last / first, 3)),
        Figure("many_queues_confirm_p99_ms", round(p99, 2), "ms"),
        Figure("many_queues_start_s", round(start_s, 2), "s"),
    ]


def _times_ms(call: Callable[[int], object], count: int) -> list[float]:
    times = []
    for number in range(count):
        started = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - started) * 1000)
    return times


# -- rows of one micro-batch ---------------------------------------------------------------------------------


def large_batch(folder: Path) -> list[Figure]:
    """The most that the broker and the Python workers of Spark have in memory at one time, while one
    micro-batch of 10 million rows copies a queue; the reference is a batch of an eighth of them.
    """
    found: list[float] = []
    with serving(folder / "batches") as served, open_spark() as spark:
        for rows in growing(BATCH_ROWS):
            with BrokerClient(served.url) as client, client.channel() as channel:
                for queue in ("in", "out"):
                    channel.queue_declare(f"{queue}-{rows}")
                for _ in range(8):
                    fill(client, "", f"in-{rows}", rows // 8)
            options = {"url": served.url, "appId": f"copy-{rows}"}
            reader = spark.readStream.format("txmq").options(**options, queue=f"in-{rows}", minPartitions=2)
            writer = reader.load().select("body").writeStream.format("txmq")
            with _most_mb(served.pid) as most:
                batches = run(writer.options(**options, queue=f"out-{rows}"), folder, rows)
            assert [batch["numInputRows"] for batch in batches] == [rows]
            found.append(most["broker"] + most["python"])
            note(f"a batch of {rows:,} rows: {', '.join(f'{name} {mb:.0f} MB' for name, mb in most.items())}")
    return [Figure("large_batch_mb", round(found[-1]), "MB", round(found[0]), round(found[-1] / found[0], 3))]


@contextlib.contextmanager
def _most_mb(broker: int) -> Iterator[dict[str, float]]:
    """The largest sizes while it is open: of the broker, of the JVM and of its Python processes. Without
    mapped files, which the kernel takes out of memory when it likes: a task that reads has two of 128 MiB.
    """
    most = {"broker": 0.0, "python": 0.0, "jvm": 0.0}
    end = threading.Event()

    def look() -> None:
        while not end.wait(0.05):
            now = {"broker": _own_mb(psutil.Process(broker)), "python": 0.0, "jvm": 0.0}
            for each in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    kind = "jvm" if each.name() == "java" else "python"
                    now[kind] += _own_mb(each) if each.pid != broker else 0
            for name, mb in now.items():
                most[name] = max(most[name], mb)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        end.set()
        thread.join()


def _own_mb(process: psutil.Process) -> float:
    memory = process.memory_info()
    return float(memory.rss - memory.shared) / 1e6
