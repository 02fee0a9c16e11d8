"""A catalog whose records contradict each other: what can be derived is repaired, what cannot is named, all
else is served.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.arrow.parts import stream_of
from broker_core.broker.load import load
from broker_core.broker.repair import RepairResult, repair
from broker_core.broker.transaction.transaction import to_rows
from broker_core.core import errors
from broker_core.core.change import ROUTE, Change, Drop, InboxRow
from broker_core.core.records import (
    AttemptRecord,
    BindingRecord,
    DeliveryRecord,
    HoleRecord,
    LedgerRecord,
    OriginRecord,
    PartRecord,
    PreparedRecord,
    ProgressRecord,
    QueueRecord,
    Record,
    RunRecord,
)
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore
from broker_core.store.port import BlockInfo, StoreImage
from broker_core.store.salvage.verify import verify
from tests.gates import examples

GONE = 77  # a block, or a queue, that does not exist


def filled(directory: Path) -> dict[str, int]:
    """Queue "bad" with messages in a segment, "good" with one in the catalog. Their ids."""
    broker = LocalBroker(DurableStore(directory), upkeep=False)
    with broker.channel() as channel:
        channel.queue_declare("bad")
        channel.queue_declare("good")
        for number in range(10):
            channel.publish(b"%d" % number, routing_key="bad")
        broker.upkeep.close_open()
        broker.upkeep.seal()
        channel.publish(b"served", routing_key="good")
    ids = {name: queue.queue_id for name, queue in broker.state.topology.queues.items()}
    broker.close()
    return ids


def damage(directory: Path, *journal: Record | Drop) -> None:
    """As a broker with a defect would have written it."""
    store = DurableStore(directory)
    store.load()
    store.commit([Change(journal=list(journal))])
    store.close()


def bodies(broker: LocalBroker, name: str) -> list[bytes]:
    with broker.channel() as channel:
        found = []
        while (delivery := channel.get(name)) is not None:
            found.append(delivery.body)
        return found


def test_leftovers_of_queues_blocks_and_settled_messages_are_dropped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = filled(tmp_path)
    bad = ids["bad"]
    leftovers = [
        RunRecord(bad, 0, 3, GONE, 0, b"", 1, 1),  # put and dropped by one commit
        HoleRecord(bad, 0, 2),
        HoleRecord(bad, 6, 9),
        HoleRecord(bad, 7, 8),
        DeliveryRecord(bad, 1, 3),
        ProgressRecord(bad, "", 3, 1, 0, 0),
        *(
            ProgressRecord(GONE, "", 3, 3, 3, 3),
            HoleRecord(GONE, 5, 6),
            RunRecord(GONE, 7, 1, GONE, 0, b"", 1, 1),
            DeliveryRecord(GONE, 1, 1),
        ),
        BindingRecord("no exchange", "bad", "k", {}),
        BindingRecord("amq.direct", "no queue", "k", {}),
        BindingRecord("amq.direct", "good", "k", {}),
        PartRecord("b1", 0, "over", "publish", {}, 0, 0, 1, 1, 1, 0, b"x", {}, 0, []),
        AttemptRecord("open", "", "", 0, 1),
        PartRecord("b2", 0, "open", "publish", {}, 0, 0, 5, 1, 1, GONE, b"", {}, 0, []),
    ]
    damage(tmp_path, Drop(RunRecord, (bad, 0)), *leftovers)
    damage(tmp_path, RunRecord(bad, 3, 7, 1, 3, b"", 0, 0))
    before = verify(tmp_path)
    assert before.problems == [] and len(before.repairs) == 10
    with caplog.at_level(logging.WARNING):
        broker = LocalBroker(DurableStore(tmp_path), upkeep=False)
    assert sorted(record.getMessage().partition(": ")[2] for record in caplog.records) == sorted(
        before.repairs
    )
    assert (
        bodies(broker, "bad") == [b"3", b"4", b"5", b"9"] and broker.state.topology.queue("bad").messages == 4
    )
    assert bodies(broker, "good") == [b"served"]
    broker.close()
    after = verify(tmp_path)
    assert (after.problems, after.repairs) == ([], [])


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (lambda queue, block: RunRecord(queue, 10, 5, GONE, 0, b"", 0, 0), f"block {GONE} does not exist"),
        (lambda queue, block: RunRecord(queue, 10, 5, block, 8, b"", 0, 0), "rows 8 to 13 are not in block"),
        (lambda queue, block: RunRecord(queue, 10, 5, block, -1, b"", 0, 0), "rows -1 to 4 are not in block"),
        (
            lambda queue, block: RunRecord(queue, 10, 5, block, 0, b"\x07", 0, 0),
            "its bitmap selects 3 rows, not 5",
        ),
        (
            lambda queue, block: RunRecord(queue, 5, 10, block, 0, b"", 0, 0),
            "the runs at offsets 0 and 5 overlap",
        ),
    ],
    ids=["no block", "behind the block", "before the block", "bitmap", "overlap"],
)
def test_rows_that_nobody_has_are_named_and_the_other_queues_are_served(
    tmp_path: Path, record: Any, why: str
) -> None:
    ids = filled(tmp_path)
    damage(tmp_path, record(ids["bad"], 1))
    (problem,) = verify(tmp_path).problems
    assert problem.startswith("queue 'bad'") and why in problem
    for _ in range(2):
        broker = LocalBroker(DurableStore(tmp_path), upkeep=False)
        assert broker.state.topology.queue("bad").messages == 15
        with pytest.raises(errors.CorruptCatalog, match=r"queue 'bad', offsets .* `txmq broker salvage`"):
            bodies(broker, "bad")
        assert broker.state.topology.queue("good").messages == 1
        with broker.channel() as channel:
            assert channel.get("good").body == b"served"  # type: ignore[union-attr]
        broker.close()
    broker = LocalBroker(DurableStore(tmp_path), upkeep=False)
    with broker.channel() as channel:
        assert channel.queue_purge("bad") == 15
        channel.publish(b"again", routing_key="bad")
    broker.close()
    assert verify(tmp_path).problems == []
    broker = LocalBroker(DurableStore(tmp_path), upkeep=False)
    assert bodies(broker, "bad") == [b"again"]
    broker.close()


def test_a_decided_or_prepared_transaction_without_its_rows_is_named_and_kept(tmp_path: Path) -> None:
    ids = filled(tmp_path)
    entry = LedgerRecord("app", 1, "q", 0, "t", {}, 0, 0, 1, 1, [["append", {}, "b", 5]], 0, False, False)
    part = PartRecord("b", 0, "t", "append", {}, 0, 0, 5, 1, 1, GONE, b"", {}, 0, [])
    route = {"block": [GONE + 1, 3, 30, False], "queues": {str(ids["good"]): [0, 3, ""]}}
    damage(tmp_path, entry, part, PreparedRecord("x", 1, b"", [route], []))
    problems = verify(tmp_path).problems
    assert (
        problems[0]
        == f"part 0 of branch b, which is decided and not applied: its 5 rows are not in block {GONE}"
    )
    store = DurableStore(tmp_path)
    state = load(_without_publishes(store.load()), new_block_id=store.new_block_id, read=store.read)
    assert set(state.prepared.by_key) == {"x"} and len(state.loaded.take(PartRecord)) == 1
    with pytest.raises(errors.CorruptCatalog, match="branch b"):
        state.blocks.require(GONE)
    with pytest.raises(errors.CorruptCatalog, match="'x'"):
        state.blocks.require(GONE + 1)
    store.close()


def _without_publishes(image: StoreImage) -> StoreImage:
    """An Arrow stream without rows in the prepared transaction."""
    empty = bytes(stream_of([to_rows([])], MESSAGE_SCHEMA))
    image.records = [
        replace(record, publishes=empty) if isinstance(record, PreparedRecord) else record
        for record in image.records
    ]
    return image


def test_two_messages_with_one_offset_are_named_and_the_first_is_served() -> None:
    def row(number: int, offset: int) -> InboxRow:
        return InboxRow(1, number, number + 1, 1, "", "q", b"", b"%d" % number, ROUTE.pack(5, offset))

    store = MemoryStore()
    store.commit(
        [
            Change(
                rows=[row(0, 0), row(1, 1), row(2, 1), row(3, 2)],
                journal=[QueueRecord(5, "q", True, False, False, {})],
            )
        ]
    )
    broker = LocalBroker(store.reopened(), upkeep=False)
    assert broker.state.loaded.repaired.problems == [
        "queue 'q': row 2 of open block 1 has offset 1, which another message has"
    ]
    assert bodies(broker, "q") == [b"0", b"1", b"3"]
    broker.close()


def test_a_record_of_which_no_sense_can_be_made_is_a_corrupt_catalog_not_a_key_error() -> None:
    store = MemoryStore()
    store.commit(
        [
            Change(
                journal=[
                    OriginRecord("a", "not json", 0, {}, False),
                    PreparedRecord("x", 1, b"no arrow", [], [[1, 2]]),
                ]
            )
        ]
    )
    with pytest.raises(errors.CorruptCatalog, match="that cannot be read"):
        LocalBroker(store.reopened(), upkeep=False)


def unread(block_id: int) -> Any:
    raise AssertionError(f"block {block_id} is read")


small = st.integers(0, 12)
queue_ids = st.integers(1, 3)
records = st.one_of(
    st.builds(lambda number, end: ProgressRecord(number, "", end, end, end, end), queue_ids, small),
    st.builds(lambda number, end, acked: ProgressRecord(number, "app", end, acked, end, end), queue_ids, small, small),
    st.builds(lambda number, start, size: HoleRecord(number, start, start + size), queue_ids, small, small),
    st.builds(DeliveryRecord, queue_ids, small, st.integers(0, 3)),
    st.builds(
        lambda number, first, count, block, row, bitmap: RunRecord(number, first, count, block, row, bitmap, 1, 1),
        queue_ids, small, st.integers(0, 6), st.integers(1, 3), st.integers(-1, 6), st.sampled_from([b"", b"", b"\x01", b"\x15"]),
    ),
    st.builds(lambda queue: BindingRecord("amq.direct", queue, "", {}), st.sampled_from(["q1", "q2", "q3"])),
    st.builds(
        lambda token, block: PartRecord("b", 0, token, "publish", {}, 0, 0, 4, 4, 4, block, b"", {}, 0, []),
        st.sampled_from(["t1", "t2"]), st.integers(0, 3),
    ),
)  # fmt: skip


def written(found: Sequence[Record], journal: Sequence[Record | Drop]) -> list[Record]:
    table: dict[Any, Record] = {}
    for entry in (*found, *journal):
        if isinstance(entry, Drop):
            table.pop((entry.kind, repr(entry.key)), None)
        else:
            table[(type(entry), repr(entry.key))] = entry
    return list(table.values())


@pytest.mark.slow
@example([ProgressRecord(1, "", 1, 1, 1, 1), RunRecord(1, 0, 2, 1, 0, b"", 1, 1)], [(1, 0)])
@examples(150)
@given(st.lists(records, max_size=25), st.lists(st.tuples(queue_ids, small), max_size=6))
def test_any_contradiction_is_repaired_once_or_named_and_never_stops_a_broker(
    drawn: list[Record], places: list[tuple[int, int]]
) -> None:
    topology: list[Record] = [
        QueueRecord(1, "q1", True, False, False, {}),
        QueueRecord(2, "q2", True, False, False, {}),
    ]
    found = written([], [*topology, *drawn, AttemptRecord("t1", "", "", 0, 1)])
    inbox = [InboxRow(9, row, 1, 1, "", "", b"", b"", ROUTE.pack(*place)) for row, place in enumerate(places)]
    infos = [BlockInfo(1, 8, 0, 0), BlockInfo(2, 2, 0, 0)]
    first = repair(found, inbox, infos)
    again = repair(written(found, first.journal), inbox, infos)
    assert (again.journal, again.done) == ([], [])
    assert again.problems == first.problems
    ids = iter(range(100, 1000))
    state = load(StoreImage(found, inbox, infos, 1, True), new_block_id=lambda: next(ids), read=unread)
    for queue in state.topology.queues.values():
        offsets = [
            offset
            for start, end in queue.progress.unsettled_within(0, queue.log.next_offset)
            for offset in range(start, end)
        ]
        assert queue.messages == len(offsets) >= 0
        for offset in offsets:
            queue.log.locate(offset)  # there is a run for each
        change = Change()
        queue.release()
        queue.settle(0, queue.log.next_offset)
        queue.record(change)
        left = written(written(found, first.journal), change.journal)
        assert [
            r
            for r in left
            if isinstance(r, (RunRecord, HoleRecord, DeliveryRecord)) and r.queue_id == queue.queue_id
        ] == []


def test_a_catalog_without_contradictions_is_left_as_it_is() -> None:
    assert repair([], [], []) == RepairResult()
