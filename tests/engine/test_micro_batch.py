"""The micro-batch protocol, rule by rule, on the embedded engine over a broker in memory.

Each test is named after what it promises. Interleavings and crashes at every step are the model's (tests/model/).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker import claim as claim_rules
from broker_core.broker import ledger as ledger_rules
from broker_core.embedded import EmbeddedEngine
from broker_core.engine import START, BranchHeader, Limit, Origin, Ranges, ReadTicket, StagedBranch, Vector
from broker_core.errors import (
    BatchDecided,
    BatchGap,
    DataLoss,
    LineageConflict,
    MissingBranch,
    OptionError,
    PreconditionFailed,
    QueueNotFound,
    ResourceLocked,
    TransactionState,
    Unroutable,
)
from broker_core.local import LocalBroker
from broker_core.message import READ_SCHEMA
from broker_core.store.memory import MemoryStore

APP = "alerts"
NO_LIMIT = Limit()
EARLIEST = Origin()


class Bench:
    """A broker with the queues ``in``, ``in2`` and ``out``, and the words of a driver and its tasks."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._open()
        with self.local.channel() as channel:
            for queue in ("in", "in2", "out"):
                channel.queue_declare(queue)

    def _open(self) -> None:
        self.now = getattr(self, "now", 1_000_000)
        self.local = LocalBroker(self.store, clock=self._clock, upkeep=False)
        self.engine = EmbeddedEngine(self.local)

    def _clock(self) -> int:
        self.now += 1_000
        return self.now

    def crash(self) -> None:
        self.store = self.store.reopened()
        self._open()

    def produce(self, *bodies: bytes, queue: str = "in") -> None:
        """One transaction."""
        with self.local.channel() as channel:
            channel.tx_select()
            for body in bodies:
                channel.publish(body, routing_key=queue)
            channel.tx_commit()

    def claim(self, start: Vector | None = None, *, app: str = APP, limit: Limit = NO_LIMIT, origin: Origin = EARLIEST, on_new: Any = "fail") -> Vector:
        return self.engine.claim(app, start or {"in": START}, limit, origin, on_new)

    def ranges(self, start: Vector, end: Vector, app: str = APP) -> Ranges:
        return self.engine.resolve(app, start, end)

    def read(self, query: str, batch: int, ranges: Ranges, *, app: str = APP, strict: bool = True) -> list[bytes]:
        slices = tuple((log, start, end) for log, (start, end) in ranges.items())
        batches = list(self.engine.read(ReadTicket(app, query, batch, ranges, slices, strict)))
        assert all(found.schema.equals(READ_SCHEMA) for found in batches)
        return [body for found in batches for body in found.column("body").to_pylist()]

    def stage(
        self, token: str, *bodies: bytes, query: str = "", batch: int = -1, app: str = "", kind: Any = "publish", target: Any = None, branch: str = ""
    ) -> StagedBranch:
        header = BranchHeader(token, branch or uuid.uuid4().hex, kind, target or {"routing_key": "out"}, app_id=app, query_id=query, batch_id=batch)
        return self.engine.stage(header, [rows(bodies)])

    def run(self, query: str, batch: int, start: Vector, end: Vector, *publish: bytes, on_new: Any = "fail") -> Any:
        """A whole batch: open, read, stage, commit."""
        opened = self.engine.open_batch(APP, query, batch, on_new)
        assert opened.entry is None
        self.read(query, batch, self.ranges(start, end))
        branches = [self.stage(opened.token, *publish)] if publish else []
        return self.engine.commit_batch(APP, query, batch, opened.token, branches).entry

    def visible(self, queue: str = "out") -> list[bytes]:
        found = self.engine.available([queue])[queue]
        return [body for batch in self.engine.browse([(queue, found.start, found.end)]) for body in batch.column("body").to_pylist()]

    def deleted(self, offset: int, queue: str = "in") -> bool:
        return not self.local.state.queue(queue).runs_between(offset, offset + 1)


def rows(bodies: Sequence[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.local.close()


# -- S1, S2: the claim record -----------------------------------------------------------------------------------------------


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
    with pytest.raises(LineageConflict, match="no end of a range"):
        bench.claim({"in": 1})


def test_s2_a_claim_acks_what_lies_below_its_start_first(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    assert not bench.deleted(0)
    bench.claim(end)
    assert bench.deleted(0)


def test_s2_a_start_after_a_later_one_is_a_new_checkpoint_and_refused(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    bench.claim(end)
    with pytest.raises(LineageConflict, match="onNewCheckpoint=resume"):
        bench.claim()


def test_s2_a_start_after_a_decided_batch_is_a_new_checkpoint_and_refused(bench: Bench) -> None:
    bench.produce(b"a")
    bench.run("q", 0, {"in": START}, bench.claim())
    with pytest.raises(LineageConflict, match="new checkpoint"):
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


def test_s2_a_claim_over_several_queues_is_cut_at_one_transaction(bench: Bench) -> None:
    for number in range(3):
        with bench.local.channel() as channel:
            channel.tx_select()
            channel.publish(b"%d" % number, routing_key="in")
            channel.publish(b"%d" % number, routing_key="in2")
            channel.tx_commit()
    start: Vector = {"in": START, "in2": START}
    assert bench.claim(start, limit=Limit(max_rows=5)) == {"in": 2, "in2": 2}


def test_s2_a_transaction_is_split_only_when_it_alone_is_over_the_limit(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.produce(b"c", b"d", b"e")
    assert bench.claim(limit=Limit(max_rows=4)) == {"in": 2}
    assert bench.claim({"in": 2}, limit=Limit(max_rows=2)) == {"in": 4}
    assert bench.claim({"in": 4}, limit=Limit(max_rows=2)) == {"in": 5}


def test_s2_a_limit_of_bytes_takes_whole_transactions(bench: Bench) -> None:
    bench.produce(b"x" * 100)
    bench.produce(b"x" * 100)
    assert bench.claim(limit=Limit(max_bytes=150)) == {"in": 1}


def test_s2_the_final_end_of_available_now_caps_a_claim(bench: Bench) -> None:
    bench.produce(b"a")
    bench.produce(b"b")
    assert bench.claim(limit=Limit(end={"in": 1})) == {"in": 1}


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
    bench.now += 1_000_000
    at = bench.now
    bench.produce(b"b", b"c")
    assert bench.ranges({"in": START}, bench.claim(origin=Origin(timestamp_us=at))) == {"in": (1, 3)}


def test_a_queue_that_does_not_exist_is_named(bench: Bench) -> None:
    with pytest.raises(QueueNotFound, match="nowhere"):
        bench.claim({"nowhere": START})
    with pytest.raises(QueueNotFound, match="nowhere"):
        bench.engine.logs(["nowhere"])


# -- S3, S4: read ---------------------------------------------------------------------------------------------------------------


def test_s3_a_range_resolves_after_it_was_settled_and_acked(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    bench.engine.ack(APP, end)
    assert bench.ranges({"in": START}, end) == {"in": (0, 1)}
    assert bench.engine.count(APP, {"in": (0, 1)})["in"].end == 1


def test_s3_a_range_that_was_never_claimed_is_a_lineage_error(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    with pytest.raises(LineageConflict, match="never given"):
        bench.ranges({"in": START}, {"in": 1})


def test_s3_the_range_from_a_start_to_itself_is_empty(bench: Bench) -> None:
    assert bench.ranges({"in": START}, {"in": START}) == {}


def test_s4_a_read_gives_the_same_rows_until_the_source_acks(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    end = bench.claim()
    ranges = bench.ranges({"in": START}, end)
    before = bench.read("q", 0, ranges)
    bench.run("q", 0, {"in": START}, end)  # settled, not acked
    bench.crash()
    assert bench.read("q", 0, ranges) == before == [b"a", b"b"]
    bench.engine.ack(APP, end)
    with pytest.raises(DataLoss, match="gone"):
        bench.read("q", 0, ranges)


def test_s4_fail_on_data_loss_false_reads_what_is_left(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.engine.ack(APP, end)
    assert bench.read("q", 0, {"in": (0, 1)}, strict=False) == []


def test_s4_what_was_settled_before_the_claim_is_skipped_on_every_replay_and_is_no_data_loss(bench: Bench) -> None:
    bench.produce(b"a", b"b", b"c")
    channel = bench.local.channel()
    first, second = channel.get("in"), channel.get("in")
    assert first is not None and second is not None
    channel.ack(second.tag)
    channel.reject(first.tag, requeue=True)
    channel.close()
    end = bench.claim()
    ranges = bench.ranges({"in": START}, end)
    assert bench.read("q", 0, ranges) == [b"a", b"c"]
    assert bench.engine.count(APP, ranges)["in"].rows == 2
    entry = bench.run("q", 0, {"in": START}, end)
    assert entry.messages == 2
    bench.crash()
    assert bench.read("q", 0, ranges) == [b"a", b"c"]


def test_s4_redelivered_is_frozen_by_the_claim(bench: Bench) -> None:
    bench.produce(b"a")
    channel = bench.local.channel()
    channel.get("in")
    channel.close()
    bench.produce(b"b")
    ranges = bench.ranges({"in": START}, bench.claim())
    ticket = ReadTicket(APP, "q", 0, ranges, (("in", 0, 2),))

    def flags() -> list[bool]:
        return [flag for found in bench.engine.read(ticket) for flag in found.column("redelivered").to_pylist()]

    assert flags() == [True, False]
    bench.crash()
    assert flags() == [True, False]


def test_s4_a_slice_reads_its_part_of_the_range_only(bench: Bench) -> None:
    bench.produce(*[b"%d" % number for number in range(10)])
    ranges = bench.ranges({"in": START}, bench.claim())
    ticket = ReadTicket(APP, "q", 0, ranges, (("in", 3, 6),))
    assert [body for found in bench.engine.read(ticket) for body in found.column("body").to_pylist()] == [b"3", b"4", b"5"]


def test_s4_no_read_no_consumption(bench: Bench) -> None:
    bench.produce(b"a")
    bench.claim()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    entry = bench.engine.commit_batch(APP, "q", 0, opened.token, []).entry
    assert (entry.ranges, entry.messages) == ({}, 0)
    assert bench.visible("in") == [b"a"]


def test_s4_a_batch_that_has_read_one_range_never_reads_another(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.read("q", 0, {"in": (0, 1)})
    bench.produce(b"b")
    bench.claim(end)
    bench.crash()
    with pytest.raises(LineageConflict, match="older or changed"):
        bench.read("q", 0, {"in": (1, 2)})


def test_s4_a_range_that_is_no_claim_is_not_read(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    with pytest.raises(LineageConflict, match="not a range"):
        bench.read("q", 0, {"in": (0, 1)})


def test_s4_a_read_without_a_query_is_not_recorded_and_consumes_nothing(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    assert bench.read("", -1, {"in": (0, 1)}) == [b"a"]
    opened = bench.engine.open_batch(APP, "", 0, "fail", consumes=False)
    assert bench.engine.commit_batch(APP, "", 0, opened.token, [], consumes=False).entry.ranges == {}
    bench.engine.ack(APP, end)
    assert bench.visible("in") == []


def test_a_decided_batch_refuses_to_read_what_it_did_not_consume(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [])  # an empty batch
    bench.produce(b"a")
    end = bench.claim()  # an older checkpoint, from before the empty batch, is restored and plans batch 0 anew
    assert bench.engine.open_batch(APP, "q", 0, "fail").already
    with pytest.raises(LineageConflict, match="decided"):
        bench.read("q", 0, bench.ranges({"in": START}, end))
    assert bench.visible("in") == [b"a"]


# -- S5, S6: deletion, ownership ------------------------------------------------------------------------------------------------


def test_s5_a_decided_batch_settles_but_only_the_ack_deletes(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    assert bench.visible("in") == []
    assert not bench.deleted(0)
    bench.crash()
    assert not bench.deleted(0)
    bench.engine.ack(APP, end)
    assert bench.deleted(0)


def test_s5_an_ack_twice_or_of_an_older_end_changes_nothing(bench: Bench) -> None:
    bench.produce(b"a")
    first = bench.claim()
    bench.produce(b"b")
    second = bench.claim(first)
    bench.engine.ack(APP, second)
    bench.engine.ack(APP, second)
    bench.engine.ack(APP, first)
    assert bench.local.state.queue("in").acked == 2


def test_s5_an_ack_of_what_is_no_end_of_a_claim_is_a_lineage_error(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    with pytest.raises(LineageConflict):
        bench.engine.ack(APP, {"in": 1})


def test_s6_an_owned_queue_refuses_other_consumers_apps_purge_and_delete(bench: Bench) -> None:
    bench.produce(b"a")
    bench.claim()
    with bench.local.channel() as channel:
        with pytest.raises(ResourceLocked, match=APP):
            channel.get("in")
    for word in ("queue_purge", "queue_delete"):
        with bench.local.channel() as channel:
            with pytest.raises(ResourceLocked, match=APP):
                getattr(channel, word)("in")
    with pytest.raises(ResourceLocked, match=f"txmq release {APP} in"):
        bench.claim(app="another")
    bench.crash()
    with pytest.raises(ResourceLocked):
        bench.claim(app="another")


def test_s6_an_app_cannot_claim_while_a_channel_holds_deliveries(bench: Bench) -> None:
    bench.produce(b"a")
    channel = bench.local.channel()
    assert channel.get("in") is not None
    with pytest.raises(ResourceLocked, match="hold"):
        bench.claim()
    channel.close()
    assert bench.claim() == {"in": 1}


def test_s6_a_refused_claim_owns_none_of_its_queues(bench: Bench) -> None:
    bench.produce(b"a", queue="in2")
    channel = bench.local.channel()
    assert channel.get("in2") is not None
    with pytest.raises(ResourceLocked):
        bench.claim({"in": START, "in2": START})
    assert bench.local.state.queue("in").owner == ""
    channel.close()


def test_s6_claimed_messages_do_not_expire_or_overflow(bench: Bench) -> None:
    with bench.local.channel() as channel:
        channel.queue_declare("short", arguments={"x-message-ttl": 1, "x-max-length": 2})
    bench.produce(b"a", b"b", queue="short")
    end = bench.claim({"short": START})
    bench.now += 10_000_000
    bench.local.upkeep.tick()
    bench.produce(b"c", b"d", b"e", queue="short")
    assert bench.read("q", 0, bench.ranges({"short": START}, end)) == [b"a", b"b"]


def test_s6_a_browser_is_always_allowed(bench: Bench) -> None:
    bench.produce(b"a")
    bench.claim()
    assert bench.visible("in") == [b"a"]


def test_s6_a_released_queue_is_there_for_others_with_what_was_not_consumed(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    bench.produce(b"b")
    bench.claim(end)
    bench.engine.release(APP, "in")
    with bench.local.channel() as channel:
        delivery = channel.get("in", no_ack=True)
        assert delivery is not None and (delivery.body, delivery.redelivered) == (b"b", True)
    bench.produce(b"c")
    assert bench.ranges({"in": START}, bench.claim(app="next"), "next") == {"in": (2, 3)}


def test_s6_a_batch_that_has_read_a_queue_cannot_commit_after_its_release(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.read("q", 0, bench.ranges({"in": START}, end))
    staged = bench.stage(opened.token, b"x")
    bench.engine.release(APP, "in")
    with pytest.raises(LineageConflict):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    assert bench.visible("in") == [b"a"]
    assert bench.visible() == []


def test_s6_only_the_owner_is_released(bench: Bench) -> None:
    bench.claim()
    with pytest.raises(PreconditionFailed, match=APP):
        bench.engine.release("another", "in")
    with pytest.raises(QueueNotFound):
        bench.engine.release(APP, "nowhere")


# -- C1: open -----------------------------------------------------------------------------------------------------------------


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
    assert opened.already and opened.entry == entry and opened.sequence == 1


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
    with pytest.raises(LineageConflict, match="q-new.*q-old"):
        bench.engine.open_batch(APP, "q-new", 0, "fail")


def test_c1_the_sequence_goes_on_over_a_resumed_checkpoint(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q-old", 0, "fail")
    bench.engine.commit_batch(APP, "q-old", 0, opened.token, [])
    resumed = bench.engine.open_batch(APP, "q-new", 0, "resume")
    assert resumed.sequence == 2
    with pytest.raises(LineageConflict, match="followed by"):
        bench.engine.open_batch(APP, "q-old", 1, "resume")


def test_c1_a_checkpoint_that_decided_nothing_is_replaced_and_its_late_driver_shut_out(bench: Bench) -> None:
    old = bench.engine.open_batch(APP, "q-old", 0, "fail")
    new = bench.engine.open_batch(APP, "q-new", 0, "fail")
    bench.crash()
    with pytest.raises(LineageConflict, match="taken over"):
        bench.engine.commit_batch(APP, "q-old", 0, old.token, [])
    assert bench.engine.commit_batch(APP, "q-new", 0, new.token, []).entry.sequence == 1


def test_c1_a_batch_from_before_the_ledgers_first_is_an_older_checkpoint(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 5, "resume")
    bench.engine.commit_batch(APP, "q", 5, opened.token, [])
    with pytest.raises(LineageConflict, match="older checkpoint"):
        bench.engine.open_batch(APP, "q", 4, "fail")


def test_c1_without_consumption_a_decided_batch_behind_a_newer_claim_is_a_lineage_error(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    opened = bench.engine.open_batch(APP, "", 0, "fail", consumes=False)
    bench.engine.commit_batch(APP, "", 0, opened.token, [], consumes=False)
    assert bench.engine.open_batch(APP, "", 0, "fail", consumes=False).already
    bench.produce(b"b")
    bench.claim(end)
    with pytest.raises(LineageConflict, match="gone on"):
        bench.engine.open_batch(APP, "", 0, "fail", consumes=False)


# -- C2: stage ------------------------------------------------------------------------------------------------------------------


def test_c2_staged_rows_are_durable_and_invisible_until_a_commit_names_them(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, b"x", b"y")
    assert bench.visible() == []
    bench.crash()
    assert bench.visible() == []
    bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    assert bench.visible() == [b"x", b"y"]


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


def test_c2_only_named_branches_are_published(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.stage(opened.token, b"lost attempt")
    winner = bench.stage(opened.token, b"winner")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [winner])
    assert bench.visible() == [b"winner"]


def test_c2_a_task_that_wakes_after_the_decision_stages_nothing(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [])
    with pytest.raises(BatchDecided):
        bench.stage(opened.token, b"late")
    with pytest.raises(BatchDecided):
        bench.stage("token of another attempt", b"late", app=APP, query="q", batch=0)


def test_c2_a_large_branch_is_staged_and_published_whole(bench: Bench) -> None:
    bodies = [b"%06d" % number for number in range(70_000)]
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, *bodies)
    assert staged.rows == len(bodies)
    bench.crash()
    assert bench.engine.commit_batch(APP, "q", 0, opened.token, [staged]).entry.published == len(bodies)
    bench.crash()
    assert bench.visible() == bodies


def test_rollback_drops_what_was_staged_and_may_be_repeated(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, b"x")
    bench.engine.rollback_batch(opened.token)
    bench.engine.rollback_batch(opened.token)
    with pytest.raises(MissingBranch):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    assert bench.visible() == []


def test_rollback_of_a_decided_batch_is_refused(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    staged = bench.stage(opened.token, b"x")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [staged])
    bench.crash()
    with pytest.raises(BatchDecided, match="batch 0"):
        bench.engine.rollback_batch(opened.token)
    assert bench.visible() == [b"x"]


# -- C4: decide -----------------------------------------------------------------------------------------------------------------


def test_c4_a_batch_publishes_consumes_and_writes_its_entry_in_one_commit(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    end = bench.claim()
    entry = bench.run("q", 0, {"in": START}, end, b"x")
    bench.crash()
    assert bench.engine.last_entry(APP) == entry
    assert (entry.sequence, entry.ranges, entry.messages, entry.published) == (1, {"in": (0, 2)}, 2, 1)
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
    with pytest.raises(BatchGap):
        bench.engine.commit_batch(APP, "q", 1, opened.token, [])


def test_c4_a_token_of_another_batch_is_refused(bench: Bench) -> None:
    first = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.engine.open_batch("other", "q2", 0, "fail")
    with pytest.raises(LineageConflict, match="token"):
        bench.engine.commit_batch("other", "q2", 0, first.token, [])


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
    with pytest.raises(LineageConflict, match="consumed up to 1"):
        bench.engine.commit_batch(APP, "q-new", 0, opened.token, [])
    assert bench.ranges(first, second) == {"in": (1, 2)}


def test_c4_the_ledgers_end_counts_whichever_app_decided_it(bench: Bench) -> None:
    """The sink may have another app id than the source: the range is found by the query and the batch."""
    bench.produce(b"a")
    end = bench.claim(app="source")
    opened = bench.engine.open_batch("sink", "q", 0, "fail")
    bench.read("q", 0, bench.ranges({"in": START}, end, "source"), app="source")
    assert bench.engine.commit_batch("sink", "q", 0, opened.token, []).entry.ranges == {"in": (0, 1)}
    bench.produce(b"b")
    assert bench.ranges({"in": START}, bench.claim(app="source", on_new="resume"), "source") == {"in": (1, 2)}


def test_c4_unroutable_messages_fail_the_whole_batch_with_a_count_and_examples(bench: Bench) -> None:
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    good = bench.stage(opened.token, b"x")
    lost = bench.stage(opened.token, b"y", b"z", target={"routing_key": "nowhere"})
    with pytest.raises(Unroutable, match="2 messages.*nowhere"):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [good, lost])
    assert bench.visible() == []
    entry = bench.engine.commit_batch(APP, "q", 0, opened.token, [good, lost], on_unroutable="drop").entry
    assert entry.published == 1 and bench.visible() == [b"x"]


def test_c4_a_full_queue_that_rejects_refuses_the_whole_batch(bench: Bench) -> None:
    with bench.local.channel() as channel:
        channel.queue_declare("small", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    good = bench.stage(opened.token, b"x")
    full = bench.stage(opened.token, b"y", b"z", target={"routing_key": "small"})
    with pytest.raises(PreconditionFailed, match="small"):
        bench.engine.commit_batch(APP, "q", 0, opened.token, [good, full])
    assert bench.visible() == [] and bench.visible("small") == []


def test_c4_orphans_of_earlier_attempts_are_dropped_when_a_batch_is_decided(bench: Bench) -> None:
    dead = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.stage(dead.token, b"dead attempt")
    opened = bench.engine.open_batch(APP, "q", 0, "fail")
    bench.stage(opened.token, b"dead task")
    bench.engine.commit_batch(APP, "q", 0, opened.token, [bench.stage(opened.token, b"x")])
    assert staged_parts(bench) == 0
    bench.crash()
    assert staged_parts(bench) == 0


def staged_parts(bench: Bench) -> int:
    """How many parts the store holds."""
    from broker_core.broker.records import PartRecord

    return sum(isinstance(record, PartRecord) for record in bench.store.reopened().load().records)


def test_c4_the_ledger_is_pruned_behind_what_is_applied_and_numbers_never_fall(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_rules, "KEPT_ENTRIES", 3)
    for batch in range(10):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
    bench.crash()
    assert [entry.sequence for entry in bench.engine.unmirrored(APP)] == [8, 9, 10]
    assert bench.engine.open_batch(APP, "q", 10, "fail").sequence == 11


def test_s4_reads_are_forgotten_by_number_as_claims_are(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from broker_core.broker.records import ReadRecord

    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 3)
    at: Vector = {"in": START}
    for batch in range(10):
        bench.produce(b"%d" % batch)
        end = bench.claim(at)
        bench.run("q", batch, at, end)
        at = end
        bench.crash()
    kept = [record for record in bench.store.reopened().load().records if isinstance(record, ReadRecord)]
    assert sorted(record.batch_id for record in kept) == [7, 8, 9]


def test_c4_claims_are_pruned_and_the_newest_still_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 3)
    at: Vector = {"in": START}
    for number in range(6):
        bench.produce(b"%d" % number)
        at = bench.claim(at)
    bench.crash()
    assert bench.claim({"in": 5}) == {"in": 6}
    with pytest.raises(LineageConflict):
        bench.ranges({"in": START}, {"in": 1})


# -- C5, C6: apply and mirror ---------------------------------------------------------------------------------------------------

TABLE = {"table": "lake/a", "options": {}}


def decide_append(bench: Bench, batch: int, *bodies: bytes) -> Any:
    opened = bench.engine.open_batch(APP, "q", batch, "fail")
    staged = bench.stage(opened.token, *bodies, kind="append", target=TABLE)
    return bench.engine.commit_batch(APP, "q", batch, opened.token, [staged]).entry


def applied_rows(bench: Bench, entry: Any) -> list[bytes]:
    branches = [branch for part in entry.to_apply for branch in part.branches]
    return [body for batch in bench.engine.read_branches(branches) for body in batch.column("body").to_pylist()]


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
    assert staged_parts(bench) == 1


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
    assert [(part.kind, part.rows, len(part.branches)) for part in entry.to_apply] == [("append", 3, 2), ("after_commit", 1, 1)]
    assert not entry.applied and applied_rows(bench, entry) == [b"1", b"2", b"3", b"4"]


def test_c6_entries_wait_to_be_mirrored_in_order(bench: Bench) -> None:
    for batch in range(3):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
    bench.engine.mark_mirrored(APP, 2)
    bench.crash()
    assert [entry.sequence for entry in bench.engine.unmirrored(APP)] == [3]
    assert [entry.sequence for entry in bench.engine.unmirrored(APP, 1)] == [3]


def test_c6_the_ledger_keeps_what_a_delta_ledger_in_use_does_not_have(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_rules, "KEPT_ENTRIES", 2)
    for batch in range(5):
        opened = bench.engine.open_batch(APP, "q", batch, "fail")
        bench.engine.commit_batch(APP, "q", batch, opened.token, [])
        if batch == 0:
            bench.engine.mark_mirrored(APP, 1)
    assert [entry.sequence for entry in bench.engine.unmirrored(APP)] == [2, 3, 4, 5]


# -- batch writes ---------------------------------------------------------------------------------------------------------------


def test_a_batch_write_is_one_transaction_and_idempotent(bench: Bench) -> None:
    staged = [bench.stage("t", b"x"), bench.stage("t", b"y")]
    assert bench.visible() == []
    assert bench.engine.commit_branches("t", staged) == 2
    bench.crash()
    assert bench.engine.commit_branches("t", staged) == 2
    assert bench.visible() == [b"x", b"y"]
    with pytest.raises(BatchDecided):
        bench.engine.rollback_batch("t")


def test_a_batch_write_that_was_rolled_back_cannot_be_committed(bench: Bench) -> None:
    staged = bench.stage("t", b"x")
    bench.engine.rollback_batch("t")
    with pytest.raises(TransactionState, match="rolled back"):
        bench.engine.commit_branches("t", [staged])
    with pytest.raises(BatchDecided):
        bench.stage("t", b"late")
    assert bench.visible() == []


def test_the_apps_are_listed_with_what_they_own_and_what_waits(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    decide_append(bench, 0, b"x")
    (found,) = bench.engine.apps()
    assert (found.app_id, found.queues, found.sequence, found.query_id, found.batch_id) == (APP, ("in",), 1, "q", 0)
    assert (found.lag, found.unapplied, found.unmirrored) == (2, 1, 1)


