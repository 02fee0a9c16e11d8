"""What the plots of the page show: numbers of virtual hosts, commits, apps and queues, every five seconds.

Not here: the rings (``state/history.py``).
Invariant: numbers are read without the lock, and some queues at a time; apps in a thread beside the loop.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor

from broker_core.server.http.backend import Backend
from broker_core.server.http.rates import AT_ONCE
from broker_core.server.http.state.history import Key, Numbers

Row = tuple[Key, Numbers]
COMMITS: Key = ("commits",)


def of_vhost(vhost: str) -> Key:
    return ("vhost", vhost)


def of_app(vhost: str, app: str) -> Key:
    return ("app", vhost, app)


def of_queue(key: str) -> Key:
    """``key``: as ``Backend.queue_key`` says."""
    return ("queue", key)


class Sampler:
    """``commits``: a second, milliseconds of the disk for a group, groups a second. Of a virtual host and a
    queue: messages, published and settled a second. Of an app: lag, batches not applied, not mirrored.
    """

    def __init__(self, backend: Backend, beside: Executor) -> None:
        self._backend, self._beside = backend, beside
        self._before = (0, 0, 0.0)
        self._at = 0.0

    async def sample(self) -> None:
        backend, history = self._backend, self._backend.history
        topologies = list(backend.broker.state.virtual_hosts.by_name.values())
        await backend.rates.sample(topologies, backend.broker.committer.counts)
        apps = await asyncio.get_running_loop().run_in_executor(self._beside, self._apps)
        history.begin(time.time())
        history.add([self._commits()])
        for topology in topologies:
            _, rate = backend.rates.of_hosts([topology.vhost])
            history.add([(of_vhost(topology.vhost), (topology.tally.total, rate.published, rate.settled))])
        history.add(apps)
        for topology in topologies:
            queues = [queue for queue in list(topology.queues.values()) if not queue.replies]
            for start in range(0, len(queues), AT_ONCE):
                for queue in queues[start : start + AT_ONCE]:
                    rate = backend.rates.of_queue(queue)
                    numbers = (queue.messages, rate.published, rate.settled)
                    history.add([(of_queue(str(queue.queue_id)), numbers)])
                await asyncio.sleep(0)
        history.end()

    def _commits(self) -> Row:
        counts, now = self._backend.broker.committer.counts, time.monotonic()
        found = (counts.changes, counts.groups, counts.durable_s)
        changes, groups, seconds = (new - old for new, old in zip(found, self._before, strict=True))
        passed = now - self._at if self._at else 0.0
        self._before, self._at = found, now
        if not passed:
            return COMMITS, (0.0, 0.0, 0.0)
        return COMMITS, (changes / passed, seconds / groups * 1000 if groups else 0.0, groups / passed)

    def _apps(self) -> list[Row]:
        rows: list[Row] = []
        for vhost in list(self._backend.broker.state.virtual_hosts.by_name):
            for app, _ in self._backend.app_ledgers(vhost):
                rows.append((of_app(vhost, app.app_id), (app.lag, app.unapplied, app.unmirrored)))
        return rows
