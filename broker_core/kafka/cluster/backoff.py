"""How long a client asks again, and how long it waits between.

Invariant: ``reconnect_s`` after the last progress it gives up, with the error that it saw last, but never
after one try: a node that is silent may have taken all the time, and another node may answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker_core import errors

# Not the generator of the program, which may be seeded; and two processes that fork have different pauses.
_random = random.SystemRandom()
PAUSES_S = (0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Time:
    """The clock and the sleep of a client; a test brings its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Backoff:
    def __init__(self, reconnect_s: float, time: Time) -> None:
        self._reconnect_s = reconnect_s
        self._time = time
        self._deadline = time.now() + reconnect_s
        self._pauses = 0

    def renew(self) -> None:
        """After progress."""
        self._deadline = self._time.now() + self._reconnect_s
        self._pauses = 0

    def wait(self, error: errors.TxmqError) -> None:
        """Waits a little because of ``error``; raises it when the time is over. Pauses differ, so that
        clients do not ask in step.
        """
        left_s = self._deadline - self._time.now()
        if left_s <= 0 and self._pauses:
            raise error
        pause_s = PAUSES_S[min(self._pauses, len(PAUSES_S) - 1)] * _random.uniform(0.5, 1.5)
        self._pauses += 1
        self._time.sleep(min(pause_s, max(0.0, left_s)))
