"""Who calls at the port of Flight, for an operator: the connections with their clients, and who stages.

Not here: who is let in (``connection_limit.py``), the rights of whoever looks (``call_permissions.py``).
Invariant: nothing here decides anything. What is kept is bounded, and what was silent for longest is
forgotten first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import TypeVar
from urllib.parse import unquote

from broker_core.admin import ClientInfo
from broker_core.broker.access.users import own_id
from broker_core.engine import StagedBatch
from broker_core.server.access.caller import Caller

KEPT = 10_000  # connections, and as many attempts

K = TypeVar("K")


@dataclass(slots=True)
class _Heard:
    user: str
    vhost: str
    address: str
    client: str
    since: float
    last: float


class FlightClients:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: OrderedDict[str, _Heard] = OrderedDict()  # by gRPC's name
        self._attempts: OrderedDict[tuple[str, str], _Heard] = OrderedDict()  # by virtual host and token

    def called(self, peer: str, caller: Caller) -> None:
        self._hear(self._connections, peer, caller)

    def forget(self, peer: str) -> None:
        with self._lock:
            self._connections.pop(peer, None)

    def staged(self, caller: Caller, token: str) -> None:
        """It has opened an attempt, or has staged for one."""
        own = caller.state.users.own_id(caller.identity.user, token)
        self._hear(self._attempts, (caller.state.vhost, own), caller)

    def _hear(self, latest: OrderedDict[K, _Heard], key: K, caller: Caller) -> None:
        now, user, vhost = time.monotonic(), caller.identity.user, caller.state.vhost
        with self._lock:
            heard = latest.get(key)
            if heard is None:
                latest[key] = _Heard(user, vhost, caller.address, caller.client, now, now)
                if len(latest) > KEPT:
                    latest.popitem(last=False)
            else:
                heard.user, heard.vhost, heard.last = user, vhost, now
                latest.move_to_end(key)

    def connections(self) -> list[ClientInfo]:
        now = time.monotonic()
        with self._lock:
            found = [(peer.partition(":")[2], astuple(heard)) for peer, heard in self._connections.items()]
        return [
            ClientInfo(unquote(address), "flight", user, vhost, at, client, now - since, now - last, 0)
            for address, (user, vhost, at, client, since, last) in found
        ]

    def with_clients(self, vhost: str, found: Iterable[StagedBatch]) -> list[StagedBatch]:
        """The staged batches with who opened each, and how long it is silent, where that is known."""
        now, rows = time.monotonic(), []
        with self._lock:
            for each in found:
                heard = self._attempts.get((vhost, own_id(each.user, each.token)))
                if heard is not None:
                    each = replace(each, client=heard.client, idle_s=now - heard.last)
                rows.append(each)
        return rows
