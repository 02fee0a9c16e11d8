"""backlog_rss_mb, backlog_open_s: ten million waiting messages."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import psutil

from bench.broker import fill, serving
from bench.report import Figure, note
from txmq import BrokerClient

MESSAGES = 10_000_000
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
    data = folder / "backlog"
    with serving(data) as served:
        idle = rss_mb(served.pid)
        with BrokerClient(served.url) as client:
            with client.channel() as channel:
                channel.queue_declare("orders")
            for _ in range(MESSAGES // COMMIT_ROWS):
                fill(client, "", "orders", COMMIT_ROWS)
            messages = next(queue.messages for queue in client.queues() if queue.name == "orders")
            assert messages == MESSAGES
        filled = rss_mb(served.pid)
    opened = []
    for _ in range(OPENS):
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(data)], check=True, capture_output=True, text=True
        )
        opened.append(float(done.stdout))
    with serving(data) as served, BrokerClient(served.url) as client:
        assert next(queue.messages for queue in client.queues() if queue.name == "orders") == MESSAGES
        reopened = rss_mb(served.pid)
    note(
        f"backlog: rss empty {idle:.0f} MB, after filling {filled:.0f} MB, opened again {reopened:.0f} MB; "
        f"opens {opened}"
    )
    return [
        Figure("backlog_rss_mb", round(max(filled, reopened), 1), "MB"),
        Figure("backlog_open_s", round(statistics.median(opened), 3), "s"),
    ]
