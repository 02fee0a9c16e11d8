"""How often each entry of a queue was returned: for a quorum queue or a queue with x-delivery-limit.

Not here: what happens to an entry over the limit (``broker/message/dispatch.py``,
``broker/message/expiry.py``). Invariant: only unsettled entries have a count. The catalog has the counts that
are not in ``changes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from broker_core.core.change import Change
from broker_core.core.ids import QueueId
from broker_core.core.records import DeliveryRecord
from broker_core.core.undo import Undo


class Deliveries:
    """``limit`` is x-delivery-limit."""

    __slots__ = ("_undo", "changes", "counts", "limit")

    def __init__(self, limit: int | None, undo: Undo) -> None:
        self._undo = undo
        self.limit = limit
        self.counts: dict[int, int] = {}
        self.changes: set[int] = set()  # offsets whose count is not in the catalog yet

    def count(self, offset: int) -> int:
        return self.counts.get(offset, 0)

    def over_limit(self, offset: int) -> bool:
        return self.limit is not None and self.counts.get(offset, 0) > self.limit

    def came_back(self, offsets: Sequence[int]) -> None:
        counts = self.counts
        before = {offset: counts[offset] for offset in offsets if offset in counts}
        fresh = set(offsets) - self.changes
        self._undo.append((self._uncount, offsets, before, fresh))
        counts.update((offset, before.get(offset, 0) + 1) for offset in offsets)
        self.changes |= fresh

    def _uncount(self, offsets: Sequence[int], before: dict[int, int], fresh: set[int]) -> None:
        for offset in offsets:
            self.counts.pop(offset, None)
        self.counts.update(before)
        self.changes -= fresh

    def forget(self, start: int, end: int) -> None:
        """Drops the counts of settled entries."""
        counts = self.counts
        for offset in range(start, end):
            if offset in counts:
                self._undo.item(counts, offset)
                del counts[offset]
                self._changed(offset)

    def forget_all(self) -> None:
        """Drops all counts of a deleted queue."""
        for offset in self.counts:
            self._changed(offset)
        self._undo.attribute(self, "counts")
        self.counts = {}

    def _changed(self, offset: int) -> None:
        if offset not in self.changes:
            self._undo.append((self.changes.discard, offset))
            self.changes.add(offset)

    # -- durable ---------------------------------------------------------------------------------------------
    def restore(self, deliveries: Iterable[DeliveryRecord]) -> None:
        """Restores the counts while loading."""
        self.counts.update((delivery.offset, delivery.count) for delivery in deliveries)

    def record(self, change: Change, queue_id: QueueId, *, written: bool, deleted: bool) -> None:
        """Records the changed counts. For a queue that is not ``written`` it records nothing, for a deleted
        one only drops.
        """
        if written:
            for offset in self.changes:
                count = self.counts.get(offset, 0)
                if count and not deleted:
                    change.put(DeliveryRecord(queue_id, offset, count))
                else:
                    change.drop(DeliveryRecord, (queue_id, offset))
        self._undo.attribute(self, "changes")
        self.changes = set()
