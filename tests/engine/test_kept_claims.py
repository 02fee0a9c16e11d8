"""Which records of claims and reads the catalog keeps, and the ledger's rule for a range behind a gap."""

from __future__ import annotations

import pytest

from broker_core.core.errors import CheckpointMismatch
from broker_core.core.records import ClaimRecord, ReadRecord
from broker_core.engine import START, Vector
from broker_core.micro_batch.claims import claim as claim_rules
from broker_core.micro_batch.ledger import MicroBatch
from tests.engine.bench import APP, Bench

IDLE: Vector = {"in2": START}
BUSY: Vector = {"in": START}


@pytest.fixture
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 3)
    return 3


def claims_of(bench: Bench) -> list[ClaimRecord]:
    return [record for record in bench.store.reopened().load().records if isinstance(record, ClaimRecord)]


def test_s2_claims_and_reads_of_each_source_are_kept_up_to_the_limit(bench: Bench, few_are_kept: int) -> None:
    ends: dict[str, Vector] = {"in": BUSY, "in2": IDLE}
    for batch in range(8):
        for queue, start in ends.items():
            bench.produce(b"x", queue=queue)
            end = bench.claim(start)
            bench.read("q", batch, bench.ranges(start, end))
            ends[queue] = end
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
        bench.crash()
    assert sorted(claim.end.popitem()[1] for claim in claims_of(bench)) == [6, 6, 7, 7, 8, 8]
    reads = [record for record in bench.store.reopened().load().records if isinstance(record, ReadRecord)]
    assert sorted(record.batch_id for record in reads) == [5, 5, 6, 6, 7, 7]


def test_c4_a_range_behind_messages_that_nobody_acknowledged_is_refused(bench: Bench) -> None:
    bench.produce(b"0")
    bench.run("q", 0, BUSY, bench.claim(BUSY))
    ledger = bench.engine.batches.ledger
    ledger.require_ranges(
        MicroBatch(APP, "q", 1), {"in": [3, 4]}, lambda log, start, end: (log, start, end) == ("in", 1, 3)
    )
    with pytest.raises(CheckpointMismatch, match="consumed up to 1"):
        ledger.require_ranges(MicroBatch(APP, "q", 1), {"in": [3, 4]}, lambda *_: False)
    with pytest.raises(CheckpointMismatch, match="claimed below it"):
        ledger.require_ranges(MicroBatch(APP, "q", 2), {"in2": [3, 4]}, lambda *_: False)
    ledger.require_ranges(MicroBatch(APP, "q", 1), {"in2": [3, 4]}, lambda *_: False)  # batch 0 passed it
    with pytest.raises(CheckpointMismatch, match="consumed up to 1"):
        ledger.require_ranges(MicroBatch(APP, "q", 1), {"in": [0, 4]}, lambda *_: True)
