"""Connections that are not open yet, or were refused: their number is bounded, so that they cost others
nothing.

Not here: the time that one has (``handshake_timeout_s`` of the options, for TLS and again for AMQP).
Invariant: at most ``limit`` wait. One more ends the one that has waited longest: a client that logs in takes
milliseconds, one that only holds a socket grows old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("txmq.listen")

REPORT_S = 5.0


class UnauthenticatedLimit:
    """Of one server; used by its loop alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[object, Callable[[], object]] = {}  # in the order of their arrival
        self._ended = 0
        self._reported_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, who: object, end: Callable[[], object]) -> None:
        """``end``: closes the connection of ``who``."""
        self._waiting[who] = end
        if len(self._waiting) <= self._limit:
            return
        oldest = next(iter(self._waiting))
        self._waiting.pop(oldest)()
        self._ended += 1
        now = time.monotonic()
        if now - self._reported_at >= REPORT_S:
            logger.warning(
                "more than %d connections have not logged in (--unauthenticated-connections): the oldest are "
                "closed, %d so far",
                self._limit,
                self._ended,
            )
            self._reported_at = now

    def leave(self, who: object) -> None:
        """It is open, or its socket is closed. It may be repeated."""
        self._waiting.pop(who, None)
