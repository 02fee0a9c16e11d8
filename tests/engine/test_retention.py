"""What the broker remembers of batches and writes ends some time, and never before somebody may still need
it.
"""

from __future__ import annotations

import pytest

from broker_core.broker.batch.branch import StagedLimits
from broker_core.core import errors
from broker_core.engine import START, Vector
from broker_core.micro_batch import ledger
from tests.engine.bench import APP, Bench

HOUR_US = 3_600_000_000
DAY_US = int(StagedLimits().idle_s) * 1_000_000


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT_ENTRIES", 10)
    monkeypatch.setattr(ledger, "MIRROR_LAG", 30)


def decide(bench: Bench, first: int, count: int, start: Vector) -> Vector:
    for batch in range(first, first + count):
        bench.produce(b"x")
        end = bench.claim(start)
        bench.run("q", batch, start, end)
        start = end
    return start


def kept(bench: Bench) -> list[int]:
    return [entry.sequence for entry in bench.engine.batches.ledger._entries[APP].values()]


def test_the_ledger_waits_for_a_delta_ledger_that_lags_and_gives_up_one_that_is_not_written_any_more(
    few: None,
) -> None:
    bench = Bench()
    start = decide(bench, 0, 12, {"in": START})
    assert kept(bench) == list(range(3, 13))
    bench.engine.mark_mirrored(APP, 5)
    start = decide(bench, 12, 20, start)
    assert kept(bench)[0] == 5 and len(kept(bench)) == 28, "entries 6 to 32 wait for their mirror"
    assert [entry.sequence for entry in bench.engine.unmirrored(APP, 3)] == [6, 7, 8]
    bench.crash()
    bench.engine.mark_mirrored(APP, 20)
    start = decide(bench, 32, 1, start)
    assert kept(bench) == list(range(20, 34))
    start = decide(bench, 33, 40, start)
    assert kept(bench) == [20, *range(64, 74)], (
        "the Delta ledger is given up; the last mirrored entry stays, to know that there was one"
    )
    assert [entry.sequence for entry in bench.engine.unmirrored(APP, 2)] == [64, 65]
    (app,) = bench.engine.apps()
    assert (app.unapplied, app.unmirrored) == (0, 10)
    bench.engine.mark_mirrored(APP, 73)
    decide(bench, 73, 5, start)
    assert kept(bench) == list(range(69, 79))
    bench.crash()
    assert [entry.sequence for entry in bench.engine.unmirrored(APP, 100)] == list(range(74, 79))


def test_a_batch_that_is_not_applied_stays_in_the_ledger_however_many_follow(few: None) -> None:
    bench = Bench()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    branch = bench.stage(
        opened.token, b"row", query="q", batch=0, app=APP, kind="append", target={"table": "t"}
    )
    bench.engine.commit_batch(APP, "q", 0, opened.token, [branch])
    for batch in range(1, 40):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
    assert [entry.sequence for entry in bench.engine.unapplied(APP)] == [1]
    bench.crash()
    assert [entry.sequence for entry in bench.engine.unapplied(APP)] == [1]
    bench.engine.mark_applied(APP, 1)
    assert bench.engine.unapplied(APP) == []
    opened = bench.engine.open_batch(APP, "q", 40, "fail")
    bench.engine.commit_batch(APP, "q", 40, opened.token, [])
    assert kept(bench) == list(range(32, 42))


def test_an_attempt_that_nobody_commits_is_dropped_a_day_after_its_last_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.now = 100 * DAY_US
    old = bench.write("old", b"1")
    busy = bench.write("busy", b"2")
    lost = bench.engine.open_batch("other", "q", 0, "fail").token
    gone = bench.stage(lost, b"5", app="other")
    bench.now += DAY_US - HOUR_US
    later = bench.write("busy", b"3")
    of_app = bench.engine.open_batch(APP, "q", 0, "fail").token
    branch = bench.stage(of_app, b"4")
    bench.crash()
    assert [(attempt.token, attempt.branches, attempt.rows) for attempt in bench.engine.staged_batches()] == [
        ("old", 1, 1), (lost, 1, 1), ("busy", 2, 2), (of_app, 1, 1),
    ]  # fmt: skip
    bench.engine.drop_abandoned()
    assert len(bench.engine.staged_batches()) == 4
    bench.now += 2 * HOUR_US
    bench.engine.drop_abandoned()
    assert [attempt.token for attempt in bench.engine.staged_batches()] == ["busy", of_app]
    assert "batch old staged nothing for 24 hours" in caplog.text
    with pytest.raises(errors.MissingBranch, match="Let Spark run it again"):
        bench.engine.commit_batch("other", "q", 0, lost, [gone])
    with pytest.raises(errors.BatchDecided):
        bench.stage(lost, b"late", app="other")
    again = bench.engine.open_batch("other", "q", 0, "fail").token
    renewed = bench.stage(again, b"5", app="other")
    assert not bench.engine.commit_batch("other", "q", 0, again, [renewed]).already
    with pytest.raises(errors.BatchDecided):
        bench.write("old", b"late")
    with pytest.raises(errors.TransactionState, match="rolled back"):
        bench.engine.commit_branches("old", [old])
    assert bench.engine.commit_branches("busy", [busy, later]) == 2
    bench.engine.commit_batch(APP, "q", 0, of_app, [branch])
    bench.now += 3 * DAY_US
    bench.engine.drop_abandoned()
    bench.crash()
    assert bench.engine.staged_batches() == []
    assert bench.visible() == [b"5", b"2", b"3", b"4"]


def test_the_rows_of_an_abandoned_write_are_forgotten_and_the_upkeep_does_it() -> None:
    bench = Bench()
    bench.now = 100 * DAY_US
    bench.write("old", *[b"x" * 100] * 2000)
    (part,) = bench.engine.batches.branches.of_token("old")
    bench.now += 2 * DAY_US
    assert bench.engine.drop_abandoned in bench.local.upkeep.chores
    for chore in bench.local.upkeep.chores:
        chore()
    assert part.block_id not in bench.local.state.blocks.by_id
    with pytest.raises(errors.DataLoss):
        bench.local.read_block(part.block_id)
