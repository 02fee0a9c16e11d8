"""Who holds a channel of AMQP, for an operator: the id that ``txmq connection channels`` shows and ``txmq
connection close`` takes.

Not here: what the channel holds (``node/open_channels.py``).
"""

from __future__ import annotations

from broker_core.node.open_channels import ChannelHolder
from broker_core.server.amqp.ports import ClientConnection

_LONGEST = 255  # characters of what a client calls itself


def channel_holder(connection: ClientConnection, number: int, now_us: int) -> ChannelHolder:
    """Of channel ``number``. RabbitMQ names connections and channels in the same way."""
    return ChannelHolder(
        f"{connection.name} ({number})",
        "amqp",
        connection.user,
        connection.address,
        client_name(connection),
        connection.seen.vhost,
        now_us,
    )


def client_name(connection: ClientConnection) -> str:
    """What the client calls itself."""
    table = connection.protocol.client_properties
    names = (table[key] for key in ("connection_name", "product") if isinstance(table.get(key), str))
    return str(next(names, ""))[:_LONGEST]
