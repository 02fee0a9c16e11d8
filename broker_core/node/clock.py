"""The broker's clock: the time of day, but it does not stand still or go back when somebody sets that back.

Deadlines and commit times are times of day, since they outlive the process. Where the time of day is more
than a second behind the latest answer (or behind the latest commit of before a restart), the clock goes on
from there at half speed, until the time of day has caught up: messages expire late then, after at most twice
their time to live, and never not at all. Not here: intervals within the process (ticks, timeouts,
heartbeats), which are measured with ``time.monotonic``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TOLERANCE_US = 1_000_000


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


class SteadyClock:
    """``wall`` gives microseconds since the epoch. Thread-safe: two threads may get answers a moment apart in
    either order.
    """

    def __init__(
        self,
        wall: Callable[[], int] = now_us,
        *,
        monotonic: Callable[[], int] = time.monotonic_ns,
        latest_us: int = 0,
    ) -> None:
        """``latest_us``: the clock starts there, or later."""
        self._wall = wall
        self._monotonic = monotonic
        self._latest_us = latest_us
        # an answer and its monotonic time, while the time of day is behind
        self._behind: tuple[int, int] | None = None

    def __call__(self) -> int:
        wall = self._wall()
        behind = self._behind
        if behind is None:
            latest_us = self._latest_us
            if wall >= latest_us:
                self._latest_us = wall
                return wall
            if wall >= latest_us - _TOLERANCE_US:
                return wall
            behind = self._behind = (self._latest_us, self._monotonic())
        base_us, since_ns = behind
        steady = base_us + (self._monotonic() - since_ns) // 2000
        if wall >= steady:
            self._behind = None
            self._latest_us = wall
            return wall
        return steady
