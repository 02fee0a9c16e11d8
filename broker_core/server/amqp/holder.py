"""Who holds a channel of AMQP, for an operator: the id that ``txmq channels`` shows and ``txmq close`` takes.

Not here: what the channel holds (``node/holders.py``).
"""

from __future__ import annotations

from broker_core.node.holders import Holder
from broker_core.server.amqp.ports import ClientConnection

_LONGEST = 255  # characters of what a client calls itself


def holder(connection: ClientConnection, number: int, now_us: int) -> Holder:
    """Of channel ``number``. RabbitMQ names connections and channels in the same way."""
    told = connection.protocol.client_properties
    name = next((told[key] for key in ("connection_name", "product") if isinstance(told.get(key), str)), "")
    return Holder(
        f"{connection.name} ({number})",
        "amqp",
        connection.user,
        connection.address,
        name[:_LONGEST],
        connection.seen.vhost,
        now_us,
    )
