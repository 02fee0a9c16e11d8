"""Ids that are given once, seen from a pipeline: staged rows, claims and the ledger never meet a later thing
of the same name or number.
"""

from __future__ import annotations

import pytest

from broker_core.core import errors
from broker_core.engine import START

from .bench import APP, Bench

RESUME = "resume"


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_c4_no_staged_row_reaches_a_queue_that_was_declared_after_a_restart(
    bench: Bench, clean: bool
) -> None:
    with bench.local.channel() as channel:
        channel.exchange_declare("alerts", "fanout")
        channel.queue_declare("monitor", durable=False)
        for queue in ("out", "monitor"):
            channel.queue_bind(queue, "alerts")
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    branch = bench.stage(opened.token, b"alert", target={"exchange": "alerts", "routing_key": ""})
    if clean:
        bench.local.close()
    bench.crash()
    with bench.local.channel() as channel:
        for number in range(3):
            channel.queue_declare(f"later{number}")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [branch])
    assert bench.visible("out") == [b"alert"]
    assert [bench.visible(f"later{number}") for number in range(3)] == [[], [], []]


def test_s6_a_release_binds_no_decision_that_follows_it_after_a_restart(bench: Bench) -> None:
    """A release names the commit sequence number of its time, which no write may have carried: it must not be
    given again.
    """
    bench.produce(b"1", b"2")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    holder = bench.local.channel()
    for number in range(50):
        holder.queue_declare(f"volatile{number}", exclusive=True)
    bench.engine.release(APP, "in", force=True)
    bench.crash()
    bench.produce(b"3")
    again = bench.claim(on_new=RESUME)
    bench.run("q2", 0, {"in": START}, again, on_new=RESUME)
    bench.crash()
    assert bench.engine.last_entry(APP).ranges == {"in": (2, 3)}  # type: ignore[union-attr]
    bench.produce(b"4")
    following = bench.claim(again)
    opened = bench.engine.open_batch(APP, "q2", 1, "fail")
    bench.read("q2", 1, bench.ranges(again, following))
    entry = bench.engine.commit_batch(APP, "q2", 1, opened.token, []).entry
    assert entry.ranges == {"in": (3, 4)}
    bench.crash()
    assert bench.engine.batches.ledger.consumed(["in"]) == {"in": 4}


def test_s4_a_read_of_a_deleted_queue_consumes_nothing_of_its_namesake(bench: Bench) -> None:
    bench.produce(b"old 1", b"old 2")
    end = bench.claim()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    assert bench.read("q", 0, bench.ranges({"in": START}, end)) == [b"old 1", b"old 2"]
    branch = bench.stage(opened.token, b"from the old ones")
    bench.engine.release(APP, "in", force=True)
    with bench.local.channel() as channel:
        channel.queue_delete("in")
        channel.queue_declare("in")
    bench.produce(b"new 1", b"new 2")
    assert bench.claim(on_new=RESUME) == end, "the new claim has the very numbers of the old one"
    with pytest.raises(errors.CheckpointMismatch):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [branch])
    with pytest.raises(errors.CheckpointMismatch):
        bench.read("q", 0, {"in": (0, 2)})
    bench.crash()
    with pytest.raises(errors.CheckpointMismatch):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [branch])
    assert bench.visible("in") == [b"new 1", b"new 2"] and bench.visible("out") == []


def test_c1_no_token_of_a_decided_or_dropped_attempt_takes_rows_again(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    branch = bench.stage(opened.token, b"1")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [branch])
    with pytest.raises(errors.BatchDecided):
        bench.write(opened.token, b"late")
    bench.write("write", b"2")
    bench.engine.rollback_batch("write")
    bench.crash()
    for token in (opened.token, "write"):
        with pytest.raises(errors.BatchDecided):
            bench.write(token, b"late")
    assert bench.visible("out") == [b"1"]


def test_the_sequence_of_an_app_goes_on_over_a_release_and_a_new_lineage(bench: Bench) -> None:
    start: dict[str, int | str] = {"in": START}
    seen = []
    for number in range(4):
        bench.produce(b"%d" % number)
        end = bench.claim(start, on_new=RESUME)
        seen.append(bench.run(f"q{number}", 0, start, end, on_new=RESUME).sequence)
        bench.engine.release(APP, "in", force=True)
        with bench.local.channel() as channel:
            channel.queue_delete("in")
            channel.queue_declare("in")
        bench.crash()
    assert seen == [1, 2, 3, 4]
