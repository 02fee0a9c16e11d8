"""What the plots of the page show: numbers of virtual hosts, commits, apps and queues, every five seconds.

Not here: the rings (``state/history.py``).
Invariant: numbers are read without the lock, and some queues at a time; apps in a thread beside the loop.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor

from broker_core.server.http.rates import AT_ONCE
from broker_core.server.http.served import Served
from broker_core.server.http.state.history import Key, Numbers

Row = tuple[Key, Numbers]
COMMITS: Key = ("commits",)


def of_vhost(vhost: str) -> Key:
    return ("vhost", vhost)


def of_app(vhost: str, app: str) -> Key:
    return ("app", vhost, app)


def of_queue(key: str) -> Key:
    """``key``: as ``Served.queue_key`` says."""
    return ("queue", key)


class Sampler:
    """``commits``: a second, milliseconds of the disk for a group, groups a second. Of a virtual host and a
    queue: messages, published and settled a second. Of an app: lag, batches not applied, not mirrored.
    """

    def __init__(self, served: Served, beside: Executor) -> None:
        self._served, self._beside = served, beside
        self._before = (0, 0, 0.0)
        self._at = 0.0

    async def sample(self) -> None:
        served, history = self._served, self._served.history
        topologies = list(served.broker.state.virtual_hosts.by_name.values())
        await served.rates.sample(topologies, served.broker.committer.counts)
        apps = await asyncio.get_running_loop().run_in_executor(self._beside, self._apps)
        history.begin(time.time())
        history.add([self._commits()])
        for topology in topologies:
            _, rate = served.rates.of_hosts([topology.vhost])
            history.add([(of_vhost(topology.vhost), (topology.tally.total, rate.published, rate.settled))])
        history.add(apps)
        for topology in topologies:
            queues = [queue for queue in list(topology.queues.values()) if not queue.replies]
            for start in range(0, len(queues), AT_ONCE):
                for queue in queues[start : start + AT_ONCE]:
                    rate = served.rates.of_queue(queue)
                    numbers = (queue.messages, rate.published, rate.settled)
                    history.add([(of_queue(str(queue.queue_id)), numbers)])
                await asyncio.sleep(0)
        history.end()

    def _commits(self) -> Row:
        counts, now = self._served.broker.committer.counts, time.monotonic()
        found = (counts.changes, counts.groups, counts.durable_s)
        changes, groups, seconds = (new - old for new, old in zip(found, self._before, strict=True))
        passed = now - self._at if self._at else 0.0
        self._before, self._at = found, now
        if not passed:
            return COMMITS, (0.0, 0.0, 0.0)
        return COMMITS, (changes / passed, seconds / groups * 1000 if groups else 0.0, groups / passed)

    def _apps(self) -> list[Row]:
        rows: list[Row] = []
        for vhost in list(self._served.broker.state.virtual_hosts.by_name):
            for app, _ in self._served.app_ledgers(vhost):
                rows.append((of_app(vhost, app.app_id), (app.lag, app.unapplied, app.unmirrored)))
        return rows
