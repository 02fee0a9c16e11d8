"""The times of one connection: limits of the handshake and of closing, and heartbeats (specification 4.2.7).

Not here: a clock. All times are in seconds, of a clock of the caller that never goes back.
"""

from __future__ import annotations


class Timers:
    """``limit``: when the step that is under way has to be over, None for no limit. ``heartbeat_s`` 0: no
    heartbeats.

    ``listens`` False: the client is not read, so its silence does not count.
    """

    __slots__ = ("heard_at", "heartbeat_s", "limit", "said_at")

    def __init__(self, now: float, limit_s: float) -> None:
        self.heard_at = self.said_at = now
        self.heartbeat_s = 0
        self.limit: float | None = now + limit_s

    def next(self, *, listens: bool) -> float | None:
        """The next time at which there is something to do."""
        times = [] if self.limit is None else [self.limit]
        if self.heartbeat_s:
            times.append(min(self._send_at, self._miss_at) if listens else self._send_at)
        return min(times, default=None)

    def expired(self, now: float, *, listens: bool) -> str:
        """Why the socket is to be closed; "" if it is not."""
        if self.limit is not None and now >= self.limit:
            return "it took too long to open or to close"
        if self.heartbeat_s and listens and now >= self._miss_at:
            return f"missed heartbeats from client, timeout: {self.heartbeat_s}s"
        return ""

    def heartbeat_due(self, now: float) -> bool:
        return bool(self.heartbeat_s) and now >= self._send_at

    @property
    def _send_at(self) -> float:
        """If nothing else is sent, a heartbeat is sent twice in the negotiated interval."""
        return self.said_at + self.heartbeat_s / 2

    @property
    def _miss_at(self) -> float:
        """A client that is silent for two intervals is gone."""
        return self.heard_at + 2 * self.heartbeat_s
