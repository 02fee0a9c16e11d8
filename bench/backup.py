"""backup_silence_ms: the longest time between two commits of a channel during a backup of the broker.

The reference is the longest one without a backup, in the same time.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from pathlib import Path

from bench.broker import fill, serving
from bench.commits import BODY
from bench.report import Figure, against, note
from broker_core.client.backup import backup
from broker_core.core.address import parse_address
from txmq import BrokerClient

STORED = 2_000_000  # messages of 100 bytes in segments, and
SMALL = 20_000  # in commits of one message, in the catalog
REPETITIONS = 5


def backup_silence_ms(folder: Path) -> list[Figure]:
    found, references = [], []
    with serving(folder / "backup") as served, BrokerClient(served.url) as client:
        with client.channel() as channel:
            channel.queue_declare("stored")
            channel.queue_declare("orders")
        fill(client, "", "stored", STORED)
        commits = Commits(served.url)
        commits.until(SMALL)
        for _ in range(REPETITIONS):
            begun = time.perf_counter()
            copied = backup(parse_address(served.url), folder / "copy")
            ended = time.perf_counter()
            shutil.rmtree(folder / "copy")
            note(f"a backup of {copied.size_bytes / 1e6:,.0f} MB in {ended - begun:.2f} s")
            commits.until_time(2 * ended - begun)
            found.append(commits.longest_ms(begun, ended))
            references.append(commits.longest_ms(ended, 2 * ended - begun))
        commits.end()
    return [against("backup_silence_ms", found, references, "ms")]


class Commits:
    """A thread with a channel that commits one message after the other, and when each was durable."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at: list[float] = [time.perf_counter()]
        self._ended = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with BrokerClient(self._url) as client, client.channel() as channel:
                channel.tx_select()
                while not self._ended.is_set():
                    channel.publish(BODY, routing_key="orders")
                    channel.tx_commit()
                    self._at.append(time.perf_counter())
        except BaseException as error:
            self._failed = error

    def until(self, count: int) -> None:
        while len(self._at) < count:
            self._check()

    def until_time(self, at: float) -> None:
        while self._at[-1] < at:
            self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        time.sleep(0.01)

    def longest_ms(self, begun: float, ended: float) -> float:
        """The longest pause that touches this time."""
        at = self._at[:]
        return max(
            (second - first) * 1000
            for first, second in itertools.pairwise(at)
            if second > begun and first < ended
        )

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
