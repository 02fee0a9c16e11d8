"""A handler that limits how fast each connection publishes: a token bucket for messages and one for bytes of
bodies.

Not here: limits over several connections.
Invariant: in any time t a connection publishes at most ``rate * (t + burst_s)`` and one message more. A
message over the limit waits or is refused; it is never lost silently.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from broker_core.amqp.v0_9_1.events import Command
from broker_core.amqp.v0_9_1.methods import BasicPublish
from broker_core.errors import OptionError, PreconditionFailed
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.session import Session


class _Bucket:
    """``level``: tokens left; below 0: debt. It fills with ``rate`` tokens a second up to ``size``."""

    __slots__ = ("_at", "_level", "_rate", "_size")

    def __init__(self, rate: float, burst_s: float, now: float) -> None:
        self._rate = rate
        self._size = self._level = rate * burst_s
        self._at = now

    def missing_s(self, tokens: int, now: float) -> float:
        """Seconds until it has ``tokens``, or is full."""
        self._level = min(self._size, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (min(tokens, self._size) - self._level) / self._rate)

    def take(self, tokens: int) -> float:
        """Take ``tokens``, also if there are too few; the seconds until the debt is paid."""
        self._level -= tokens
        return max(0.0, -self._level / self._rate)


class PublishRateLimit(Handler):
    """``messages_per_s`` and ``bytes_per_s`` (of bodies) of each connection; None: no limit.

    ``burst_s``: the longest time for which a silent connection saves up tokens. ``refuse`` False: a
    connection over its limit is not read until it is below; True: its channel is closed with 406. Raises
    OptionError for a limit that is not above 0, and without any limit.
    """

    def __init__(
        self,
        messages_per_s: float | None = None,
        bytes_per_s: float | None = None,
        *,
        burst_s: float = 1.0,
        refuse: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if messages_per_s is None and bytes_per_s is None:
            raise OptionError("a rate limit needs messages_per_s, bytes_per_s or both")
        for name, value in (
            ("messages_per_s", messages_per_s),
            ("bytes_per_s", bytes_per_s),
            ("burst_s", burst_s),
        ):
            if value is not None and not value > 0:
                raise OptionError(f"{name} of a rate limit is {value}; it must be above 0")
        self._messages_per_s = messages_per_s
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._refuse = refuse
        self._clock = clock

    def session_in(self, session: Session, command: Command) -> Command | None:
        if type(command.method) is not BasicPublish:
            return command
        connection = session.connection
        now = self._clock()
        buckets: tuple[_Bucket | None, _Bucket | None] | None = connection.attached.get(self)
        if buckets is None:
            buckets = connection.attached[self] = (
                self._bucket(self._messages_per_s, now),
                self._bucket(self._bytes_per_s, now),
            )
        costs = [
            (bucket, cost)
            for bucket, cost in zip(buckets, (1, len(command.body)), strict=True)
            if bucket is not None
        ]
        if self._refuse:
            missing_s = max(bucket.missing_s(cost, now) for bucket, cost in costs)
            if missing_s:
                raise PreconditionFailed(
                    f"connection '{connection.name}' publishes faster than {self._rates()}: "
                    "publish more slowly",
                )
        else:
            for bucket, _ in costs:
                bucket.missing_s(0, now)
        wait_s = max(bucket.take(cost) for bucket, cost in costs)
        if wait_s and not self._refuse:
            connection.pause(self)
            connection.server.loop.call_later(wait_s, connection.resume, self)
        return command

    def _bucket(self, rate: float | None, now: float) -> _Bucket | None:
        return None if rate is None else _Bucket(rate, self._burst_s, now)

    def _rates(self) -> str:
        limits = ((self._messages_per_s, "messages/s"), (self._bytes_per_s, "bytes/s"))
        return " or ".join(f"{rate:g} {unit}" for rate, unit in limits if rate is not None)
