"""The rules of claims over queues of several logs, and their replay from the records of another driver."""

from __future__ import annotations

import pytest

from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.core.records import ReadRecord, canonical
from broker_core.core.undo import Undo
from broker_core.engine import START, Origin, Vector
from broker_core.micro_batch.claims import claim as claim_rules
from broker_core.micro_batch.claims.claim import Claims
from broker_core.micro_batch.claims.finished import CommittedBelow
from broker_core.micro_batch.ledger import Ledger
from tests.micro_batch.partitions import APP, Partitions, Written, claim
from tests.undo.snapshot import difference, snapshot


@pytest.fixture
def claims() -> Claims:
    return Claims()


@pytest.fixture
def written() -> Written:
    return Written()


def test_s1_a_symbolic_start_names_queues_and_its_end_names_logs(claims: Claims, written: Written) -> None:
    end = claim(claims, Partitions(orders=[3, 4]), written, {"orders": START})
    assert end == {"orders/0": 3, "orders/1": 4}
    found = claims.resolve(APP, {"orders": START}, end)
    assert found is not None
    assert found.ranges == {"orders/0": [0, 3], "orders/1": [0, 4]}


def test_s2_a_claim_from_the_start_stays_when_a_log_is_added(claims: Claims, written: Written) -> None:
    end = claim(claims, Partitions(orders=[3]), written, {"orders": START})
    assert claim(claims, Partitions(orders=[9, 5]), written, {"orders": START}) == end


@pytest.mark.parametrize("at", ["earliest", "latest"])
def test_s2_a_new_log_is_read_from_its_beginning_whatever_the_origin(
    claims: Claims, written: Written, at: str
) -> None:
    origin = Origin("latest" if at == "latest" else "earliest")
    assert claim(claims, Partitions(orders=[3]), written, {"orders": START}, origin=Origin("latest")) == {
        "orders": START
    }, "nothing is new"
    end = claim(claims, Partitions(orders=[5, 2]), written, {"orders": START}, origin=origin)
    assert end == {"orders/0": 5, "orders/1": 2}
    found = claims.resolve(APP, {"orders": START}, end)
    assert found is not None
    assert found.ranges == {"orders/0": [3, 5], "orders/1": [0, 2]}
    later = claim(claims, Partitions(orders=[5, 2, 7]), written, end, origin=origin)
    assert later == {"orders/0": 5, "orders/1": 2, "orders/2": 7}


def test_s2_resuming_reads_a_log_from_its_beginning_if_it_was_added_meanwhile(
    claims: Claims, written: Written
) -> None:
    first = claim(claims, Partitions(orders=[3]), written, {"orders": START})
    logs = Partitions(orders=[6, 2], pay=[8])
    claim(claims, logs, written, first)
    with pytest.raises(CheckpointMismatch, match="already read orders"):
        claim(claims, logs, written, {"orders": START})
    end = claim(
        claims,
        logs,
        written,
        {"orders": START, "pay": START},
        "orders",
        "pay",
        origin=Origin("latest"),
        consumed={"orders/0": 3},
        resume=True,
    )
    found = claims.resolve(APP, {"orders": START, "pay": START}, end)
    assert found is not None
    assert found.ranges == {"orders/0": [3, 6], "orders/1": [0, 2], "pay/0": [8, 8]}


@pytest.mark.parametrize("decided", [False, True])
def test_s2_a_new_checkpoint_is_known_also_if_the_app_has_read_added_logs_only(
    claims: Claims, written: Written, decided: bool
) -> None:
    """By what is decided, or by what the old checkpoint has gone past."""
    logs = Partitions(orders=[3])
    claim(claims, logs, written, {"orders": START}, origin=Origin("latest"))
    logs.ends["orders"] = [3, 5]
    end = claim(claims, logs, written, {"orders": START})
    assert end == {"orders/0": 3, "orders/1": 5}
    assert claim(claims, logs, written, {"orders": START}) == end, "the same checkpoint may ask again"
    if not decided:
        claim(claims, logs, written, end)
    consumed = {"orders/0": 3, "orders/1": 5} if decided else {}
    with pytest.raises(CheckpointMismatch, match="already read orders"):
        claim(claims, logs, written, {"orders": START}, consumed=consumed)
    logs.ends["orders"] = [4, 6]
    resumed = claim(claims, logs, written, {"orders": START}, consumed=consumed, resume=True)
    found = claims.resolve(APP, {"orders": START}, resumed)
    assert found is not None
    assert found.ranges == {"orders/0": [3, 4], "orders/1": [5, 6]}


def test_starting_offsets_may_name_a_log_or_a_queue_and_nothing_else(
    claims: Claims, written: Written
) -> None:
    logs = Partitions(orders=[3, 4], pay=[2])
    for offsets in ({"orders/0": 0, "orders/2": 0}, {"pay/0": 1}, {"orders/0": 1, "pay": 0}):
        with pytest.raises(OptionError, match="startingOffsets"):
            claim(
                claims,
                logs,
                written,
                {"orders": START, "pay": START},
                "orders",
                "pay",
                origin=Origin(offsets=offsets),
            )
    origin = Origin(offsets={"orders/0": 2, "pay": -1})
    claim(claims, logs, written, {"orders": START, "pay": START}, "orders", "pay", origin=origin)
    assert logs.acked == {("orders/0", APP): 2, ("orders/1", APP): 0, ("pay/0", APP): 2}


def test_s4_two_drivers_that_recorded_different_ranges_are_both_refused(written: Written) -> None:
    """Where reads are appended by tasks and not checked by a broker."""
    claims = Claims()
    logs = Partitions(orders=[3])
    first = claim(claims, logs, written, {"orders": START})
    logs.ends["orders"] = [5]
    claim(claims, logs, written, first)
    for start, end in ((0, 3), (3, 5)):
        claims.apply(ReadRecord(APP, "query", 0, canonical(["orders/0"]), {"orders/0": [start, end]}))
    with pytest.raises(CheckpointMismatch, match="now asks for"):
        claims.ranges_read("query", 0)
    for ranges in ({"orders/0": (0, 3)}, {"orders/0": (3, 5)}):
        with pytest.raises(CheckpointMismatch, match="now asks for"):
            claims.record_read(written, APP, "query", 0, ranges)


def test_s4_a_batch_cannot_read_a_log_more_than_its_earlier_attempt(claims: Claims, written: Written) -> None:
    logs = Partitions(orders=[3])
    end = claim(claims, logs, written, {"orders": START})
    claims.record_read(written, APP, "query", 0, {"orders/0": (0, 3)})
    logs.ends["orders"] = [4, 2]
    later = claim(claims, logs, written, end)
    assert later == {"orders/0": 4, "orders/1": 2}
    with pytest.raises(CheckpointMismatch, match="now asks for"):
        claims.record_read(written, APP, "query", 0, {"orders/0": (3, 4), "orders/1": (0, 2)})


def history(claims: Claims, written: Written, rounds: int = 6) -> Vector:
    """Claims, reads, acks, a resumed checkpoint and a release over two queues whose logs grow; the end of the
    newest claim.
    """
    logs = Partitions(orders=[1, 2], pay=[1])
    vector = claim(claims, logs, written, {"orders": START, "pay": START}, "orders", "pay")
    for batch in range(rounds):
        if batch == 3:
            logs.ends["orders"].append(1)
        for ends in logs.ends.values():
            ends[0] += batch + 1
        following = claim(claims, logs, written, vector, "orders", "pay")
        found = claims.resolve(APP, vector, following)
        assert found is not None
        ranges = {log: (int(first), int(last)) for log, (first, last) in found.ranges.items()}
        claims.record_read(written, APP, "query", batch, ranges)
        vector = following
    claims.ack(logs, written, APP, vector, CommittedBelow(Ledger()))
    logs.ends["pay"][0] += 2
    newest = claim(claims, logs, written, {"pay": START}, "pay", consumed={"pay/0": 3}, resume=True)
    claims.release(logs, written, APP, "orders", logs.of("orders"))
    return newest


def test_the_records_of_another_driver_give_the_same_claims(
    claims: Claims, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 3)
    newest = history(claims, written)
    replayed = written.replay(Claims())
    assert not differs(claims, replayed)
    ours, theirs = Written(), Written()
    logs = [Partitions(orders=[9, 9, 9], pay=[50]) for _ in range(2)]
    assert claim(claims, logs[0], ours, newest, "pay") == claim(replayed, logs[1], theirs, newest, "pay")
    assert ours.entries == theirs.entries


def test_an_applied_record_and_a_change_that_lost_its_race_leave_nothing_behind() -> None:
    undo = Undo()
    claims = Claims(undo=undo)
    won = Written()
    newest = history(claims, won)
    for record in list(won.entries):
        if not isinstance(record, tuple):
            before = snapshot(claims)
            undo.begin()
            claims.apply(record)  # type: ignore[arg-type]
            claims.remove(record)  # type: ignore[arg-type]
            undo.roll_back()
            assert not difference(before, snapshot(claims)), record
    before = snapshot(claims)
    undo.begin()
    lost = Written()
    claim(claims, Partitions(pay=[70]), lost, newest, "pay")
    assert lost.entries
    undo.roll_back()
    assert not difference(before, snapshot(claims))


def differs(ours: Claims, theirs: Claims) -> list[str]:
    return [
        line
        for line in difference(snapshot(ours), snapshot(theirs))
        if "_positions" not in line  # what was dropped before it was replayed
    ]


@pytest.mark.parametrize("start", [{"orders": START, "pay": START}, {"orders/0": 3, "pay/0": 0}])
def test_a_start_of_other_queues_is_refused(claims: Claims, written: Written, start: Vector) -> None:
    logs = Partitions(orders=[3], pay=[1])
    claim(claims, logs, written, {"orders": START, "pay": START}, "orders", "pay")
    with pytest.raises(
        CheckpointMismatch, match=r"which the queues orders do not have|not the end of a range"
    ):
        claim(claims, logs, written, start, "orders")
