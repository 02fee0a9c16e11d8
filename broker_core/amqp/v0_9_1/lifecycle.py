"""The state of one connection, and the effects of its changes: time limits, heartbeats, silence.

Not here: the table (``states.py``), a clock, and the answers on channel 0 (``negotiation.py``).
"""

from __future__ import annotations

from broker_core.amqp.v0_9_1.encoder import Outgoing
from broker_core.amqp.v0_9_1.events import Command, Event, Violation
from broker_core.amqp.v0_9_1.methods import ConnectionClose, ConnectionCloseOk
from broker_core.amqp.v0_9_1.states import CONNECTION_IGNORES, Cause, ConnectionState, Step, connection_step


class Timers:
    """The limits of the handshake and of closing, and heartbeats (specification 4.2.7). All times are in
    seconds, of a clock of the caller that never goes back.

    ``limit``: when the step that is under way has to be over, None for no limit. ``heartbeat_s`` 0: no
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


class Lifecycle:
    """``passes``: commands of open channels need no more checks.

    The connection is open then, and not ``watched``.
    """

    __slots__ = ("_close_timeout_s", "_out", "passes", "state", "timers", "watched")

    def __init__(self, out: Outgoing, timers: Timers, close_timeout_s: float) -> None:
        self._out = out
        self._close_timeout_s = close_timeout_s
        self.timers = timers
        self.state = ConnectionState.awaiting_header
        self.watched = self.passes = False

    @property
    def closing(self) -> bool:
        """One side has closed the connection, or it is lost."""
        return self.state in CONNECTION_IGNORES

    def watch(self, watched: bool) -> None:
        self.watched = watched
        self.passes = not watched and self.state is ConnectionState.open

    def go(self, cause: Cause) -> ConnectionState:
        """Change the state; returns the one before. Raises ChannelNumberError."""
        before, self.state = self.state, connection_step(self.state, cause)
        self.watch(self.watched)
        if self.closing and before not in CONNECTION_IGNORES:
            self.timers.heartbeat_s = 0
            self.timers.limit = self.timers.heard_at + self._close_timeout_s
        return before

    def open(self, heartbeat_s: int) -> None:
        """The handshake is over."""
        self.timers.limit = None
        self.timers.heartbeat_s = heartbeat_s

    def end(self, step: Step) -> None:
        """Send nothing more, and drop what comes."""
        self.go(step)
        self._out.stop_after_current()
        self.timers.limit = self.timers.heard_at + self._close_timeout_s

    def ignores(self, event: Event) -> bool:
        """Whether one side has closed the connection, and ``event`` is not part of closing it."""
        if self.state is not ConnectionState.closing:
            return self.closing
        if isinstance(event, Command):
            return event.channel != 0 or not isinstance(event.method, (ConnectionClose, ConnectionCloseOk))
        return not isinstance(event, Violation)
