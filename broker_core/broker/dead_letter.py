"""What a message becomes when it is dead-lettered: its new headers, and whether it would go round in a cycle.

Not here: when (``broker.py``). ``x-death`` and ``x-first-death-*`` are RabbitMQ's; ``x-original-transaction`` is the commit sequence
number of the transaction that first published the message, which the copy keeps while it belongs to no transaction of its own.
Invariant: a dead-lettered copy has no expiration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from broker_core.broker.change import InboxRow
from broker_core.broker.exchange import Queues
from broker_core.message import Message
from broker_core.properties import Properties, Timestamp

Reason = Literal["rejected", "expired", "maxlen"]


def dead_letter_copy(
    row: InboxRow, queue: str, reason: Reason, exchange: str, routing_key: str | None, sequence: int, now_us: int
) -> Message:
    """The message as it goes to ``exchange``; ``routing_key`` None keeps its own."""
    properties = Properties.decode(row.properties)
    headers = dict(properties.headers)
    death = _death(headers, queue, reason)
    rest = [entry for entry in _deaths(headers) if entry is not death]
    entry: dict[str, Any] = {
        "queue": queue,
        "reason": reason,
        "count": int(death.get("count", 0)) + 1 if death else 1,
        "exchange": row.exchange,
        "routing-keys": [row.routing_key],
        "time": Timestamp(now_us // 1_000_000),
    }
    if properties.expiration is not None:
        entry["original-expiration"] = properties.expiration
    headers["x-death"] = [entry, *rest]
    headers.setdefault("x-first-death-queue", queue)
    headers.setdefault("x-first-death-reason", reason)
    headers.setdefault("x-first-death-exchange", row.exchange)
    headers.setdefault("x-original-transaction", sequence)
    changed = replace(properties, headers=headers, expiration=None)
    return Message(row.body, row.routing_key if routing_key is None else routing_key, exchange, changed.encode())


def without_cycles(queues: Queues, message: Message) -> Queues:
    """The queues that the copy may go to: not one where it died before, unless it was rejected somewhere on the way."""
    deaths = _deaths(Properties.decode(message.properties).headers)
    if any(death.get("reason") == "rejected" for death in deaths):
        return queues
    been = {death.get("queue") for death in deaths}
    return tuple(queue for queue in queues if queue.name not in been)


def _deaths(headers: Mapping[str, Any]) -> list[dict[str, Any]]:
    deaths = headers.get("x-death")
    return [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []


def _death(headers: Mapping[str, Any], queue: str, reason: Reason) -> dict[str, Any] | None:
    for death in _deaths(headers):
        if death.get("queue") == queue and death.get("reason") == reason:
            return death
    return None
