"""Lines of the audit log that come too often: they are counted instead.

Pure: the time goes in. Not here: the file (``audit.py``).

A refusal is like another one of the same user from the same address that asked for the same; the first of an
interval is written at once. Everything else is written until a user has filled LINES of an interval.
Invariant: memory, and the lines of an interval, are bounded for each user, and for all who have not proved
who they are together. What an administrator changes is always written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

INTERVAL_S = 60.0
LINES = 1000  # of what a user does, in an interval
REFUSALS = 50  # kinds of them, of a user in an interval; of all logins that are refused together
GROUPS = 1000  # users in an interval, beyond which they share one
ALWAYS = "admin."
OTHERS = "*"  # in a line that counts those of several users or addresses
_LIKE = ("event", "user", "address", "listener", "vhost", "answer", "asked")

Line = Mapping[str, object]


def is_refusal(line: Line) -> bool:
    return line["event"] == "refused" or line.get("answer") == "refused"


class RepeatCount(NamedTuple):
    """``line``: the last one. ``more``: how many were not written, since ``since``."""

    line: Line
    more: int
    since: float


class Repeats:
    """One thread at a time."""

    def __init__(self) -> None:
        self._written: dict[tuple[str, str], int] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._counted: dict[tuple[object, ...], RepeatCount] = {}
        self._since = 0.0

    @property
    def pending(self) -> bool:
        return bool(self._counted)

    def due(self, now: float) -> bool:
        return now - self._since >= INTERVAL_S

    def writes(self, line: Line, now: float) -> bool:
        """Whether ``line`` is written, or only counted. What is ``due`` is taken first."""
        if not self._written:
            self._since = now
        refusal = is_refusal(line)
        if not refusal and str(line["event"]).startswith(ALWAYS):
            return True
        kind = str(line["event"]) if refusal else ""
        user = OTHERS if kind == "login" else str(line["user"])
        if (kind, user) not in self._written and len(self._written) >= GROUPS:
            user = OTHERS
        key = tuple(line.get(name) for name in _LIKE)
        if refusal and key in self._seen:
            return self._count(key, line)
        written = self._written.get((kind, user), 0)
        if written >= (REFUSALS if refusal else LINES):
            shared = {"event": line["event"], "user": user, "address": OTHERS}
            shared |= {name: line[name] for name in ("listener", "answer") if name in line}
            return self._count(tuple(shared.get(name) for name in _LIKE), shared)
        self._written[kind, user] = written + 1
        if refusal:
            self._seen.add(key)
        return True

    def _count(self, key: tuple[object, ...], line: Line) -> bool:
        more = self._counted[key].more if key in self._counted else 0
        self._counted[key] = RepeatCount(line, more + 1, self._since)
        return False

    def reset(self) -> list[RepeatCount]:
        """What was counted; a new interval begins."""
        found = list(self._counted.values())
        self._written.clear()
        self._seen.clear()
        self._counted.clear()
        return found
