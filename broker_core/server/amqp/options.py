"""The options of an AMQP server. Not here: those of the broker (``launcher.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from broker_core.message.message import MAX_BODY_BYTES
from broker_core.server.alarm import AlarmLimits


@dataclass(frozen=True, slots=True)
class AmqpOptions:
    """``heartbeat_s`` 0: no heartbeats."""

    channel_max: int = 2047
    frame_max: int = 131_072
    heartbeat_s: int = 60
    handshake_timeout_s: float = 10.0  # for TLS, and again until connection.open
    max_unauthenticated: int = 1000  # connections that have not logged in; one more ends the oldest
    close_timeout_s: float = 10.0  # for the answer to connection.close, and for the last bytes to leave
    max_body_bytes: int = MAX_BODY_BYTES
    max_pending_bytes: int = 2 * MAX_BODY_BYTES  # content in assembly on one connection
    alarms: AlarmLimits = field(default_factory=AlarmLimits)
    cluster_name: str = "txmq"
