"""The port of an operator: queues, exchanges and bindings, and messages by hand. The command line calls it.

Not here: what an operator asks of a pipeline (``engine.py``), and what only the embedded broker has (prepared
transactions, channels: ``client/broker.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One row of ``txmq queues``."""

    name: str
    messages: int  # committed and not settled
    unacknowledged: int  # of these, held by channels
    next_offset: int  # over all logs, their sum
    consumers: int
    owner: str  # app_id, "" for none
    durable: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)
    logs: int = 1


class Admin(Protocol):
    def queues(self) -> list[QueueInfo]:
        """Returns every queue, by name."""

    def declare_queue(
        self, name: str, *, durable: bool = True, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Makes a queue. Raises PreconditionFailed for arguments that the engine does not have, or that the
        existing queue does not have.
        """

    def delete_queue(self, name: str) -> None:
        """Deletes a queue, if it exists, with its messages. Raises ResourceLocked."""

    def declare_exchange(self, name: str, type: str) -> None:
        """Makes an exchange: direct, fanout, topic or headers."""

    def delete_exchange(self, name: str) -> None:
        """Deletes an exchange, if it exists, with its bindings."""

    def bind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Binds a queue to an exchange. Raises QueueNotFound, ExchangeNotFound."""

    def unbind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Removes a binding, if it exists."""

    def publish(
        self, bodies: Iterable[bytes], exchange: str = "", routing_key: str = "", properties: bytes = b""
    ) -> int:
        """Publishes one message for each body, all in one transaction, and returns their number. Raises
        Unroutable if some reach no queue.
        """
