"""What the server offers before a connection is open, and the login (specification 2.2.4).

Not here: the order of the steps (``amqp/v0_9_1/states.py``), the limits (``amqp/v0_9_1/negotiation.py``).
Invariant: a refused client never learns which of user, password or address was wrong; only the log has it.
"""

from __future__ import annotations

import hmac
import logging
import platform

from broker_core.amqp.v0_9_1 import sasl
from broker_core.amqp.v0_9_1.methods import ConnectionStart, ConnectionStartOk
from broker_core.amqp.v0_9_1.negotiation import Offer
from broker_core.errors import CommandInvalid, ConnectionAccessRefused
from broker_core.server.amqp.options import AmqpOptions

logger = logging.getLogger("txmq.amqp")

VERSION = "3.12.0"  # clients infer the features of RabbitMQ from it
CAPABILITIES = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "consumer_priorities": True,
    "authentication_failure_close": True,
    "per_consumer_qos": True,
    "direct_reply_to": False,
}
_MECHANISMS = {"PLAIN": sasl.plain, "AMQPLAIN": sasl.amqplain}


def offer(options: AmqpOptions) -> Offer:
    """What each client is offered."""
    return Offer(
        start=_start(options),
        channel_max=options.channel_max,
        frame_max=options.frame_max,
        heartbeat_s=options.heartbeat_s,
        handshake_timeout_s=options.handshake_timeout_s,
        close_timeout_s=options.close_timeout_s,
        max_body_bytes=options.max_body_bytes,
        max_pending_bytes=options.max_pending_bytes,
    )


def _start(options: AmqpOptions) -> ConnectionStart:
    """The first method that a client gets."""
    properties = {
        "product": "txmq",
        "version": VERSION,
        "platform": f"Python {platform.python_version()}",
        "copyright": "none",
        "information": "AMQP 0-9-1 as RabbitMQ speaks it",
        "cluster_name": options.cluster_name,
        "capabilities": CAPABILITIES,
    }
    return ConnectionStart(0, 9, properties, " ".join(_MECHANISMS).encode(), b"en_US")


def login(method: ConnectionStartOk, options: AmqpOptions, connection: str, loopback: bool) -> str:
    """The user. ``loopback``: the client is on this host. Raises CommandInvalid, MethodSyntaxError,
    ConnectionAccessRefused.
    """
    read = _MECHANISMS.get(method.mechanism)
    if read is None:
        raise CommandInvalid(
            f"unknown authentication mechanism '{method.mechanism}'", f"use {' or '.join(_MECHANISMS)}"
        )
    user, password = read(method.response)
    refusal = _refusal(user, password, options, loopback)
    if refusal:
        logger.warning("connection %s: login of %r is refused: %s", connection, user, refusal)
        raise ConnectionAccessRefused(
            f"Login was refused using authentication mechanism {method.mechanism}. For details see the "
            "broker logfile."
        )
    return user


def _refusal(user: str, password: str, options: AmqpOptions, loopback: bool) -> str:
    """Why the login is refused; "" if it is not."""
    known = options.users.get(user)
    same = hmac.compare_digest((known or "").encode(), password.encode(errors="surrogateescape"))
    if known is None or not same:
        return "unknown user or wrong password"
    if user in options.loopback_users and not loopback:
        return "this user can only connect from the host of the broker"
    return ""
