"""The commits of one event loop: what its connections ask for in one tick is one group commit, on the loop's
own thread.

Not here: how a group commits (``node/committer.py``), and what a session asks for (``session.py``).

A tick, in this order:
1. gather: every session that gathered publishes or acks hands them over as one work
2. commit: the loop's thread leads the group; if another thread leads, it is called when the group is done. A
   work that needs blocks from the disk is committed again when a thread beside the loop has loaded them
3. answer: the works of a session in the order of asking, also those that another thread's group committed;
   a session carries out the commands that came meanwhile
4. dispatch: what became visible or free goes to consumers. A queue whose next messages are on disk is left
   out until a thread beside the loop has loaded them

Invariant: everything here except ``awaken`` runs in the thread of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from broker_core.broker.block import NotLoaded
from broker_core.broker.queue import Queue
from broker_core.broker.transaction import Settle, Transaction
from broker_core.node.committer import Waiting, Work
from broker_core.node.local import LocalBroker
from broker_core.node.shelf import NOTHING, Loaded

logger = logging.getLogger("txmq.amqp")

DISPATCH_BUDGET = 1024  # messages, before the loop looks at its sockets again

T = TypeVar("T")
Then = Callable[[Any, BaseException | None], None]


class Gathering(Protocol):
    """Holds publishes or acks to commit at the end of the tick."""

    def hand_over(self) -> None: ...


class _Gate:
    """Opens in the loop's thread."""

    __slots__ = ("_loop", "_opened", "_waiting")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, opened: Callable[[Waiting], None], waiting: Waiting
    ) -> None:
        self._loop = loop
        self._opened = opened
        self._waiting = waiting

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._opened, self._waiting)


class CommitQueue:
    """``submit`` and ``gather`` during a tick; the answers come after it. ``idle`` is set while nothing waits
    for an answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, broker: LocalBroker) -> None:
        self._loop = loop
        self._broker = broker
        self._state = broker.state
        self._scheduled = False
        self._awakened = False
        self._group: list[tuple[Waiting, Then]] = []
        self._gathering: list[Gathering] = []
        self._settles: list[Settle] = []
        # in a group that another thread leads, or behind a work that waits for blocks
        self._elsewhere: dict[Waiting, Then] = {}
        self._unanswered: dict[object, deque[tuple[Waiting, Then]]] = {}  # per origin, in the order of asking
        self._aside = 0  # works in other threads
        # what dispatch needs from the disk: None while it is being loaded
        self._loaded: dict[Queue, Loaded | None] = {}
        self._thread = threading.get_ident()
        broker.awaken = self.awaken
        # called when a tick is over: what it answered may be written
        self.answered: Callable[[], None] | None = None

    # -- asking ----------------------------------------------------------------------------------------------
    def submit(self, work: Work[Any], then: Then, origin: object = None) -> None:
        """Call ``then(answer, error)`` when all changes of ``work`` are durable, or it has failed. Works of
        the same ``origin`` are carried out and answered in the order of asking.
        """
        waiting = Waiting(work, origin)
        if origin is not None:
            self._unanswered.setdefault(origin, deque()).append((waiting, then))
        self._again(waiting, then)

    def _again(self, waiting: Waiting, then: Then) -> None:
        self._group.append((waiting, then))
        if not self._scheduled:
            self._schedule()

    def gather(self, session: Gathering) -> None:
        """Call ``session.hand_over()`` at the end of this tick."""
        self._gathering.append(session)
        if not self._scheduled:
            self._schedule()

    def settle(self, settles: list[Settle]) -> None:
        """Settle deliveries that need no ack."""
        self._settles += settles
        if not self._scheduled:
            self._schedule()

    def aside(self, work: Callable[[], T], then: Callable[[T | None, BaseException | None], None]) -> None:
        """Run ``work`` in another thread, without the loop's objects; then ``then(answer, error)`` here."""
        self._aside += 1

        def done(future: asyncio.Future[T]) -> None:
            self._aside -= 1
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            then(None if error is not None else future.result(), error)
            self.wake()

        self._loop.run_in_executor(None, work).add_done_callback(done)

    def wake(self) -> None:
        """Consumers may take more: dispatch at the end of this tick."""
        self._awakened = False
        if not self._scheduled:
            self._schedule()

    def awaken(self) -> None:
        """The same, from any thread."""
        if threading.get_ident() != self._thread and not self._awakened:
            self._awakened = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: no consumer is left
                self._loop.call_soon_threadsafe(self.wake)

    @property
    def idle(self) -> bool:
        return not (self._group or self._gathering or self._settles or self._elsewhere or self._aside)

    def close(self) -> None:
        """No other thread calls the loop from now on."""
        if self._broker.awaken == self.awaken:
            self._broker.awaken = None

    # -- a tick ----------------------------------------------------------------------------------------------
    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._scheduled = False
        if self._gathering:  # 1. gather
            gathering, self._gathering = self._gathering, []
            for session in gathering:
                session.hand_over()
        if self._settles:
            self._submit_settles()
        if self._group:
            group, self._group = self._group, []
            if self._broker.committer.submit([waiting for waiting, _ in group], self._gate):  # 2. commit
                for waiting, then in group:
                    self._committed(waiting, then)
            else:
                self._elsewhere.update(group)
        if self._state.agenda.runnable or self._state.hosts.registry.cancelled:
            self._dispatch()  # 4. dispatch
        if self.answered is not None:
            self.answered()

    def _submit_settles(self) -> None:
        transaction = Transaction(self._broker.limits, 0)
        transaction.settles, self._settles = self._settles, []
        self.submit(lambda state, change, now: state.transactions.commit(change, transaction, now), _ignore)

    def _gate(self, waiting: Waiting) -> _Gate:
        return _Gate(self._loop, self._opened, waiting)

    def _opened(self, waiting: Waiting) -> None:
        """Another thread has committed it, or handed over the lead; or its blocks must be loaded."""
        if waiting.leads:
            self._broker.committer.lead(waiting)
        self._committed(waiting, self._elsewhere.pop(waiting))
        self.wake()

    def _committed(self, waiting: Waiting, then: Then) -> None:
        if waiting.done:
            self._answer(waiting, then)  # 3. answer
        elif waiting.missing is not None:
            waiting.gate = None
            self.aside(
                partial(self._broker.committer.load, waiting), partial(self._loaded_for, waiting, then)
            )
        else:  # behind another one
            waiting.gate = self._gate(waiting)
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

    def _loaded_for(self, waiting: Waiting, then: Then, _answer: object, _error: object) -> None:
        self._again(waiting, then)

    def dispatch(self, queue: Queue | None) -> None:
        """Dispatch at once if consumers may take messages of this queue."""
        if queue is not None and queue.consumers and queue in self._state.agenda.runnable:
            self._dispatch()

    def _dispatch(self) -> None:
        shelf = self._broker.committer.shelf
        with self._broker.look as state:
            lent = [queue for queue, loaded in self._loaded.items() if loaded is not None]
            for queue in lent:
                shelf.loaded = {**shelf.loaded, **(self._loaded[queue] or {})}
            dispatched = state.dispatch.send(self._broker.clock(), DISPATCH_BUDGET)
            shelf.loaded = NOTHING
            for queue in lent:
                if queue not in state.agenda.runnable:
                    del self._loaded[queue]
            # a queue that cannot be read is left for a repair; its consumers are cancelled
            registry = state.hosts.registry
            cancelled, registry.cancelled = registry.cancelled, []
        for consumer in cancelled:
            consumer.cancelled(consumer)
        if dispatched.settles:
            self.settle(dispatched.settles)
        if dispatched.due:
            self._expire(dispatched.due)
        for queue, missing in dispatched.unread:
            self._load(queue, missing)
        if self._state.agenda.runnable:
            self.wake()

    def _load(self, queue: Queue, missing: NotLoaded) -> None:
        """Loads blocks beside the loop, then dispatches their queue."""
        if queue in self._loaded:
            return  # it was woken meanwhile
        self._loaded[queue] = None
        loaded: Loaded = {}

        def done(_answer: object, _error: BaseException | None) -> None:
            with self._broker.look as state:
                state.agenda.wake(queue)
                if queue in state.agenda.runnable:
                    self._loaded[queue] = loaded
                else:
                    del self._loaded[queue]

        committer = self._broker.committer
        self.aside(partial(committer.shelf.load, missing, loaded, committer.look), done)

    def _expire(self, due: list[Queue]) -> None:
        self.submit(lambda state, change, now: state.expiry.expire(change, now, due), _ignore)


def _call(waiting: Waiting, then: Then) -> None:
    """An answer that raises does not stop the others."""
    try:
        then(waiting.answer, waiting.error)
    except Exception:
        logger.exception("an answer to a commit failed")


def _ignore(_answer: object, _error: BaseException | None) -> None:
    """If the broker has stopped, callers that wait for an answer get the error."""
