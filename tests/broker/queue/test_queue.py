from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker_core.broker.batch.extent import too_few
from broker_core.broker.queue import Queue, Run, ready
from broker_core.broker.queue.parts import requeue_parts, settle_parts
from broker_core.broker.queue.progress import IntervalSet
from broker_core.broker.queue.room import Room
from broker_core.core.block import Blocks
from broker_core.core.change import Change, Drop, InboxRow
from broker_core.core.records import HoleRecord, ProgressRecord, RunRecord
from broker_core.core.undo import Undo
from broker_core.engine import Limit
from tests.gates import examples
from tests.reading import oldest, purgeable
from tests.steps import steps


def no_block(block_id: int) -> pa.RecordBatch:
    raise AssertionError(block_id)


class Ids:
    def __init__(self) -> None:
        self.last = 0

    def __call__(self) -> int:
        self.last += 1
        return self.last


def rows_of(runs: list[Run]) -> list[tuple[int, int, int]]:
    return [
        (run.first + ahead, run.block_id, int(row)) for run in runs for ahead, row in enumerate(run.rows())
    ]


def take(queue: Queue) -> int | None:
    """The next entry, which is held from now on."""
    offset = queue.ready.head(queue.log.visible_end)
    if offset is not None:
        queue.ready.take_head(offset)
    return offset


class QueueModel(RuleBasedStateMachine):
    """A queue against a plain list of entries; the records it writes are replayed into a second queue."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = Ids()
        self.blocks = Blocks(self.ids, no_block)
        self.queue = Queue(1, "q", self.blocks)
        self.entries: list[tuple[int, int]] = []  # (block, row)
        self.settled: set[int] = set()
        self.held: set[int] = set()
        self.sent: set[int] = set()
        self.records: dict[tuple[type, object], object] = {}

    def _apply(self, change: Change) -> None:
        for entry in change.journal:
            if isinstance(entry, Drop):
                self.records.pop(entry, None)
            else:
                self.records[(type(entry), entry.key)] = entry
        for block_id in change.forgets:
            assert not any(
                entry[0] == block_id
                for offset, entry in enumerate(self.entries)
                if offset not in self.settled
            ), "a living block is never forgotten"

    @rule(gaps=st.lists(st.integers(1, 3), min_size=1, max_size=5))
    def append_to_the_open_block(self, gaps: list[int]) -> None:
        for gap in gaps:
            block = self.blocks.open()
            row = block.rows + gap - 1  # rows between belong to other queues
            assert block.inbox is not None
            block.inbox += [InboxRow(block.block_id, 0, 1, 1, "", "", b"", b"x", b"")] * gap
            block.rows = row + 1
            assert self.queue.log.append_row(block, row) == len(self.entries)
            self.entries.append((block.block_id, row))
        self.queue.log.show()

    @rule(bits=st.lists(st.booleans(), min_size=1, max_size=20))
    def append_a_stored_block(self, bits: list[bool]) -> None:
        rows = [row for row, bit in enumerate(bits) if bit]
        if not rows:
            return
        self.blocks.close_open()
        info = self.blocks.name(self.ids(), len(bits), len(bits))
        bitmap = bytearray(-(-len(bits) // 8))
        for row in rows:
            bitmap[row >> 3] |= 1 << (row & 7)
        contiguous = rows == list(range(rows[0], rows[-1] + 1))
        first = self.queue.log.append(
            len(rows), info.block_id, rows[0] if contiguous else 0, b"" if contiguous else bytes(bitmap), 7, 7
        )
        assert first == len(self.entries)
        self.records[(RunRecord, (1, first))] = self.queue.log.record_last_run()
        self.entries += [(info.block_id, row) for row in rows]
        self.queue.log.show()

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.entries)))
        end = min(len(self.entries), start + data.draw(st.integers(0, 6)))
        if any(offset in self.held for offset in range(start, end)):
            return
        self.queue.settle(start, end)
        self.settled |= set(range(start, end))

    @rule()
    def take(self) -> None:
        waiting = [
            offset
            for offset in range(len(self.entries))
            if offset not in self.settled and offset not in self.held
        ]
        requeued = [offset for offset in waiting if offset in self.sent]
        offset = take(self.queue)
        assert offset == min(requeued or waiting, default=None)
        if offset is not None:
            assert self.queue.ready.was_sent(offset) == (offset in self.sent)
            self.held.add(offset)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), requeue=st.booleans())
    def give_back_or_ack(self, data: st.DataObject, requeue: bool) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard(offset)
        if requeue:
            requeue_parts(self.queue, [(offset, offset + 1)])
            self.sent.add(offset)
        else:
            self.queue.settle_range(offset, offset + 1)
            self.settled.add(offset)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), requeue=st.booleans())
    def give_back_or_ack_many(self, data: st.DataObject, requeue: bool) -> None:
        offsets = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1))
        parts = list(IntervalSet((offset, offset + 1) for offset in sorted(offsets)))
        self.held -= offsets
        if requeue:
            requeue_parts(self.queue, parts)
            self.sent |= offsets
        else:
            settle_parts(self.queue, parts)
            self.settled |= offsets

    @rule(data=st.data(), most=st.integers(1, 3))
    def purge_some(self, data: st.DataObject, most: int) -> None:
        end = len(self.entries)
        start = data.draw(st.integers(0, end))
        parts, stop = ready.purgeable(self.queue.ready, start, end, most)
        if parts:
            settle_parts(self.queue, parts)
            ready.purged(self.queue.ready, parts[0][0], parts[-1][1])
        purged = {offset for low, high in parts for offset in range(low, high)}
        assert purged == set(range(start, stop)) - self.settled - self.held
        self.settled |= purged

    @rule()
    def record(self) -> None:
        change = Change()
        self.queue.record(change)
        self._apply(change)
        progress = self.records.get((ProgressRecord, (1,)))
        if isinstance(progress, ProgressRecord):
            holes = [record for record in self.records.values() if isinstance(record, HoleRecord)]
            found = set(range(progress.floor)) | {
                offset for hole in holes for offset in range(hole.start, hole.end)
            }
            assert found == self.settled, "progress and holes say exactly what is settled"
        for record in self.records.values():
            if isinstance(record, RunRecord):
                assert not set(range(record.first, record.first + record.count)) <= self.settled, (
                    "a deletable run has no record"
                )

    @invariant()
    def the_queue_says_what_the_list_says(self) -> None:
        queue, end = self.queue, len(self.entries)
        unsettled = [offset for offset in range(end) if offset not in self.settled]
        assert oldest(queue) == purgeable(queue) and oldest(queue, 2) == purgeable(queue)[:2]
        assert queue.messages == len(unsettled)
        assert queue.unacknowledged == len(self.held)
        assert queue.droppable == len(unsettled) - len(self.held)
        assert queue.progress.floor == min(unsettled, default=end)
        middle = end // 2
        for start, stop in ((0, end), (middle, end), (0, middle)):
            assert {
                at for low, high in queue.progress.settled_within(start, stop) for at in range(low, high)
            } == self.settled & set(range(start, stop))
            kept = rows_of(queue.log.runs_between(start, stop))
            assert [entry for entry in kept if entry[0] not in self.settled] == [
                (offset, *self.entries[offset]) for offset in unsettled if start <= offset < stop
            ]
        for offset in unsettled:
            run, row = queue.log.locate(offset)
            assert (run.block_id, row) == self.entries[offset]


TestQueueModel = pytest.mark.slow(QueueModel.TestCase)
TestQueueModel.settings = settings(examples(150), stateful_step_count=40)


def filled(count: int) -> Queue:
    blocks = Blocks(Ids(), no_block)
    queue = Queue(1, "q", blocks)
    blocks.name(1, count, count * 100)
    queue.log.append(count, 1, 0, b"", 5, 5)
    queue.log.show()
    return queue


def test_an_owned_queue_keeps_what_is_settled_until_its_source_acks() -> None:
    queue = filled(10)
    queue.progress.own("app", 0)
    queue.claim(0, 10)
    queue.settle(0, 10)
    change = Change()
    queue.record(change)
    assert queue.messages == 0
    assert change.forgets == []
    assert len(rows_of(queue.log.runs_between(0, 10))) == 10
    queue.ack_to(10)
    change = Change()
    queue.record(change)
    assert change.forgets == [1]
    assert queue.log.runs_between(0, 10) == []


def test_a_release_makes_claimed_and_unsettled_entries_ready_again_as_redelivered() -> None:
    queue = filled(10)
    queue.progress.own("app", 0)
    queue.claim(0, 6)
    queue.settle(0, 4)
    queue.release()
    assert take(queue) == 4
    assert (queue.ready.was_sent(4), queue.ready.was_sent(5), queue.ready.was_sent(6)) == (True, True, False)


@pytest.mark.parametrize("settles", [True, False])
def test_the_oldest_messages_are_found_in_few_steps_whatever_is_held_or_settled(settles: bool) -> None:
    """Every second one: 1,000 gaps before the first one that is ready, and nothing ready after it."""
    queue = filled(2_100)
    for offset in range(2_050):
        assert take(queue) == offset
        if settles and offset % 2:
            queue.ready.let_go(offset, offset + 1)
            queue.settle(offset, offset + 1)
    queue.ready.let_go(2_000, 2_001)
    queue.ready.put_back([(2_000, 2_001)])
    assert ready.oldest(queue.ready, 0, 3, 12) == ([[2_000, 2_001], [2_050, 2_052]], None)
    assert oldest(queue) == purgeable(queue) == [2_000, *range(2_050, 2_100)]


def test_what_waits_is_counted_without_a_look_at_each_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one is settled. ``too_few`` of a claim and the list of the apps ask for this."""
    queue = filled(2_000)
    queue.progress.own("app", 0)
    queue.claim(0, 1_500)
    for offset in range(1, 2_000, 2):
        queue.settle(offset, offset + 1)
    asked: list[int] = []
    for name in ("within", "outside"):
        walk = getattr(IntervalSet, name)
        monkeypatch.setattr(
            IntervalSet, name, lambda *them, walk=walk: [asked.append(1) or each for each in walk(*them)]
        )
    progress = queue.progress
    assert progress.unsettled_below(2_000) == progress.unsettled_count(0, 2_000) == 1_000
    assert progress.unsettled_count(3, 1_998) == 997 and progress.first_unsettled(1) == 2
    assert too_few({"q": queue}, {"q": 0}, Limit(min_rows=1_001), no_block, 0)
    assert not too_few({"q": queue}, {"q": 0}, Limit(min_rows=1_000), no_block, 0)
    assert (queue.droppable, queue.to_read, len(asked)) == (250, 1_000, 1)  # of what is claimed


def test_a_purge_of_very_many_parts_takes_some_at_a_time() -> None:
    queue = filled(2_000)
    for offset in range(1, 2_000, 2):
        queue.settle(offset, offset + 1)
    assert take(queue) == 0 and take(queue) == 2
    parts, stop = ready.purgeable(queue.ready, 0, 2_000, 10)
    assert parts == [[at, at + 1] for at in range(4, 24, 2)] and 23 <= stop <= 25
    settle_parts(queue, parts)
    assert queue.progress.floor == 0 and list(queue.progress.holes) == [
        (1, 2),
        (3, 24),
        *((at, at + 1) for at in range(25, 2_000, 2)),
    ]
    assert ready.purgeable(queue.ready, stop, 2_000, 3)[0] == [[24, 25], [26, 27], [28, 29]]


def test_a_purge_looks_at_some_of_what_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one is held, of more than it looks at."""
    monkeypatch.setattr(ready, "LOOKED_AT", 100)
    queue = filled(2_000)
    for offset in range(1_000):
        assert take(queue) == offset
    for offset in range(0, 1_000, 2):
        requeue_parts(queue, [(offset, offset + 1)])
    start, found, looks = 0, list[int](), 0
    while start < 2_000:
        parts, start = ready.purgeable(queue.ready, start, 2_000, 30)
        found += [at for first, last in parts for at in range(first, last)]
        looks += 1
        assert len(parts) <= 30
    assert found == [*range(0, 1_000, 2), *range(1_000, 2_000)] and 17 <= looks <= 25


def test_a_purge_looks_at_nothing_that_is_held_below_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = filled(2_100)
    for _ in range(2_050):
        take(queue)
    asked: list[Any] = []
    without = ready.without
    monkeypatch.setattr(ready, "without", lambda *them: asked.append(them) or without(*them))
    assert ready.purgeable(queue.ready, 0, 2_100, 5) == ([[2_050, 2_100]], 2_100)
    assert asked == [([[2_050, 2_100]], [])]


def test_the_next_message_behind_very_many_that_were_purged_is_found_in_one_look() -> None:
    """To drop 100,000 intervals one by one took a second."""
    queue = filled(4_000)
    for offset in range(2_000):
        assert take(queue) == offset
    parts = [(at, at + 1) for at in range(0, 2_000, 2)]
    requeue_parts(queue, parts)
    settle_parts(queue, parts[:-1])
    found: list[int | None] = []
    looks = [steps(lambda: found.append(queue.ready.head(4_000))) for _ in range(2)]
    assert looks[0] < 18 * 1_000 and looks[1] < 50, "they are dropped together, once"
    assert found == [1_998] * 2


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_parts_without_what_is_held_are_the_rest_of_them(inside: set[int], held: set[int]) -> None:
    parts = [list(part) for part in IntervalSet((at, at + 1) for at in sorted(inside))]
    found = ready.without(parts, sorted(held))
    assert [at for start, end in found for at in range(start, end)] == sorted(inside - held)
    assert all(start < end for start, end in found)


def test_ten_million_messages_of_small_commits_are_a_few_hundred_runs() -> None:
    blocks = Blocks(Ids(), no_block)
    queue = Queue(1, "q", blocks)
    for block_id in range(1, 611):
        block = blocks.name(block_id, 16_384, 16_384 * 100)
        queue.log.append_row(block, 0)
        queue.log.runs_between(queue.log.next_offset - 1, queue.log.next_offset)[0].count = 16_384
        queue.log.next_offset += 16_383
    assert queue.log.next_offset > 9_990_000
    assert len(queue.log.runs_between(0, queue.log.next_offset)) == 610


@pytest.mark.parametrize("gap", [1, 2])
def test_rows_of_one_open_block_stay_one_run_also_where_other_queues_rows_lie_between(gap: int) -> None:
    blocks = Blocks(Ids(), no_block)
    queue = Queue(1, "q", blocks)
    block = blocks.open()
    for row in range(0, 1000 * gap, gap):
        queue.log.append_row(block, row)
    (run,) = queue.log.runs_between(0, 1000)
    assert list(map(int, run.rows())) == list(range(0, 1000 * gap, gap))
    assert list(map(int, run.clip(10, 13).rows())) == [10 * gap, 11 * gap, 12 * gap]


def test_a_wide_range_is_settled_by_the_sizes_that_are_there() -> None:
    """A purge settles what is between two parts with them, however much that is."""
    room = Room(Undo())
    room.begin()
    room.add(3, 5)
    room.add(10**12, 7)
    room.settle(3, 10**12, ())
    assert room.sizes == {10**12: 7} and room.total == 7
