"""Whose turn it is: the time of the loop is shared by the connections that have something to carry out.

Not here: what is carried out (``connection.py``), and which bytes wait for it (``input.py``).

Time is counted as the processor's, and what is over two shares is forgiven: else a thread that holds the
interpreter during the turn of one client would keep it from its next turns until all others have had as much.

Invariant: the connection that has had least time is next, so one that asks for little waits for no more than
a share, however many others ask for much, and on however many channels. What it publishes is in the commit
that comes next, because it has its share when its bytes come.

Between two iterations the loop looks at its sockets, and commits. An iteration takes about ``TURN_S`` of the
processor with what the turns cause (segments, commits, deliveries): where that takes most of it, turns are
shorter, but for a client or two with little: what they publish before they wait for confirms is one commit,
because shorter turns would only make more of them. The time of the disk does not count: a slow one needs
larger commits, not more of them. A turn may take a share, one event or one piece of bytes longer.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("txmq.amqp")

TURN_S = 0.01  # of all connections together, in one iteration of the loop
LATEST = 0.8  # of how the time was spent, what counts from one iteration to the next
SHARE_S = 0.001  # of one connection while others wait
WINDOW_S = 0.004  # takes what clients publish before they wait for confirms, a thousand messages
FEW = 2  # connections, as of a client that publishes and one that consumes
DRAIN_S = 0.002  # between two reads of closed connections
YOUNG_S = 0.02  # of the processor, between two looks of the collector at what is new


class Taker(Protocol):
    """``spent``: the time that it has had, or has let pass. ``waits``: it is in the line."""

    spent: float
    waits: bool

    def turn(self, ends: float) -> bool:
        """Carry out at least one thing, and more until ``ends``. Returns whether something is left."""

    def abort(self) -> None:
        """Its turn failed."""

    def stop_reading(self) -> None:
        """Its turn comes later: it takes no more meanwhile. It reads again when nothing is left."""

    def read(self) -> None:
        """It may read again."""


class Turns:
    """Of one loop; everything runs in its thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._processor = processor
        self._line: list[tuple[float, int, Taker]] = []  # a heap
        self._waiting = 0
        # What those that had a turn had spent at least. Who comes again begins a share before that, and so
        # before all that go on.
        self._least = 0.0
        self._left = TURN_S  # of the time of this iteration
        self._had: set[Taker] = set()  # a turn of this iteration
        # of the processor, in the latest iterations: within turns, and between them
        self._within = self._between = 0.0
        self._turned = 0.0  # since the round before
        self._over = self._collected = processor()  # when it was over, and the collector looked
        self._scheduled = False
        self._drained: deque[Taker] = deque()

    @property
    def idle(self) -> bool:
        """Nobody waits for a turn."""
        return not self._line

    def come(self, who: Taker) -> None:
        """Something has come. It has a share at once if it would be next, and there is time left: what
        it publishes is in the commit that comes now, not in the one behind.
        """
        self._schedule()
        if who.waits:
            return
        little = 0 < who.spent < self._least - SHARE_S  # for it there is time when others have had it all
        self._begin(who)
        if self._left > (-TURN_S if little else 0) and not (self._line and self._line[0][0] < who.spent):
            self._least = max(self._least, who.spent)
            self._turn(who, self._most())
        else:
            self.ask(who)

    def ask(self, who: Taker) -> None:
        """It may be repeated."""
        if who.waits:
            return
        who.waits = True
        self._begin(who)
        self._waiting += 1
        heapq.heappush(self._line, (who.spent, self._waiting, who))
        self._schedule()

    def drain(self, who: Taker) -> None:
        """A closed connection, whose client still sends, has stopped reading. One of them reads at a time, so
        that others have the loop, and each client can come to its close-ok.
        """
        self._drained.append(who)
        if len(self._drained) == 1:
            self._loop.call_later(DRAIN_S, self._drain_next)

    def _drain_next(self) -> None:
        self._drained[0].read()
        self._drained.popleft()
        if self._drained:
            self._loop.call_later(DRAIN_S, self._drain_next)

    def _begin(self, who: Taker) -> None:
        """A new connection has no such advantage: it may be one of very many."""
        who.spent = max(who.spent, self._least - SHARE_S) if who.spent else self._least

    def _most(self) -> float:
        """A share, or a window if nobody waits and few have had a turn in this iteration."""
        return SHARE_S if self._line or len(self._had) > FEW else WINDOW_S

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._round)

    def _turn(self, who: Taker, most_s: float) -> None:
        began, used = self._clock(), self._processor()
        self._had.add(who)
        try:
            left = who.turn(began + min(max(self._left, SHARE_S), most_s))
        except Exception:
            logger.exception("a connection is closed")
            who.abort()
            left = False
        used = self._processor() - used
        self._left -= self._clock() - began
        self._turned += used
        who.spent = min(who.spent + used, self._least + 2 * SHARE_S)
        if left:
            self.ask(who)
            who.stop_reading()

    def _round(self) -> None:
        line = self._line
        self._left = max(self._left, SHARE_S)  # those that came had it all
        while line:
            spent, _, who = heapq.heappop(line)
            self._least = max(self._least, spent)
            who.waits = False
            self._turn(who, SHARE_S if line else TURN_S)
            if self._left <= 0:
                break
        over = self._processor()
        self._between = LATEST * self._between + over - self._over - self._turned
        self._within = LATEST * self._within + self._turned
        self._over, self._turned = over, 0.0
        within = max(self._within, 1e-9)
        self._left = max(self._most(), TURN_S * within / (within + self._between))
        self._had.clear()
        self._scheduled = False
        # by itself it comes for what was made less what was freed: where many channels replace what they
        # have, for all of it at once, 70 ms of the processor
        if over - self._collected > YOUNG_S and gc.isenabled():
            self._collected = over
            gc.collect(1)
        if line:
            self._schedule()
