"""The values of options: text -> value.

Invariant: a parser returns a value, or raises Wrong with what is allowed. No text here has the value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from broker_core.engine import EARLIEST
from connector.ledger_start import LedgerStart

_URL = re.compile(r"(txmqs?|kafka)://[^/\s]+(/\S*)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+)\s*(us|ms|s|m|min|h|d)?")
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?)b?")
_UNIT_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class InvalidOption(ValueError):
    """A value is not allowed; the text lists the allowed ones."""


def name(value: str) -> str:
    if not value.strip():
        raise InvalidOption("a text that is not empty")
    return value.strip()


def url(value: str) -> str:
    if not _URL.fullmatch(value.strip()):
        raise InvalidOption(
            "txmq://[user:password@]host:port[/vhost], txmqs:// for TLS, or kafka://host:port,host:port"
        )
    return value.strip()


def directory(value: str) -> str:
    if not value.strip():
        raise InvalidOption("the path of a data directory")
    if "://" in value:
        raise InvalidOption(
            "the path of a data directory on this machine; the address of a broker goes into option 'url'"
        )
    return os.path.abspath(os.path.expanduser(value.strip()))


def names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise InvalidOption("a queue, or several separated by commas")
    if len(set(names)) != len(names):
        raise InvalidOption("each queue once")
    return names


def boolean(value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise InvalidOption("true, false")
    return value.strip().lower() == "true"


def positive(value: str) -> int:
    if not re.fullmatch(r"\d{1,18}", value.strip()) or int(value) == 0:
        raise InvalidOption("a whole number above 0")
    return int(value)


def size_bytes(value: str) -> int:
    found = _SIZE.fullmatch(value.strip().lower())
    size_bytes = int(found[1]) * _UNIT_BYTES[found[2]] if found else 0
    if not 0 < size_bytes < 1 << 63:
        raise InvalidOption("a number of bytes above 0, such as 1048576, 512k, 10m, 1g")
    return size_bytes


def duration_s(value: str) -> float:
    found = _DURATION.fullmatch(value.strip().lower())
    if not found or int(found[1]) == 0:
        raise InvalidOption("a duration above 0, such as 500ms, 30s, 15m, 2h; without a unit, milliseconds")
    return int(found[1]) * _UNIT_S[found[2] or "ms"]


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.strip().lower() not in allowed:
            raise InvalidOption(", ".join(allowed))
        return value.strip().lower()

    return parse


def _object(value: str) -> dict[str, Any]:
    """The JSON object of a text; empty for another text."""
    try:
        found = json.loads(value)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _by_log(offsets: Mapping[str, object]) -> dict[str, Any]:
    """``{"orders": {"3": 12}}``, as Spark's Kafka source takes it, is ``{"orders/3": 12}``."""
    logs: dict[str, object] = {}
    for name, found in offsets.items():
        if isinstance(found, dict) and found:
            logs |= {f"{name}/{partition}": offset for partition, offset in found.items()}
        else:
            logs[name] = found
    return logs


def offsets(value: str) -> str | dict[str, int]:
    text = value.strip()
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    offsets = _by_log(_object(text))
    if not offsets or not all(type(offset) is int and offset >= EARLIEST for offset in offsets.values()):
        raise InvalidOption(
            'earliest, latest, or JSON from queue to offset such as {"orders": 1200} (-2 earliest, -1 latest)'
        )
    return offsets


def starting_offsets(value: str) -> str | dict[str, int] | LedgerStart:
    """As ``offsets``, or a batch of a ledger."""
    found = _object(value)
    if not isinstance(found.get("ledger"), str):
        return offsets(value)
    ledger, batch, app_id = found.pop("ledger"), found.pop("batch", None), found.pop("app", None)
    numbered = batch is None or (isinstance(batch, int) and not isinstance(batch, bool) and batch > 0)
    valid_app = app_id is None or (isinstance(app_id, str) and app_id)
    if found or not ledger or not numbered or not valid_app:
        raise InvalidOption('{"ledger": PATH, "batch": N, "app": APP}; batch and app may be left out')
    return LedgerStart(ledger, batch, app_id)


def timestamp_us(value: str) -> int:
    """Milliseconds since the epoch, or ISO 8601 (UTC without a zone), as microseconds since the epoch."""
    text = value.strip()
    if re.fullmatch(r"\d{1,15}", text):
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except ValueError:
        raise InvalidOption(
            "milliseconds since the epoch, or ISO 8601 such as 2013-01-01T05:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return int(moment.timestamp() * 1_000_000)
