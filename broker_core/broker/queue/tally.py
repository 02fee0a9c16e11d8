"""How many messages the queues of a virtual host keep: a running count, which a failed work gives back.

Invariant: ``total`` is the sum of ``Queue.kept`` of the queues that count here.
"""

from __future__ import annotations

from broker_core.broker.state.undo import Undo


class Tally:
    __slots__ = ("_saved", "_undo", "total")

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._saved = 0  # ``Undo.work`` when the total was last saved
        self.total = 0

    def add(self, count: int) -> None:
        if self._saved != self._undo.work:
            self._saved = self._undo.work
            self._undo.append((setattr, self, "total", self.total))
        self.total += count
