"""Which queues must be checked, and when.

Invariant: what is due is found without a look at other queues. A mark that is kept too long only causes an
additional check. So undoing a work keeps marks, except ``overfull``: a marked queue is either cut, or no
longer marked.
"""

from __future__ import annotations

import heapq

from broker_core.broker.queue import Queue
from broker_core.broker.queue.message_ids import MessageIds
from broker_core.core.records import NEVER
from broker_core.core.undo import Undo

_FEW = 64


class PendingChecks:
    def __init__(self, undo: Undo) -> None:
        # the commits in progress added entries to these, which become visible with the commits
        self.touched: set[Queue] = set()
        self.runnable: dict[Queue, None] = {}  # consumers of these may get something
        self.next_deadline = NEVER  # when the head of some queue expires, in microseconds since the epoch
        self._deadlines: list[tuple[int, int, Queue]] = []  # a heap, with times that are no longer planned
        self._planned: dict[Queue, int] = {}
        self._crowded = _FEW  # so many times in the heap are worth a look for what is gone
        self.overfull: dict[Queue, None] = {}  # over their limit: one commit could not drop enough
        self.remembering: dict[MessageIds, None] = {}  # the work in progress added ids to these
        self._undo = undo

    def wake(self, queue: Queue) -> None:
        """Marks a queue that may have something for a consumer, or a message that expires at once."""
        if queue.consumers or queue.marks.hasty:
            self.runnable[queue] = None

    def cut_later(self, queue: Queue, now: int) -> None:
        """Marks a queue that is too long; a commit soon cuts it."""
        self._undo.item(self.overfull, queue)
        self.overfull[queue] = None
        self.plan(queue, now)

    def obey_soon(self, queue: Queue, now: int) -> None:
        """The queue has other limits: a commit soon makes it keep them."""
        if queue.arguments.limited and not queue.arguments.refuses:
            self.cut_later(queue, now)
        else:
            self.plan(queue, now)

    def plan(self, queue: Queue, deadline: int) -> None:
        """Checks the queue at ``deadline``, or earlier."""
        if deadline < self._planned.get(queue, NEVER):
            self._planned[queue] = deadline
            heapq.heappush(self._deadlines, (deadline, queue.queue_id, queue))
            self.next_deadline = self._deadlines[0][0]
            if len(self._deadlines) >= self._crowded:
                self._tidy()

    def is_planned(self, queue: Queue, deadline: int) -> bool:
        """Returns whether the queue is checked at ``deadline`` or earlier anyway."""
        return deadline >= self._planned.get(queue, NEVER)

    def take_due(self, now: int) -> list[Queue]:
        """Removes and returns the queues whose time has come, the earliest first."""
        due: list[Queue] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, queue = heapq.heappop(self._deadlines)
            if self._planned.get(queue) == deadline:
                del self._planned[queue]
                if not queue.deleted:
                    due.append(queue)
        self.next_deadline = self._deadlines[0][0] if self._deadlines else NEVER
        return due

    def _tidy(self) -> None:
        """Drops the times of deleted queues, and those that were planned anew."""
        self._planned = {queue: time for queue, time in self._planned.items() if not queue.deleted}
        self._deadlines = [(time, queue.queue_id, queue) for queue, time in self._planned.items()]
        heapq.heapify(self._deadlines)
        self.next_deadline = self._deadlines[0][0] if self._deadlines else NEVER
        self._crowded = max(_FEW, 2 * len(self._deadlines))

    def was_cut(self, queue: Queue) -> bool:
        """Removes the mark of ``cut_later`` and returns whether there was one."""
        if queue not in self.overfull:
            return False
        self._undo.item(self.overfull, queue)
        del self.overfull[queue]
        return True
