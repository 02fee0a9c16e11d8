"""Closes a connection, or one channel of it, for an operator.

Not here: the ids (``channel_holder.py``), and how a connection or a channel ends (``connection.py``).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from broker_core.core.errors import ConnectionForced, PreconditionFailed
from broker_core.server.amqp.connection import Connection


class _Server(Protocol):
    loop: asyncio.AbstractEventLoop
    connections: dict[Connection, float]


def close(server: _Server, id: str) -> bool:
    """Close a connection, or one channel of it, for an operator; whether there is one. For any thread."""
    name, bracket, number = id.removesuffix(")").rpartition(" (")
    channel = int(number) if bracket and number.isascii() and number.isdecimal() else 0
    for connection in tuple(server.connections):
        sessions = connection.sessions.by_number
        if connection.name == (name if channel else id) and (not channel or channel in sessions):
            server.loop.call_soon_threadsafe(_fail, connection, channel)
            return True
    return False


def _fail(connection: Connection, channel: int) -> None:
    """``channel`` 0: the connection."""
    if not channel:
        connection.fail(0, ConnectionForced("an operator closed the connection"))
    elif channel in connection.sessions.by_number:
        connection.fail(channel, PreconditionFailed("an operator closed the channel"))
