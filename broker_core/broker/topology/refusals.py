"""What a virtual host refuses, with RabbitMQ's codes and texts. Not here: when (``topology.py``)."""

from __future__ import annotations

from collections.abc import Collection

from broker_core.broker.queue import REPLIES, Queue
from broker_core.core.errors import (
    AccessRefused,
    ExchangeNotFound,
    NotAllowed,
    PreconditionFailed,
    QueueNotFound,
    ResourceLocked,
)

SOURCES = 4_096  # exchanges that lead to one queue or exchange: deleting it takes a step for each
VHOST_BINDING_BYTES = 512 * 1024 * 1024  # about, of all bindings of a virtual host


def no_vhost(name: str) -> NotAllowed:
    return NotAllowed(
        f"vhost {name} not found", "txmq vhosts list shows those that exist, and txmq vhosts add makes one"
    )


def no_queue(name: str, vhost: str) -> QueueNotFound:
    return QueueNotFound(f"no queue '{name}' in vhost '{vhost}'", "declare it first")


def no_exchange(name: str, vhost: str) -> ExchangeNotFound:
    return ExchangeNotFound(f"no exchange '{name}' in vhost '{vhost}'", "declare it first")


def default_exchange() -> AccessRefused:
    return AccessRefused("operation not permitted on the default exchange")


def system_exchange(name: str, vhost: str) -> AccessRefused:
    return AccessRefused(
        f"deletion of system exchange '{name}' in vhost '{vhost}' not allowed", "it is part of the broker"
    )


def check_room(queues: Collection[Queue], name: str, vhost: str, limit: int) -> None:
    """Raises PreconditionFailed if ``queues`` of a virtual host are as many as its limit; -1: none."""
    if limit < 0 or limit > len(queues) or name.startswith(REPLIES):
        return
    if sum(not queue.replies for queue in queues) >= limit:
        raise PreconditionFailed(
            f"cannot declare queue '{name}': queue limit in vhost '{vhost}' ({limit}) is reached",
            "delete a queue, or raise the limit with txmq vhosts limit",
        )


def check_bindings(size_bytes: int, sources: Collection[object], target: str, vhost: str) -> None:
    """Before a binding to ``target``, which ``sources`` lead to. Raises PreconditionFailed."""
    if size_bytes >= VHOST_BINDING_BYTES:
        raise PreconditionFailed(
            f"cannot bind {target}: the bindings of vhost '{vhost}' take {size_bytes} bytes, the limit is "
            f"{VHOST_BINDING_BYTES}: "
            "remove bindings that are not needed",
        )
    check_sources(sources, target)


def check_sources(sources: Collection[object], target: str) -> None:
    """Raises PreconditionFailed: to delete ``target`` would take too long (docs/bounds.md)."""
    if len(sources) >= SOURCES:
        raise PreconditionFailed(
            f"{target} has bindings or an alternate from {len(sources)} exchanges, which is the limit: "
            "bind it to fewer exchanges",
        )


def owned(queue: Queue) -> ResourceLocked:
    return ResourceLocked(
        f"queue '{queue.name}' belongs to app '{queue.owner}': "
        f"only its stream consumes it; `txmq release {queue.owner} {queue.name}` takes it from a pipeline "
        "that will not come back",
    )


def locked(queue: Queue) -> ResourceLocked:
    return ResourceLocked(
        f"cannot obtain exclusive access to locked {queue.full_name}. It could be originally declared on "
        "another connection or the exclusive property value does not match that of the original declaration."
    )


def check_exclusive(queue: Queue, connection: object) -> None:
    """Raises ResourceLocked."""
    if queue.exclusive and queue.connection is not connection:
        raise locked(queue)
