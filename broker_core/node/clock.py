"""The broker's clock: the time of day, except that it never stops or goes back when that is set back.

Deadlines and commit times are times of day, because they outlive the process. If the time of day is more than
a second behind the latest result (or the latest commit before a restart), the clock runs from there at half
speed until the time of day has caught up. Messages then expire late, after at most twice their time to live.
Not here: intervals in the process (ticks, timeouts, heartbeats), which use ``time.monotonic``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TOLERANCE_US = 1_000_000


def now_us() -> int:
    """Returns microseconds since the epoch."""
    return time.time_ns() // 1000


class SteadyClock:
    """``wall`` returns microseconds since the epoch. Thread-safe: results of two threads may be slightly out
    of order.
    """

    def __init__(
        self,
        wall: Callable[[], int] = now_us,
        *,
        monotonic: Callable[[], int] = time.monotonic_ns,
        latest_us: int = 0,
    ) -> None:
        """``latest_us``: the earliest time that the clock returns."""
        self._wall = wall
        self._monotonic = monotonic
        self._latest_us = latest_us
        # a result and its monotonic time, while the time of day is behind
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
