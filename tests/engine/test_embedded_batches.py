"""What the rules C2 to C5 mean where the broker knows every part and every token."""

from __future__ import annotations

import pytest

from broker_core.core.errors import (
    BatchDecided,
    CheckpointMismatch,
    MissingBranch,
    PreconditionFailed,
    TransactionState,
    UnknownTransaction,
)
from broker_core.core.records import LedgerRecord
from broker_core.engine import START
from tests.engine.bench import APP, Bench


def test_c2_a_part_sent_twice_is_staged_once(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    first = bench.stage(opened.token, b"x", branch="b1")
    again = bench.stage(opened.token, b"x", branch="b1")
    assert first == again
    bench.engine.commit_batch(APP, "q", 0, opened.token, [again])
    assert bench.visible() == [b"x"]


def test_c2_a_part_sent_twice_with_other_rows_is_refused(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.stage(opened.token, b"x", branch="b1")
    with pytest.raises(MissingBranch, match="b1"):
        bench.stage(opened.token, b"x", b"y", branch="b1")


def test_rollback_drops_what_was_staged_and_may_be_repeated(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, b"x")
    bench.engine.rollback_batch(opened.token)
    bench.engine.rollback_batch(opened.token)
    with pytest.raises(MissingBranch):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    assert bench.visible() == []


def test_c4_a_token_of_another_batch_is_refused(bench: Bench) -> None:
    first = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.open_batch("other", "q2", 0, "fail")
    with pytest.raises(CheckpointMismatch, match="token"):
        bench.engine.commit_batch("other", "q2", 0, first.token, [])


def test_c4_the_ledgers_end_counts_whichever_app_decided_it(bench: Bench) -> None:
    """The sink may have another app id than the source: the range is found by the query and the batch."""
    bench.produce(b"a")
    end = bench.claim(app="source")
    opened = bench.engine.open_batch("sink", "q", 0, "fail")
    bench.read("q", 0, bench.ranges({"in": START}, end, "source"), app="source")
    assert bench.engine.commit_batch("sink", "q", 0, opened.token, []).entry.ranges == {"in": (0, 1)}
    bench.produce(b"b")
    assert bench.ranges({"in": START}, bench.claim(app="source", on_new="resume"), "source") == {"in": (1, 2)}


def test_c4_a_full_queue_that_rejects_refuses_the_whole_batch(bench: Bench) -> None:
    with bench.local.channel() as channel:
        channel.queue_declare("small", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    good = bench.stage(opened.token, b"x")
    full = bench.stage(opened.token, b"y", b"z", target={"routing_key": "small"})
    with pytest.raises(PreconditionFailed, match="small"):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [good, full])
    assert bench.visible() == [] and bench.visible("small") == []


def test_c5_a_batch_that_is_skipped_frees_its_rows_and_says_where_they_went(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    first = bench.stage(opened.token, b"x", kind="append", target={"table": "lake/a", "options": {}})
    second = bench.stage(opened.token, b"y", kind="append", target={"table": "lake/b", "options": {}})
    bench.engine.commit_batch(APP, "q", 0, opened.token, [first, second])
    for _ in range(2):  # idempotent
        bench.engine.skip(APP, 1, [first.branch], "/skipped")
        bench.crash()
        (waiting,) = bench.engine.unapplied(APP)
        assert [part.branches for part in waiting.to_apply] == [(second.branch,)] and bench.staged() == 1
    with pytest.raises(UnknownTransaction, match="no such rows to apply"):
        bench.engine.skip(APP, 1, ["another"], "/skipped")
    with pytest.raises(UnknownTransaction, match="no such rows to apply"):
        bench.engine.skip(APP, 2, [second.branch], "/skipped")
    bench.engine.skip(APP, 1, [second.branch], "/skipped")
    bench.engine.skip(APP, 1, [second.branch, first.branch], "/skipped")
    bench.crash()
    assert bench.engine.unapplied(APP) == [] and bench.staged() == 0
    assert bench.engine.open_batch(APP, "q", 0, "fail").already
    (kept,) = [record for record in bench.store.load().records if isinstance(record, LedgerRecord)]
    assert [target["skipped"] for _, target, _, _ in kept.branches] == ["/skipped", "/skipped"]


def test_a_batch_write_that_was_rolled_back_cannot_be_committed(bench: Bench) -> None:
    staged = bench.write("t", b"x")
    bench.engine.rollback_batch("t")
    with pytest.raises(TransactionState, match="rolled back"):
        bench.engine.commit_branches("t", [staged])
    with pytest.raises(BatchDecided):
        bench.write("t", b"late")
    assert bench.visible() == []
