"""How many messages came and went, and how fast: of each queue, of each virtual host and of all.

Not here: who asks. Source: RabbitMQ's statistics, which are as old as their interval too.
Invariant: a sample reads numbers without the lock, and some queues at a time, so that it stops nobody. Counts
of a virtual host never go back, also when queues are deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

from broker_core.broker.queue import Queue
from broker_core.broker.topology.topology import Topology

INTERVAL_S = 5.0
AT_ONCE = 500  # queues


class Counts(NamedTuple):
    """``published``: entries that a queue ever had. ``settled``: acked, expired, dropped, purged or
    dead-lettered.
    """

    published: int = 0
    settled: int = 0

    def since(self, before: Counts) -> Counts:
        return Counts(max(self.published - before.published, 0), max(self.settled - before.settled, 0))

    def plus(self, more: Counts) -> Counts:
        return Counts(self.published + more.published, self.settled + more.settled)


NOTHING = Counts()


class Rate(NamedTuple):
    """Per second."""

    published: float = 0.0
    settled: float = 0.0


def counts_of(queue: Queue) -> Counts:
    """Of any thread."""
    return Counts(queue.log.visible_end, queue.progress.floor + queue.progress.holes.total)


class Rates:
    """Sampled by one loop, read by any thread."""

    def __init__(self) -> None:
        self._now: dict[int, Counts] = {}  # by the id of a queue
        self._before: dict[int, Counts] = {}
        self._hosts: dict[str, Counts] = {}
        self._hosts_before: dict[str, Counts] = {}
        self._at = self._passed = 0.0

    async def sample(self, topologies: Iterable[Topology]) -> None:
        found: dict[int, Counts] = {}
        hosts: dict[str, Counts] = {}
        for topology in topologies:
            queues = list(topology.queues.values())
            sum_ = self._hosts.get(topology.vhost, NOTHING)
            for start in range(0, len(queues), AT_ONCE):
                for queue in queues[start : start + AT_ONCE]:
                    now = found[queue.queue_id] = counts_of(queue)
                    if self._at or queue.queue_id in self._now:
                        sum_ = sum_.plus(now.since(self._now.get(queue.queue_id, NOTHING)))
                await asyncio.sleep(0)
            hosts[topology.vhost] = sum_
        now_s = time.monotonic()
        self._passed, self._at = now_s - self._at if self._at else 0.0, now_s
        self._before, self._now = self._now, found
        self._hosts_before, self._hosts = self._hosts, hosts

    def of_queue(self, queue: Queue) -> Rate:
        """Between the last two samples."""
        now = self._now.get(queue.queue_id)
        return self._rate(now, self._before.get(queue.queue_id, NOTHING)) if now is not None else Rate()

    def of_hosts(self, vhosts: Iterable[str]) -> tuple[Counts, Rate]:
        """Since this door was opened, and between the last two samples."""
        now = before = NOTHING
        for vhost in vhosts:
            now = now.plus(self._hosts.get(vhost, NOTHING))
            before = before.plus(self._hosts_before.get(vhost, NOTHING))
        return now, self._rate(now, before)

    def _rate(self, now: Counts, before: Counts) -> Rate:
        if not self._passed:
            return Rate()
        more = now.since(before)
        return Rate(round(more.published / self._passed, 1), round(more.settled / self._passed, 1))
