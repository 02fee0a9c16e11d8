"""Answers that are given again: who asks for one path often gets what is a moment old.

RabbitMQ's numbers are five seconds old for everybody. Here they are those of now, but for who asks so often
that those who commit would pay for it.
Not here: whether a caller may have the answer, which the application asks each time.
Invariant: an answer is given for the key of its request alone, and no longer than KEPT_S; what this listener
has changed is seen at once; MOST answers of at most LARGEST_BYTES are held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from starlette.responses import Response

OFTEN = 10  # times in a second
KEPT_S = 0.2
MOST = 64
LARGEST_BYTES = 256 * 1024


@dataclass(slots=True)
class _Entry:
    """``times``: since ``began_s``; ``before``: in the second before. ``response``: until ``until_s``."""

    began_s: float
    times: int = 0
    before: int = 0
    until_s: float = 0.0
    response: Response | None = None

    def ask(self, now_s: float) -> None:
        passed = now_s - self.began_s
        if passed >= 1:
            self.began_s, self.before, self.times = now_s, self.times if passed < 2 else 0, 0
        self.times += 1


class AnswerCache:
    """Used in one thread. ``changes``: how often this listener has changed something."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_key: dict[Hashable, _Entry] = {}
        self.changes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: Hashable) -> Response | None:
        """Counts that it was asked for."""
        now = self._clock()
        entry = self._by_key.get(key)
        if entry is None:
            if len(self._by_key) >= MOST:
                self._by_key.clear()
            entry = self._by_key[key] = _Entry(now)
        entry.ask(now)
        return entry.response if now < entry.until_s else None

    def keep(self, key: Hashable, response: Response, changes: int, seconds: float = 0.0) -> None:
        """``changes``: when it was asked for. ``seconds``: for so long, also for those who ask seldom."""
        entry = self._by_key.get(key)
        if entry is None or changes != self.changes or response.status_code != 200:
            return
        if not seconds and max(entry.times, entry.before) <= OFTEN:
            return
        if len(response.body) <= LARGEST_BYTES or seconds:
            entry.response, entry.until_s = response, self._clock() + (seconds or KEPT_S)

    def changed(self) -> None:
        self.changes += 1
        for entry in self._by_key.values():
            entry.response, entry.until_s = None, 0.0
