"""What a message becomes when it is dead-lettered: its new headers, and whether it would go round in a cycle.

Not here: when (``broker.py``). ``x-death`` and ``x-first-death-*`` are RabbitMQ's; ``x-original-transaction`` is the commit sequence
number of the transaction that first published the message, which the copy keeps while it belongs to no transaction of its own.
Invariant: a dead-lettered copy has no expiration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from broker_core.broker.change import InboxRow
from broker_core.broker.exchange import Queues
from broker_core.message import Message
from broker_core.properties import Long, Properties, Timestamp, rewrite

Reason = Literal["rejected", "expired", "maxlen", "delivery_limit"]


def dead_letter_copy(
    row: InboxRow, queue: str, reason: Reason, exchange: str, routing_key: str | None, sequence: int, now_us: int
) -> Message:
    """The message as it goes to ``exchange``; ``routing_key`` None keeps its own, and those of its header CC."""
    properties = Properties.decode(row.properties)
    headers = properties.headers
    copies = headers.get("CC")
    changed: dict[str, Any] = {
        "x-death": _deaths_after(properties, row, queue, reason, now_us),
        "x-delivery-count": None,
        "x-first-death-queue": headers.get("x-first-death-queue", queue),
        "x-first-death-reason": headers.get("x-first-death-reason", reason),
        "x-first-death-exchange": headers.get("x-first-death-exchange", row.exchange),
    }
    if routing_key is not None and copies is not None:
        changed["CC"] = None
    if "x-original-transaction" not in headers:
        changed["x-original-transaction"] = sequence
    encoded = rewrite(row.properties, changed, without=("expiration",))
    return Message(row.body, row.routing_key if routing_key is None else routing_key, exchange, encoded)


def _deaths_after(properties: Properties, row: InboxRow, queue: str, reason: Reason, now_us: int) -> list[dict[str, Any]]:
    """``x-death``, newest first. A second death of the same queue and reason counts up what the first one says."""
    deaths = _deaths(properties.headers)
    death = _death(deaths, queue, reason)
    rest = [{**entry, "count": Long(_count(entry))} for entry in deaths if entry is not death]
    if death is not None:
        return [{**death, "count": Long(_count(death) + 1)}, *rest]
    copies = properties.headers.get("CC")
    entry: dict[str, Any] = {
        "count": Long(1),
        "reason": reason,
        "queue": queue,
        "time": Timestamp(now_us // 1_000_000),
        "exchange": row.exchange,
        "routing-keys": [row.routing_key, *(copies if isinstance(copies, list) else ())],
    }
    if properties.expiration is not None:
        entry["original-expiration"] = properties.expiration
    return [entry, *rest]


def _count(death: Mapping[str, Any]) -> int:
    count = death.get("count")
    return count if isinstance(count, int) else 0


def without_cycles(queues: Queues, message: Message, reason: Reason) -> Queues:
    """The queues that the copy may go to: not one where it died before, unless it was rejected since then (or just now)."""
    if reason == "rejected":
        return queues
    deaths = _deaths(Properties.decode(message.properties).headers)
    return tuple(queue for queue in queues if not _is_cycle(queue.name, deaths))


def _is_cycle(queue: str, deaths: list[dict[str, Any]]) -> bool:
    """Newest death first: whether it went from its death in ``queue`` to here without anybody's doing."""
    for death in deaths:
        if death.get("reason") == "rejected":
            return False
        if death.get("queue") == queue:
            return True
    return False


def _deaths(headers: Mapping[str, Any]) -> list[dict[str, Any]]:
    deaths = headers.get("x-death")
    return [death for death in deaths if isinstance(death, dict)] if isinstance(deaths, list) else []


def _death(deaths: list[dict[str, Any]], queue: str, reason: Reason) -> dict[str, Any] | None:
    for death in deaths:
        if death.get("queue") == queue and death.get("reason") == reason:
            return death
    return None
