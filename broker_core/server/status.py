"""The state of a broker as a whole, for a probe and for an operator.

Not here: what publishers wait for (``alarm.py``).
Invariant: a probe costs nothing that grows with messages. No look at the state is longer than for a few
queues.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable

from broker_core import __version__
from broker_core.admin import BrokerStatus, Level
from broker_core.broker.batch.extent import waiting_since
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.alarm import Alarm

FILES_SHARE = 0.9  # of the files that the process may open: above it, clients are soon refused


class StatusReader:
    """``listens``: the addresses of all listeners."""

    def __init__(
        self,
        broker: LocalBroker,
        engines: VhostEngines,
        alarm: Alarm | None,
        directory: str,
        listens: Callable[[], list[str]],
        vhosts: Vhosts,
    ) -> None:
        self._broker = broker
        self._engines = engines
        self._alarm = alarm
        self._directory = directory
        self._listens = listens
        self._vhosts = vhosts
        self._started = time.monotonic()

    def now(self) -> BrokerStatus:
        levels = self._alarm.levels() if self._alarm is not None else []
        with self._broker.look as state:
            states = list(state.queues)
        queues = [queue for queue in states if not queue.replies]
        counts = self._broker.map_under_lock(queues, lambda queue: (queue.messages, queue.unacknowledged))
        with self._broker.look as state:
            batches = [engine.batches for engine in self._engines.all()]
            since = [at for queue in queues if queue.owner and (at := waiting_since(queue)) is not None]
            return BrokerStatus(
                version=__version__,
                uptime_s=time.monotonic() - self._started,
                pid=os.getpid(),
                directory=self._directory,
                listens=tuple(self._listens()),
                levels=(*levels, _files()),
                vhosts=len(state.virtual_hosts.by_name),
                queues=len(queues),
                messages=sum(messages for messages, _ in counts),
                unacknowledged=sum(unacked for _, unacked in counts),
                connections=sum(map(self._vhosts.connections, state.virtual_hosts.by_name)),
                channels=len(self._broker.open_channels.channels()),
                prepared=len(state.prepared.by_key),
                staged=sum(len(each.branches.attempts()) for each in batches),
                unapplied=sum(each.ledger.waiting(app)[0] for each in batches for app in each.ledger.apps()),
                lag_s=max(0, self._broker.clock() - min(since)) / 1e6 if since else None,
            )


def _files() -> Level:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        found = len(os.listdir("/proc/self/fd"))
    except OSError:  # none is left to look with
        found = limit
    return Level("files", found, limit, found > limit * FILES_SHARE)
