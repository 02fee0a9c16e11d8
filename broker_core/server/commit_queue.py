"""The commits of one event loop: what its connections ask for in one tick is one group commit, on the loop's
own thread.

Not here: how a group commits (``node/committer.py``), what a session asks for (``session.py``), and what
consumers get (``dispatcher.py``).

A tick, in this order:
1. gather: every session that gathered publishes or acks hands them over as one work. At most ``MOST`` works
   are under way, of each connection in turns. One that has more is not read until they had their turn
2. commit: the loop's thread leads the group; if another thread leads, it is called when the group is done. A
   work that needs blocks from the disk is committed again when a thread beside the loop has loaded them
3. answer: the works of a session in the order of asking, also those that another thread's group committed;
   a session carries out the commands that came meanwhile
4. dispatch: what became visible or free goes to consumers

Invariant: everything here except ``awaken`` runs in the thread of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from broker_core.broker.queue import Queue
from broker_core.broker.transaction.transaction import Settle, Transaction
from broker_core.core.errors import ResourceShortage, StoreFailed
from broker_core.node.committer import Waiting, Work
from broker_core.node.local import LocalBroker
from broker_core.server.dispatcher import Dispatcher
from broker_core.server.threads import started_pool

T = TypeVar("T")


class Lines(Generic[T]):
    """What waits for a place, one of each owner at a time, so that nobody who asks for much is in the way of
    others. Who had nothing in line is first, but for a quarter of the places: a commit takes as many as there
    is time for, and the last ones wait for the next. What one has asked for stays in order.
    """

    __slots__ = ("_came", "_lines", "_turns")

    def __init__(self) -> None:
        self._lines: dict[object, deque[T]] = {}
        self._came: deque[object] = deque()  # owners who have not had a turn since they came
        self._turns: deque[object] = deque()  # the others

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def owners(self) -> Iterable[object]:
        return self._lines

    def put(self, owner: object, item: T) -> None:
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = deque()
            self._came.append(owner)
        line.append(item)

    def take(self, most: int) -> list[T]:
        """The next ones, at most so many."""
        found: list[T] = []
        lines, came, turns = self._lines, self._came, self._turns
        first = most - min(len(turns), max(most // 4, 1))
        while lines and len(found) < most:
            owner = (came if came and (len(found) < first or not turns) else turns).popleft()
            line = lines[owner]
            found.append(line.popleft())
            if line:
                turns.append(owner)
            else:
                del lines[owner]
        return found


logger = logging.getLogger("txmq.amqp")

THREADS = 8  # beside the loop, for what waits for the disk
MOST = 64  # works of a tick, with those that wait for another thread: more take longer than a turn
AGAIN_S, AGAIN_AT_MOST_S = 0.5, 30.0  # after a work failed that must be done

Then = Callable[[Any, BaseException | None], None]


class Gathering(Protocol):
    """Holds publishes or acks to commit at the end of the tick."""

    def hand_over(self) -> None: ...


class Asking(Protocol):
    """A connection, which can wait."""

    def pause(self, why: object) -> None: ...

    def resume(self, why: object) -> None: ...


class _Gates:
    """Opens the gates of works in the loop's thread, and then calls ``wake``: one call of the loop for all
    that happens before it gets to it, because each is a system call, which lets go of the interpreter.
    """

    __slots__ = ("_called", "_loop", "_open", "_opened", "_wake")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, opened: Callable[[Waiting], None], wake: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._opened = opened
        self._wake = wake
        self._open: deque[Waiting] = deque()
        self._called = False

    def of(self, waiting: Waiting) -> _Gate:
        return _Gate(self, waiting)

    def release(self, waiting: Waiting) -> None:
        """From any thread, as ``call``."""
        self._open.append(waiting)
        self.call()

    def call(self) -> None:
        """From any thread. Raises RuntimeError after the loop has closed."""
        if not self._called or self._loop.is_closed():
            self._called = True
            self._loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        self._called = False  # first: what opens from now on is either in the line, or calls again
        try:
            while self._open:
                self._opened(self._open.popleft())
        finally:
            if self._open:
                self._loop.call_soon(self._call)
            self._wake()


class _Gate:
    __slots__ = ("_gates", "_waiting")

    def __init__(self, gates: _Gates, waiting: Waiting) -> None:
        self._gates = gates
        self._waiting = waiting

    def release(self) -> None:
        self._gates.release(self._waiting)


class CommitQueue:
    """``submit`` and ``gather`` during a tick; the answers come after it. ``idle`` is set while nothing waits
    for an answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, broker: LocalBroker) -> None:
        self._loop = loop
        self._broker = broker
        self._dispatcher = Dispatcher(loop, broker, self)
        self._pool = started_pool(THREADS, "txmq-beside")
        self._scheduled = False
        self._works: Lines[tuple[Waiting, Then]] = Lines()  # by connection, as the next one
        self._gathering: Lines[Gathering] = Lines()
        self._behind: set[Asking] = set()  # connections that wait because they have too many of them
        self._settles: list[Settle] = []
        # in a later group, or in one that another thread leads, or behind a work that waits for blocks
        self._elsewhere: dict[Waiting, Then] = {}
        self._unanswered: dict[object, deque[tuple[Waiting, Then]]] = {}  # per origin, in the order of asking
        self._aside = 0  # works in other threads
        self._thread = threading.get_ident()
        self._gates = _Gates(loop, self._opened, self.wake)
        broker.committer.listeners.awaken = self.awaken
        # called when a tick is over: what it answered may be written
        self.answered: Callable[[], None] | None = None

    # -- asking ----------------------------------------------------------------------------------------------
    def submit(self, work: Work[object], then: Then, origin: object = None) -> None:
        """Call ``then(answer, error)`` when all changes of ``work`` are durable, or it has failed. Works of
        the same ``origin`` are carried out and answered in the order of asking.
        """
        waiting = Waiting(work, origin)
        if origin is not None:
            self._unanswered.setdefault(origin, deque()).append((waiting, then))
        self._again(waiting, then)

    def insist(self, work: Work[object], then: Then, origin: object) -> None:
        """Like ``submit``, for what must be done and nobody asks for again: it is tried again until it
        succeeds, or the broker has stopped. ``then`` is called once, not for a shortage of resources.
        """
        self._insist(work, then, origin, AGAIN_S)

    def _insist(self, work: Work[object], then: Then, origin: object, wait_s: float) -> None:
        # a function that names itself is a cycle, and would keep a session until a collection
        self.submit(work, partial(self._insisted, work, then, origin, wait_s), origin)

    def _insisted(
        self,
        work: Work[object],
        then: Then,
        origin: object,
        wait_s: float,
        answer: object,
        error: BaseException | None,
    ) -> None:
        answers = not isinstance(error, ResourceShortage)
        if error is not None and not isinstance(error, StoreFailed):
            logger.error("a work is tried again in %.1f s: %s", wait_s, error)
            later = _ignore if answers else then
            self._loop.call_later(wait_s, self._insist, work, later, origin, min(2 * wait_s, AGAIN_AT_MOST_S))
        if answers:
            then(answer, error)
        self.wake()

    def _again(self, waiting: Waiting, then: Then) -> None:
        self._works.put(getattr(waiting.origin, "connection", None), (waiting, then))
        if not self._scheduled:
            self._schedule()

    def gather(self, session: Gathering, connection: Asking | None = None) -> None:
        """Call ``session.hand_over()`` at the end of this tick, or of a later one."""
        self._gathering.put(connection, session)
        if not self._scheduled:
            self._schedule()

    def settle(self, settles: list[Settle]) -> None:
        """Settle deliveries that need no ack."""
        self._settles += settles
        if not self._scheduled:
            self._schedule()

    def aside(self, work: Callable[[], T], then: Callable[[T | None, BaseException | None], None]) -> None:
        """Run ``work`` in another thread, without the loop's objects; then ``then(answer, error)`` here."""

        def done(future: asyncio.Future[T]) -> None:
            self._aside -= 1
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            then(None if error is not None else future.result(), error)
            self.wake()

        self._loop.run_in_executor(self._pool, work).add_done_callback(done)
        self._aside += 1

    def wake(self) -> None:
        """Consumers may take more: dispatch at the end of this tick."""
        if not self._scheduled:
            self._schedule()

    def awaken(self) -> None:
        """The same, from any thread."""
        if threading.get_ident() != self._thread:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no consumer is left
                self._gates.call()

    @property
    def idle(self) -> bool:
        return not (self._works or self._gathering or self._settles or self._elsewhere or self._aside)

    def close(self) -> None:
        """No other thread calls the loop from now on."""
        listeners = self._broker.committer.listeners
        if listeners.awaken == self.awaken:
            listeners.awaken = None
        self._pool.shutdown(wait=False)

    # -- a tick ----------------------------------------------------------------------------------------------
    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._scheduled = False
        try:
            self._carry_out()
        finally:
            if self.answered is not None:
                self.answered()

    def _carry_out(self) -> None:
        group = self._next_works()  # 1. gather
        if group:
            if self._broker.committer.submit([waiting for waiting, _ in group], self._gates.of):  # 2. commit
                for waiting, then in group:
                    self._committed(waiting, then)
            else:
                self._elsewhere.update(group)
        state = self._broker.state
        if state.pending_checks.runnable or state.virtual_hosts.registry.cancelled:
            self._dispatcher.dispatch()  # 4. dispatch

    def _next_works(self) -> list[tuple[Waiting, Then]]:
        room = MOST - len(self._broker.committer.waiting)
        if room <= 0 and not self._elsewhere:
            room = 1  # it is told when those of other threads are done
        for session in self._gathering.take(room):
            try:
                session.hand_over()
            except Exception:  # of a handler: the others have theirs committed
                logger.exception("what was gathered in a tick is not committed")
        if self._settles:
            self._submit_settles()
        group = self._works.take(room)
        if self._works or self._gathering or self._behind:
            self._hold_back()
            if (self._works or self._gathering) and (group or room > 0) and not self._scheduled:
                self._schedule()
        return group

    def _hold_back(self) -> None:
        owners = (*self._works.owners, *self._gathering.owners)
        behind = {cast(Asking, owner) for owner in owners if owner is not None}
        for connection in self._behind - behind:
            connection.resume(self)
        for connection in behind - self._behind:
            connection.pause(self)
        self._behind = behind

    def _submit_settles(self) -> None:
        transaction = Transaction(self._broker.limits, 0)
        transaction.settles, self._settles = self._settles, []
        self.submit(lambda state, change, now: state.transactions.commit(change, transaction, now), _ignore)

    def _opened(self, waiting: Waiting) -> None:
        """Another thread has committed it, or handed over the lead; or its blocks must be loaded."""
        waiting.gate = None  # which has ``waiting``: a cycle would wait for the collector
        if waiting.leads:
            self._broker.committer.lead(waiting)
        self._committed(waiting, self._elsewhere.pop(waiting))

    def _committed(self, waiting: Waiting, then: Then) -> None:
        if waiting.done:
            self._answer(waiting, then)  # 3. answer
        elif waiting.missing is not None:
            waiting.gate = None
            load = partial(self._broker.committer.load, waiting)
            self.aside(load, lambda *_: self._again(waiting, then))
        else:  # in a later group, or behind another one
            waiting.gate = waiting.gate or self._gates.of(waiting)
            self._elsewhere[waiting] = then

    def _answer(self, waiting: Waiting, then: Then) -> None:
        """Answers it after the earlier works of its origin, unless it was answered before a later one.

        Those are done too, but the thread that committed them may not have called the loop yet.
        """
        if waiting.origin is None:
            _call(waiting, then)
            return
        line = self._unanswered.get(waiting.origin)
        while line and line[0][0].done:
            _call(*line.popleft())
        if line is not None and not line:
            del self._unanswered[waiting.origin]

    def dispatch(self, queue: Queue | None) -> None:
        """Dispatch at once if consumers may take messages of this queue."""
        if queue is not None and queue.consumers and queue in self._broker.state.pending_checks.runnable:
            self._dispatcher.dispatch()


def _call(waiting: Waiting, then: Then) -> None:
    """An answer that raises does not stop the others."""
    try:
        then(waiting.answer, waiting.error)
    except Exception:
        logger.exception("an answer to a commit failed")
    waiting.error = None  # frames of its traceback have ``waiting``: a cycle would wait for the collector


def _ignore(_answer: object, _error: BaseException | None) -> None:
    """If the broker has stopped, callers that wait for an answer get the error."""
