"""How many messages came and went, and how fast: of each queue, of each virtual host and of all.

Not here: who asks. Source: RabbitMQ's statistics, which are as old as their interval too.
Invariant: a sample reads numbers without the lock, and some queues at a time, so that it stops nobody. Counts
of a virtual host never go back, even when queues are deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from operator import add
from typing import NamedTuple

from broker_core.broker.queue import Queue
from broker_core.broker.topology.topology import Topology
from broker_core.node.committer import CommitCounts

INTERVAL_S = 5.0
AT_ONCE = 500  # queues
NEWEST = 0.2  # the weight of a sample


class Counts(NamedTuple):
    """``published``: entries that a queue ever had. ``settled``: acked, expired, dropped, purged or
    dead-lettered. The others count since the broker started: deliveries to consumers with and without acks,
    the same of basic.get, those of them that came again; of a virtual host, publishes that were confirmed,
    and messages that were returned. A rate is the same, per second.
    """

    published: float = 0
    settled: float = 0
    delivered: float = 0
    delivered_no_ack: float = 0
    got: float = 0
    got_no_ack: float = 0
    redelivered: float = 0
    confirmed: float = 0
    returned: float = 0

    def since(self, before: Counts) -> Counts:
        return Counts(*(max(now - then, 0) for now, then in zip(self, before)))

    def plus(self, more: Counts) -> Counts:
        return Counts(*map(add, self, more))


NOTHING = Counts()
Rate = Counts
NO_RATE = Rate(*[0.0] * len(Rate._fields))


def counts_of(queue: Queue) -> Counts:
    """Of any thread."""
    settled = queue.progress.floor + queue.progress.holes.total
    return Counts(queue.log.visible_end, settled, *queue.marks.deliveries())


class Rates:
    """Sampled by one loop, read by any thread."""

    def __init__(self) -> None:
        self._now: dict[int, Counts] = {}  # by the id of a queue
        self._before: dict[int, Counts] = {}
        self._hosts: dict[str, Counts] = {}
        self._hosts_before: dict[str, Counts] = {}
        self._at = self._passed = 0.0
        self._idle: dict[int, float] = {}  # since when nothing of a queue has changed
        self._used: dict[int, float] = {}  # the part of samples in which no message waited for a consumer

    async def sample(self, topologies: Iterable[Topology], commits: CommitCounts) -> None:
        found: dict[int, Counts] = {}
        idle: dict[int, float] = {}
        used: dict[int, float] = {}
        wall_s = time.time()
        hosts: dict[str, Counts] = {}
        for topology in topologies:
            queues = list(topology.queues.values())
            sum_ = self._hosts.get(topology.vhost, NOTHING)
            for start in range(0, len(queues), AT_ONCE):
                for queue in queues[start : start + AT_ONCE]:
                    key, now = queue.queue_id, counts_of(queue)
                    found[key], before = now, self._now.get(key)
                    if before is None or before == now:
                        idle[key] = self._idle.get(key, wall_s)
                    if len(queue.consumers):
                        waits = queue.messages > queue.unacknowledged
                        used[key] = self._used.get(key, 1.0) * (1 - NEWEST) + (not waits) * NEWEST
                    if self._at or before is not None:
                        sum_ = sum_.plus(now.since(before or NOTHING))
                await asyncio.sleep(0)
            vhost = topology.vhost
            hosts[vhost] = sum_._replace(confirmed=commits.confirmed[vhost], returned=commits.returned[vhost])
        now_s = time.monotonic()
        self._passed, self._at = now_s - self._at if self._at else 0.0, now_s
        self._before, self._now = self._now, found
        self._idle, self._used = idle, used
        self._hosts_before, self._hosts = self._hosts, hosts

    def of_queue(self, queue: Queue) -> Rate:
        """Between the last two samples."""
        now = self._now.get(queue.queue_id)
        return self._rate(now, self._before.get(queue.queue_id, NOTHING)) if now is not None else NO_RATE

    def idle_since(self, queue: Queue, counts: Counts) -> float | None:
        """Seconds since the epoch; None: it was used between the last two samples, or is new."""
        return self._idle.get(queue.queue_id) if self._now.get(queue.queue_id) == counts else None

    def utilisation(self, queue: Queue) -> float:
        """The part of the last samples in which the consumers of a queue that has some had taken all."""
        return self._used.get(queue.queue_id, 1.0)

    def of_hosts(self, vhosts: Iterable[str]) -> tuple[Counts, Rate]:
        """Since this listener was opened, and between the last two samples."""
        now = before = NOTHING
        for vhost in vhosts:
            now = now.plus(self._hosts.get(vhost, NOTHING))
            before = before.plus(self._hosts_before.get(vhost, NOTHING))
        return now, self._rate(now, before)

    def _rate(self, now: Counts, before: Counts) -> Rate:
        if not self._passed:
            return NO_RATE
        more = now.since(before)
        return Rate(*(round(each / self._passed, 1) for each in more))
