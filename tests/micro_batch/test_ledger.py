"""The ledger from the records of another driver, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker_core.core.errors import CheckpointMismatch
from broker_core.core.records import LedgerRecord, LineageRecord, ReleaseRecord
from broker_core.core.undo import Undo
from broker_core.micro_batch import ledger as ledger_rules
from broker_core.micro_batch.ledger import Ledger, MicroBatch
from broker_core.micro_batch.opening import open_batch
from broker_core.micro_batch.unapplied import mark_applied, mark_mirrored
from tests.micro_batch.partitions import APP, Written
from tests.undo.snapshot import difference, snapshot


def entry(sequence: int, query: str = "query", *, log: str = "orders/0") -> LedgerRecord:
    return LedgerRecord(
        app_id=APP,
        sequence=sequence,
        query_id=query,
        batch_id=sequence - 1,
        token=f"token {sequence}",
        ranges={log: [10 * (sequence - 1), 10 * sequence]},
        messages=10,
        published=0,
        committed_at=sequence,
        commit_sequence=sequence,
        branches=[["append", {"table": "t"}, f"branch {sequence}", 1]],
        claim_position=sequence,
        applied=False,
        mirrored=False,
    )


def decide(ledger: Ledger, written: Written, sequence: int) -> None:
    made = entry(sequence)
    batch = MicroBatch(APP, made.query_id, made.batch_id)
    assert open_batch(ledger, written, batch, "fail") is None
    ledger.require_ranges(batch, made.ranges, lambda _log, start, _end: start is None)
    ledger.decide(written, made)
    if sequence % 2:
        mark_applied(ledger, written, APP, sequence, {})


def test_the_records_of_another_driver_give_the_same_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_rules, "KEPT_ENTRIES", 3)
    ledger, written = Ledger(), Written()
    for sequence in range(1, 8):
        decide(ledger, written, sequence)
    mark_mirrored(ledger, written, APP, 5)
    replayed, known = Ledger(), {}
    for record in written.entries:
        key = record if isinstance(record, tuple) else (type(record), record.key)
        gone = known.pop(key, None)
        if isinstance(record, tuple):
            if isinstance(gone, (LedgerRecord, LineageRecord)):
                replayed.remove(gone)
        else:
            assert isinstance(record, (LedgerRecord, LineageRecord, ReleaseRecord))
            replayed.apply(record)
            known[key] = record
    assert any(isinstance(record, tuple) for record in written.entries), "an entry was pruned"
    assert not difference(snapshot(ledger), snapshot(replayed))
    for each in (ledger, replayed):
        assert each.consumed(["orders/0", "orders/1"]) == {"orders/0": 70}
        with pytest.raises(CheckpointMismatch, match="consumed up to 70"):
            each.require_ranges(MicroBatch(APP, "query", 7), {"orders/0": [60, 80]}, lambda *_: False)


@pytest.mark.parametrize("release_first", [False, True])
def test_a_release_holds_for_entries_before_it_in_whichever_order_they_come(release_first: bool) -> None:
    ledger = Ledger()
    release, before = ReleaseRecord("orders/0", 1), entry(1)
    for record in (release, before) if release_first else (before, release):
        ledger.apply(record)
    assert ledger.consumed(["orders/0"]) == {}
    ledger.apply(entry(2))
    ledger.apply(release)
    assert ledger.consumed(["orders/0"]) == {"orders/0": 20}


def test_a_record_that_was_applied_and_removed_can_be_undone() -> None:
    undo = Undo()
    ledger = Ledger([entry(1), entry(2), LineageRecord(APP, "query", 1, 0)], undo)
    before = snapshot(ledger)
    for record in (entry(3), replace(entry(2), applied=True), LineageRecord(APP, "later", 2, 0)):
        undo.begin()
        ledger.apply(record)
        assert difference(before, snapshot(ledger))
        ledger.remove(record)
        undo.roll_back()
        assert not difference(before, snapshot(ledger)), record
    ledger.remove(entry(9))
    assert not difference(before, snapshot(ledger))
