"""The deliveries of one event loop: what became visible or free goes to consumers.

Not here: which consumer gets a message (``broker/message/dispatch.py``), commits (``commit_queue.py``). A
queue whose next messages are on disk is left out until a thread beside the loop has loaded them. One that
fails for another reason than damage, for instance because no file can be opened, is tried again after
``AGAIN_S``.

Invariant: everything here runs in the thread of the loop. What was loaded, or why it could not be, is for one
dispatch of its queue: no error outlives it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from broker_core.broker.broker import BrokerState
from broker_core.broker.message.dispatch import Dispatched
from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer
from broker_core.broker.transaction.transaction import Settle
from broker_core.core.block import NotLoaded
from broker_core.core.change import Change
from broker_core.node.loaded_blocks import NOTHING, Loaded
from broker_core.node.local import LocalBroker

logger = logging.getLogger("txmq.amqp")

BUDGET = 1024  # messages, before the loop looks at its sockets again
AGAIN_S = 0.5  # after a queue could not be read


class Ticks(Protocol):
    """What dispatch asks of the loop. ``wake``: dispatch again at the end of this tick."""

    def wake(self) -> None: ...

    def settle(self, settles: list[Settle]) -> None: ...

    def aside(
        self, work: Callable[[], object], then: Callable[[object, BaseException | None], None]
    ) -> None: ...

    def submit(
        self,
        work: Callable[[BrokerState, Change, int], object],
        then: Callable[[object, BaseException | None], None],
        origin: object = None,
    ) -> None: ...


class Dispatcher:
    def __init__(self, loop: asyncio.AbstractEventLoop, broker: LocalBroker, ticks: Ticks) -> None:
        self._loop = loop
        self._broker = broker
        self._ticks = ticks
        self._pending_checks = broker.state.pending_checks
        self._registry = broker.state.virtual_hosts.registry
        self._loaded: dict[Queue, Loaded | None] = {}  # None while it is being loaded
        self._stuck: dict[Queue, str] = {}  # to be tried again, and why

    def dispatch(self) -> None:
        dispatched, cancelled = self._send()
        for consumer in cancelled:
            consumer.cancelled(consumer)
        if dispatched.settles:
            self._ticks.settle(dispatched.settles)
        if dispatched.due:
            due = dispatched.due
            self._ticks.submit(lambda state, change, now: state.expiry.expire(change, now, due), _ignore)
        for queue, missing in dispatched.unread:
            self._load(queue, missing)
        for queue, error in dispatched.stuck:
            self._try_again(queue, error)
        if self._pending_checks.runnable:
            self._ticks.wake()

    def _send(self) -> tuple[Dispatched, list[Consumer]]:
        """Returns also whose queues cannot be read, or are gone."""
        loaded_blocks = self._broker.committer.loaded_blocks
        with self._broker.look as state:
            lent = [queue for queue, loaded in self._loaded.items() if loaded is not None]
            for queue in lent:
                loaded_blocks.loaded = {**loaded_blocks.loaded, **(self._loaded[queue] or {})}
            try:
                dispatched = state.dispatch.send(self._broker.clock(), BUDGET)
            finally:
                loaded_blocks.loaded = NOTHING
                for queue in lent:
                    if queue not in state.pending_checks.runnable:
                        del self._loaded[queue]
            cancelled, self._registry.cancelled = self._registry.cancelled, []
        return dispatched, cancelled

    def _load(self, queue: Queue, missing: NotLoaded) -> None:
        """Loads blocks beside the loop, then dispatches their queue."""
        if queue in self._loaded:
            return  # it was woken meanwhile
        loaded: Loaded = {}

        def done(_answer: object, error: BaseException | None) -> None:
            del self._loaded[queue]
            if error is not None:
                self._try_again(queue, error)
            elif self._wake(queue):
                self._loaded[queue] = loaded

        committer = self._broker.committer
        self._ticks.aside(partial(committer.loaded_blocks.load, missing, loaded, committer.look), done)
        self._loaded[queue] = None

    def _wake(self, queue: Queue) -> bool:
        """Returns whether a consumer may take something."""
        with self._broker.look as state:
            state.pending_checks.wake(queue)
            return queue in state.pending_checks.runnable

    def _try_again(self, queue: Queue, error: BaseException) -> None:
        """After a while. Logs an error of a queue when it differs from the last one."""
        if queue in self._stuck:
            return

        def again() -> None:
            del self._stuck[queue]
            if self._wake(queue):
                self._ticks.wake()

        self._stuck[queue] = f"{type(error).__name__}: {error}"
        logger.error("queue '%s' cannot be dispatched, and is tried again: %s", queue.name, error)
        self._loop.call_later(AGAIN_S, again)


def _ignore(_answer: object, _error: BaseException | None) -> None:
    """The queues are looked at again by the upkeep."""
