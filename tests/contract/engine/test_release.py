"""S6: an operator releases a queue of an app that has finished, or by force; and how the app goes on."""

from __future__ import annotations

import pytest

from broker_core.core.errors import CheckpointMismatch, PreconditionFailed
from broker_core.engine import START, Vector
from connector.stream.offset import vector
from tests.contract.engine.bench import APP
from tests.contract.engine.bench import EngineBench as Bench

START_OF_ALL: Vector = {"in": START}


def released(bench: Bench) -> Vector:
    """One batch is decided and one is claimed, of three messages; the end of the first."""
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, START_OF_ALL, end, b"of a")
    bench.produce(b"b")
    bench.claim(end)
    bench.produce(b"c")
    bench.engine.release(APP, "in", force=True, by="ann")
    return end


def follow(bench: Bench, query: str, batch: int, start: Vector, on_new: str = "resume") -> list[bytes]:
    """What the next batch reads, which is decided."""
    end = bench.claim(start, on_new=on_new)
    ranges = bench.ranges(start, end)
    opened = bench.engine.open_batch(APP, query, batch, "resume")
    found = bench.read(query, batch, ranges)
    bench.engine.commit_batch(APP, query, batch, opened.token, [])
    return found


def test_s6_what_is_claimed_and_not_decided_is_released_by_force_only(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    end = bench.claim()
    with pytest.raises(PreconditionFailed, match=r"2 .* are claimed and not decided.*--force"):
        bench.engine.release(APP, "in")
    bench.run("q", 0, START_OF_ALL, end)
    bench.engine.release(APP, "in")
    (app,) = bench.engine.apps()
    assert (app.queues, app.lag) == ((), 0)
    bench.produce(b"c")
    assert bench.engine.apps()[0].lag == 0, "the app had finished, and reads nothing any more"


def test_s6_what_is_decided_and_not_applied_is_released_by_force_only(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.read("q", 0, bench.ranges(START_OF_ALL, end))
    staged = bench.stage(opened.token, b"row", kind="append", target={"table": "t", "schema": "{}"})
    bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    bench.produce(b"b", b"c")
    for _ in range(2):
        with pytest.raises(PreconditionFailed, match=r"1 decided batches are not applied \(SEQUENCE 1\)"):
            bench.engine.release(APP, "in")
        assert bench.engine.apps()[0].queues == ("in",)
        bench.crash()
    bench.engine.release(APP, "in", force=True)
    (app,) = bench.engine.apps()
    assert (app.queues, app.lag, app.unapplied) == ((), 2, 1), "two messages wait for the app, and a batch"
    assert follow(bench, "new", 0, START_OF_ALL) == [b"b", b"c"]
    bench.engine.mark_applied(APP, 1)
    assert bench.engine.app(APP).lag == 0  # type: ignore[union-attr]
    bench.engine.release(APP, "in")


@pytest.mark.parametrize("crash", [False, True])
def test_s6_every_error_after_a_release_names_it_and_the_way_on_works(bench: Bench, crash: bool) -> None:
    end = released(bench)
    later = {"in": 2}
    told = r"released from app 'alerts' by ann at \d{4}-.*onNewCheckpoint=resume"
    if crash:
        bench.crash()
    for ask in (
        lambda: bench.claim(end),
        lambda: bench.ranges(START_OF_ALL, end),
        lambda: bench.ranges(end, later),
        lambda: bench.ack(end),
        lambda: bench.read("q", 1, {"in": (1, 2)}),
        lambda: bench.run("q", 1, end, later),
    ):
        with pytest.raises(CheckpointMismatch, match=told):
            ask()
    assert bench.engine.apps()[0].lag == 2
    assert follow(bench, "new", 0, START_OF_ALL) == [b"b", b"c"], "each message once"
    assert bench.visible("in") == [] or "exclusive_claims" in bench.lacks


@pytest.mark.parametrize("crash", [False, True])
def test_s6_a_checkpoint_that_has_only_decided_batches_resumes_after_a_release(
    bench: Bench, crash: bool
) -> None:
    end = released(bench)
    if crash:
        bench.crash()
    assert follow(bench, "q", 1, end) == [b"b", b"c"]
    bench.produce(b"d")
    assert follow(bench, "q", 2, {"in": 3}, on_new="fail") == [b"d"], "the option is needed once"


def test_s6_a_checkpoint_that_resumes_where_nothing_waits_goes_on_later(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, START_OF_ALL, end)
    bench.engine.release(APP, "in")
    assert bench.claim(end, on_new="resume") == end
    bench.crash()
    bench.ack(end)
    assert bench.claim(end) == end
    bench.produce(b"b")
    assert follow(bench, "q", 1, end, on_new="fail") == [b"b"]


def test_s6_a_checkpoint_with_an_undecided_batch_does_not_resume_after_a_release(bench: Bench) -> None:
    """That batch may have been read, and others may have what it read."""
    released(bench)
    for start in ({"in": 2}, {"in": 0}):
        with pytest.raises(CheckpointMismatch, match="released"):
            bench.claim(start, on_new="resume")
    with pytest.raises(CheckpointMismatch, match="released"):
        bench.ranges({"in": 1}, {"in": 2})


def test_s6_an_older_checkpoint_does_not_resume_where_a_newer_one_went_on(bench: Bench) -> None:
    end = released(bench)
    assert follow(bench, "new", 0, START_OF_ALL) == [b"b", b"c"]
    with pytest.raises(
        CheckpointMismatch, match=r"released from app 'alerts' by ann .* has gone on since then"
    ):
        bench.claim(end, on_new="resume")


def test_s6_a_queue_of_the_same_name_is_not_the_one_that_was_released(bench: Bench) -> None:
    end = released(bench)
    bench.remake("in")
    bench.produce(b"x", b"y")
    with pytest.raises(CheckpointMismatch, match="released"):
        bench.claim(end, on_new="resume")
    assert bench.engine.apps()[0].lag == 0
    assert follow(bench, "new", 0, START_OF_ALL) == [b"x", b"y"]


@pytest.mark.parametrize("crash", [False, True])
def test_s2_a_stream_with_a_queue_more_or_less_goes_on_with_a_new_checkpoint_and_resume(
    bench: Bench, crash: bool
) -> None:
    """What a checkpoint of other queues is told; a batch is claimed and not decided both times."""
    with pytest.raises(CheckpointMismatch, match="new checkpoint, the same appId and onNewCheckpoint=resume"):
        vector({"in": 1}, {"in": ["in"], "in2": ["in2"]})
    bench.produce(b"a")
    end = bench.claim()
    bench.run("one", 0, START_OF_ALL, end, b"of a")
    bench.produce(b"b")
    bench.produce(b"x", queue="in2")
    bench.read("one", 1, bench.ranges(end, bench.claim(end)))
    both: Vector = {"in": START, "in2": START}
    if crash:
        bench.crash()
    assert sorted(follow(bench, "two", 0, both)) == [b"b", b"x"]
    bench.produce(b"c")
    bench.produce(b"y", queue="in2")
    then: Vector = {"in": 2, "in2": 1}
    bench.read("two", 1, bench.ranges(then, bench.claim(then)))
    if crash:
        bench.crash()
    assert follow(bench, "three", 0, {"in": START}) == [b"c"]
    bench.produce(b"d")
    assert sorted(follow(bench, "four", 0, both)) == [b"d", b"y"], "the queue waited for its app"
