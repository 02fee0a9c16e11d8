"""Virtual hosts, as an operator adds, lists, limits and deletes them.

Not here: the rules (``broker/topology/virtual_hosts.py``).
Invariant: when the call returns, a change is durable and in force at every listener.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

from broker_core.admin import VhostInfo
from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queue
from broker_core.broker.topology.policies import KINDS
from broker_core.broker.topology.topology import Topology
from broker_core.broker.topology.virtual_hosts import LIMITS, NO_LIMIT
from broker_core.core.address import VHOST
from broker_core.core.change import Change
from broker_core.core.records import PolicyRecord
from broker_core.node.committer import changes
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.audit import Auditor, Record


class Vhosts(Auditor):
    """``changed``: called after one is deleted. ``connections``: how many AMQP connections one has."""

    def __init__(
        self,
        broker: LocalBroker,
        engines: VhostEngines,
        changed: list[Callable[[], None]] | None = None,
        record: Record | None = None,
    ) -> None:
        super().__init__(record)
        self._broker = broker
        self._engines = engines
        self._changed = [] if changed is None else changed
        self.connections: Callable[[str], int] = lambda _vhost: 0

    def vhosts(self) -> list[VhostInfo]:
        with self._broker.look as state:
            found = [
                (name, list(topology.queues.values()), state.virtual_hosts.limits(name))
                for name, topology in state.virtual_hosts.by_name.items()
            ]
        return [
            VhostInfo(
                name,
                sum(not queue.replies for queue in queues),
                self.connections(name),
                sum(self._broker.map_under_lock(queues, lambda queue: queue.messages)),
                *(_limit_or_none(getattr(limits, limit)) for limit in LIMITS),
            )
            for name, queues, limits in sorted(found, key=itemgetter(0))
        ]

    def add_vhost(
        self,
        name: str,
        max_queues: int | None = None,
        max_connections: int | None = None,
        max_messages: int | None = None,
    ) -> None:
        """``max_*`` None: no limit. Raises OptionError."""
        limits = [
            NO_LIMIT if limit is None else limit for limit in (max_queues, max_connections, max_messages)
        ]
        self._broker.run(changes(self._broker.state.virtual_hosts.add, name, *limits))
        self._audit("add_vhost", name=name, **dict(zip(LIMITS, limits, strict=True)))

    def limit_vhost(
        self,
        name: str,
        max_queues: int | None = None,
        max_connections: int | None = None,
        max_messages: int | None = None,
    ) -> None:
        """Changes the limits that are given; -1: none. What is over a new limit stays. Raises OptionError."""
        values = {"max_queues": max_queues, "max_connections": max_connections, "max_messages": max_messages}
        limits = {limit: value for limit, value in values.items() if value is not None}
        self._broker.run(changes(self._broker.state.virtual_hosts.limit, name, limits))
        self._audit("limit_vhost", name=name, **limits)

    # -- policies --------------------------------------------------------------------------------------------
    def policies(self, vhost: str | None = None) -> list[PolicyRecord]:
        """Those of one virtual host, or of all. Raises OptionError."""
        with self._broker.look as state:
            hosts = state.virtual_hosts
            if vhost is not None:
                hosts.require(vhost)
            return [
                record
                for topology in hosts.by_name.values()
                if vhost in (None, topology.vhost)
                for record in topology.policies.all()
            ]

    def set_policy(
        self,
        name: str,
        pattern: str,
        definition: dict[str, object],
        *,
        vhost: str = VHOST,
        operator: bool = False,
        apply_to: str = "all",
        priority: int = 0,
    ) -> None:
        """In one commit, for what is there and what will be declared. Raises OptionError."""
        record = PolicyRecord(vhost, KINDS[operator], name, pattern, apply_to, priority, definition)
        self._change_policies(vhost, lambda topology, change: topology.policies.put(change, record))
        what = {"pattern": pattern, "apply_to": apply_to, "priority": priority, "definition": definition}
        self._audit("set_policy", name=name, vhost=vhost, operator=operator, **what)

    def delete_policy(self, name: str, *, vhost: str = VHOST, operator: bool = False) -> None:
        """Raises OptionError."""
        self._change_policies(
            vhost, lambda topology, change: topology.policies.delete(change, KINDS[operator], name)
        )
        self._audit("delete_policy", name=name, vhost=vhost, operator=operator)

    def _change_policies(self, vhost: str, step: Callable[[Topology, Change], list[Queue]]) -> None:
        def work(state: BrokerState, change: Change, now: int) -> None:
            for queue in step(state.virtual_hosts.require(vhost), change):
                state.pending_checks.obey_soon(queue, now)

        self._broker.run(work)

    def delete_vhost(self, name: str) -> None:
        """Deletes it with its queues, exchanges, permissions and apps, rolls back what is prepared there, and
        closes its connections. Raises OptionError.
        """

        def work(state: BrokerState, change: Change, now: int) -> None:
            state.virtual_hosts.require_deletable(name)
            state.prepared.forget_vhost(change, name, now)
            self._engines.forget(change, name)
            state.users.forget_vhost(change, name)
            state.virtual_hosts.delete(change, name)
            state.transactions.history.hide(change, name, now)

        self._broker.run(work)
        self._broker.upkeep.end_queues()
        self._audit("delete_vhost", name=name)
        self._engines.deleted(name)
        for notify in self._changed:
            notify()
        self._broker.committer.listeners.tell_consumers()


def _limit_or_none(limit: int) -> int | None:
    return None if limit == NO_LIMIT else limit
