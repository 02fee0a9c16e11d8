"""How long a client tries again, and how long it waits between.

Not here: which failures pass, and what is tried.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Not the generator of the program, which may be seeded; and two processes that fork have different pauses.
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Time:
    """The clock and the sleep of a client; a test brings its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Backoff:
    """Gives up ``limit_s`` after the first failure since the last progress.

    ``from_start``: after the last progress itself, but never after one try. A server that is silent may have
    taken all the time, and another one may answer. ``pauses_s``: the waits, of which the last one repeats.
    ``spread``: the part by which a wait may be shorter or longer, so that clients do not ask in step.
    """

    def __init__(
        self,
        limit_s: float,
        time: Time,
        pauses_s: Sequence[float],
        *,
        spread: float = 0.0,
        from_start: bool = False,
    ) -> None:
        self._limit_s = limit_s
        self._time = time
        self._pauses_s = pauses_s
        self._spread = spread
        self._from_start = from_start
        self.renew()

    def renew(self) -> None:
        """After progress."""
        self._deadline = self._time.now() + self._limit_s if self._from_start else None
        self._pauses = 0

    def failed(self) -> bool:
        """Counts a failure and waits a little. Returns False when the time is over."""
        now = self._time.now()
        if self._deadline is None:
            self._deadline = now + self._limit_s
        left_s = self._deadline - now
        if left_s <= 0 and (self._pauses or not self._from_start):
            return False
        pause_s = self._pauses_s[min(self._pauses, len(self._pauses_s) - 1)]
        self._pauses += 1
        pause_s *= _random.uniform(1 - self._spread, 1 + self._spread)
        self._time.sleep(min(pause_s, max(0.0, left_s)))
        return True

    def wait(self, error: Exception) -> None:
        """As :meth:`failed`, but raises ``error`` when the time is over."""
        if not self.failed():
            raise error
