"""The wire over sockets: a connection for each node and lane, made when it is first used.

Not here: the connection itself, and which node to ask.
Invariant: threads share a connection; a forked child never sends on one of its parent's.
"""

from __future__ import annotations

import os
import threading
from typing import TypeVar

from broker_core.core import errors
from broker_core.kafka.cluster.connection import NodeConnection, Settings
from broker_core.kafka.protocol.port import NodeAddress, Pending, Request

A = TypeVar("A")


class SocketWire:
    """Implements :class:`broker_core.kafka.protocol.port.Wire`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.connections: dict[tuple[NodeAddress, str], NodeConnection] = {}
        self._lock = threading.Lock()
        self._opening: dict[tuple[NodeAddress, str], threading.Lock] = {}
        self._pid = os.getpid()
        self._closed = False

    def send(self, node: NodeAddress, request: Request[A], lane: str = "") -> Pending[A]:
        """Raises ConnectionFailed: nothing was sent."""
        return self._connection(node, lane).send(request)

    def _connection(self, node: NodeAddress, lane: str) -> NodeConnection:
        self._forget_parent()
        with self._lock:
            opening = self._opening.setdefault((node, lane), threading.Lock())
        with opening:  # one thread opens it; requests to other nodes go on
            with self._lock:
                if self._closed:
                    raise errors.ConnectionFailed("this client of Kafka is closed")
                connection = self.connections.get((node, lane))
            if connection is None or connection.broken:
                connection = NodeConnection(node, self._settings)
                self._keep(node, lane, connection)
            return connection

    def _keep(self, node: NodeAddress, lane: str, connection: NodeConnection) -> None:
        with self._lock:
            self.connections[node, lane] = connection
            if not self._closed:
                return
        connection.close()  # the wire was closed while it was opened; sending on it says so

    def _forget_parent(self) -> None:
        if self._pid == os.getpid():
            return
        # the locks may be held by threads that do not exist here
        self._lock, self._opening = threading.Lock(), {}
        inherited, self.connections = self.connections, {}
        self._pid = os.getpid()
        for connection in inherited.values():
            connection.abandon()

    def close(self) -> None:
        """Requests without an answer get none; nothing can be sent any more."""
        self._forget_parent()
        with self._lock:
            self._closed = True
            connections, self.connections = self.connections, {}
        for connection in connections.values():
            connection.close()
