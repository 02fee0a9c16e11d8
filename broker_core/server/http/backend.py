"""What the HTTP listener serves: the parts of a running broker.

Not here: who may see what (``gate.py``) and how it is shown (``management/``, ``txmq_api.py``).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_core.admin import ConnectionInfo, LedgerInfo
from broker_core.broker.batch import overview
from broker_core.core.errors import NotAllowed
from broker_core.engine import AppInfo, StagedBatch
from broker_core.micro_batch.ledger_info import ledger_info
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.accounts import Accounts
from broker_core.server.access.logins import Logins
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.history_reader import HistoryReader
from broker_core.server.http.rates import Rates
from broker_core.server.http.state.history import PlotHistory
from broker_core.server.http.state.page_sessions import PageSessions
from broker_core.server.quotas import Quotas
from broker_core.server.tls import TlsFiles

NODE = f"txmq@{platform.node() or 'localhost'}"


_PROTOCOLS = {"txmq": "flight", "txmqs": "flight/ssl", "amqps": "amqp/ssl"}  # by scheme, if not the same


class Listening(NamedTuple):
    """``protocol``: as RabbitMQ names it."""

    protocol: str
    host: str
    port: int


class AppLedger(NamedTuple):
    """An app, and its last decided batches, oldest first."""

    app: AppInfo
    last: Sequence[LedgerInfo]


@dataclass(frozen=True, slots=True)
class Backend:
    """``connections``: of AMQP.
    ``directory`` "": a broker without files. ``cluster``: its name for clients. ``urls``: where the broker
    listens. ``with_clients``: staged batches with who opened each, as far as a listener knows it.
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
    with_clients: Callable[[str, list[StagedBatch]], list[StagedBatch]] = lambda _vhost, found: found
    certificate: TlsFiles | None = None
    rates: Rates = field(default_factory=Rates)
    history: PlotHistory = field(default_factory=PlotHistory)
    sessions: PageSessions = field(default_factory=PageSessions)

    # What follows is seen without a commit, and waits for none: even while the disk hangs. A batch that is
    # about to be durable may be among it.
    def app_ledgers(self, vhost: str, last: int = 1, app_id: str | None = None) -> list[AppLedger]:
        """The apps, or one, with their last batches, oldest first; none of a virtual host that is gone."""
        try:
            engine = self.engines.of(vhost)
        except NotAllowed:
            return []
        with self.broker.look:
            found = overview.app_batches(engine.state, engine.batches, self.broker.clock(), last, app_id)
        return [AppLedger(app, [ledger_info(each, each.commit_sequence) for each in of]) for app, of in found]

    def staged_batches(self, vhost: str) -> list[StagedBatch]:
        try:
            engine = self.engines.of(vhost)
        except NotAllowed:
            return []
        with self.broker.look:
            found = overview.staged_batches(engine.batches, self.broker.clock())
        return self.with_clients(vhost, found)

    @property
    def past(self) -> HistoryReader:
        return HistoryReader(self.broker, self.engines, waits=False)

    def queue_key(self, vhost: str, name: str) -> str:
        """Names the plots of a queue; "": there is none."""
        topology = self.broker.state.virtual_hosts.by_name.get(vhost)
        queue = topology.queues.get(name) if topology is not None else None
        return str(queue.queue_id) if queue is not None else ""

    @property
    def things(self) -> int:
        """How many queues, exchanges, channels and connections there are, about."""
        hosts = list(self.broker.state.virtual_hosts.by_name.values())
        declared = sum(len(each.queues) + len(each.exchanges) for each in hosts)
        return declared + len(self.broker.open_channels) + len(self.quotas.connections)

    def listening(self) -> list[Listening]:
        found = []
        for url in self.urls():
            scheme, _, address = url.partition("://")
            host, _, port = address.rpartition(":")
            found.append(Listening(_PROTOCOLS.get(scheme, scheme), host.strip("[]"), int(port)))
        return found
