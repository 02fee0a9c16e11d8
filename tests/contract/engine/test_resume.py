"""C7: an app goes on behind entries of a ledger that the engine does not have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.engine import START, LedgerEntry, Vector
from tests.contract.engine.bench import APP
from tests.contract.engine.bench import EngineBench as Bench
from tests.contract.engine.test_release import follow

START_OF_ALL: Vector = {"in": START}
BODIES = (b"a", b"b", b"c", b"d", b"e")


def entry(
    bench: Bench, sequence: int, end: int, *, start: int = 0, queue: str = "in", query: str = "lost"
) -> LedgerEntry:
    """What a lost engine has decided."""
    return LedgerEntry(
        app_id=APP,
        sequence=sequence,
        query_id=query,
        batch_id=sequence - 1,
        token=f"token {sequence}",
        ranges={bench.log(queue): (start, end)},
        messages=end - start,
        published=0,
        committed_at_us=1_000_000,
    )


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("started", [False, True], ids=["new", "after a start that was refused"])
def test_c7_a_new_checkpoint_goes_on_behind_the_entries_with_the_next_sequence(
    bench: Bench, crash: bool, started: bool
) -> None:
    bench.produce(*BODIES)
    if started:  # at the beginning of the queue, and nothing was decided
        end = bench.claim()
        bench.read("hasty", 0, bench.ranges(START_OF_ALL, end))
        bench.engine.open_batch(APP, "hasty", 0, "fail")
    assert bench.engine.resume(APP, [entry(bench, 6, 1), entry(bench, 7, 3, start=1)])
    if crash:
        bench.crash()
    assert bench.engine.resume(APP, [entry(bench, 7, 3)]), "it may be repeated"
    last = bench.engine.last_entry(APP)
    assert last is not None and (last.sequence, last.batch_id, last.applied, last.mirrored) == (
        7,
        6,
        True,
        True,
    )
    assert bench.engine.unmirrored(APP) == [] and bench.engine.unapplied(APP) == []
    with pytest.raises(CheckpointMismatch, match="onNewCheckpoint=resume"):
        bench.claim()
    assert follow(bench, "new", 0, START_OF_ALL) == [b"d", b"e"]
    assert bench.engine.last_entry(APP).sequence == 8  # type: ignore[union-attr]
    assert bench.visible("in") == [], "what the lost engine consumed is consumed"


@pytest.mark.parametrize("crash", [False, True])
def test_c7_the_old_checkpoint_goes_on_where_all_that_it_has_planned_is_in_the_entries(
    bench: Bench, crash: bool
) -> None:
    bench.produce(*BODIES)
    assert bench.engine.resume(APP, [entry(bench, 1, 3)])
    if crash:
        bench.crash()
    for start in ({"in": 2}, {"in": 4}):
        with pytest.raises(CheckpointMismatch):
            bench.claim(start, on_new="resume")
    assert bench.engine.open_batch(APP, "lost", 0, "fail").already, "its last batch is decided"
    assert follow(bench, "lost", 1, {"in": 3}) == [b"d", b"e"]
    assert bench.engine.last_entry(APP).sequence == 2  # type: ignore[union-attr]


def test_c7_what_has_decided_something_is_not_replaced(bench: Bench) -> None:
    bench.produce(*BODIES)
    end = bench.claim()
    decided = bench.run("q", 0, START_OF_ALL, end)
    assert not bench.engine.resume(APP, [entry(bench, 5, 2)])
    assert bench.engine.last_entry(APP) == decided
    assert bench.engine.resume(APP, [replace(entry(bench, 1, 5), token=decided.token)])


def test_c7_each_log_goes_on_behind_its_own_newest_entry(bench: Bench) -> None:
    bench.produce(*BODIES)
    bench.produce(*BODIES, queue="in2")
    both = replace(entry(bench, 3, 2), ranges={bench.log("in"): (0, 2), bench.log("in2"): (0, 1)})
    assert bench.engine.resume(APP, [both, entry(bench, 4, 4, start=2)])
    bench.crash()
    old: Vector = {"in": 4, "in2": 1}
    assert bench.ranges(old, bench.claim(old)) == {"in": (4, 5), "in2": (1, 5)}, "the old checkpoint"
    start: Vector = {"in": START, "in2": START}
    end = bench.claim(start, on_new="resume")
    assert bench.ranges(start, end) == {"in": (4, 5), "in2": (1, 5)}, "and a new one"


def test_c7_an_end_that_a_log_has_not_reached_is_refused_and_nothing_has_changed(bench: Bench) -> None:
    bench.produce(b"a")
    with pytest.raises(CheckpointMismatch, match=r"has consumed .*: ?3.*does not have these offsets"):
        bench.engine.resume(APP, [entry(bench, 7, 3)])
    assert bench.engine.last_entry(APP) is None
    end = bench.claim()
    assert bench.ranges(START_OF_ALL, end) == {"in": (0, 1)}


def test_c7_entries_that_are_none_of_the_app_are_refused(bench: Bench) -> None:
    bench.produce(*BODIES)
    first, second = entry(bench, 1, 2), entry(bench, 2, 3, start=2)
    for wrong in (
        [],
        [second, first],
        [first, replace(second, sequence=1)],
        [replace(first, sequence=(1 << 63) - 1)],
        [replace(first, app_id="other")],
        [first, replace(second, token=first.token)],
        [replace(first, token="")],
        [replace(first, ranges={bench.log("in"): (3, 2)})],
    ):
        with pytest.raises(OptionError):
            bench.engine.resume(APP, wrong)
    assert bench.engine.last_entry(APP) is None


def test_c7_a_driver_of_a_start_that_was_refused_decides_nothing_any_more(bench: Bench) -> None:
    bench.produce(*BODIES)
    end = bench.claim()
    opened = bench.engine.open_batch(APP, "hasty", 0, "fail")
    bench.read("hasty", 0, bench.ranges(START_OF_ALL, end))
    assert bench.engine.resume(APP, [entry(bench, 7, 3)])
    with pytest.raises(CheckpointMismatch):
        bench.engine.commit_batch(APP, "hasty", 0, opened.token, [])
    assert bench.engine.last_entry(APP).sequence == 7  # type: ignore[union-attr]
