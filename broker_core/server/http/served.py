"""What the HTTP door serves: the parts of a running broker.

Not here: who may see what (``gate.py``), how it is shown (``management/``, ``own/``).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_core.admin import ConnectionInfo
from broker_core.engine import AttemptInfo
from broker_core.errors import NotAllowed
from broker_core.micro_batch import overview
from broker_core.micro_batch.overview import AppBatches
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.accounts import Accounts
from broker_core.server.access.logins import Logins
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.http.kept.history import PlotHistory
from broker_core.server.http.kept.page_sessions import PageSessions
from broker_core.server.http.rates import Rates
from broker_core.server.quotas import Quotas
from broker_core.server.tls import TlsFiles

NODE = f"txmq@{platform.node() or 'localhost'}"


_PROTOCOLS = {"txmq": "flight", "txmqs": "flight/ssl", "amqps": "amqp/ssl"}  # by scheme, if not the same


class Listening(NamedTuple):
    """``protocol``: as RabbitMQ names it."""

    protocol: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Served:
    """``accounts`` and ``vhosts`` leave the audit log to their caller. ``connections``: of AMQP.
    ``directory`` "": a broker without files. ``cluster``: its name for clients. ``urls``: where the broker
    listens.
    """

    broker: LocalBroker
    engines: VhostEngines
    accounts: Accounts
    vhosts: Vhosts
    logins: Logins
    quotas: Quotas
    directory: str = ""
    cluster: str = "txmq"
    connections: Callable[[], Sequence[ConnectionInfo]] = tuple
    urls: Callable[[], Sequence[str]] = tuple
    flight_calls: Callable[[], int] = int
    certificate: TlsFiles | None = None
    rates: Rates = field(default_factory=Rates)
    history: PlotHistory = field(default_factory=PlotHistory)
    sessions: PageSessions = field(default_factory=PageSessions)

    # What follows is seen without a commit, and waits for none: also while the disk hangs. A batch that is
    # about to be durable may be among it.
    def pipelines(self, vhost: str, last: int = 1, app_id: str | None = None) -> list[AppBatches]:
        """The apps, or one, with their last batches, oldest first; none of a virtual host that is gone."""
        try:
            engine = self.engines.of(vhost)
        except NotAllowed:
            return []
        with self.broker.look:
            return overview.pipelines(engine.state, engine.batches, self.broker.clock(), last, app_id)

    def attempts(self, vhost: str) -> list[AttemptInfo]:
        try:
            engine = self.engines.of(vhost)
        except NotAllowed:
            return []
        with self.broker.look:
            return overview.attempts(engine.batches, self.broker.clock())

    def listening(self) -> list[Listening]:
        found = []
        for url in self.urls():
            scheme, _, address = url.partition("://")
            host, _, port = address.rpartition(":")
            found.append(Listening(_PROTOCOLS.get(scheme, scheme), host.strip("[]"), int(port)))
        return found
