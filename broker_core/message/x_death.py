"""``x-death``: the header in which RabbitMQ says how often, where and why a message was dead-lettered.

Not here: the whole copy of a message that the broker dead-letters (``broker/message/dead_letter.py``), and
the messages that a Spark app rejects (``connector/reject/dead_letters.py``).
Invariant: the newest death is in front, and one queue and reason have one entry, which counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from broker_core.message.field_table import Long, Timestamp

Deaths = list[dict[str, object]]

# the headers that a death depends on
READ = ("CC", "x-death", "x-first-death-queue", "x-first-death-reason", "x-first-death-exchange")
DAMAGED = "x-damaged-properties"  # properties that do not decode, byte for byte
_LONGEST = (1 << 63) - 1


class Death(NamedTuple):
    """One death of a message that was published to ``exchange`` with ``routing_key``."""

    queue: str
    reason: str
    time: Timestamp
    exchange: str
    routing_key: str
    expiration: str | None = None  # which the copy does not have


def headers_after(
    headers: Mapping[str, object], death: Death, *, keeps_key: bool
) -> tuple[dict[str, object], list[str], Deaths]:
    """Returns the changed headers (None: removed), the additional routing keys and the deaths, newest first.

    ``keeps_key``: the copy has the routing keys of the message, also those of its header CC.
    """
    copies = [key for key in _list(headers.get("CC")) if isinstance(key, str)]
    deaths = _deaths_after(headers, death, copies)
    changed: dict[str, object] = {"x-death": deaths, "x-delivery-count": None}
    first = (("queue", death.queue), ("reason", death.reason), ("exchange", death.exchange))
    for name, value in first:
        if f"x-first-death-{name}" not in headers:
            changed[f"x-first-death-{name}"] = value
    if not keeps_key:
        changed["CC"] = None
        copies = []
    return changed, copies, deaths


def _deaths_after(headers: Mapping[str, object], death: Death, copies: list[str]) -> Deaths:
    """A repeated death with the same queue and reason increments the existing entry."""
    deaths = [each for each in _list(headers.get("x-death")) if isinstance(each, dict)]
    before = next(
        (each for each in deaths if each.get("queue") == death.queue and each.get("reason") == death.reason),
        None,
    )
    rest = [{**each, "count": Long(_count(each))} for each in deaths if each is not before]
    if before is not None:
        return [{**before, "count": Long(min(_count(before) + 1, _LONGEST))}, *rest]
    entry: dict[str, object] = {
        "count": Long(1),
        "reason": death.reason,
        "queue": death.queue,
        "time": death.time,
        "exchange": death.exchange,
        "routing-keys": [death.routing_key, *copies],
    }
    if death.expiration is not None:
        entry["original-expiration"] = death.expiration
    return [entry, *rest]


def count_of(deaths: object, queue: str, reason: str) -> int:
    """Returns how often a message died so, by the value of its header."""
    found = [each for each in _list(deaths) if isinstance(each, dict)]
    return sum(_count(each) for each in found if (each.get("queue"), each.get("reason")) == (queue, reason))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _count(death: Mapping[str, object]) -> int:
    count = death.get("count")
    return min(max(count, -_LONGEST), _LONGEST) if isinstance(count, int) else 0
