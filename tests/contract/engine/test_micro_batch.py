"""The micro-batch protocol, rules C1 to C6, on every engine.

Each test is named after what it promises. Interleavings and crashes at every step are the model's
(tests/model/).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from broker_core.core.errors import (
    BatchDecided,
    BatchGap,
    CheckpointMismatch,
    MissingBranch,
    OptionError,
    UnknownTransaction,
    Unroutable,
)
from broker_core.engine import REFUSED, REFUSED_ROWS, ROWS_TO, START, UNKNOWN_OFFSETS, StagedBranch, Vector
from broker_core.micro_batch import ledger as ledger_rules
from broker_core.micro_batch.claims import claim as claim_rules
from tests.contract.engine.bench import APP
from tests.contract.engine.bench import EngineBench as Bench

# -- C1: open ------------------------------------------------------------------------------------------------


def test_c1_batches_follow_each_other_and_the_sequence_counts_them(bench: Bench) -> None:
    for batch in range(3):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        assert (opened.sequence, opened.already) == (batch + 1, False)
        assert bench.engine.commit_batch(APP, "q", batch, opened.token, []).entry.sequence == batch + 1
        bench.crash()


def test_c1_a_decided_batch_answers_already_with_its_entry(bench: Bench) -> None:
    bench.produce(b"a")
    entry = bench.run("q", 0, {"in": START}, bench.claim(), b"x")
    bench.crash()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    assert opened.identity == bench.engine.identity(APP) != ""
    assert opened.already and opened.entry == entry and (opened.sequence, opened.token) == (1, "")


def test_c4_a_replay_commits_without_a_token_and_gets_the_entry(bench: Bench) -> None:
    bench.produce(b"a")
    start, end = {"in": START}, bench.claim()
    entry = bench.run("q", 0, start, end, b"x")
    bench.crash()
    assert bench.read("q", 0, bench.ranges(start, end)) == [b"a"]
    committed = bench.engine.commit_batch(APP, "q", 0, "", [])
    assert committed.already and committed.entry == entry
    assert bench.visible() == [b"x"]


def test_one_app_is_found_by_its_name(bench: Bench) -> None:
    assert bench.engine.app(APP) is None
    bench.produce(b"a")
    bench.run("q", 0, {"in": START}, bench.claim())
    assert [bench.engine.app(APP)] == bench.engine.apps()
    assert bench.engine.app("another") is None


def test_c1_a_batch_id_that_skips_is_a_gap(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [])
    with pytest.raises(BatchGap, match="expects batch 1"):
        bench.engine.open_batch(APP, "q", 2, "fail")


def test_c1_a_first_batch_above_zero_needs_resume(bench: Bench) -> None:
    with pytest.raises(BatchGap, match="another sink"):
        bench.engine.open_batch(APP, "q", 7, "fail")
    opened = bench.engine.open_batch(APP, "q", 7, "resume")
    assert opened.sequence == 1
    bench.engine.commit_batch(APP, "q", 7, opened.token, [])
    assert bench.engine.open_batch(APP, "q", 8, "fail").sequence == 2


def test_c1_another_checkpoint_is_refused_by_default_and_both_queries_are_named(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q-old", 0, "fail")
    bench.engine.commit_batch(APP, "q-old", 0, opened.token, [])
    with pytest.raises(CheckpointMismatch, match=r"q-new.*q-old"):
        bench.engine.open_batch(APP, "q-new", 0, "fail")


def test_c1_the_sequence_goes_on_over_a_resumed_checkpoint(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q-old", 0, "fail")
    bench.engine.commit_batch(APP, "q-old", 0, opened.token, [])
    resumed = bench.engine.open_batch(APP, "q-new", 0, "resume")
    assert resumed.sequence == 2
    with pytest.raises(CheckpointMismatch, match="followed by"):
        bench.engine.open_batch(APP, "q-old", 1, "resume")


def test_c1_a_checkpoint_that_decided_nothing_is_replaced_and_its_late_driver_shut_out(bench: Bench) -> None:
    old = bench.engine.open_batch(APP, "q-old", 0, "fail")
    new = bench.engine.open_batch(APP, "q-new", 0, "fail")
    bench.crash()
    with pytest.raises(CheckpointMismatch, match="taken over"):
        bench.engine.commit_batch(APP, "q-old", 0, old.token, [])
    assert bench.engine.commit_batch(APP, "q-new", 0, new.token, []).entry.sequence == 1


def test_c1_and_c4_a_batch_is_opened_and_decided_in_one_call_and_once(bench: Bench) -> None:
    bench.produce(b"a")
    start, end = {"in": START}, bench.claim()
    bench.read("q", 0, bench.ranges(start, end))
    branch = bench.stage("t", b"x")
    committed = bench.engine.commit_batch(APP, "q", 0, "t", [branch], opens="fail")
    assert not committed.already and bench.ranges_of(committed.entry) == {"in": (0, 1)}
    bench.crash()
    again = bench.engine.commit_batch(APP, "q", 0, "t", [branch], opens="fail")
    assert again.already and again.entry == committed.entry
    assert bench.visible() == [b"x"]


def test_c1_and_c4_what_open_refuses_the_one_call_refuses_and_decides_nothing(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q-old", 0, "fail")
    bench.engine.commit_batch(APP, "q-old", 0, opened.token, [])
    branch = bench.stage("t", b"x", query="q-new")
    with pytest.raises(CheckpointMismatch, match=r"q-new.*q-old"):
        bench.engine.commit_batch(APP, "q-new", 0, "t", [branch], opens="fail")
    skipping = bench.stage("u", b"y", query="q-old", batch=2)
    with pytest.raises(BatchGap, match="expects batch 1"):
        bench.engine.commit_batch(APP, "q-old", 2, "u", [skipping], opens="fail")
    bench.crash()
    assert bench.visible() == []
    assert bench.engine.commit_batch(APP, "q-new", 0, "t", [branch], opens="resume").entry.sequence == 2
    assert bench.visible() == [b"x"]


@pytest.mark.parametrize("other", ["another", ""], ids=["other offsets", "not known"])
def test_row_16_a_decided_batch_that_comes_with_other_offsets_of_another_source_is_an_older_checkpoint(
    bench: Bench, other: str
) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail", offset_log="first")
    branch = bench.stage(opened.token, b"x", query="q", batch=0)
    entry = bench.engine.commit_batch(APP, "q", 0, opened.token, [branch], offset_log="first").entry
    bench.crash()
    for _ in range(2):
        for refused in (
            lambda: bench.engine.open_batch(APP, "q", 0, "resume", offset_log=other),
            lambda: bench.engine.commit_batch(APP, "q", 0, "", [], offset_log=other),
            lambda: bench.engine.commit_batch(APP, "q", 0, "t", [branch], opens="resume", offset_log=other),
        ):
            with pytest.raises(CheckpointMismatch, match="an older checkpoint was restored"):
                refused()
        assert bench.engine.open_batch(APP, "q", 0, "fail", offset_log="first").entry == entry
        assert bench.engine.commit_batch(APP, "q", 0, "", [], offset_log="first").already
    assert bench.visible() == [b"x"]


def test_row_16_what_a_batch_of_unknown_offsets_has_read_is_claimed_once_and_nothing_changes(
    bench: Bench,
) -> None:
    """Spark asks for a claim once before it writes its offset log. It asks again where that was lost, and what it plans
    then of another source may be other rows. The newest checkpoint goes on, and replays the batch without asking.
    """
    bench.produce(b"a")
    start = bench.claim()
    bench.run("q", 0, {"in": START}, start)
    bench.produce(b"b")
    end = bench.claim(start)
    assert bench.claim(start) == end, "the driver died before Spark's offset log"
    for offsets, refused in ((UNKNOWN_OFFSETS, True), ("", False), ("digest", False)):
        batch = len(bench.engine.entries(APP))
        bench.read("q", batch, bench.ranges(start, end))
        branch = bench.stage(f"t{batch}", b"x", batch=batch)
        commit = partial(bench.engine.commit_batch, APP, "q", batch, f"t{batch}", [branch])
        decide = partial(commit, opens="fail", offset_log=offsets)
        decide()
        for _ in range(2):
            bench.crash()
            if not refused:
                assert bench.claim(start) == end
                continue
            with pytest.raises(CheckpointMismatch, match="an older checkpoint was restored"):
                bench.claim(start, ran=False)
        assert decide().already
        bench.produce(b"b")
        start, end = end, bench.claim(end)
    assert len(bench.visible()) == 3


def test_row_16_a_batch_of_unknown_offsets_that_read_no_queue_has_no_rows(bench: Bench) -> None:
    def decide(batch: int, *bodies: bytes) -> bool:
        token = f"t{batch}{len(bodies)}"
        branch = bench.stage(token, *bodies, batch=batch)
        found = bench.engine.commit_batch(
            APP, "q", batch, token, [branch], opens="fail", offset_log=UNKNOWN_OFFSETS
        )
        return found.already

    with pytest.raises(OptionError, match="the option checkpointLocation on a disk of the driver"):
        decide(0, b"x")
    assert not decide(0)
    assert decide(0)
    bench.crash()
    try:
        row = bench.stage("again", b"x")
    except BatchDecided:
        row = StagedBranch("again", 0, 0, rows=1, checksum=0)  # of a sink that has read its row all the same
    with pytest.raises(OptionError, match="the option checkpointLocation on a disk of the driver"):
        bench.engine.commit_batch(APP, "q", 0, "again", [row], opens="fail", offset_log=UNKNOWN_OFFSETS)
    assert not decide(1) and bench.visible() == []


@pytest.mark.parametrize(
    ("decided", "now", "accepted"),
    [("first", UNKNOWN_OFFSETS, False), ("", UNKNOWN_OFFSETS, False), (UNKNOWN_OFFSETS, "", True),
     (UNKNOWN_OFFSETS, "first", False)],
)  # fmt: skip
def test_row_16_offsets_that_are_not_known_are_equal_to_no_others(
    bench: Bench, decided: str, now: str, accepted: bool
) -> None:
    def decide(offsets: str) -> bool:
        return bench.engine.commit_batch(APP, "q", 0, "t", [], opens="fail", offset_log=offsets).already

    decide(decided)
    bench.crash()
    if accepted:
        assert decide(now)
    else:
        with pytest.raises(CheckpointMismatch, match="begin each source that is not txmq after"):
            decide(now)


def test_c1_a_batch_from_before_the_ledgers_first_is_an_older_checkpoint(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 5, "resume")
    bench.engine.commit_batch(APP, "q", 5, opened.token, [])
    with pytest.raises(CheckpointMismatch, match="older checkpoint"):
        bench.engine.open_batch(APP, "q", 4, "fail")


# -- C2: stage -----------------------------------------------------------------------------------------------


def test_c2_staged_rows_are_durable_and_invisible_until_a_commit_names_them(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, b"x", b"y")
    assert bench.visible() == []
    bench.crash()
    assert bench.visible() == []
    bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    assert bench.visible() == [b"x", b"y"]


def test_c2_only_named_branches_are_published(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.stage(opened.token, b"lost attempt")
    winner = bench.stage(opened.token, b"winner")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [winner])
    assert bench.visible() == [b"winner"]


@pytest.mark.needs("refuses_late_tasks")
def test_c2_a_task_that_wakes_after_the_decision_stages_nothing(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [])
    with pytest.raises(BatchDecided):
        bench.write(opened.token, b"late")
    with pytest.raises(BatchDecided):
        bench.stage("token of another attempt", b"late")


def test_c2_a_large_branch_is_staged_and_published_whole(bench: Bench) -> None:
    bodies = [b"%06d" % number for number in range(70_000)]
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, *bodies)
    assert staged.rows == len(bodies)
    bench.crash()
    assert bench.engine.commit_batch(APP, "q", 0, opened.token, [staged]).entry.published == len(bodies)
    bench.crash()
    assert bench.visible() == bodies


def test_rollback_of_a_decided_batch_is_refused(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, b"x")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    bench.crash()
    with pytest.raises(BatchDecided, match="batch 0"):
        bench.engine.rollback_batch(opened.token)
    assert bench.visible() == [b"x"]


# -- C4: decide ----------------------------------------------------------------------------------------------


def test_c4_a_batch_publishes_consumes_and_writes_its_entry_in_one_commit(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    end = bench.claim()
    entry = bench.run("q", 0, {"in": START}, end, b"x")
    bench.crash()
    assert bench.engine.last_entry(APP) == entry
    assert (entry.sequence, bench.ranges_of(entry), entry.messages, entry.published) == (
        1,
        {"in": (0, 2)},
        2,
        1,
    )
    assert bench.visible() == [b"x"] and bench.visible("in") == []


def test_c4_the_same_commit_again_answers_already_and_publishes_nothing(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, b"x")
    first = bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    bench.crash()
    again = bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    assert again.already and again.entry == first.entry
    assert bench.visible() == [b"x"]


def test_c4_of_two_attempts_the_first_decides_and_the_second_answers_already(bench: Bench) -> None:
    one, two = bench.engine.open_batch(APP, "q", 0, "fail"), bench.engine.open_batch(APP, "q", 0, "fail")
    first, second = bench.stage(one.token, b"one"), bench.stage(two.token, b"two")
    bench.engine.commit_batch(APP, "q", 0, two.token, [second])
    assert bench.engine.commit_batch(APP, "q", 0, one.token, [first]).already
    assert bench.visible() == [b"two"]


def test_c4_a_commit_out_of_order_is_refused(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    with pytest.raises(BatchGap, match="expects batch 0"):
        bench.engine.commit_batch(APP, "q", 1, opened.token, [])
    with pytest.raises(CheckpointMismatch, match="belongs to query q"):
        bench.engine.commit_batch(APP, "q2", 0, opened.token, [])
    bench.crash()
    assert bench.engine.last_entry(APP) is None


@pytest.mark.parametrize("damage", ["missing", "rows", "checksum"])
def test_c4_a_named_branch_that_is_not_there_whole_is_refused(bench: Bench, damage: str) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    good = bench.stage(opened.token, b"x", b"y")
    named = {
        "missing": StagedBranch("nobody's", 0, 0, 2, good.checksum),
        "rows": StagedBranch(good.branch, 0, 0, 3, good.checksum),
        "checksum": StagedBranch(good.branch, 0, 0, 2, good.checksum ^ 1),
    }[damage]
    with pytest.raises(MissingBranch, match=named.branch):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [named])
    assert bench.visible() == []
    assert bench.engine.last_entry(APP) is None


def test_c4_a_range_that_does_not_start_at_the_ledgers_end_is_refused(bench: Bench) -> None:
    bench.produce(b"a")
    first = bench.claim()
    bench.produce(b"b")
    second = bench.claim(first)
    bench.run("q-old", 0, {"in": START}, first)
    opened = bench.engine.open_batch(APP, "q-new", 0, "resume")
    bench.read("q-new", 0, bench.ranges({"in": START}, first))  # what is consumed already
    with pytest.raises(CheckpointMismatch, match="consumed up to 1"):
        bench.engine.commit_batch(APP, "q-new", 0, opened.token, [])
    assert bench.ranges(first, second) == {"in": (1, 2)}


def test_c4_unroutable_messages_fail_the_whole_batch_with_a_count_and_examples(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    good = bench.stage(opened.token, b"x")
    lost = bench.stage(opened.token, b"y", b"z", target={"routing_key": "nowhere"})
    with pytest.raises(Unroutable, match=r"2 messages.*nowhere"):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [good, lost])
    assert bench.visible() == []
    entry = bench.engine.commit_batch(APP, "q", 0, opened.token, [good, lost], on_unroutable="drop").entry
    assert entry.published == 1 and bench.visible() == [b"x"]


def test_c4_orphans_of_earlier_attempts_are_dropped_when_a_batch_is_decided(bench: Bench) -> None:
    dead = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.stage(dead.token, b"dead attempt")
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.stage(opened.token, b"dead task")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [bench.stage(opened.token, b"x")])
    assert bench.staged() == 0
    bench.crash()
    assert bench.staged() == 0


def test_c4_the_ledger_is_pruned_behind_what_is_applied_and_numbers_never_fall(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_rules, "KEPT_ENTRIES", 3)
    for batch in range(10):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
    bench.crash()
    assert [entry.sequence for entry in bench.engine.unmirrored(APP)] == [8, 9, 10]
    assert bench.engine.open_batch(APP, "q", 10, "fail").sequence == 11


def test_c4_claims_are_pruned_and_the_newest_still_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 3)
    at: Vector = {"in": START}
    for number in range(6):
        bench.produce(b"%d" % number)
        at = bench.claim(at)
    bench.crash()
    assert bench.claim({"in": 5}) == {"in": 6}
    with pytest.raises(CheckpointMismatch):
        bench.ranges({"in": START}, {"in": 1})


# -- C5, C6: apply and mirror --------------------------------------------------------------------------------

TABLE = {"table": "lake/a", "options": {}}


def decide_append(bench: Bench, batch: int, *bodies: bytes) -> Any:
    opened = bench.engine.open_batch(APP, "q", batch, "fail")
    staged = bench.stage(opened.token, *bodies, batch=batch, kind="append", target=TABLE)
    return bench.engine.commit_batch(APP, "q", batch, opened.token, [staged]).entry


def applied_rows(bench: Bench, entry: Any) -> list[bytes]:
    branches = [branch for part in entry.to_apply for branch in part.branches]
    return [
        body for batch in bench.engine.read_branches(branches) for body in batch.column("body").to_pylist()
    ]


def test_c5_decided_rows_wait_in_order_until_they_are_applied(bench: Bench) -> None:
    decide_append(bench, 0, b"x")
    decide_append(bench, 1, b"y")
    bench.crash()
    waiting = bench.engine.unapplied(APP)
    assert [entry.sequence for entry in waiting] == [1, 2]
    assert [applied_rows(bench, entry) for entry in waiting] == [[b"x"], [b"y"]]
    bench.engine.mark_applied(APP, 1)
    bench.engine.mark_applied(APP, 1)
    assert [entry.sequence for entry in bench.engine.unapplied(APP)] == [2]
    assert bench.staged() == 1


def test_c5_what_is_applied_cannot_be_skipped(bench: Bench) -> None:
    entry = decide_append(bench, 0, b"x")
    bench.engine.mark_applied(APP, 1)
    with pytest.raises(UnknownTransaction, match="they are applied, or the batch was never decided"):
        bench.engine.skip(APP, 1, entry.to_apply[0].branches, "/skipped")


def test_c5_why_a_batch_is_not_applied_is_kept_with_the_time_of_its_first_error(bench: Bench) -> None:
    entry = decide_append(bench, 0, b"x")
    branches = entry.to_apply[0].branches
    bench.engine.note(APP, 1, branches, REFUSED, "the first error")
    first, _ = bench.engine.unapplied(APP)[0].to_apply[0].target[REFUSED]
    for _ in range(2):
        bench.engine.note(APP, 1, branches, REFUSED, "the last error")
        bench.engine.note(APP, 1, branches, ROWS_TO, "/refused")
        bench.crash()
    (part,) = bench.engine.unapplied(APP)[0].to_apply
    assert part.target[REFUSED] == [first, "the last error"] and part.target[ROWS_TO][1] == "/refused"
    assert (part.branches, part.rows, applied_rows(bench, entry)) == (branches, 1, [b"x"])
    bench.engine.mark_applied(APP, 1)
    assert bench.engine.unapplied(APP) == []
    with pytest.raises(UnknownTransaction, match="they are applied"):
        bench.engine.note(APP, 1, branches, REFUSED, "too late")


def test_c5_rows_that_a_table_refuses_are_published_once_and_the_first_call_says_which(bench: Bench) -> None:
    entry = decide_append(bench, 0, b"x", b"y")
    branches = entry.to_apply[0].branches

    def publish(token: str, body: bytes, rows: str) -> str:
        return bench.engine.publish_refused(APP, 1, branches, rows, token, [bench.write(token, body)])

    with pytest.raises(MissingBranch):
        bench.engine.publish_refused(APP, 1, branches, "0", "another", [bench.write("one", b"x")])
    assert bench.visible() == [] and bench.engine.unapplied(APP) == [entry]
    assert publish("one more", b"x", "0") == "0"
    bench.crash()
    assert publish("two", b"y", "1") == "0", "a second driver learns what the first one has done"
    bench.engine.note(APP, 1, branches, REFUSED, "the storage is away")
    bench.crash()
    (part,) = bench.engine.unapplied(APP)[0].to_apply
    assert part.target[REFUSED_ROWS][1] == "0" and part.target[REFUSED][1] == "the storage is away"
    assert bench.visible() == [b"x"] and applied_rows(bench, entry) == [b"x", b"y"]
    bench.engine.mark_applied(APP, 1)
    with pytest.raises(UnknownTransaction, match="they are applied"):
        publish("three", b"y", "1")
    assert bench.visible() == [b"x"]


def test_c5_rows_that_were_freed_are_an_error_and_not_an_empty_answer(bench: Bench) -> None:
    """A second driver that still has the entry in hand must not hand no rows to a function."""
    entry = decide_append(bench, 0, b"x")
    bench.engine.mark_applied(APP, 1)
    with pytest.raises(MissingBranch, match="applied"):
        applied_rows(bench, entry)


def test_c5_branches_are_grouped_by_target_with_all_their_rows(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    branches = [
        bench.stage(opened.token, b"1", kind="append", target=TABLE),
        bench.stage(opened.token, b"2", b"3", kind="append", target=TABLE),
        bench.stage(opened.token, b"4", kind="after_commit", target={"name": "upsert"}),
    ]
    entry = bench.engine.commit_batch(APP, "q", 0, opened.token, branches).entry
    assert [(part.kind, part.rows, len(part.branches)) for part in entry.to_apply] == [
        ("append", 3, 2),
        ("after_commit", 1, 1),
    ]
    assert not entry.applied and applied_rows(bench, entry) == [b"1", b"2", b"3", b"4"]


def test_c6_entries_wait_to_be_mirrored_in_order(bench: Bench) -> None:
    for batch in range(3):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
    bench.engine.mark_mirrored(APP, 2)
    bench.crash()
    assert [entry.sequence for entry in bench.engine.unmirrored(APP)] == [3]
    assert [(entry.sequence, entry.mirrored) for entry in bench.engine.entries(APP)] == [
        (1, True),
        (2, True),
        (3, False),
    ]
    assert [entry.sequence for entry in bench.engine.unmirrored(APP, 1)] == [3]


def test_c6_the_ledger_keeps_what_a_delta_ledger_in_use_does_not_have(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_rules, "KEPT_ENTRIES", 2)
    for batch in range(5):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
        if batch == 0:
            bench.engine.mark_mirrored(APP, 1)
    assert [entry.sequence for entry in bench.engine.unmirrored(APP)] == [2, 3, 4, 5]


# -- batch writes --------------------------------------------------------------------------------------------


def test_a_batch_write_is_one_transaction_and_idempotent(bench: Bench) -> None:
    staged = [bench.write("t", b"x"), bench.write("t", b"y")]
    assert bench.visible() == []
    assert bench.engine.commit_branches("t", staged) == 2
    bench.crash()
    assert bench.engine.commit_branches("t", staged) == 2
    assert bench.visible() == [b"x", b"y"]
    with pytest.raises(BatchDecided, match="batch write t"):
        bench.engine.rollback_batch("t")
    assert bench.engine.commit_branches("empty", []) == 0


def test_a_token_that_nobody_has_used_yet_is_not_taken_by_a_rollback(bench: Bench) -> None:
    """Who knows a token, or guesses one, does not decide about what another one will stage under it."""
    bench.engine.rollback_batch("t")
    bench.crash()
    assert bench.engine.commit_branches("t", [bench.write("t", b"x")]) == 1
    assert bench.visible() == [b"x"]


def test_the_apps_are_listed_with_what_they_own_and_what_waits(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    decide_append(bench, 0, b"x")
    (found,) = bench.engine.apps()
    assert (found.app_id, found.queues, found.sequence, found.query_id, found.batch_id) == (
        APP,
        ("in",),
        1,
        "q",
        0,
    )
    assert (found.lag, found.unapplied, found.unmirrored) == (2, 1, 0), "it has no Delta ledger"
    decide_append(bench, 1, b"y")
    bench.engine.mark_mirrored(APP, 1)
    (found,) = bench.engine.apps()
    assert (found.unapplied, found.unmirrored) == (2, 1)


@pytest.mark.parametrize("rows", [(b"once",), ()])
@pytest.mark.parametrize("app", [APP, ""])
def test_c4_a_commit_that_names_a_branch_twice_is_refused_and_changes_nothing(
    bench: Bench, app: str, rows: tuple[bytes, ...]
) -> None:
    token = bench.engine.open_batch(APP, "q", 0, "fail").token if app else "a batch write"
    staged = bench.stage(token, *rows, query="q" if app else "", batch=0 if app else -1, app=app)

    def commit(*branches: StagedBranch) -> None:
        if app:
            bench.engine.commit_batch(APP, "q", 0, token, branches)
        else:
            bench.engine.commit_branches(token, branches)

    with pytest.raises(MissingBranch, match=f"branch {staged.branch} is named"):
        commit(staged, staged)
    bench.crash()
    assert bench.visible() == []
    commit(staged)
    assert bench.visible() == list(rows)
