"""What a task stages, and the receipt with which it is found again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core import errors
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.kafka import names
from broker_core.kafka.protocol.port import LATEST, Isolation, TopicPartition
from broker_core.kafka.sink.staged_branches import BranchPlace, Receipt, Span, joined
from broker_core.kafka.topics import topics
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from tests.kafka.bench.sink_bench import APP, QUERY, Cluster, rows


def header(branch: str = "b", *, partition: int = 0, kind: str = "append") -> BranchHeader:
    target = {"table": "t"} if kind == "append" else {"exchange": "", "routing_key": "orders"}
    return BranchHeader("token", branch, kind, target, APP, QUERY, 0, partition=partition)  # type: ignore[arg-type]


def test_rows_for_a_table_come_back_with_their_types_whatever_their_size() -> None:
    cluster = Cluster()
    driver = cluster.driver()
    large = random.Random(3).randbytes(300_000)
    table = pa.table(
        {
            "n": pa.array(range(20_000), pa.int16()),
            "at": pa.array([None, 1] * 10_000, pa.timestamp("ms", "UTC")),
            "nested": pa.array([{"a": [1, 2]}] * 20_000),
            "body": pa.array([large if number % 2000 == 0 else b"x" for number in range(20_000)]),
        }
    )
    token = driver.open(0).token
    given = BranchHeader(token, "b", "append", {"table": "t"}, APP, QUERY, 0)
    branch = driver.sink.stage(given, table.to_batches(max_chunksize=700))
    receipt = Receipt.parse(branch.receipt)
    assert branch.rows == 20_000 and receipt.records > 3 and receipt.size_bytes > 3_000_000
    assert receipt.place.spans == (Span(0, receipt.records - 1),), "one task alone has one span"
    driver.commit(0, token, [branch])
    ((to_apply,),) = (entry.to_apply for entry in cluster.driver().sink.unapplied(APP))
    assert pa.Table.from_batches(cluster.driver().sink.read_branches(to_apply.branches)) == table


def test_tasks_that_share_a_partition_of_the_stage_topic_are_read_apart() -> None:
    cluster = Cluster()
    driver = cluster.driver()
    token, number = driver.open(0).token, 8
    turn = threading.Barrier(number)

    def batches(task: int) -> Iterator[pa.RecordBatch]:
        for piece in range(4):
            turn.wait()  # so that their records stand in any order
            yield rows(*[b"%d:%d:" % (task, piece) + random.Random(piece).randbytes(400_000)] * 3)

    branches = {}

    def stage(task: int) -> None:
        given = BranchHeader(token, f"b{task}", "append", {"table": "t"}, APP, QUERY, 0, partition=6 * task)
        branches[task] = driver.sink.stage(given, batches(task))

    threads = [threading.Thread(target=stage, args=(task,)) for task in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = [Receipt.parse(branch.receipt).place for branch in branches.values()]
    assert {place.log.partition for place in places} == {0}
    driver.commit(0, token, list(branches.values()))
    ((to_apply,),) = (entry.to_apply for entry in driver.sink.unapplied(APP))
    for name in to_apply.branches:
        task = BranchPlace.parse(name).branch[1:].encode()
        found = [body for batch in driver.sink.read_branches([name]) for body in batch["body"].to_pylist()]
        assert [body[: len(task) + 3] for body in found] == [
            b"%s:%d:" % (task, piece) for piece in range(4) for _ in range(3)
        ]


def test_a_task_without_rows_stages_nothing() -> None:
    cluster = Cluster()
    for kind in ("append", "publish"):
        branch = cluster.driver().sink.stage(header(kind=kind), [rows().slice(0, 0)])
        assert (branch.rows, branch.checksum, branch.receipt) == (0, 0, "")
    log = TopicPartition(names.stage_topic(APP), 0)
    assert cluster.reader.offsets({log: LATEST}, Isolation.READ_UNCOMMITTED) == {log: 0}


def test_a_stage_topic_that_would_lose_rows_is_refused_before_a_batch_is_opened() -> None:
    cluster = Cluster()
    cluster.reader.create_topic(names.stage_topic(APP), 6, configs={"retention.ms": "1000"})
    for call in (
        lambda: cluster.driver().open(0),
        lambda: cluster.driver().sink.stage(header(), [rows(b"x")]),
    ):
        with pytest.raises(errors.PreconditionFailed, match=r"retention\.ms=1000"):
            call()


def test_what_is_staged_is_small_enough_for_its_topic() -> None:
    cluster = Cluster()
    cluster.reader.create_topic("large", 1, configs={"max.message.bytes": str(64 << 20)})
    driver = cluster.driver()
    for size in (1, 450_000, 899_000, 901_000, 1_990_000, topics.STAGED_BYTES - 20_000):
        target = {"exchange": "", "routing_key": "large"}
        given = BranchHeader("t" * 200, "b" * 200, "publish", target, APP, QUERY, 0)
        branch = driver.sink.stage(given, [rows(*[b"x" * size] * 3)])
        assert Receipt.parse(branch.receipt).reached == 3


spans = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6)


@given(st.uuids(), spans)
def test_a_place_is_read_as_it_was_written(branch: object, gaps: list[tuple[int, int]]) -> None:
    offset, found = 0, []
    for gap, length in gaps:
        found.append(Span(offset + gap, offset + gap + length))
        offset = found[-1].last + 1
    place = BranchPlace(str(branch), TopicPartition("_txmq.stage.app", 3), joined(found))
    assert BranchPlace.parse(str(place)) == place
    offsets = [each for span in found for each in range(span.first, span.last + 1)]
    assert [each for span in place.spans for each in range(span.first, span.last + 1)] == offsets


@pytest.mark.parametrize("text", ["", "b", "b@3:1-2", "b@x/3:1", "b@x/3:1-2;3-4", "b@/3:1-2"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(errors.OptionError):
        BranchPlace.parse(text)
    with pytest.raises((errors.OptionError, errors.MissingBranch)):
        list(Cluster().driver().sink.read_branches([text]))


@pytest.mark.parametrize("kind", ["publish", "append"])
@pytest.mark.parametrize("known", [True, False], ids=["settings known", "settings asked for"])
def test_a_stage_topic_that_was_deleted_is_made_again_by_the_attempt_that_finds_it_gone(
    kind: str, known: bool
) -> None:
    cluster = Cluster()
    driver = cluster.driver()
    driver.run(0, [b"before"])
    cluster.reader.delete_topic(names.stage_topic(APP))
    if not known:
        driver.sink._staging._stages.clear()
    token = driver.open(1).token
    given = BranchHeader(token, "b", kind, header(kind=kind).target, APP, QUERY, 1)  # type: ignore[arg-type]
    branch = driver.sink.stage(given, [rows(b"after")])
    driver.commit(1, token, [branch])
    if kind == "publish":
        assert sorted(cluster.bodies()) == [b"after", b"before"]
    else:
        ((to_apply,),) = (entry.to_apply for entry in cluster.driver().sink.unapplied(APP))
        (found,) = cluster.driver().sink.read_branches(to_apply.branches)
        assert found["body"].to_pylist() == [b"after"]


def test_a_target_that_is_made_again_with_fewer_partitions_fails_one_attempt() -> None:
    """A process that stages the batch again knows at once how many there are."""
    cluster = Cluster()
    driver, worker = cluster.driver(), cluster.driver()
    driver.run(0, [b"before"])

    def staged(token: str) -> list[StagedBranch]:
        target = header(kind="publish").target
        branches = [
            BranchHeader(token, f"b{task}", "publish", target, APP, QUERY, 1, partition=task)
            for task in range(4)
        ]
        return [worker.sink.stage(each, [rows(each.branch.encode())]) for each in branches]

    token = driver.open(1).token
    branches = staged(token)
    cluster.reader.delete_topic("orders")
    cluster.reader.create_topic("orders", 1)
    with pytest.raises(errors.QueueNotFound, match="run the batch again"):
        driver.commit(1, token, branches)
    token = driver.open(1).token
    driver.commit(1, token, staged(token))
    assert sorted(cluster.bodies()) == [b"b0", b"b1", b"b2", b"b3"]


def test_a_stage_topic_that_is_deleted_under_a_branch_fails_the_batch_and_the_next_attempt_does_it() -> None:
    cluster = Cluster()
    driver = cluster.driver()
    stage = names.stage_topic(APP)
    token = driver.open(0).token

    def slowly() -> Iterator[pa.RecordBatch]:
        for piece in range(40):
            if piece == 30:
                cluster.reader.delete_topic(stage)
            yield rows(random.Random(piece).randbytes(1_500_000))

    given = BranchHeader(token, "b", "append", {"table": "t"}, APP, QUERY, 0)
    with pytest.raises(errors.MissingBranch, match=f"{stage} was deleted while rows were staged"):
        driver.sink.stage(given, slowly())
    assert cluster.entries() == []
    driver.run(0, [b"again"])
    assert cluster.bodies() == [b"again"]


def test_copies_go_to_more_topics_and_bcc_is_in_none_of_them() -> None:
    cluster = Cluster()
    driver = cluster.driver()
    copied = Properties(headers={"CC": ["paid", "no such topic"], "BCC": ["orders"], "kept": "1"}).encode()
    blind = Properties(headers={"BCC": ["paid"]}).encode()
    batch = pa.RecordBatch.from_pydict(
        {
            "exchange": ["", "", ""],
            "routing_key": ["orders", "nobody", "orders"],
            "body": [b"copied", b"blind", b"plain"],
            "properties": [copied, blind, b""],
        },
        MESSAGE_SCHEMA,
    )
    token = driver.open(0).token
    given = BranchHeader(token, "b", "publish", {}, APP, QUERY, 0)
    driver.commit(0, token, [driver.sink.stage(given, [batch])])
    assert sorted(cluster.bodies("orders")) == [b"copied", b"plain"]
    assert sorted(cluster.bodies("paid")) == [b"blind", b"copied"]
    for topic in ("orders", "paid"):
        for number in cluster.reader.topic(topic).partitions:
            log = TopicPartition(topic, number)
            fetched = cluster.reader.fetch({log: 0}, isolation=Isolation.READ_COMMITTED)[log]
            assert b"BCC" not in bytes(fetched.records)
