"""Who holds a channel of AMQP, for an operator: the id that ``txmq channels`` shows and ``txmq close`` takes.

Not here: what the channel holds (``node/held_channels.py``).
"""

from __future__ import annotations

from broker_core.node.held_channels import ChannelHolder
from broker_core.server.amqp.ports import ClientConnection

_LONGEST = 255  # characters of what a client calls itself


def channel_holder(connection: ClientConnection, number: int, now_us: int) -> ChannelHolder:
    """Of channel ``number``. RabbitMQ names connections and channels in the same way."""
    properties = connection.protocol.client_properties
    found = map(properties.get, ("connection_name", "product"))
    name = next((each for each in found if isinstance(each, str)), "")
    return ChannelHolder(
        f"{connection.name} ({number})",
        "amqp",
        connection.user,
        connection.address,
        name[:_LONGEST],
        connection.seen.vhost,
        now_us,
    )
