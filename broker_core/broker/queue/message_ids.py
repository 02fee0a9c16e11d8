"""The ids of the messages that a queue has seen, by which it drops duplicates.

Not here: what the id of a message is (``message/deduplication.py``), and who asks (``message/admission.py``).
The ids of a commit become durable with its messages, in the same change; those of transient messages are in
memory, like the messages.

Invariant: ids are in the order of their offsets. There are at most ``size`` after each commit, and the oldest
leaves first. The catalog has a record for each commit of which an id is remembered, and a few older ones.
Times are commit times, which always rise: a clock that is set back makes ids stay longer, never a new message
a duplicate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import NamedTuple

from broker_core.broker.queue.progress import Progress
from broker_core.core.change import ANY, Change
from broker_core.core.ids import QueueId
from broker_core.core.records import MessageIdsRecord
from broker_core.core.undo import Tally, Undo
from broker_core.message.deduplication import ID_BYTES, Deduplication

_DROPPED = 64  # records that are dropped together, which stand together in the catalog
_TOGETHER = 16_384  # ids of a record
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


class SeenMessage(NamedTuple):
    """A message with an id."""

    id: bytes
    offset: int
    at_us: int


# what was added, with those of the same ids before it; or (None) what was forgotten
Step = tuple[list[SeenMessage], dict[bytes, SeenMessage] | None]


class MessageIds:
    """``rule``: what the queue obeys; a policy may set another one. ``duplicates``: those dropped since the
    start.
    """

    __slots__ = (
        "_by_id", "_fresh", "_order", "_progress", "_queue_id", "_records", "_saved", "_steps", "_undo",
        "duplicates", "rule",
    )  # fmt: skip

    def __init__(self, rule: Deduplication, queue_id: QueueId, progress: Progress, undo: Undo) -> None:
        self.rule = rule
        self._queue_id = queue_id
        self._progress = progress
        self._undo = undo
        self._saved = 0  # ``Undo.work`` of the last change
        self._steps: list[Step] = []  # of this work
        self._by_id: dict[bytes, SeenMessage] = {}  # the latest one
        self._order: deque[SeenMessage] = deque()
        self._records: deque[tuple[int, int]] = deque()  # first and last offset of each, in the catalog
        self._fresh: list[SeenMessage] = []  # of the commit in progress, to be recorded
        self.duplicates = Tally(undo)

    def __len__(self) -> int:
        return len(self._order)

    def has(self, id_: bytes, now: int) -> bool:
        """Returns whether a message with this id is a duplicate."""
        seen = self._by_id.get(id_)
        return seen is not None and not self._is_over(seen, now)

    def _is_over(self, seen: SeenMessage, now: int) -> bool:
        _, offset, at_us = seen
        _, _, ttl_us, stays, _ = self.rule
        if ttl_us is not None and now - at_us >= ttl_us:
            return True
        return not stays and self._progress.is_settled(offset)

    def are_new(self, ids: Sequence[bytes], now: int) -> bool:
        """Whether none of these is a duplicate. Faster than to ask for each one, if they come for the first
        time.
        """
        some = ids if all(ids) else [id_ for id_ in ids if id_]
        if len(set(some)) < len(some):
            return False
        return self._by_id.keys().isdisjoint(some) or not any(self.has(id_, now) for id_ in some)

    # -- changes ---------------------------------------------------------------------------------------------
    def add(self, ids: Sequence[bytes], first: int, now: int, *, durable: bool) -> None:
        """Remembers the ids of messages that are enqueued from offset ``first`` on. ``record`` must follow in
        the same work.
        """
        self._save()
        by_id = self._by_id
        more = max(0, len(ids) - self.rule.size)  # which would leave at once
        ids, first = ids[more:], first + more
        added = list(map(_new, repeat(SeenMessage), zip(ids, count(first), repeat(now))))
        if not all(ids):
            added = [seen for seen in added if seen[0]]
        before = {} if by_id.keys().isdisjoint(ids) else {id_: by_id[id_] for id_ in ids if id_ in by_id}
        self._steps.append((added, before))
        by_id.update(zip(ids, added) if len(added) == len(ids) else ((seen[0], seen) for seen in added))
        self._order += added
        if durable:
            self._fresh += added

    def record(self, change: Change, now: int) -> None:
        """Forgets what is too old or too much, and records what is new."""
        if self._saved != self._undo.work:
            return
        order, records, by_id = self._order, self._records, self._by_id
        gone: list[SeenMessage] = []
        self._steps.append((gone, None))
        surplus = len(order) - self.rule.size
        while order and (len(gone) < surplus or self._is_over(order[0], now)):
            seen = order[0]
            gone.append(seen)
            order.popleft()
            if by_id.get(seen[0]) is seen:
                del by_id[seen[0]]
        oldest = order[0].offset if order else 1 << 62
        full = len(records) > _DROPPED and records[_DROPPED][1] < oldest
        while full and records and records[0][1] < oldest:
            self._undo.append((self._put_back_record, records[0]))
            change.drop(MessageIdsRecord, (self._queue_id, records.popleft()[0]))
        fresh, self._fresh = self._fresh, []
        if fresh and fresh[0].offset < oldest:
            fresh = [seen for seen in fresh if seen.offset >= oldest]
        for some in _runs(fresh):
            record = (some[0].offset, some[-1].offset)
            self._undo.append((self._remove_record, record))
            records.append(record)
            change.put(MessageIdsRecord(self._queue_id, record[0], now, b"".join([seen[0] for seen in some])))

    def forget_all(self, change: Change) -> None:
        """The queue is deleted, or takes duplicates from now on."""
        change.drop(MessageIdsRecord, (self._queue_id, ANY))

    def _put_back_record(self, record: tuple[int, int]) -> None:
        if not self._records or self._records[0] != record:
            self._records.appendleft(record)

    def _remove_record(self, record: tuple[int, int]) -> None:
        if self._records and self._records[-1] == record:
            self._records.pop()

    def _save(self) -> None:
        if self._saved != self._undo.work:
            self._saved = self._undo.work
            self._steps, self._fresh = [], []
            self._undo.append((self._put_back, self._steps))

    def _put_back(self, steps: list[Step]) -> None:
        by_id, order = self._by_id, self._order
        for some, before in reversed(steps):
            if before is None:
                for seen in reversed(some):
                    if not order or order[0] is not seen:
                        order.appendleft(seen)
                    by_id.setdefault(seen.id, seen)
                continue
            for seen in reversed(some):
                if order and order[-1] is seen:
                    order.pop()
                if by_id.get(seen.id) is seen:
                    del by_id[seen.id]
            by_id.update(before)

    # -- loading ---------------------------------------------------------------------------------------------
    def restore(self, records: Iterable[MessageIdsRecord]) -> None:
        """Restores what the catalog has, while loading. Raises ValueError."""
        for record in sorted(records, key=lambda record: record.first):
            number, rest = divmod(len(record.ids), ID_BYTES)
            if rest:
                raise ValueError(f"{len(record.ids)} bytes are no ids")
            for at in range(number):
                id_ = record.ids[at * ID_BYTES : (at + 1) * ID_BYTES]
                self._by_id[id_] = seen = SeenMessage(id_, record.first + at, record.committed_at)
                self._order.append(seen)
            self._records.append((record.first, record.first + number - 1))
        while len(self._order) > self.rule.size:
            seen = self._order.popleft()
            if self._by_id.get(seen.id) is seen:
                del self._by_id[seen.id]


def _runs(fresh: Sequence[SeenMessage]) -> Iterator[Sequence[SeenMessage]]:
    """Yields what stands in one record: consecutive offsets."""
    start = 0
    for end in range(1, len(fresh) + 1):
        if end == len(fresh) or fresh[end].offset != fresh[end - 1].offset + 1 or end - start == _TOGETHER:
            yield fresh[start:end]
            start = end
