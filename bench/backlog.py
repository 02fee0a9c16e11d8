"""backlog_rss_mb, backlog_open_s: ten million waiting messages. many_messages_*: a hundred million."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.broker import fill, serving
from bench.report import Figure, note
from txmq import BrokerClient

MESSAGES, MANY = 10_000_000, 100_000_000
COMMIT_ROWS = 1_000_000
OPENS = 3
OPEN = """
import sys, time
from txmq import Broker
started = time.perf_counter()
with Broker.open(sys.argv[1]) as broker:
    print(time.perf_counter() - started)
"""


def rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss / 1e6)


def backlog(folder: Path) -> list[Figure]:
    grown = grow(folder / "backlog", [MESSAGES])
    return [Figure("backlog_rss_mb", *grown[0]), Figure("backlog_open_s", *grown[1])]


def many_messages(folder: Path) -> list[Figure]:
    grown = grow(folder / "many", [MANY // 8, MANY // 4, MANY // 2, MANY])
    return [Figure("many_messages_rss_mb", *grown[0]), Figure("many_messages_open_s", *grown[1])]


def grow(data: Path, counts: Sequence[int]) -> tuple[tuple[float, str], tuple[float, str]]:
    """Fills a queue up to each of ``counts``. Returns the largest resident size of the broker at the last one
    and the time to open it.
    """
    there = 0
    for count in counts:
        with serving(data) as served:
            with BrokerClient(served.url) as client:
                with client.channel() as channel:
                    channel.queue_declare("orders")
                for first in range(there, count, COMMIT_ROWS):
                    fill(client, "", "orders", min(COMMIT_ROWS, count - first))
                assert _waiting(client) == count
            filled = rss_mb(served.pid)
        there = count
        opened = []
        for _ in range(OPENS):
            command = [sys.executable, "-c", OPEN, str(data)]
            opened.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        with serving(data) as served, BrokerClient(served.url) as client:
            assert _waiting(client) == count
            reopened = rss_mb(served.pid)
        note(f"{count:,} messages: rss {filled:.0f} MB, opened again {reopened:.0f} MB; opens {opened}")
    return (round(max(filled, reopened), 1), "MB"), (round(statistics.median(opened), 3), "s")


def _waiting(client: BrokerClient) -> int:
    return next(queue.messages for queue in client.queues() if queue.name == "orders")
