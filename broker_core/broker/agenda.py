"""The agenda: which queues must be checked, and when.

A mark that is kept too long only causes an additional check. So undoing a work keeps marks, except
``overfull``: a marked queue is either cut, or no longer marked.
"""

from __future__ import annotations

from broker_core.broker.queue import Queue
from broker_core.broker.undo import Undo

NEVER = 1 << 62


class Agenda:
    def __init__(self, undo: Undo) -> None:
        # the commits in progress added entries to these, which become visible with the commits
        self.touched: set[Queue] = set()
        self.runnable: dict[Queue, None] = {}  # consumers of these may get something
        self.next_deadline = NEVER  # when the head of some queue expires, in microseconds since the epoch
        self.overfull: dict[Queue, None] = {}  # over their limit: one commit could not drop enough
        self._undo = undo

    def wake(self, queue: Queue) -> None:
        """Marks a queue that may have something for a consumer, or a message that expires at once."""
        if queue.consumers or queue.marks.hasty:
            self.runnable[queue] = None

    def cut_later(self, queue: Queue, now: int) -> None:
        """Marks a queue that is too long; a commit soon cuts it."""
        self._undo.item(self.overfull, queue)
        self.overfull[queue] = None
        self.next_deadline = min(self.next_deadline, now)

    def was_cut(self, queue: Queue) -> bool:
        """Removes the mark of ``cut_later`` and returns whether there was one."""
        if queue not in self.overfull:
            return False
        self._undo.item(self.overfull, queue)
        del self.overfull[queue]
        return True
