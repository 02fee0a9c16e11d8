"""The state of one connection, and the effects of its changes: time limits, heartbeats, silence.

Not here: the table (``states.py``), and the answers on channel 0 (``negotiation.py``).
"""

from __future__ import annotations

from broker_core.amqp.v0_9_1.events import Command, Event, Violation
from broker_core.amqp.v0_9_1.methods import ConnectionClose, ConnectionCloseOk
from broker_core.amqp.v0_9_1.outgoing import Outgoing
from broker_core.amqp.v0_9_1.states import CONNECTION_IGNORES, Cause, ConnectionState, Step, connection_step
from broker_core.amqp.v0_9_1.timers import Timers


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
