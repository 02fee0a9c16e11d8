"""Several sources under one app: what one of them does, or how long it idles, costs the others nothing (S2,
S4).
"""

from __future__ import annotations

import pytest

from broker_core.core.errors import CheckpointMismatch
from broker_core.engine import START, Vector
from broker_core.micro_batch.claims import claim as claim_rules
from tests.contract.engine.bench import APP
from tests.contract.engine.bench import EngineBench as Bench

IDLE: Vector = {"in2": START}
BUSY: Vector = {"in": START}


@pytest.fixture
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 3)
    return 3


def busy_batches(bench: Bench, first: int, count: int, start: Vector) -> Vector:
    for batch in range(first, first + count):
        bench.produce(b"busy %d" % batch)
        end = bench.claim(start)
        bench.run("q", batch, start, end)
        start = end
    return start


@pytest.mark.parametrize("crash", [False, True])
def test_s2_an_idle_source_goes_on_after_any_number_of_batches_of_a_busy_one(
    bench: Bench, few_are_kept: int, crash: bool
) -> None:
    bench.produce(b"rare", queue="in2")
    idle = bench.claim(IDLE)
    bench.run("q", 0, IDLE, idle)
    busy = busy_batches(bench, 1, 4 * few_are_kept, BUSY)
    if crash:
        bench.crash()
    assert bench.claim(idle) == idle  # an idle source is asked in each trigger
    bench.produce(b"rare 2", queue="in2")
    bench.run("q", 1 + 4 * few_are_kept, idle, bench.claim(idle))
    busy_batches(bench, 2 + 4 * few_are_kept, 1, busy)
    assert bench.visible("in") == bench.visible("in2") == []


def test_s2_a_start_that_was_claimed_holds_also_when_the_claim_before_it_is_pruned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old driver of the checkpoint, told to resume, claims too, and takes the place of a claim that the
    checkpoint was at.
    """
    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 2)
    at = busy_batches(bench, 0, 3, BUSY)
    bench.produce(b"more")
    bench.claim(BUSY, on_new="resume")
    bench.produce(b"and more")
    end = bench.claim(at)
    bench.crash()
    assert bench.claim(at) == end
    bench.ack(at)
    bench.run("q", 3, at, end)
    assert bench.visible("in") == []


def test_s2_a_claim_that_is_not_read_yet_outlives_the_claims_of_another_source(
    bench: Bench, few_are_kept: int
) -> None:
    """A batch waits for its decision while another query of the app, over another queue, goes on."""
    bench.produce(b"slow", queue="in2")
    idle = bench.claim(IDLE)
    assert bench.read("slow", 0, bench.ranges(IDLE, idle)) == [b"slow"]
    busy_batches(bench, 0, 4 * few_are_kept, BUSY)
    bench.crash()
    assert bench.claim(IDLE) == idle
    assert bench.read("slow", 0, bench.ranges(IDLE, idle)) == [b"slow"]
    opened = bench.engine.open_batch(APP, "slow", 0, "resume")
    decided = bench.engine.commit_batch(APP, "slow", 0, opened.token, []).entry
    assert bench.ranges_of(decided) == {"in2": (0, 1)}


def test_s2_a_released_queue_takes_the_claims_of_its_source_only(bench: Bench, few_are_kept: int) -> None:
    bench.produce(b"a", queue="in2")
    idle = bench.claim(IDLE)
    busy = busy_batches(bench, 0, 2 * few_are_kept, BUSY)
    bench.engine.release(APP, "in")
    with pytest.raises(CheckpointMismatch):
        bench.claim(busy)
    assert bench.claim(IDLE) == idle


# -- a batch that did not read its range ---------------------------------------------------------------------


def unread(bench: Bench, batch: int, start: Vector) -> Vector:
    """A batch that is decided though its tasks have read nothing of what was claimed for it."""
    bench.produce(b"unread")
    end = bench.claim(start)
    opened = bench.engine.open_batch(APP, "q", batch, "fail")
    bench.engine.commit_batch(APP, "q", batch, opened.token, [])
    return end


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("crash", [False, True])
def test_s4_a_batch_behind_one_that_did_not_read_its_range_is_decided(
    bench: Bench, batches: int, crash: bool
) -> None:
    bench.produce(b"0")
    at = bench.claim(BUSY)
    bench.run("q", 0, BUSY, at)
    for batch in range(1, 1 + batches):
        at = unread(bench, batch, at)
    bench.produce(b"2")
    end = bench.claim(at)  # Spark has the batches before in its commit log
    if crash:
        bench.crash()
    entry = bench.run("q", 1 + batches, at, end, b"out")
    assert (bench.ranges_of(entry), entry.messages) == ({"in": (1 + batches, 2 + batches)}, 1)
    assert bench.visible("in") == []
