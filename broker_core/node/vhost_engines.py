"""The engines of a broker: one for each virtual host.

Invariant: a virtual host that is made again after it was deleted has another engine, without apps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import quote

from broker_core.arrow.part_file import PartFile
from broker_core.broker.batch.branch import StagedLimits
from broker_core.core.address import VHOST
from broker_core.core.change import Change
from broker_core.node.engine import Adopt, EmbeddedEngine
from broker_core.node.local import LocalBroker


class VhostEngines:
    """Thread-safe. ``default`` is that of ``/``."""

    def __init__(
        self,
        local: LocalBroker,
        adopt: Callable[[PartFile], Adopt] | None = None,
        *,
        identity: str = "",
        staged: StagedLimits | None = None,
    ) -> None:
        self._local = local
        self._adopt = adopt
        self._identity = identity
        self._staged = staged
        self._lock = threading.Lock()
        self._engines: dict[str, EmbeddedEngine] = {}
        for vhost in local.state.virtual_hosts.by_name:
            self._engines[vhost] = self._new_engine(vhost)
        self.default = self._engines[VHOST]

    def _new_engine(self, vhost: str) -> EmbeddedEngine:
        # apps of two virtual hosts are different ones, even where they change one table, or have one name
        host = f"/{quote(vhost, safe='')}/{self._local.state.virtual_hosts.limits(vhost).vhost_id}"
        identity = self._identity + host if self._identity and vhost != VHOST else self._identity
        return EmbeddedEngine(self._local, self._adopt, identity=identity, staged=self._staged, vhost=vhost)

    def of(self, vhost: str) -> EmbeddedEngine:
        """Raises NotAllowed: there is no such virtual host."""
        topology = self._local.state.virtual_hosts.get(vhost)
        found = self._engines.get(vhost)
        if found is not None and found.state.topology is topology:
            return found
        with self._lock:
            found = self._engines.get(vhost)
            if found is None or found.state.topology is not topology:
                found = self._engines[vhost] = self._new_engine(vhost)
            return found

    def all(self) -> list[EmbeddedEngine]:
        return list(self._engines.values())

    def size(self) -> int:
        """Returns how many attempts, branches, claims and decided batches there are, of all."""
        of = [engine.batches for engine in self.all()]
        return sum(each.branches.size() + each.claims.size() + each.ledger.size() for each in of)

    def staged_bytes(self) -> int:
        """Returns the bytes of all parts that are staged, and neither published nor applied."""
        return sum(engine.batches.branches.room.total for engine in list(self._engines.values()))

    def forget(self, change: Change, vhost: str) -> None:
        """Drops the records of the micro-batches of a virtual host, in the work that deletes it."""
        self.of(vhost).batches.forget(change)

    def deleted(self, vhost: str) -> None:
        """The work is durable."""
        with self._lock:
            found = self._engines.get(vhost)
            if found is not None and found.state.topology.deleted:
                del self._engines[vhost]
                found.retire()
