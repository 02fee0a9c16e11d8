"""Who is told of a commit: threads that wait for messages, the dispatch to consumers, and the upkeep.

Not here: what a commit is (``committer.py``), what upkeep does (``upkeep.py``).
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Collection

from broker_core.broker.broker import BrokerState
from broker_core.broker.queue.queue import Queue

# fewer full blocks wait for a tick of the upkeep: short-lived messages are settled by then, and never sealed
WAITING = 2


class CommitListeners:
    """``awaken``: called by any thread, to dispatch; None: there are no consumers. ``upkeep`` wakes the
    upkeep, which wakes by itself at ``upkeep_us``.
    """

    __slots__ = ("_mutex", "_readers", "_state", "awaken", "upkeep", "upkeep_us")

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._mutex = _thread.allocate_lock()  # guards the next one
        self._readers: dict[Queue, set[_thread.LockType]] = {}  # gates
        self.awaken: Callable[[], None] | None = None
        self.upkeep = threading.Event()
        self.upkeep_us = 0  # microseconds since the epoch

    def gate(self, queues: Collection[Queue]) -> _thread.LockType:
        """A lock that is held, and released by the next commit that makes messages of one of these queues
        visible: a commit costs nothing for those who wait for other queues.
        """
        gate = _thread.allocate_lock()
        gate.acquire()
        with self._mutex:
            for queue in queues:
                self._readers.setdefault(queue, set()).add(gate)
        return gate

    def leave(self, gate: _thread.LockType, queues: Collection[Queue]) -> None:
        with self._mutex:
            for queue in queues:
                gates = self._readers.get(queue, set())
                gates.discard(gate)
                if not gates:
                    self._readers.pop(queue, None)

    def tell(self, touched: Collection[Queue] | None) -> None:
        """``touched``: queues with new messages; None: wake all that wait."""
        if self._readers:
            with self._mutex:
                queues = [*self._readers] if touched is None else touched
                gates = {gate for queue in queues for gate in self._readers.pop(queue, ())}
            for gate in gates:
                if gate.locked():  # not opened for another of its queues
                    gate.release()
        self.tell_consumers()
        state = self._state
        if (
            len(state.blocks.full) > WAITING or state.pending_checks.next_deadline < self.upkeep_us
        ) and not self.upkeep.is_set():
            self.upkeep.set()

    def tell_consumers(self) -> None:
        """After a change outside a commit, too, that may affect consumers."""
        state = self._state
        if self.awaken is not None and (
            state.pending_checks.runnable or state.virtual_hosts.registry.cancelled
        ):
            self.awaken()
