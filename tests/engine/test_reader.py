"""Reads beside everything that takes bytes away: consumers, acknowledgements, sealing, compaction,
deletion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker_core.arrow.parts import branch_checksum
from broker_core.arrow.rows import ReadPlan
from broker_core.arrow.segment_files import SegmentFiles
from broker_core.core.errors import DataLoss, MissingBranch, QueueNotFound
from broker_core.engine import START, BranchHeader, Limit, Origin, ReadTicket, Slice, StagedBranch, Vector
from broker_core.node.engine import INLINE_ROWS, EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.node.reader import GROUP, Reader
from broker_core.store.durable import DurableStore

ROWS = 1100  # of a commit: more than stays in the catalog, so each is a batch of a segment
BATCHES = 4


class Bed:
    """A broker over small segments, with a queue of a few stored batches."""

    def __init__(self, path: Path) -> None:
        self.store = DurableStore(path, roll_bytes=100_000)
        self.local = LocalBroker(self.store, upkeep=False)
        self.engine = EmbeddedEngine(self.local)
        self.sent: list[bytes] = []
        with self.local.channel() as channel:
            channel.queue_declare("q")
        for batch in range(BATCHES):
            self.publish(batch)

    def publish(self, batch: int) -> None:
        with self.local.channel() as channel:
            channel.tx_select()
            for row in range(ROWS):
                self.sent.append(b"%d of %d " % (row, batch) + b"." * 100)
                channel.publish(self.sent[-1], routing_key="q")
            channel.tx_commit()

    def consume(self, keep: int) -> list[bytes]:
        """Everything that is ready is consumed, but every ``keep``-th; what is left."""
        left = []
        held = self.local.channel()  # what is not acked comes back when it closes
        number = 0
        while (delivery := held.get("q")) is not None:
            if number % keep:
                held.ack(delivery.tag)
            else:
                left.append(delivery.body)
            number += 1
        held.close()
        return left

    def compact(self) -> None:
        self.local.upkeep.tick()
        self.local.upkeep.compact()
        self.local.upkeep.tick()

    def claim(self, start: Vector | None = None, limit: Limit | None = None) -> Vector:
        return self.engine.claim("app", ["q"], start or {"q": START}, limit or Limit(), Origin(), "fail")

    def ticket(self, start: Vector, end: Vector, batch: int = 0, *, strict: bool = True) -> ReadTicket:
        ranges = self.engine.resolve("app", start, end)
        return ReadTicket(
            "app", "query", batch, ranges, tuple((log, *span) for log, span in ranges.items()), strict
        )


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    found = Bed(tmp_path / "data")
    yield found
    found.local.close()


def bodies(batches: list[pa.RecordBatch]) -> list[bytes]:
    return [body for batch in batches for body in batch.column("body").to_pylist()]


@pytest.mark.slow
def test_a_browser_that_compaction_overtakes_gets_whole_bodies_and_no_settled_row(bed: Bed) -> None:
    reading = bed.engine.browse([("q", 0, len(bed.sent))])
    first = bodies([next(reading)])
    assert first == bed.sent[:ROWS]
    left = bed.consume(keep=100)
    before = [
        bed.store.locate(run.block_id)
        for run in bed.local.state.topology.queue("q").log.runs_between(0, len(bed.sent))
    ]
    bed.compact()
    after = [
        bed.store.locate(run.block_id)
        for run in bed.local.state.topology.queue("q").log.runs_between(0, len(bed.sent))
    ]
    assert before[1:-1] != after[1:-1], "batches were rewritten under the reader"
    assert bodies(list(reading)) == [body for body in left if body not in first]


def test_a_browser_whose_batches_are_forgotten_meanwhile_ends_without_them(bed: Bed) -> None:
    reading = bed.engine.browse([("q", 0, len(bed.sent))])
    next(reading)
    with bed.local.channel() as channel:
        channel.queue_purge("q")
    bed.compact()
    assert bodies(list(reading)) == []


def test_a_browser_of_a_queue_that_is_deleted_and_made_anew_reads_no_message_of_the_new_one(bed: Bed) -> None:
    reading = bed.engine.browse([("q", 0, len(bed.sent))])
    next(reading)
    with bed.local.channel() as channel:
        channel.queue_delete("q")
        channel.queue_declare("q")
    for batch in range(BATCHES):
        bed.publish(batch)
    with pytest.raises(QueueNotFound, match="deleted while it was read"):
        list(reading)


@pytest.mark.parametrize("claimed", [True, False], ids=["of a claim", "of a browser"])
def test_a_request_of_thousands_of_slices_holds_the_lock_for_some_at_a_time(
    bed: Bed, claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = tuple(("q", start, start + 1) for start in range(2_000))
    plan, together = Reader.plan, list[int]()

    def counted(reader: Reader, some: Sequence[Slice], *args: Any, **keywords: Any) -> ReadPlan:
        together.append(len(some))
        return plan(reader, some, *args, **keywords)

    monkeypatch.setattr(Reader, "plan", counted)
    if claimed:
        ticket = replace(bed.ticket({"q": START}, bed.claim()), slices=slices)
        assert bodies(list(bed.engine.read(ticket))) == bed.sent[:2_000]
    else:
        assert bodies(list(bed.engine.browse(slices))) == bed.sent[:2_000]
    assert sum(together) == len(slices) and max(together) <= GROUP


def test_a_replay_reads_whole_bodies_after_its_batch_is_decided_and_compaction_ran(bed: Bed) -> None:
    end = bed.claim()
    ticket = bed.ticket({"q": START}, end)
    assert bodies(list(bed.engine.read(ticket))) == bed.sent
    opened = bed.engine.open_batch("app", "query", 0, "fail")
    bed.engine.commit_batch("app", "query", 0, opened.token, [])
    bed.engine.ack("app", end)
    bed.compact()
    assert bodies(list(bed.engine.read(ticket))) == bed.sent


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("planned", [True, False], ids=["planned before", "planned after"])
def test_a_read_of_rows_that_were_acked_and_compacted_is_data_loss_and_never_blank(
    bed: Bed, planned: bool, strict: bool
) -> None:
    first = bed.claim(limit=Limit(max_rows=ROWS * 3 // 2))
    assert first == {"q": ROWS}, "a transaction is not split"
    # but where it is larger than the limit: its batch stays for the rest
    second = bed.claim(first, Limit(max_rows=ROWS - 100))
    ticket = bed.ticket(first, second, strict=strict)
    plan = bed.engine.open_read(ticket)
    third = bed.claim(second, Limit(max_rows=10))
    bed.engine.ack("app", bed.claim(third, Limit(max_rows=10)), ran=True)  # its sink is another system
    assert bed.local.state.topology.queue("q").progress.acked > second["q"]
    bed.compact()
    assert bed.local.read_block(plan.pieces[0].block_id).column("body")[0].as_py() == b"", (
        "and its bytes are blank"
    )

    def read() -> list[bytes]:
        return bodies(list(bed.engine.read_plan(plan, ticket) if planned else bed.engine.read(ticket)))

    if strict:
        with pytest.raises(DataLoss, match="are gone"):
            read()
    else:
        assert read() == []


@pytest.mark.slow
def test_a_place_that_a_mapping_reader_was_given_keeps_its_bytes_or_is_gone(bed: Bed) -> None:
    plan = bed.engine.plan_browse([("q", 0, len(bed.sent))])
    bed.consume(keep=100)
    bed.compact()
    files = SegmentFiles(str(bed.store.directory))
    found = [files.read(piece.location) for piece in plan.pieces if piece.location is not None]
    assert len(found) == BATCHES
    for number, batch in enumerate(found):
        if batch is not None:
            assert batch.column("body").to_pylist() == bed.sent[number * ROWS : (number + 1) * ROWS]


def test_rows_that_another_driver_has_applied_meanwhile_are_a_missing_branch_and_no_damage(bed: Bed) -> None:
    end = bed.claim()
    list(bed.engine.read(bed.ticket({"q": START}, end)))
    token = bed.engine.open_batch("app", "query", 0, "fail").token
    header = BranchHeader(
        token, "branch", "append", {"path": "/table"}, app_id="app", query_id="query", batch_id=0
    )
    rows = pa.RecordBatch.from_pydict({"n": list(range(INLINE_ROWS + 1))})
    parts = [bed.engine.stage_part(header, number, rows) for number in range(2)]
    checksum = branch_checksum(checksum for _, checksum in parts)
    entry = bed.engine.commit_batch(
        "app", "query", 0, token, [StagedBranch("branch", 0, 0, 2 * rows.num_rows, checksum)]
    ).entry
    reading = bed.engine.read_branches(["branch"])
    assert next(reading).num_rows == rows.num_rows
    bed.engine.mark_applied("app", entry.sequence)
    with pytest.raises(MissingBranch, match="another driver of this query applied the rows"):
        next(reading)


@pytest.mark.slow
def test_a_small_claim_over_deleted_rows_ends_where_a_transaction_ends(bed: Bed) -> None:
    channel = bed.local.channel()
    tags = []
    while (delivery := channel.get("q")) is not None:
        tags.append(delivery.tag)
    for tag in tags[ROWS : 2 * ROWS] + tags[3 * ROWS :]:
        channel.ack(tag)
    channel.close()
    queue = bed.local.state.topology.queue("q")
    assert len(queue.log.runs_between(0, len(bed.sent))) == 2
    bed.publish(BATCHES)
    end = bed.claim(limit=Limit(max_rows=2 * ROWS + ROWS // 2))
    assert end == {"q": 3 * ROWS}, "two transactions are whole, and nothing of the third"
    assert (
        bodies(list(bed.engine.read(bed.ticket({"q": START}, end))))
        == bed.sent[:ROWS] + bed.sent[2 * ROWS : 3 * ROWS]
    )
    assert bodies(list(bed.engine.read(bed.ticket(end, bed.claim(end), 1)))) == bed.sent[4 * ROWS :]
