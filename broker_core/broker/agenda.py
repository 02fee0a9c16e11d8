"""The agenda: which queues have to be looked at, and when.

A mark that stands for too long only causes one more look. So undoing a work leaves marks where they are,
except ``overfull``: a queue that is on it is cut, or the mark is gone.
"""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.broker.undo import Undo

NEVER = 1 << 62


class Agenda:
    def __init__(self, undo: Undo) -> None:
        # the commits in hand added entries to these: they become visible with the commits
        self.touched: set[Queue] = set()
        self.runnable: dict[Queue, None] = {}  # consumers of these may be given something
        self.next_deadline = NEVER  # when the head of some queue expires, in microseconds since the epoch
        self.overfull: dict[Queue, None] = {}  # longer than they may be: one commit could not take out enough
        self._undo = undo

    def wake(self, queue: Queue) -> None:
        """Some consumer of it may be given something now, or what is too old at once has to go."""
        if queue.consumers or queue.marks.hasty:
            self.runnable[queue] = None

    def cut_later(self, queue: Queue, now: int) -> None:
        """It is too long; a commit that comes soon cuts it."""
        self._undo.item(self.overfull, queue)
        self.overfull[queue] = None
        self.next_deadline = min(self.next_deadline, now)

    def was_cut(self, queue: Queue) -> bool:
        """Whether it was to be cut; it is not any more."""
        if queue not in self.overfull:
            return False
        self._undo.item(self.overfull, queue)
        del self.overfull[queue]
        return True
