"""The micro-batch protocol, rules S1 to S6, on every engine.

Each test is named after what it promises. Interleavings and crashes at every step are the model's
(tests/model/).
"""

from __future__ import annotations

import pytest

from broker_core.core.errors import (
    BatchGap,
    CheckpointMismatch,
    DataLoss,
    OptionError,
    PreconditionFailed,
    QueueNotFound,
)
from broker_core.engine import START, Limit, Origin, Ranges, Vector
from tests.contract.engine.bench import APP
from tests.contract.engine.bench import EngineBench as Bench

# -- S1, S2: the claim record --------------------------------------------------------------------------------


def test_s1_a_symbolic_start_is_resolved_once_whatever_comes_or_is_asked_later(bench: Bench) -> None:
    bench.produce(b"old")
    assert bench.claim(origin=Origin("latest")) == {"in": START}
    bench.produce(b"new")
    end = bench.claim(origin=Origin("latest"))
    assert bench.ranges({"in": START}, end) == {"in": (1, 2)}


def test_s1_the_meaning_of_start_survives_a_crash(bench: Bench) -> None:
    bench.produce(b"old")
    bench.claim(origin=Origin("latest"))
    bench.produce(b"new")
    bench.crash()
    assert bench.ranges({"in": START}, bench.claim(origin=Origin("earliest"))) == {"in": (1, 2)}


def test_s2_the_same_start_has_the_same_end_whatever_the_limit_and_the_new_messages(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    assert bench.claim() == {"in": 2}
    bench.produce(b"c")
    assert bench.claim() == {"in": 2}
    assert bench.claim(limit=Limit(max_rows=1)) == {"in": 2}


def test_s2_a_claim_survives_a_crash_of_the_engine(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    bench.crash()
    bench.produce(b"c")
    assert bench.claim() == {"in": 2}


def test_s2_nothing_new_gives_the_start_back_and_records_nothing(bench: Bench) -> None:
    assert bench.claim() == {"in": START}
    bench.produce(b"a")
    assert bench.claim() == {"in": 1}
    assert bench.claim({"in": 1}) == {"in": 1}
    bench.produce(b"b")
    assert bench.claim({"in": 1}) == {"in": 2}


def test_s2_a_start_that_is_no_end_of_a_claim_is_a_lineage_error(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    with pytest.raises(CheckpointMismatch, match="not the end of a range"):
        bench.claim({"in": 1})


@pytest.mark.needs("deletes_acked")
def test_s2_a_claim_acks_what_lies_below_its_start_first(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    assert bench.visible("in") == [b"a"]
    bench.claim(end)
    assert bench.visible("in") == []


@pytest.mark.parametrize("reads", [False, True])
def test_s2_a_committed_batch_that_should_be_decided_here_and_is_not_is_refused(
    bench: Bench, reads: bool
) -> None:
    """As on an older copy: the ledger ends where the claim begins, and the checkpoint is behind it."""
    bench.produce(b"a")
    first = bench.claim()
    bench.run("q", 0, {"in": START}, first)
    bench.produce(b"b")
    second = bench.claim(first)
    if reads:
        bench.read("q", 1, bench.ranges(first, second))
    bench.crash()
    for asks in (lambda: bench.claim(second, ran=False), lambda: bench.ack(second, ran=False)):
        with pytest.raises(CheckpointMismatch, match="Nothing was done"):
            asks()
    assert bench.visible("in") == [b"b"]
    again = bench.claim(on_new="resume")  # as the error says
    entry = bench.run("another", 0, {"in": START}, again, on_new="resume")
    assert (bench.ranges_of(entry), bench.visible("in")) == ({"in": (1, 2)}, [])


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_s2_a_batch_whose_error_the_caller_caught_is_not_acknowledged(
    bench: Bench, later: bool, reads: bool
) -> None:
    """Spark has committed it, and the reader that planned it asks. Kafka keeps what is acknowledged: there the next
    batch is refused, except behind the first one.
    """
    start: Vector = {"in": START}
    batch = int(later)
    if later:
        bench.produce(b"before")
        start = bench.claim()
        bench.run("q", 0, {"in": START}, start)
    bench.produce(b"a")
    end = bench.claim(start)
    token = bench.engine.open_batch(APP, "q", batch, "fail").token
    if reads:
        bench.read("q", batch, bench.ranges(start, end))
    bench.engine.rollback_batch(token)
    bench.produce(b"b")
    late = later and "deletes_acked" in bench.lacks
    for asks in () if late else (lambda: bench.claim(end), lambda: bench.ack(end)):
        with pytest.raises(CheckpointMismatch, match="was not called for it, or its error was caught"):
            asks()
    if late:
        bench.claim(end)
        with pytest.raises(BatchGap, match="was not called for it, or its error was caught"):
            bench.engine.open_batch(APP, "q", batch + 1, "fail")
    start, again, read = {"in": START}, 0, 0
    while bench.visible("in"):  # as the error says
        end = bench.claim(start, on_new="resume")
        entry = bench.run("another", again, start, end, on_new="resume")
        start, again, read = end, again + 1, read + entry.messages
    assert read == 2


def test_s2_a_first_batch_that_something_may_still_decide_is_acknowledged_with_the_next(bench: Bench) -> None:
    bench.produce(b"a")
    first = bench.claim()
    bench.crash()
    bench.produce(b"b")
    second = bench.claim(first, ran=False)
    assert bench.visible("in") == [b"a", b"b"]
    bench.claim(second)
    assert bench.visible("in") == []


def test_s2_a_query_of_another_sink_needs_no_decision_after_one_that_decides(bench: Bench) -> None:
    bench.produce(b"a")
    bench.run("q", 0, {"in": START}, bench.claim())
    bench.produce(b"b")
    end = bench.claim(on_new="resume")
    bench.read("of another sink", 0, bench.ranges({"in": START}, end))
    bench.claim(end)
    assert bench.visible("in") == []
    bench.crash()
    assert bench.claim(end, ran=False) == end


def test_s2_a_start_after_a_later_one_is_a_new_checkpoint_and_refused(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    bench.claim(end)
    with pytest.raises(CheckpointMismatch, match="onNewCheckpoint=resume"):
        bench.claim()


def test_s2_a_start_after_a_decided_batch_is_a_new_checkpoint_and_refused(bench: Bench) -> None:
    bench.produce(b"a")
    bench.run("q", 0, {"in": START}, bench.claim())
    with pytest.raises(CheckpointMismatch, match="new checkpoint"):
        bench.claim()


def test_s2_resume_goes_on_at_the_end_of_the_ledger_and_not_at_what_is_acked(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.run("q", 0, {"in": START}, bench.claim())  # decided, not acked
    bench.produce(b"c")
    end = bench.claim(on_new="resume")
    assert bench.ranges({"in": START}, end) == {"in": (2, 3)}


def test_s2_resume_without_a_ledger_goes_on_at_what_is_acked(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    end = bench.claim(limit=Limit(max_rows=1))
    bench.claim(end)
    assert bench.ranges({"in": START}, bench.claim(on_new="resume"))["in"][0] == end["in"]


def test_s2_another_checkpoint_before_anything_is_decided_gets_the_same_claim(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.produce(b"b")
    assert bench.claim() == end


def test_s2_resume_gives_the_new_checkpoint_claims_of_its_own(bench: Bench) -> None:
    bench.produce(b"a")
    first = bench.claim()
    bench.run("q", 0, {"in": START}, first)
    bench.produce(b"b")
    second = bench.claim(on_new="resume")
    bench.crash()
    assert bench.claim(on_new="resume") == second
    assert bench.ranges({"in": START}, first) == {"in": (0, 1)}
    assert bench.ranges({"in": START}, second) == {"in": (1, 2)}


def test_s2_a_claim_at_the_final_end_of_available_now_takes_nothing_with_any_limit(bench: Bench) -> None:
    """Its range is empty and lies inside a run."""
    for _ in range(3):
        bench.produce(b"x")
    bench.claim(limit=Limit(max_rows=1))
    for limit in (
        Limit(max_bytes=10, end={"in": 1}),
        Limit(max_rows=1, end={"in": 1}),
        Limit(max_rows=0, max_bytes=0, end={"in": 0}),
    ):
        assert bench.claim({"in": 1}, limit=limit) == {"in": 1}
    assert bench.claim({"in": 1}, limit=Limit(max_rows=2)) == {"in": 3}


def test_s2_the_final_end_of_available_now_caps_a_claim(bench: Bench) -> None:
    bench.produce(b"a")
    bench.produce(b"b")
    assert bench.claim(limit=Limit(end={"in": 1})) == {"in": 1}


def test_s2_a_final_end_that_does_not_name_a_log_takes_nothing_from_it(bench: Bench) -> None:
    bench.produce(b"a")
    bench.produce(b"b", queue="in2")
    start: Vector = {"in": START, "in2": START}
    end = bench.claim(start, limit=Limit(end={"in": 1}))
    assert end == {"in": 1, "in2": 0}
    assert bench.claim(end) == {"in": 1, "in2": 1}


def test_waiting_counts_a_log_without_an_end_from_zero(bench: Bench) -> None:
    queues = ["in", "in2"]
    assert not bench.wait(queues, {})
    bench.produce(b"a", queue="in2")
    assert bench.wait(queues, {"in": 0})
    assert not bench.wait(queues, {"in2": 1})


def test_s2_starting_offsets_name_a_place_in_each_queue(bench: Bench) -> None:
    bench.produce(b"a", b"b", b"c")
    start: Vector = {"in": START}
    assert bench.ranges(start, bench.claim(origin=Origin(offsets={"in": 2}))) == {"in": (2, 3)}


def test_s2_starting_offsets_past_the_end_or_of_another_queue_are_option_errors(bench: Bench) -> None:
    with pytest.raises(OptionError, match="offset 5"):
        bench.claim(origin=Origin(offsets={"in": 5}))
    with pytest.raises(OptionError, match="in2"):
        bench.claim(origin=Origin(offsets={"in2": 0}))


def test_s2_a_starting_timestamp_is_the_first_message_committed_at_or_after_it(bench: Bench) -> None:
    bench.produce(b"a")
    at = bench.later()
    bench.produce(b"b", b"c")
    assert bench.ranges({"in": START}, bench.claim(origin=Origin(timestamp_us=at))) == {"in": (1, 3)}


def test_a_queue_that_does_not_exist_is_named(bench: Bench) -> None:
    with pytest.raises(QueueNotFound, match="nowhere"):
        bench.claim({"nowhere": START})
    with pytest.raises(QueueNotFound, match="nowhere"):
        bench.engine.logs(["nowhere"])


# -- S3, S4: read --------------------------------------------------------------------------------------------


def test_s3_a_range_resolves_after_it_was_settled_and_acked(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    bench.ack(end)
    assert bench.ranges({"in": START}, end) == {"in": (0, 1)}
    assert bench.count({"in": (0, 1)})["in"].end == 1


def test_s3_a_range_that_was_never_claimed_is_a_lineage_error(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    with pytest.raises(CheckpointMismatch, match="never claimed"):
        bench.ranges({"in": START}, {"in": 1})


def test_s3_the_range_from_a_start_to_itself_is_empty(bench: Bench) -> None:
    assert bench.ranges({"in": START}, {"in": START}) == {}


@pytest.mark.needs("deletes_acked")
def test_s4_a_read_gives_the_same_rows_until_the_source_acks(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    end = bench.claim()
    ranges = bench.ranges({"in": START}, end)
    before = bench.read("q", 0, ranges)
    bench.run("q", 0, {"in": START}, end)  # settled, not acked
    bench.crash()
    assert bench.read("q", 0, ranges) == before == [b"a", b"b"]
    bench.ack(end)
    assert bench.read("q", 0, ranges) == before  # the last finished range stays for a replay
    bench.produce(b"c")
    bench.run("q", 1, end, then := bench.claim(end))
    bench.ack(then)
    with pytest.raises(DataLoss, match="gone"):
        bench.read("q", 0, ranges)


@pytest.mark.needs("deletes_acked")
def test_s4_fail_on_data_loss_false_reads_what_is_left(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.crash()  # so that b stands in another batch
    bench.produce(b"b")
    bench.ack(bench.claim(end))
    assert bench.read("q", 0, {"in": (0, 1)}, strict=False) == []


def test_s4_a_slice_reads_its_part_of_the_range_only(bench: Bench) -> None:
    bench.produce(*[b"%d" % number for number in range(10)])
    ranges = bench.ranges({"in": START}, bench.claim())
    assert bench.read("q", 0, ranges, slices={"in": (3, 6)}) == [b"3", b"4", b"5"]


def test_s4_no_read_no_consumption(bench: Bench) -> None:
    bench.produce(b"a")
    bench.claim()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    entry = bench.engine.commit_batch(APP, "q", 0, opened.token, []).entry
    assert (entry.ranges, entry.messages) == ({}, 0)
    assert bench.visible("in") == [b"a"]


def test_s4_a_batch_that_notes_its_range_without_reading_rows_consumes_it(bench: Bench) -> None:
    """The driver does so where the tasks that read knew no query: those of a thread of the function."""
    bench.produce(b"a", b"b")
    end = bench.claim()
    ranges = bench.ranges({"in": START}, end)
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    assert bench.read("", -1, ranges) == [b"a", b"b"]
    for _ in range(2):
        assert bench.read("q", 0, ranges, slices={}) == []
    bench.crash()
    entry = bench.engine.commit_batch(APP, "q", 0, opened.token, []).entry
    assert (bench.ranges_of(entry), entry.messages) == ({"in": (0, 2)}, 2)
    assert bench.visible("in") == []


def test_s4_a_batch_decided_without_its_range_reads_it_later_until_the_source_goes_on(bench: Bench) -> None:
    """Only threads had read the batch."""
    bench.produce(b"a")
    end = bench.claim()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [])
    bench.crash()
    ranges = bench.ranges({"in": START}, end)
    assert bench.read("q", 0, ranges) == [b"a"]
    assert bench.engine.commit_batch(APP, "q", 0, "", []).already
    bench.produce(b"b")
    following = bench.claim(end)  # Spark has batch 0 in its commit log
    entry = bench.run("q", 1, end, following)
    assert (bench.ranges_of(entry), bench.visible("in")) == ({"in": (1, 2)}, [])


def test_s4_a_batch_decided_without_a_range_does_not_read_what_was_claimed_later(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [])
    bench.produce(b"a")
    ranges = bench.ranges({"in": START}, bench.claim())
    with pytest.raises(CheckpointMismatch, match="restored"):
        read_and_repeat(bench, 0, ranges)


def read_and_repeat(bench: Bench, batch: int, ranges: Ranges) -> None:
    """A decided batch, as its replay does."""
    bench.read("q", batch, ranges)
    bench.engine.commit_batch(APP, "q", batch, "", [])


def read_and_commit(bench: Bench, batch: int, ranges: Ranges) -> None:
    """What must not be read together with something else is refused by the read, or by the decision."""
    token = bench.engine.open_batch(APP, "q", batch, "fail").token
    bench.read("q", batch, ranges)
    bench.engine.commit_batch(APP, "q", batch, token, [])


def test_s4_a_batch_that_has_read_one_range_never_reads_another(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.read("q", 0, {"in": (0, 1)})
    bench.produce(b"b")
    bench.claim(end)
    bench.crash()
    with pytest.raises(CheckpointMismatch):
        read_and_commit(bench, 0, {"in": (1, 2)})
    assert bench.engine.last_entry(APP) is None


def test_s4_a_batch_that_reads_the_range_of_an_earlier_one_is_refused_and_goes_on_with_its_own(
    bench: Bench,
) -> None:
    """A function that keeps the frame of a batch and uses it in a later one."""
    bench.produce(b"a")
    end = bench.claim()
    read_and_commit(bench, 0, {"in": (0, 1)})
    bench.produce(b"b")
    bench.claim(end)
    with pytest.raises(
        OptionError, match="the range of batch 0: its function uses the frame of another batch"
    ):
        bench.read("q", 1, {"in": (0, 1)})
    bench.crash()
    read_and_commit(bench, 1, {"in": (1, 2)})
    entry = bench.engine.last_entry(APP)
    assert entry is not None and bench.ranges_of(entry) == {"in": (1, 2)}


def test_s4_a_range_that_is_no_claim_is_not_read(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    with pytest.raises(CheckpointMismatch, match="not a range"):
        read_and_commit(bench, 0, {"in": (0, 1)})
    assert bench.engine.last_entry(APP) is None


def test_s4_a_read_without_a_query_is_not_recorded_and_consumes_nothing(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    assert bench.read("", -1, {"in": (0, 1)}) == [b"a"]
    opened = bench.engine.open_batch(APP, "", 0, "fail")
    assert bench.engine.commit_batch(APP, "", 0, opened.token, []).entry.ranges == {}
    bench.ack(end)
    assert bench.visible("in") == []


def test_a_decided_batch_refuses_to_read_what_it_did_not_consume(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [])  # an empty batch
    bench.produce(b"a")
    # an older checkpoint, from before the empty batch, is restored and plans batch 0 anew
    end = bench.claim()
    assert bench.engine.open_batch(APP, "q", 0, "fail").already
    with pytest.raises(CheckpointMismatch, match="decided"):
        read_and_commit(bench, 0, bench.ranges({"in": START}, end))
    assert bench.visible("in") == [b"a"]


# -- S5, S6: deletion, ownership -----------------------------------------------------------------------------


@pytest.mark.needs("deletes_acked")
def test_s5_a_decided_batch_settles_but_only_the_ack_of_the_next_deletes(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    assert bench.visible("in") == []
    assert not bench.deleted(0)
    bench.crash()
    bench.ack(end)
    assert not bench.deleted(0)
    bench.produce(b"b")
    bench.run("q", 1, end, then := bench.claim(end))
    bench.ack(then)
    assert bench.deleted(0)
    assert not bench.deleted(1)


def test_s5_an_ack_twice_or_of_an_older_end_changes_nothing(bench: Bench) -> None:
    bench.produce(b"a")
    first = bench.claim()
    bench.produce(b"b")
    second = bench.claim(first)
    bench.ack(second)
    bench.ack(second)
    bench.ack(first)
    assert bench.visible("in") == []


def test_s5_an_ack_of_what_is_no_end_of_a_claim_is_a_lineage_error(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    with pytest.raises(CheckpointMismatch):
        bench.ack({"in": 1})


def test_s6_a_browser_is_always_allowed(bench: Bench) -> None:
    bench.produce(b"a")
    bench.claim()
    assert bench.visible("in") == [b"a"]


def test_s6_a_batch_that_has_read_a_queue_cannot_commit_after_its_release(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.read("q", 0, bench.ranges({"in": START}, end))
    staged = bench.stage(opened.token, b"x")
    bench.engine.release(APP, "in", force=True)
    with pytest.raises(CheckpointMismatch):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    assert bench.visible("in") == [b"a"]
    assert bench.visible() == []


@pytest.mark.needs("exclusive_claims")
def test_s6_only_the_owner_is_released(bench: Bench) -> None:
    bench.claim()
    with pytest.raises(PreconditionFailed, match=APP):
        bench.engine.release("another", "in")
    with pytest.raises(QueueNotFound):
        bench.engine.release(APP, "nowhere")
