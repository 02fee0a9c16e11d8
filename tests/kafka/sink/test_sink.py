"""The rules C1 to C6 on Kafka, over FakeKafka."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from broker_core.core import errors, failpoint
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.kafka import names
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.port import EARLIEST, LATEST, Isolation, Request, TopicPartition
from broker_core.kafka.sink import decide, decisions
from broker_core.kafka.sink.staged_branches import Receipt
from broker_core.kafka.topics import topics
from tests.kafka.bench.fake_kafka import LOST, REFUSED, UNANSWERED, FakeKafka
from tests.kafka.bench.sink_bench import APP, QUERY, Cluster, Driver, nothing_open, rows

STAGE = names.stage_topic(APP)


@pytest.fixture(params=[1, 2], ids=["tv1", "tv2"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return Cluster(request.param)


def watched(cluster: Cluster, kind: type[Request[Any]]) -> list[Any]:
    """The requests of a kind from now on."""
    found: list[Any] = []

    def fault(node: int, request: Request[Any]) -> None:
        if isinstance(request, kind):
            found.append(request)

    cluster.kafka.fault = fault
    return found


# -- C1: open ------------------------------------------------------------------------------------------------


def test_an_app_whose_topic_was_emptied_hides_no_other_app(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    driver = cluster.driver()
    driver.run(0, [b"a"])
    token = driver.sink.open_batch("other", QUERY, 0, "fail").token
    driver.sink.commit_batch("other", QUERY, 0, token, [])
    topic = cluster.reader.topic(names.app_topic("other"))
    logs = [TopicPartition(names.app_topic("other"), number) for number in range(len(topic.partitions))]
    cluster.reader.delete_records(cluster.reader.offsets(dict.fromkeys(logs, LATEST)))
    sink = cluster.driver().sink
    with pytest.raises(
        errors.DataLoss, match=r"delete topic _txmq\.app\.other and let nothing set a retention"
    ):
        sink.app("other")
    assert [app.app_id for app in sink.apps()] == [APP]
    assert "_txmq.app.other" in caplog.text and "retention" in caplog.text
    cluster.reader.delete_topic(names.app_topic("other"))  # as the error says
    again = cluster.driver().sink
    token = again.open_batch("other", "q2", 0, "fail").token
    assert again.commit_batch("other", "q2", 0, token, []).entry.sequence == 1
    assert sorted(app.app_id for app in again.apps()) == sorted([APP, "other"])


def test_c1_a_driver_that_was_overtaken_sees_no_false_gap_and_no_stale_already(cluster: Cluster) -> None:
    stale, other = cluster.driver(), cluster.driver()
    stale.run(0, [b"a", b"b"])
    for number in (1, 2):
        other.run(number, [b"c", b"d"])
    assert not stale.open(3).already
    other.open(0, "q2", on_new="resume")
    for number in (0, 3):
        with pytest.raises(errors.CheckpointMismatch, match="an older checkpoint was started again"):
            stale.open(number)


def test_c1_with_a_kept_epoch_an_open_that_is_new_asks_kafka_nothing() -> None:
    cluster = Cluster(2)
    driver = cluster.driver()
    driver.run(0, [b"a", b"b"])
    asked = watched(cluster, Request)
    driver.open(1)
    assert asked == []


# -- C4: decide ----------------------------------------------------------------------------------------------


def test_c4_an_entry_has_the_token_of_its_attempt_whatever_it_looks_like(cluster: Cluster) -> None:
    """The embedded broker alone keeps a token with its user, as "@user:token"."""
    driver = cluster.driver()
    token = driver.open(0, token="@night:7").token
    assert driver.commit(0, token, [driver.stage(token, [b"row"])]).entry.token == "@night:7"
    assert cluster.driver().sink.entries(APP)[0].token == "@night:7"


def test_c4_already_is_answered_for_the_same_ranges_only(cluster: Cluster) -> None:
    driver = cluster.driver()
    cluster.journal.reads[(QUERY, 0)] = {"input/0": [0, 7]}
    driver.run(0, [b"a", b"b"])
    assert driver.commit(0, "", []).already
    cluster.journal.reads[(QUERY, 0)] = {"input/0": [0, 8]}
    for each in (driver, cluster.driver()):
        with pytest.raises(errors.CheckpointMismatch, match="is decided"):
            each.commit(0, "", [])


def test_c4_a_range_begins_where_the_last_one_ended_or_where_the_source_acknowledged(
    cluster: Cluster,
) -> None:
    driver = cluster.driver()
    cluster.journal.reads[(QUERY, 0)] = {"input/0": [0, 7]}
    driver.run(0, [b"a", b"b"])
    cluster.journal.reads[(QUERY, 1)] = {"input/0": [9, 12]}
    with pytest.raises(errors.CheckpointMismatch, match="is consumed up to 7"):
        driver.run(1, [b"c", b"d"])
    cluster.journal.acked["input/0"] = 9
    assert driver.run(1, [b"c", b"d"]).entry.ranges == {"input/0": (9, 12)}
    assert sorted(cluster.bodies()) == [b"a", b"b", b"c", b"d"]


def test_c4_a_fact_that_was_written_after_open_is_seen(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    cluster.journal.reads[(QUERY, 0)] = {"input/0": [0, 7]}
    assert driver.commit(0, token, []).entry.ranges == {"input/0": (0, 7)}


def test_c4_messages_without_a_queue_refuse_the_batch_or_are_dropped(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    header = BranchHeader(token, "b", "publish", {"exchange": ""}, APP, QUERY, 0)
    keys = ["orders", "nowhere", "_txmq.topology", "bad/name"]
    branch = driver.sink.stage(header, [rows(b"0", b"1", b"2", b"3", routing_key=keys)])
    with pytest.raises(errors.Unroutable, match=r"3 messages .*'nowhere'.*'_txmq.topology'.*'bad/name'"):
        driver.commit(0, token, [branch])
    assert cluster.bodies() == [] and cluster.entries() == [] and nothing_open(cluster)
    assert driver.commit(0, token, [branch], on_unroutable="drop").entry.published == 1
    assert cluster.bodies() == [b"0"]


def test_c4_a_batch_whose_rows_all_have_no_queue_is_decided(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    branch = driver.stage(token, [b"lost"], target={"exchange": "", "routing_key": "nowhere"})
    assert branch.rows == 1
    assert driver.commit(0, token, [branch], on_unroutable="drop").entry.published == 0
    assert cluster.entries() == [(1, 0)]


def test_c4_a_branch_that_is_not_what_was_staged_is_missing(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    good, other = driver.stage(token, [b"a" * 100]), driver.stage(token, [b"b" * 100])
    elsewhere = driver.stage("another", [b"c"])

    def changed(branch: StagedBranch, **changes: Any) -> StagedBranch:
        values = {name: getattr(branch, name) for name in branch.__slots__}
        return StagedBranch(**{**values, **changes})

    later = driver.stage(token, [b"d"], batch=1)
    for branches, error, text in (
        ([good, good], errors.MissingBranch, "named twice"),
        ([changed(good, checksum=other.checksum)], errors.MissingBranch, "checksum differs"),
        ([changed(good, receipt="")], errors.MissingBranch, "has no receipt"),
        ([changed(good, receipt="{}")], errors.OptionError, "receipt of a branch is damaged"),
        ([changed(good, receipt=other.receipt)], errors.MissingBranch, "was staged under token"),
        ([elsewhere], errors.MissingBranch, "was staged under token another"),
        ([later], errors.CheckpointMismatch, "was staged for batch 1"),
    ):
        with pytest.raises(error, match=text):
            driver.commit(0, token, branches)
    # the receipt of one branch, with the place of another one
    ours, theirs = Receipt.parse(good.receipt), Receipt.parse(other.receipt)
    text = good.receipt.replace(str(ours.place).split("@")[1], str(theirs.place).split("@")[1])
    with pytest.raises(errors.MissingBranch, match="is in the place of another one"):
        driver.commit(0, token, [changed(good, receipt=text)])
    assert cluster.bodies() == [] and cluster.entries() == [] and nothing_open(cluster)
    driver.commit(0, token, [good, other])
    assert sorted(cluster.bodies()) == [b"a" * 100, b"b" * 100]


def test_c4_staged_rows_that_were_deleted_are_missing_and_the_replay_is_decided(cluster: Cluster) -> None:
    for kind in ("publish", "append"):
        driver = cluster.driver()
        last = driver.sink.last_entry(APP)
        number = last.batch_id + 1 if last else 0
        token = driver.open(number).token
        branch = driver.stage(token, [b"row"], batch=number, kind=kind)  # type: ignore[arg-type]
        place = Receipt.parse(branch.receipt).place
        cluster.reader.delete_records({place.log: place.spans[-1].last + 1})
        with pytest.raises(errors.MissingBranch, match="deleted"):
            driver.commit(number, token, [branch])
        assert nothing_open(cluster)
        driver.run(number, [b"x", b"y"])
    assert cluster.entries() == [(1, 0), (2, 1)]


def test_c4_rows_that_a_log_has_lost_at_its_end_are_missing_and_the_replay_is_decided(
    cluster: Cluster,
) -> None:
    """As an unclean leader election leaves it."""
    driver = cluster.driver()
    token = driver.open(0).token
    branch = driver.stage(token, [b"row"], kind="append", target={"table": "t"})
    log = cluster.kafka.log(Receipt.parse(branch.receipt).place.log)
    assert log is not None
    log.batches.pop()
    log.end -= 1
    with pytest.raises(errors.MissingBranch, match="deleted"):
        driver.commit(0, token, [branch])
    assert cluster.entries() == [] and nothing_open(cluster)
    token = driver.open(0).token
    driver.commit(0, token, [driver.stage(token, [b"row"], kind="append", target={"table": "t"})])
    assert cluster.entries() == [(1, 0)]


def test_c4_a_staged_record_with_a_flipped_byte_is_never_published(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    branch = driver.stage(token, [b"abcdefgh"])
    log = cluster.kafka.log(Receipt.parse(branch.receipt).place.log)
    assert log is not None
    head, data = log.batches[-1]
    log.batches[-1] = head, data.replace(b"abcdefgh", b"abcdefgX")
    with pytest.raises(errors.CorruptRecordBatch, match="checksum"):
        driver.commit(0, token, [branch])
    assert cluster.bodies() == [] and cluster.entries() == [] and nothing_open(cluster)


@pytest.mark.parametrize("kind", ["append", "publish"])
def test_c4_a_stage_topic_that_is_made_again_before_the_decision_is_missing_and_the_replay_is_decided(
    cluster: Cluster, kind: Any
) -> None:
    """Rows of another branch stand at the offsets of those that were staged."""
    driver, task = cluster.driver(), cluster.driver()
    target = {"table": "t"} if kind == "append" else None

    def stage(task: Driver, token: str, *bodies: bytes) -> StagedBranch:
        return task.stage(token, list(bodies), kind=kind, target=target)

    opened = driver.open(0)
    branch = stage(task, opened.token, b"a", b"b")
    remake_stage(cluster)
    stage(cluster.driver(), "another", b"x", b"y")
    stage(cluster.driver(), "another", b"x", b"y")
    with pytest.raises(errors.MissingBranch, match="Nothing was published"):
        driver.commit(0, opened.token, [branch])
    assert driver.sink.last_entry(APP) is None and nothing_open(cluster)
    opened = driver.open(0)
    driver.commit(0, opened.token, [staged_at_last(lambda: stage(task, opened.token, b"a", b"b"))])
    if kind == "publish":
        assert cluster.bodies() == [b"a", b"b"]
    else:
        ((to_apply,),) = (entry.to_apply for entry in cluster.driver().sink.unapplied(APP))
        found = cluster.driver().sink.read_branches(to_apply.branches)
        assert [body for rows in found for body in rows["body"].to_pylist()] == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["publish", "append"])
def test_c4_a_stage_topic_that_is_deleted_before_the_decision_is_missing_and_the_replay_is_decided(
    cluster: Cluster, kind: Any
) -> None:
    driver = cluster.driver()
    target = {"table": "t"} if kind == "append" else None
    opened = driver.open(0)
    branch = driver.stage(opened.token, [b"a"], kind=kind, target=target)
    cluster.reader.delete_topic(STAGE)
    with pytest.raises(errors.MissingBranch, match="Nothing was published"):
        driver.commit(0, opened.token, [branch])
    assert driver.sink.last_entry(APP) is None and nothing_open(cluster)
    opened = driver.open(0)
    again = staged_at_last(lambda: driver.stage(opened.token, [b"a"], kind=kind, target=target))
    driver.commit(0, opened.token, [again])
    assert cluster.entries() == [(1, 0)]


def test_c5_a_stage_topic_that_is_made_again_after_the_decision_gives_no_rows_of_others(
    cluster: Cluster,
) -> None:
    driver = cluster.driver()
    opened = driver.open(0)
    branch = driver.stage(opened.token, [b"a"], kind="append", target={"table": "t"})
    driver.commit(0, opened.token, [branch])
    remake_stage(cluster)
    cluster.driver().stage("another", [b"x"], kind="append", target={"table": "t"})
    ((to_apply,),) = (entry.to_apply for entry in driver.sink.unapplied(APP))
    with pytest.raises(errors.MissingBranch, match="not in the stage topic any more"):
        list(driver.sink.read_branches(to_apply.branches))


def remake_stage(cluster: Cluster) -> None:
    """By somebody else: nobody of the app notices."""
    cluster.reader.delete_topic(STAGE)
    topics.ensure(cluster.client(), topics.stage(APP))


def staged_at_last(stage: Callable[[], StagedBranch]) -> StagedBranch:
    """As a task of Spark, which tries again."""
    with contextlib.suppress(errors.MissingBranch):
        return stage()
    return stage()


def test_c4_a_queue_that_was_deleted_refuses_the_batch_and_nothing_is_published(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    branches = [
        driver.stage(token, [b"row"], target={"exchange": "", "routing_key": queue})
        for queue in ("orders", "paid")
    ]
    cluster.reader.delete_topic("paid")
    with pytest.raises(errors.QueueNotFound, match="paid"):
        driver.commit(0, token, branches)
    assert cluster.bodies("orders") == [] and cluster.entries() == [] and nothing_open(cluster)


def test_c4_an_epoch_serves_one_transaction(cluster: Cluster) -> None:
    ended, driver = watched(cluster, port.EndTransaction), cluster.driver()
    for number in range(5):
        driver.run(number, [b"a", b"b"])
    cluster.driver().run(5, [b"a", b"b"])
    epochs = [request.producer for request in ended]
    assert len(epochs) == 7 and len(set(epochs)) == 7, "six decisions and the lineage"


def test_c4_transaction_version_2_keeps_the_epoch_that_a_commit_answers() -> None:
    cluster = Cluster(2)
    driver = cluster.driver()
    driver.run(0, [b"a", b"b"])
    fences, joined = watched(cluster, port.InitProducer), watched(cluster, port.AddPartitions)
    for number in range(1, 4):
        driver.run(number, [b"a", b"b"])
    assert fences == [] and joined == []


def test_c4_transaction_version_1_fences_for_every_batch_and_lets_all_logs_join_at_once() -> None:
    cluster = Cluster(1)
    driver = cluster.driver()
    driver.run(0, [b"a", b"b"])
    fences = watched(cluster, port.InitProducer)
    driver.run(1, [b"a", b"b"])
    assert len(fences) == 1
    joined = watched(cluster, port.AddPartitions)
    driver.run(2, [b"a", b"b"])
    (request,) = joined
    assert TopicPartition(names.app_topic(APP), names.DECISIONS) in request.logs and len(request.logs) >= 2


def test_c4_the_transaction_of_a_large_batch_may_last_longer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = cluster.driver()
    driver.run(0, [b"a", b"b"])
    token = driver.open(1).token
    branch = driver.stage(token, [b"x" * 1000] * 30, batch=1)
    size = Receipt.parse(branch.receipt).size_bytes
    fences = watched(cluster, port.InitProducer)
    monkeypatch.setattr(decide, "SLOWEST", 1)
    driver.commit(1, token, [branch])
    assert [request.transaction_ms for request in fences] == [3 * size] and size > 30_000
    monkeypatch.setattr(decide, "SLOWEST", 0.01)
    token = driver.open(2).token
    with pytest.raises(errors.TransactionTooLarge, match="at most 15 minutes"):
        driver.commit(2, token, [driver.stage(token, [b"x" * 1000] * 10, batch=2)])


@pytest.mark.parametrize("late", [port.Produce, port.EndTransaction])
def test_c4_a_transaction_that_kafka_aborts_for_its_age_is_decided_once(
    cluster: Cluster, late: type[Request[Any]]
) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    branches = [driver.stage(token, [b"%d" % number], partition=number) for number in range(4)]
    aged = 0

    def wait(node: int, request: Request[Any]) -> None:
        nonlocal aged
        if isinstance(request, late) and not aged:
            aged += 1
            for known in cluster.kafka.transactions.all.values():
                known.began -= 100

    cluster.kafka.fault = wait
    driver.commit(0, token, branches)
    assert aged and sorted(cluster.bodies()) == [b"0", b"1", b"2", b"3"] and cluster.entries() == [(1, 0)]


def test_c4_an_entry_that_no_record_holds_is_refused_before_anything_is_sent(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    branches = [driver.stage(token, [b"row"], kind="append", target={"table": "t"}) for _ in range(5)]
    produced = watched(cluster, port.Produce)
    monkeypatch.setattr(decisions, "ENTRY_BYTES", 300)
    with pytest.raises(errors.TransactionTooLarge, match="ledger entry"):
        driver.commit(0, token, branches)
    assert produced == []


def test_c4_many_pieces_are_published_in_the_order_of_each_task(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from broker_core.kafka.sink import encoded_batches, staged_branches

    monkeypatch.setattr(encoded_batches, "BATCH_BYTES", 500)
    monkeypatch.setattr(staged_branches, "PIECE_BYTES", 4000)
    driver = cluster.driver()
    token = driver.open(0).token
    bodies = [[b"%d:%04d" % (task, number) for number in range(500)] for task in range(9)]
    branches = [driver.stage(token, each, partition=task) for task, each in enumerate(bodies)]
    for task in range(9):
        driver.stage(token, bodies[task], partition=task)
    driver.commit(0, token, branches)
    assert sorted(cluster.bodies()) == sorted(body for each in bodies for body in each)
    for number in cluster.reader.topic("orders").partitions:
        found = cluster.read(TopicPartition("orders", number))
        for task in range(9):
            mine = [body for body in found if body.startswith(b"%d:" % task)]
            assert mine and mine == sorted(mine)


def test_s2_where_the_next_range_begins_is_known_at_once_behind_a_driver_that_died_deciding(
    cluster: Cluster,
) -> None:
    class Killed(BaseException):
        pass

    def kill(_: str) -> None:
        raise Killed

    assert cluster.driver().sink.decided(APP).consumed(["input/0"]) == {}
    first, fences = cluster.driver(), watched(cluster, port.InitProducer)
    cluster.journal.reads[(QUERY, 0)] = {"input/0": [0, 7]}
    first.run(0, [b"a", b"b"])
    fences.clear()
    assert (
        cluster.driver(reconnect_s=1).sink.decided(APP).consumed(["input/0"]) == {"input/0": 7}
        and fences == []
    )
    cluster.journal.reads[(QUERY, 1)] = {"input/0": [7, 9]}
    failpoint.arm("kafka.decide.entered", kill)
    try:
        with pytest.raises(Killed):
            first.run(1, [b"c", b"d"])
    finally:
        failpoint.disarm()
    assert not nothing_open(cluster)
    assert cluster.driver(reconnect_s=1).sink.decided(APP).consumed(["input/0"]) == {
        "input/0": 7
    } and nothing_open(cluster)
    assert first.run(1, [b"c", b"d"]).entry.ranges == {"input/0": (7, 9)}
    assert cluster.driver(reconnect_s=1).sink.decided(APP).consumed(["input/0"]) == {"input/0": 9}
    assert sorted(cluster.bodies()) == [b"a", b"b", b"c", b"d"]


# -- rollback ------------------------------------------------------------------------------------------------


def test_a_rollback_leaves_nothing_and_a_later_commit_of_the_token_decides_once(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    branch = driver.stage(token, [b"row"])
    driver.sink.rollback_batch(token)
    driver.sink.rollback_batch("unknown")
    assert cluster.bodies() == [] and cluster.entries() == []
    driver.commit(0, token, [branch])
    assert cluster.bodies() == [b"row"] and cluster.entries() == [(1, 0)]
    for each in (driver, cluster.driver()):
        with pytest.raises(errors.BatchDecided, match="batch 0 of app 'app'"):
            each.sink.rollback_batch(token)
    assert cluster.driver().commit(0, token, [branch]).already
    assert cluster.bodies() == [b"row"]


# -- C5, C6 --------------------------------------------------------------------------------------------------


def append(driver: Driver, number: int) -> None:
    token = driver.open(number).token
    branches = [
        driver.stage(
            token, [b"%d" % number], batch=number, kind="append", target={"table": "t"}, partition=task
        )
        for task in range(3)
    ]
    branches.append(driver.stage(token, [b"out"], batch=number, partition=1))
    branches.append(driver.stage(token, [b"m"], batch=number, kind="after_commit", target={"name": "f"}))
    driver.commit(number, token, branches)


def test_c5_rows_stay_until_they_are_applied_and_are_freed_then(cluster: Cluster) -> None:
    driver = cluster.driver()
    for number in range(3):
        append(driver, number)
    for each in (driver, cluster.driver()):
        waiting = each.sink.unapplied(APP)
        assert [entry.sequence for entry in waiting] == [1, 2, 3]
        table, function = waiting[0].to_apply
        assert (table.kind, table.target, table.rows, len(table.branches)) == ("append", {"table": "t"}, 3, 3)
        assert (function.kind, function.target) == ("after_commit", {"name": "f"})
        for entry in waiting:
            found = pa.Table.from_batches(each.sink.read_branches(entry.to_apply[0].branches))
            assert found["body"].to_pylist() == [b"%d" % entry.batch_id] * 3
    # in another order than they were decided: a driver that was suspended may be late
    driver.sink.mark_applied(APP, 2)
    driver.sink.mark_applied(APP, 2)
    second = cluster.driver()
    assert [entry.sequence for entry in second.sink.unapplied(APP)] == [1, 3]
    for entry in waiting[0], waiting[2]:
        assert list(second.sink.read_branches(entry.to_apply[0].branches))
    second.sink.mark_applied(APP, 1)
    assert [entry.sequence for entry in driver.sink.unapplied(APP)] == [3]
    assert list(driver.sink.read_branches(waiting[2].to_apply[0].branches))
    with pytest.raises(errors.MissingBranch, match="not in the stage topic any more"):
        list(driver.sink.read_branches(waiting[0].to_apply[0].branches))
    driver.sink.mark_applied(APP, 3)
    for entry in waiting:
        with pytest.raises(errors.MissingBranch, match="not in the stage topic any more"):
            list(driver.sink.read_branches(entry.to_apply[0].branches))
    last = driver.sink.last_entry(APP)
    assert last is not None and last.applied


def test_c5_what_is_staged_for_the_next_batch_is_not_deleted_by_a_late_mark(cluster: Cluster) -> None:
    driver, late = cluster.driver(), cluster.driver()
    append(driver, 0)
    token = driver.open(1).token
    staged = [driver.stage(token, [b"next"], batch=1, partition=task) for task in range(6)]
    late.sink.mark_applied(APP, 1)
    driver.commit(1, token, staged)
    assert cluster.bodies().count(b"next") == 6


def test_garbage_and_published_rows_are_deleted_with_the_decision(cluster: Cluster) -> None:
    driver = cluster.driver()
    for number in range(4):
        token = driver.open(number).token
        for task in range(6):
            driver.stage(token, [b"speculative"], batch=number, partition=task)
        named = [driver.stage(token, [b"row"], batch=number, partition=task) for task in range(6)]
        driver.commit(number, token, named)
    begins = cluster.reader.offsets({TopicPartition(STAGE, number): EARLIEST for number in range(6)})
    assert begins == {TopicPartition(STAGE, number): 8 for number in range(6)}


def test_the_stage_topic_is_cleaned_now_and_then_and_a_failure_is_left_to_the_next_time(
    cluster: Cluster,
) -> None:
    driver = cluster.driver(clean_every_bytes=1000)
    deleted = watched(cluster, port.DeleteRecords)
    driver.run(0, [b"a", b"b"])
    assert deleted, "a driver begins with it"
    deleted.clear()
    driver.run(1, [b"a", b"b"])
    assert deleted == []
    cluster.kafka.fault = lambda node, request: (
        port.Code.TOPIC_AUTHORIZATION_FAILED if isinstance(request, port.DeleteRecords) else None
    )
    assert not driver.run(2, [b"x" * 1000, b"b"]).already
    deleted = watched(cluster, port.DeleteRecords)
    driver.run(3, [b"a", b"b"])
    assert deleted


def test_c5_skipped_rows_are_applied_by_nobody(cluster: Cluster) -> None:
    driver = cluster.driver()
    append(driver, 0)
    (entry,) = driver.sink.unapplied(APP)
    table, function = entry.to_apply
    with pytest.raises(errors.UnknownTransaction):
        driver.sink.skip(APP, 1, ["nothing@orders/0:1-1"], "/files")
    for _ in range(2):
        driver.sink.skip(APP, 1, table.branches, "/files")
    for each in (driver, cluster.driver()):
        (entry,) = each.sink.unapplied(APP)
        assert entry.to_apply == (function,)
    driver.sink.skip(APP, 1, function.branches, "/files")
    assert cluster.driver().sink.unapplied(APP) == []


def test_c6_old_entries_are_dropped_for_every_driver(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from broker_core.micro_batch import ledger

    monkeypatch.setattr(ledger, "KEPT_ENTRIES", 3)
    driver = cluster.driver()
    for number in range(8):
        driver.run(number, [b"a", b"b"])
    assert cluster.journal.forgotten == {1, 2, 3, 4, 5}
    for each in (driver, cluster.driver()):
        assert [entry.sequence for entry in each.sink.unmirrored(APP)] == [6, 7, 8]
        with pytest.raises(errors.CheckpointMismatch, match="lies before what the ledger"):
            each.open(2)
        assert each.open(7).already


# -- operators -----------------------------------------------------------------------------------------------


def test_an_app_is_shown_with_what_waits(cluster: Cluster) -> None:
    driver = cluster.driver()
    assert driver.sink.app(APP) is None and driver.sink.apps() == [] and driver.sink.unapplied("other") == []
    cluster.journal.reads[(QUERY, 0)] = {"input/0": [0, 7]}
    cluster.reader.create_topic("input", 1)
    append(driver, 0)
    (info,) = cluster.driver().sink.apps()
    assert (info.app_id, info.queues, info.sequence, info.query_id, info.batch_id) == (
        APP,
        ("input",),
        1,
        QUERY,
        0,
    )
    assert (info.lag, info.unapplied, info.unmirrored) == (93, 1, 0)
    assert [topic for topic in cluster.kafka.topics if "other" in topic] == [], "a question makes no topic"


def test_attempts_are_what_is_staged_and_not_decided(cluster: Cluster) -> None:
    driver = cluster.driver(clean_every_bytes=1 << 40)
    driver.run(0, [b"a", b"b"])
    driver.run(1, [b"a", b"b"])
    token = driver.open(2).token
    driver.stage(token, [b"a", b"b"], batch=2)
    driver.stage(token, [b"c"], batch=2, kind="append", target={"table": "t"})
    driver.stage("write", [b"d"], batch=-1, app="")
    (attempt, write) = sorted(
        cluster.driver().sink.staged_batches(), key=lambda each: each.batch_id, reverse=True
    )
    assert (attempt.token, attempt.app_id, attempt.batch_id, attempt.branches, attempt.rows) == (
        token,
        APP,
        2,
        2,
        3,
    )
    assert (write.token, write.app_id, write.branches, write.rows) == ("write", "", 1, 1)


def test_s6_a_released_queue_may_begin_anywhere_and_the_driver_loses_its_epoch(cluster: Cluster) -> None:
    driver, operator = cluster.driver(), cluster.driver()
    cluster.reader.create_topic("input", 1)
    cluster.journal.reads[(QUERY, 0)] = {"input/0": [0, 7]}
    driver.run(0, [b"a", b"b"])
    with pytest.raises(errors.PreconditionFailed, match="not claimed"):
        operator.sink.release(APP, "orders", force=False, by="ann")
    operator.sink.release(APP, "input", force=False, by="ann")
    with pytest.raises(errors.PreconditionFailed, match="not claimed"):
        operator.sink.release(APP, "input", force=False, by="ann")
    cluster.journal.reads[(QUERY, 1)] = {"input/0": [3, 9]}
    for each in (driver, cluster.driver()):
        assert each.run(1, [b"c", b"d"]).entry.ranges == {"input/0": (3, 9)}
    assert sorted(cluster.bodies()) == [b"a", b"b", b"c", b"d"]


# -- batch writes --------------------------------------------------------------------------------------------


def write(driver: Driver, token: str, number: int = 3) -> list[StagedBranch]:
    return [
        driver.stage(token, [b"%d" % task], batch=-1, app="", query="", partition=task)
        for task in range(number)
    ]


@pytest.mark.parametrize("fault", [REFUSED, LOST, UNANSWERED])
def test_a_batch_write_is_published_once_whatever_request_fails(fault: str) -> None:
    for version in (1, 2):
        for number in range(1, 200):
            cluster = Cluster(version)
            driver = cluster.driver()
            branches = write(driver, "w")
            count = 0

            def fail(node: int, request: Request[Any], number: int = number) -> str | None:
                nonlocal count
                count += 1
                return fault if count == number else None

            cluster.kafka.fault = fail
            assert driver.sink.commit_branches("w", branches) == 3
            reached = count >= number
            assert driver.sink.commit_branches("w", branches) == 3
            assert sorted(cluster.bodies()) == [b"0", b"1", b"2"]
            if not reached:
                break


def test_a_batch_write_with_messages_without_a_queue_is_refused(cluster: Cluster) -> None:
    driver = cluster.driver()
    branch = driver.stage("w", [b"x"], batch=-1, app="", target={"exchange": "", "routing_key": "nowhere"})
    with pytest.raises(errors.Unroutable):
        driver.sink.commit_branches("w", [branch])
    assert driver.sink.commit_branches("w", [branch], on_unroutable="drop") == 1
    with pytest.raises(errors.MissingBranch, match="staged under token w"):
        driver.sink.commit_branches("other", [branch])


def test_nothing_of_an_undecided_batch_is_read_by_anyone(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    driver.stage(token, [b"row"])
    assert cluster.read(TopicPartition("orders", 0), Isolation.READ_UNCOMMITTED) == []
    assert cluster.read(TopicPartition("orders", 1), Isolation.READ_UNCOMMITTED) == []


def test_a_clock_ahead_of_kafkas_is_named(cluster: Cluster) -> None:
    driver = cluster.driver()
    token = driver.open(0).token
    branch = driver.stage(token, [b"row"])
    cluster.kafka.fault = lambda node, request: (
        port.Code.INVALID_TIMESTAMP
        if isinstance(request, port.Produce) and request.transactional_id
        else None
    )
    with pytest.raises(errors.KafkaError, match=r"INVALID_TIMESTAMP.*clock"):
        driver.commit(0, token, [branch])
    assert isinstance(cluster.kafka, FakeKafka)
