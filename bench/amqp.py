"""amqp_*: the same load on txmq and on RabbitMQ, in turns; and the cost of a large transaction.

Not here: the loads (perf_test.py, AmqpLoad.java) and the brokers (broker.py, rabbitmq.py).
Invariant: both brokers run during the whole figure; the one that is not measured is idle and empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import perf_test
from bench.broker import serving
from bench.rabbitmq import installed, rabbitmq
from bench.report import Figure, against, note

REPETITIONS = 3
SECONDS = 4
WARM_S = 1
QUEUE = "bench"

Load = Callable[[str], float]


@contextlib.contextmanager
def brokers(folder: Path) -> Iterator[tuple[str, str]]:
    """The AMQP URIs of a new txmq and a new RabbitMQ. Raises Skipped if RabbitMQ is not installed."""
    installed()
    perf_test.classpath()
    with serving(folder / "txmq", amqp=True) as txmq, rabbitmq(folder / "rabbitmq") as reference:
        assert txmq.amqp is not None
        yield txmq.amqp, reference


def compared(folder: Path, unit: str, **loads: Load) -> list[Figure]:
    """One figure per load, with its name: the medians of ``REPETITIONS`` alternating runs."""
    figures = []
    with brokers(folder) as (txmq, reference):
        for name, load in loads.items():
            values: list[float] = []
            references: list[float] = []
            for _ in range(REPETITIONS):
                values.append(load(txmq))
                references.append(load(reference))
            figures.append(against(name, values, references, unit))
    return figures


def produced(*options: str) -> Load:
    """Messages per second sent by PerfTest without a consumer."""

    def load(uri: str) -> float:
        sent = perf_test.perf_test(uri, QUEUE, SECONDS, "-y", "0", *options).sent
        perf_test.delete(uri, QUEUE)
        return sent

    return load


def passed(*options: str) -> Load:
    """Messages per second received by PerfTest's consumer while its producer runs."""

    def load(uri: str) -> float:
        rates = perf_test.perf_test(uri, QUEUE, SECONDS, *options)
        perf_test.delete(uri, QUEUE)
        if not rates.received:
            raise SystemExit(f"the consumer received none of {rates.sent:,.0f} messages per second: {uri}")
        return rates.received

    return load


def amqp_tx_1(folder: Path) -> list[Figure]:
    return compared(folder, "msg/s", amqp_tx_1=produced("-m", "1"))


def amqp_tx_1x32(folder: Path) -> list[Figure]:
    return compared(folder, "msg/s", amqp_tx_1x32=produced("-m", "1", "-X", "32"))


def amqp_tx_100(folder: Path) -> list[Figure]:
    return compared(folder, "msg/s", amqp_tx_100=produced("-m", "100"))


def amqp_relay_100(folder: Path) -> list[Figure]:
    def load(uri: str) -> float:
        found = perf_test.relay(uri, 8, 100, "multiple", 2 * WARM_S, SECONDS - WARM_S)
        note(f"{found.rate:,.0f} messages/s; the load used {found.cores:.2f} of a core")
        return found.rate

    return compared(folder, "msg/s", amqp_relay_100=load)


def tx_open_100k(folder: Path) -> list[Figure]:
    """One transaction of 100,000 messages and one of 10,000, both on txmq: a publish should cost the same."""
    perf_test.classpath()
    values, references = [], []
    with serving(folder / "txmq", amqp=True) as txmq:
        assert txmq.amqp is not None
        for _ in range(REPETITIONS):
            values.append(perf_test.open_transaction(txmq.amqp, 100_000).rate)
            references.append(perf_test.open_transaction(txmq.amqp, 10_000).rate)
    return [against("tx_open_100k", values, references, "msg/s")]


def amqp_confirms(folder: Path) -> list[Figure]:
    return compared(folder, "msg/s", amqp_confirms=passed("-c", "1000", "-q", "1000"))


def amqp_plain(folder: Path) -> list[Figure]:
    return compared(folder, "msg/s", amqp_plain_autoack=passed("-a"), amqp_plain_acks=passed("-q", "1000"))


def amqp_commit_p99(folder: Path) -> list[Figure]:
    def load(uri: str) -> float:
        times = perf_test.commits(uri, 32, WARM_S, SECONDS - WARM_S)
        note(
            f"{times.commits:,} commits, p50 {times.p50_us:,.0f} us, p99 {times.p99_us:,.0f} us; load "
            f"{times.cores:.2f} of a core"
        )
        return times.p99_us

    return compared(folder, "us", amqp_commit_p99=load)
