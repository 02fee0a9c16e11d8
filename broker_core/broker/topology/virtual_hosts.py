"""The virtual hosts of a broker: each has its own names of queues and exchanges.

Not here: the names of one (``topology.py``), who may use it (``access/rights.py``), the records of its
micro-batches (``micro_batch/``). Codes and texts are RabbitMQ's where it has them.
Invariant: ``/`` is always there. Every other virtual host has a record, and ``/`` has one if it has a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from broker_core.broker.topology.registry import Registry
from broker_core.broker.topology.topology import Topology
from broker_core.core.address import VHOST, check_vhost
from broker_core.core.block import Blocks
from broker_core.core.change import Change, Numbers
from broker_core.core.errors import OptionError
from broker_core.core.records import VhostRecord
from broker_core.routing import refusals

NO_LIMIT = -1
LIMITS = ("max_queues", "max_connections", "max_messages")


class VirtualHosts:
    """``by_name`` is read by any thread; it changes in works only."""

    def __init__(self, blocks: Blocks, numbers: Numbers) -> None:
        self._undo = blocks.undo
        self._blocks = blocks
        self._numbers = numbers
        self.registry = Registry(blocks.undo)
        self.by_name: dict[str, Topology] = {}
        self.records: dict[str, VhostRecord] = {}
        self.limited = False  # some virtual host has a limit of messages
        self.strict = False
        self.forget_outcomes: Callable[[Change, str], None]  # of an earlier one of this name
        self._make(VHOST)

    def restore(self, records: Iterable[VhostRecord]) -> None:
        """Restores them while loading, before what is in them."""
        for record in records:
            self._keep(record)

    def get(self, name: str) -> Topology:
        """Raises NotAllowed."""
        found = self.by_name.get(name)
        if found is None:
            raise refusals.no_vhost(name)
        return found

    def limits(self, name: str) -> VhostRecord:
        return self.records.get(name) or VhostRecord(name, 0, NO_LIMIT, NO_LIMIT, NO_LIMIT)

    def be_strict(self) -> None:
        """Refuse arguments without effect from now on. Before others use it."""
        self.strict = True
        for topology in self.by_name.values():
            topology.strict = True

    # -- changes ---------------------------------------------------------------------------------------------
    def add(
        self,
        change: Change,
        name: str,
        max_queues: int = NO_LIMIT,
        max_connections: int = NO_LIMIT,
        max_messages: int = NO_LIMIT,
    ) -> None:
        """Makes a virtual host. Raises OptionError: it exists, or the name or a limit is wrong."""
        check_vhost(name)
        if name in self.by_name:
            raise OptionError(
                f"virtual host '{name}' already exists", "change its limits with `txmq vhost limit`"
            )
        vhost_id = self._numbers.next_sequence()
        self._put(change, VhostRecord(name, vhost_id, max_queues, max_connections, max_messages))
        self.forget_outcomes(change, name)

    def limit(self, change: Change, name: str, limits: Mapping[str, int]) -> None:
        """Changes the limits that are given; what is over a new one stays. Raises OptionError."""
        self.require(name)
        before = self.limits(name)
        of = (limits.get(each, getattr(before, each)) for each in LIMITS)
        self._put(change, VhostRecord(name, before.vhost_id, *of))

    def delete(self, change: Change, name: str) -> None:
        """Deletes a virtual host with its queues and exchanges. ``Registry.end_some`` does the rest, in
        pieces. Raises OptionError.
        """
        self.require_deletable(name)
        self.by_name[name].delete_all(change)
        self._undo.item(self.by_name, name)
        self._undo.item(self.records, name)
        del self.by_name[name], self.records[name]
        change.drop(VhostRecord, (name,))

    def require_deletable(self, name: str) -> None:
        """Raises OptionError: there is none of this name, or it always stays."""
        self.require(name)
        if name == VHOST:
            raise OptionError(
                f"virtual host '{VHOST}' cannot be deleted",
                "clients that name none use it; take their permissions, or set its limits to 0",
            )

    def require(self, name: str) -> Topology:
        """Like ``get``, for an operator. Raises OptionError: there is none of this name."""
        if name not in self.by_name:
            raise OptionError(
                f"virtual host '{name}' does not exist", "list those that exist with `txmq vhost list`"
            )
        return self.by_name[name]

    def _put(self, change: Change, record: VhostRecord) -> None:
        for limit in LIMITS:
            if getattr(record, limit) < NO_LIMIT:
                raise OptionError(
                    f"{limit} of virtual host '{record.name}' is {getattr(record, limit)}",
                    f"give 0 or more, or {NO_LIMIT} for no limit",
                )
        self._keep(record)
        change.put(record)

    def _keep(self, record: VhostRecord) -> None:
        self._undo.item(self.records, record.name)
        self.records[record.name] = record
        topology = self.by_name.get(record.name) or self._make(record.name)
        self._undo.attribute(topology, "max_queues")
        self._undo.attribute(topology, "max_messages")
        topology.max_queues, topology.max_messages = record.max_queues, record.max_messages
        self._undo.attribute(self, "limited")
        self.limited = any(each.max_messages != NO_LIMIT for each in self.records.values())

    def _make(self, name: str) -> Topology:
        self._undo.item(self.by_name, name)
        new = self.by_name[name] = Topology(self._blocks, self._numbers, name, self.registry)
        new.strict = self.strict
        return new
