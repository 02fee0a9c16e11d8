"""Who has a queue alone: from its first claim a Spark app owns it (S6) and no channel consumes it; or it is
exclusive to a connection.

Codes and texts are RabbitMQ's.
"""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.core.change import Change
from broker_core.core.errors import PreconditionFailed, ResourceLocked


class QueueHeld(ResourceLocked):
    """Channels or prepared transactions use ``queue``; who they are, only the servers know."""

    def __init__(self, queue: Queue, app_id: str, why: str) -> None:
        self.queue = queue
        super().__init__(
            f"queue '{queue.name}' cannot be owned by app '{app_id}': {why}",
            f"let them end, or `txmq connection close` them (`txmq connection channels --queue {queue.name}` "
            f"and `txmq tx list --queue {queue.name}` name them all), or give the stream a queue of its own",
        )


def require_ownable(queue: Queue, app_id: str) -> None:
    """Raises QueueHeld if channels use the queue or hold its messages, ResourceLocked if another app owns
    it.
    """
    if queue.owner == app_id:
        return
    if queue.owner:
        raise ResourceLocked(
            f"queue '{queue.name}' belongs to app '{queue.owner}', not to '{app_id}'; "
            f"`txmq app release {queue.owner} {queue.name}` takes it from an app that has finished and will "
            "not come back"
        )
    if queue.consumers:
        raise QueueHeld(queue, app_id, f"{len(queue.consumers)} consumers are subscribed to it")
    if queue.ready.unacked:
        text = f"channels or prepared transactions hold {len(queue.ready.unacked)} of its messages"
        raise QueueHeld(queue, app_id, text)
    if not queue.durable:
        raise PreconditionFailed(
            f"queue '{queue.name}' is not durable: a stream needs a queue that survives the broker; declare "
            "it durable"
        )
    if queue.exclusive:
        raise ResourceLocked(
            f"queue '{queue.name}' is exclusive to a connection: app '{app_id}' cannot own it"
        )


def own(change: Change, queue: Queue, app_id: str, start: int = 0) -> None:
    """Makes the app the owner from its first claim on; it skips entries below ``start``. Raises like
    ``require_ownable``.
    """
    if queue.owner != app_id:
        require_ownable(queue, app_id)
        queue.progress.own(app_id, start)
        queue.record(change)


def release(change: Change, queue: Queue) -> None:
    """Removes the owner of the queue. The caller decides whether this is allowed."""
    queue.release()
    queue.record(change)


def owned(queue: Queue) -> ResourceLocked:
    return ResourceLocked(
        f"queue '{queue.name}' belongs to app '{queue.owner}': "
        f"only its stream consumes it; `txmq app release {queue.owner} {queue.name}` takes it from an app "
        "that will not come back"
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
