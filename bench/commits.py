"""commit_1, commit_16: ``tx.commit`` of one 100-byte message, compared with fdatasync of this disk."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from bench.report import Figure, against
from txmq import Broker

BODY = os.urandom(100)
SLICE_S = 0.7
REPETITIONS = 9
PAGE = 4096
PREALLOCATED = 8192  # pages: the file does not grow, so fdatasync is as fast as possible


class Disk:
    """Overwrites 4 kB and calls fdatasync, in the directory that is measured."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "fdatasync", os.O_RDWR | os.O_CREAT)
        os.pwrite(self._file, bytes(PAGE * PREALLOCATED), 0)
        os.fsync(self._file)
        self._page = 0

    def rate(self, seconds: float) -> float:
        page, count, started = os.urandom(PAGE), 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            os.pwrite(self._file, page, PAGE * self._page)
            os.fdatasync(self._file)
            self._page = (self._page + 1) % PREALLOCATED
            count += 1
        return count / elapsed

    def close(self) -> None:
        os.close(self._file)


def commit_rate(broker: Broker, threads: int, seconds: float) -> float:
    """Commits per second of ``threads`` channels, each committing one message at a time."""
    counts = [0] * threads
    barrier = threading.Barrier(threads + 1)
    stop = threading.Event()
    failures: list[BaseException] = []

    def commits(number: int) -> None:
        try:
            with broker.channel() as channel:
                channel.tx_select()
                barrier.wait()
                while not stop.is_set():
                    channel.publish(BODY, routing_key="orders")
                    channel.tx_commit()
                    counts[number] += 1
        except BaseException as error:  # raised in the caller
            failures.append(error)
            barrier.abort()

    workers = [threading.Thread(target=commits, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        barrier.wait()
        started = time.perf_counter()
        time.sleep(seconds)
        stop.set()
    except threading.BrokenBarrierError:
        stop.set()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return sum(counts) / (time.perf_counter() - started)


def measure(folder: Path, figure: str, threads: int) -> list[Figure]:
    data = folder / figure
    disk = Disk(folder)
    commits, syncs = [], []
    with Broker.open(data) as broker:
        with broker.channel() as channel:
            channel.queue_declare("orders")
        commit_rate(broker, threads, SLICE_S)
        disk.rate(SLICE_S)
        for _ in range(REPETITIONS):
            commits.append(commit_rate(broker, threads, SLICE_S))
            syncs.append(disk.rate(SLICE_S))
    disk.close()
    return [against(figure, commits, syncs, "commits/s")]


def commit_1(folder: Path) -> list[Figure]:
    return measure(folder, "commit_1", 1)


def commit_16(folder: Path) -> list[Figure]:
    return measure(folder, "commit_16", 16)
