"""What one connection has to carry out: bytes that have come, and commands of its sessions that waited for a
commit. It is done in turns (``server/turns.py``).

Not here: how it is carried out (``connection.py``, ``session.py``), and the protocol.

Invariant: a socket is not read while bytes of it wait, or while the connection is paused; it is read again
when all was carried out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from broker_core.amqp.v0_9_1.connection import AmqpConnection
from broker_core.amqp.v0_9_1.decoder import OPEN_BYTES
from broker_core.server.turns import TURN_S, Turns

SMALL_BYTES = 1024 * 1024


class Resumable(Protocol):
    """A session whose commands waited."""

    def carry_on(self, ends: float) -> None:
        """Carry out at least one of them, and more until ``ends``."""


def _nothing(_: float) -> None:
    pass


class Input:
    """``carry_out``: carries out the next events until a time, and at least one of them. ``count``: gets the
    bytes of contents that have not come whole, if they are or were more than SMALL_BYTES.
    ``paused``: why nothing is read and no event carried out.
    """

    __slots__ = (
        "_carry_out", "_count", "_counted", "_late", "_protocol", "_reads", "_sessions", "_transport",
        "_turns", "paused", "spent", "waits",
    )  # fmt: skip

    def __init__(
        self,
        protocol: AmqpConnection,
        turns: Turns,
        carry_out: Callable[[float], None],
        count: Callable[[int], None],
    ) -> None:
        self._protocol = protocol
        self._turns = turns
        self._carry_out = carry_out
        self._count = count
        self._counted = 0
        self._transport: asyncio.Transport | None = None
        self._reads = True
        self._late = 0  # bytes that came when the connection was closed
        self._sessions: dict[Resumable, None] = {}  # in the order in which they asked
        self.paused: set[object] = set()
        self.spent = 0.0
        self.waits = False

    def begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def lost(self) -> None:
        """The socket is gone."""
        self._transport = None
        # the connection's, which has this: a cycle would wait for the collector
        self._carry_out = self._count = _nothing
        self.paused.clear()

    def came(self, data: bytes) -> None:
        self._protocol.receive(data, time.monotonic())
        self._turns.come(self)
        if self.waits:
            self.stop_reading()

    def came_late(self, size_bytes: int, *, logged_in: bool) -> None:
        """The connection is closed, and only its close-ok is looked for: so many bytes more came. Behind what
        may come before a login, it is read by turns; without a login no further, and its time ends.
        """
        self._late += size_bytes
        if self._late > OPEN_BYTES:
            self.stop_reading()
            if logged_in:
                self._turns.drain(self)

    def go_on(self, session: Resumable) -> None:
        """Its commands that waited are due; it asks again while it has some left."""
        self._sessions[session] = None
        self._turns.ask(self)

    def last_turn(self) -> None:
        """The client has ended its half: what came with the end."""
        self.turn(time.monotonic() + TURN_S)

    def turn(self, ends: float) -> bool:
        sessions, protocol, clock = self._sessions, self._protocol, time.monotonic
        goes_on = True
        while sessions and goes_on:
            session = next(iter(sessions))
            del sessions[session]
            session.carry_on(ends)
            goes_on = clock() <= ends
        while protocol.due and goes_on:
            self._carry_out(ends)
            goes_on = clock() <= ends
        pending = protocol.pending_bytes
        if pending != self._counted and max(pending, self._counted) > SMALL_BYTES:
            self._counted = pending
            self._count(pending)
        if sessions or protocol.due:
            return True
        if not self.paused:
            self.read()
        return False

    # -- the socket ------------------------------------------------------------------------------------------
    def pause(self, why: object) -> None:
        """Read and carry out nothing more until each ``why`` has resumed."""
        if not self.paused:
            if self._transport is None or self._protocol.closing:
                return
            self._protocol.hold()
            self.stop_reading()
        self.paused.add(why)

    def resume(self, why: object) -> None:
        """Does nothing if the connection is not paused for ``why``."""
        if self.paused:
            self.paused.discard(why)
            if not self.paused:
                self.read_on()

    def read_on(self) -> None:
        """For no reason is it paused any more."""
        self.paused.clear()
        self._protocol.release(time.monotonic())
        self._turns.ask(self)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def stop_reading(self) -> None:
        if self._reads and self._transport is not None and not self._transport.is_closing():
            self._reads = False
            self._transport.pause_reading()

    def read(self) -> None:
        if not self._reads and self._transport is not None and not self._transport.is_closing():
            self._reads = True
            self._transport.resume_reading()
