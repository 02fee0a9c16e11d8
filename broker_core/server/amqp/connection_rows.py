"""The connections of AMQP, for an operator.

Not here: who holds their channels (``channel_holder.py``), closing one (``closing.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, TypeVar

from broker_core.admin import ClientInfo, ConnectionInfo
from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.server.amqp.channel_holder import client_name
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.sessions import Sessions


class ListedConnection(ClientConnection, Protocol):
    """A connection with its sessions and its socket."""

    sessions: Sessions

    @property
    def tls(self) -> bool: ...


S = TypeVar("S", bound=ListedConnection)


def clients(connections: Mapping[S, float]) -> list[ClientInfo]:
    """For any thread: the open ones of ``connections``, which says when each was opened."""
    now, now_s = time.time(), time.monotonic()
    return [
        ClientInfo(
            each.name,
            "amqp",
            each.user,
            each.seen.vhost,
            each.address,
            client_name(each),
            max(0.0, now - opened_at),
            max(0.0, now_s - each.protocol.heard_at),
            len(each.sessions.by_number),
        )
        for each, opened_at in list(connections.items())
        if each.protocol.state is ConnectionState.open
    ]


def connection_info(connection: ListedConnection, opened_at: float) -> ConnectionInfo:
    """For any thread: from values that one step of Python reads."""
    protocol = connection.protocol
    peer, _, here = connection.name.partition(" -> ")
    (host, port), (peer_host, peer_port) = _split(here), _split(peer)
    tuned = protocol.tuned
    return ConnectionInfo(
        connection.name,
        connection.user,
        connection.seen.vhost,
        "running",
        host,
        port,
        peer_host,
        peer_port,
        connection.tls,
        len(connection.sessions.by_number),
        tuned.channel_max,
        tuned.frame_max,
        tuned.heartbeat,
        int(opened_at * 1000),
        protocol.client_properties,
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0
