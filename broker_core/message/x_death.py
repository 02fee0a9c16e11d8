"""``x-death``: the header in which RabbitMQ says how often, where and why a message was dead-lettered.

Not here: the whole copy of a message that the broker dead-letters (``broker/message/dead_letter.py``), and
the messages that a Spark app rejects (``connector/reject/dead_letters.py``).
Invariant: the newest death is in front, and one queue and reason have one entry, which counts.
"""

from __future__ import annotations

from collections import Counter
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
    if "x-death" not in headers:  # the first death; what a client wrote is not one
        first = (("queue", death.queue), ("reason", death.reason), ("exchange", death.exchange))
        changed |= {f"x-first-death-{name}": value for name, value in first}
    if not keeps_key:
        changed["CC"] = None
        copies = []
    return changed, copies, deaths


def _deaths_after(headers: Mapping[str, object], death: Death, copies: list[str]) -> Deaths:
    """A repeated death with the same queue and reason increments the existing entry."""
    deaths = _grouped(headers.get("x-death"))
    before = deaths.pop(_key({"queue": death.queue, "reason": death.reason}), None)
    if before is not None:
        return [{**before, "count": Long(min(_count(before) + 1, _LONGEST))}, *deaths.values()]
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
    return [entry, *deaths.values()]


def count_of(deaths: object, queue: str, reason: str) -> int:
    """Returns how often a message died so, by the value of its header."""
    return _count(_grouped(deaths).get(_key({"queue": queue, "reason": reason}), {}))


def _grouped(value: object) -> dict[tuple[str, str], dict[str, object]]:
    """Returns entries that a client may have written, one for each queue and reason, as RabbitMQ reads them.
    One that is no table is left out: RabbitMQ's queue crashes.
    """
    deaths = [each for each in _list(value) if isinstance(each, dict)]
    rows = Counter(map(_key, deaths))
    found: dict[tuple[str, str], dict[str, object]] = {}
    for each in deaths:
        if (key := _key(each)) in found:
            continue
        if type(each.get("count")) is int:
            each = {**each, "count": Long(_count(each))}  # reading it has lost its type
        elif "count" not in each and len(deaths) > 1:  # a RabbitMQ before 3.6 wrote an entry for each death
            each = {**each, "count": Long(rows[key])}
        found[key] = each
    return found


def _key(death: Mapping[str, object]) -> tuple[str, str]:
    """As text, because a value that a client wrote may be a list, which has no hash."""
    return repr(death.get("queue")), repr(death.get("reason"))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _count(death: Mapping[str, object]) -> int:
    count = death.get("count")
    return min(max(count, -_LONGEST), _LONGEST) if isinstance(count, int) and count is not True else 0
