"""What a virtual host refuses, with RabbitMQ's codes and texts. Not here: when (``exchanges.py``), and whose
a queue is (``broker/topology/ownership.py``).
"""

from __future__ import annotations

from collections.abc import Collection

from broker_core.core.errors import (
    AccessRefused,
    ExchangeNotFound,
    NotAllowed,
    PreconditionFailed,
    QueueNotFound,
)
from broker_core.routing.consistent_hash import DESTINATIONS
from broker_core.routing.exchange import Exchange, Q, destinations

SOURCES = 4_096  # exchanges that lead to one queue or exchange: deleting it takes a step for each


def no_vhost(name: str) -> NotAllowed:
    return NotAllowed(
        f"vhost {name} not found", "`txmq vhost list` shows those that exist, and `txmq vhost add` makes one"
    )


def no_queue(name: str, vhost: str) -> QueueNotFound:
    return QueueNotFound(f"no queue '{name}' in vhost '{vhost}'", "declare it first")


def no_exchange(name: str, vhost: str) -> ExchangeNotFound:
    return ExchangeNotFound(f"no exchange '{name}' in vhost '{vhost}'", "declare it first")


def check_not_default(*exchanges: str) -> None:
    if "" in exchanges:
        raise AccessRefused("operation not permitted on the default exchange")


def system_exchange(name: str, vhost: str) -> AccessRefused:
    return AccessRefused(
        f"deletion of system exchange '{name}' in vhost '{vhost}' not allowed", "it is part of the broker"
    )


def check_sources(sources: Collection[object], target: str) -> None:
    """Raises PreconditionFailed: to delete ``target`` would take too long (docs/bounds.md)."""
    if len(sources) >= SOURCES:
        raise PreconditionFailed(
            f"{target} has bindings or an alternate from {len(sources)} exchanges, which is the limit: "
            "bind it to fewer exchanges"
        )


def check_destinations(exchange: Exchange[Q], new: Q | Exchange[Q], vhost: str) -> None:
    """Raises PreconditionFailed: each message would take too long (docs/bounds.md)."""
    count = destinations(exchange)
    if exchange.chooses_one and count >= DESTINATIONS and not exchange.bytes_of(new):
        raise PreconditionFailed(
            f"exchange '{exchange.name}' in vhost '{vhost}' divides its keys among {count} destinations, "
            "which is the limit: bind other exchanges of its type to it, and the queues to these"
        )


def in_use(name: str, vhost: str, bindings: int) -> PreconditionFailed:
    return PreconditionFailed(f"exchange '{name}' in vhost '{vhost}' in use", f"it has {bindings} bindings")
