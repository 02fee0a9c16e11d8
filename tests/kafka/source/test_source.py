"""Claims, acks and what is known of logs: several processes over one FakeKafka."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from broker_core.core import errors
from broker_core.engine import START, Limit, Origin
from broker_core.kafka import names
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.source.source import KafkaSource
from tests.kafka.bench.source_bench import APP, QUEUE, SourceBench, claim, now_ms, read


@pytest.fixture
def bench() -> SourceBench:
    return SourceBench()


# -- S2, S3 --------------------------------------------------------------------------------------------------


def test_s2_a_claim_that_finds_nothing_writes_nothing(bench: SourceBench) -> None:
    source = bench.source()
    assert claim(source) == {QUEUE: START}
    log = bench.kafka.log(source.journal(APP).log)
    assert log is not None
    before = log.end
    for _ in range(3):
        assert claim(source) == {QUEUE: START} == claim(bench.source())
    assert log.end == before
    bench.send(0, b"a")
    assert claim(source) == {"orders/0": 1, "orders/1": 0}


def test_s3_a_range_is_resolved_counted_and_read_again(bench: SourceBench) -> None:
    bench.send(0, b"a", b"b")
    bench.send(1, b"c")
    end = claim(bench.source())
    for source in (bench.source(), bench.source()):
        ranges = source.resolve(APP, {QUEUE: START}, end)
        assert ranges == {"orders/0": (0, 2), "orders/1": (0, 1)}
        assert read(source, ranges) == [b"a", b"b", b"c"]
        counted = source.count(APP, ranges)
        assert {log: found.rows for log, found in counted.items()} == {"orders/0": 2, "orders/1": 1}
        assert all(found.size_bytes > 0 for found in counted.values())
    assert source.resolve(APP, end, end) == {} and source.count(APP, {}) == {}
    with pytest.raises(errors.CheckpointMismatch, match="which it never claimed"):
        source.resolve(APP, {QUEUE: START}, {"orders/0": 1, "orders/1": 1})
    with pytest.raises(errors.CheckpointMismatch, match="not a range that it claimed"):
        source.count(APP, {"orders/0": (0, 1)})


def test_s6_two_apps_read_one_queue(bench: SourceBench) -> None:
    bench.send(0, b"a")
    source = bench.source()
    assert claim(source) == claim(source, app_id="other") == {"orders/0": 1, "orders/1": 0}
    source.ack("other", {"orders/0": 1, "orders/1": 0})
    assert source.available(["orders/0"])["orders/0"].rows == 1  # nothing is deleted


def test_what_is_open_is_not_claimed_and_what_was_aborted_is_a_gap(bench: SourceBench) -> None:
    bench.send(0, b"a")
    bench.send_in_transaction(0, b"no", b"no", commit=False)
    bench.send_in_transaction(0, b"b", commit=True)
    bench.send_in_transaction(1, b"open", commit=None)
    bench.send(1, b"behind")
    source = bench.source()
    end = claim(source)
    assert end == {"orders/0": 6, "orders/1": 0}
    assert read(source, source.resolve(APP, {QUEUE: START}, end)) == [b"a", b"b"]


# -- S1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "begin"),
    [
        (Origin(), (1, 0)),
        (Origin(at="latest"), (4, 2)),
        (Origin(offsets={QUEUE: -1}), (4, 2)),
        (Origin(offsets={QUEUE: -2}), (1, 0)),
        (Origin(offsets={"orders/0": 2, "orders/1": -1}), (2, 2)),
        (Origin(timestamp_us=2000), (2, 1)),
        (Origin(timestamp_us=2001), (3, 2)),
        (Origin(timestamp_us=9_000_000), (4, 2)),
    ],
)
def test_s1_where_a_stream_starts(bench: SourceBench, origin: Origin, begin: tuple[int, int]) -> None:
    for timestamp in (1, 1, 2, 3):
        bench.send(0, b"x", timestamp=timestamp)
    for timestamp in (1, 2):
        bench.send(1, b"x", timestamp=timestamp)
    bench.client.delete_records({TopicPartition(QUEUE, 0): 1})
    vector = dict(zip(("orders/0", "orders/1"), begin))
    source = bench.source()
    assert source.offsets([QUEUE], origin) == vector
    claim(source, origin=origin)
    bench.send(0, b"later", timestamp=9)
    bench.send(1, b"later", timestamp=9)
    end = claim(bench.source(), origin=Origin())  # resolved once: another origin changes nothing
    ranges = source.resolve(APP, {QUEUE: START}, end)
    assert {log: first for log, (first, _) in ranges.items()} == vector


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ({"orders/0": 9, "orders/1": 0}, "names offset 9 of 'orders/0', which has 1 to 2"),
        ({"orders/0": 0, "orders/1": 0}, "names offset 0 of 'orders/0', which has 1 to 2"),
        ({"orders": 1}, "which has the logs orders/0, orders/1"),
        ({"orders/0": 1, "orders/1": 0, "orders/2": 0}, "names orders/0, orders/1, orders/2"),
    ],
)
def test_s1_offsets_that_a_log_does_not_have_are_refused(
    bench: SourceBench, offsets: Mapping[str, int], text: str
) -> None:
    bench.send(0, b"a", b"b")
    bench.client.delete_records({TopicPartition(QUEUE, 0): 1})
    for ask in (
        lambda: claim(bench.source(), origin=Origin(offsets=offsets)),
        lambda: bench.source().offsets([QUEUE], Origin(offsets=offsets)),
    ):
        with pytest.raises(errors.OptionError, match=text):
            ask()


def test_a_partition_that_is_added_is_read_from_its_beginning(bench: SourceBench) -> None:
    source = bench.source()
    claim(source, origin=Origin(at="latest"))
    bench.send(0, b"a")
    bench.kafka.grow(QUEUE, 3)
    bench.now += 60
    bench.send(2, b"new")
    end = claim(source, origin=Origin(at="latest"))
    assert end == claim(bench.source()) == {"orders/0": 1, "orders/1": 0, "orders/2": 1}
    assert read(source, source.resolve(APP, {QUEUE: START}, end)) == [b"a", b"new"]
    bench.kafka.grow(QUEUE, 4)
    bench.now += 60
    assert claim(source, end) == end
    bench.send(3, b"newer")
    assert claim(source, end) == {**end, "orders/3": 1}


# -- limits --------------------------------------------------------------------------------------------------


def test_rows_are_taken_by_the_share_of_the_backlog(bench: SourceBench) -> None:
    bench.send(0, *[b"x"] * 30)
    bench.send(1, *[b"x"] * 10)
    source = bench.source()
    end = claim(source, limit=Limit(max_rows=10))
    assert end in ({"orders/0": 8, "orders/1": 2}, {"orders/0": 7, "orders/1": 3})
    taken = 10
    while taken < 40:
        end = claim(source, end, Limit(max_rows=7))
        assert sum(int(at) for at in end.values()) == min(40, taken + 7)
        taken = min(40, taken + 7)


def test_bytes_are_taken_by_what_an_offset_takes(bench: SourceBench) -> None:
    for _ in range(20):
        bench.send(0, bytes(1000))
    source = bench.source()
    end = claim(source, limit=Limit(max_bytes=5000))
    assert 3 <= int(end["orders/0"]) <= 5
    assert claim(source, end, Limit(max_bytes=1)) == {"orders/0": int(end["orders/0"]) + 1, "orders/1": 0}


def test_too_few_rows_wait_until_the_oldest_is_old(bench: SourceBench) -> None:
    source = bench.source()
    bench.send(0, b"x", timestamp=now_ms() - 10_000)
    bench.send_in_transaction(1, b"no", commit=False)
    assert claim(source, limit=Limit(min_rows=5)) == {QUEUE: START}
    assert claim(source, limit=Limit(min_rows=5, max_delay_s=3600)) == {QUEUE: START}
    assert claim(source, limit=Limit(min_rows=5, max_delay_s=5)) == {"orders/0": 1, "orders/1": 2}
    bench.send(0, *[b"x"] * 5, timestamp=now_ms())
    assert claim(source, {"orders/0": 1, "orders/1": 2}, Limit(min_rows=5))["orders/0"] == 6


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    "limit",
    [
        Limit(),
        Limit(max_rows=100),
        Limit(max_bytes=10_000),
        Limit(end={"orders/0": 6, "orders/1": 1}),
        Limit(min_rows=1),
        Limit(min_rows=100, max_delay_s=5),
        Limit(min_rows=100, max_delay_s=5, max_rows=100, max_bytes=10_000),
    ],
)
@pytest.mark.parametrize("lost", [1, 3, 6])  # all of the claim, some of it, all that is there
def test_s4_a_limit_does_not_decide_what_a_lost_row_means(
    bench: SourceBench, limit: Limit, fails: bool, lost: int
) -> None:
    source = bench.source()
    bench.send(0, b"a", timestamp=now_ms() - 10_000)
    bench.send(1, b"b", timestamp=now_ms() - 10_000)
    start = claim(source)
    bench.send(0, *[b"%d" % number for number in range(5)], timestamp=now_ms() - 10_000)
    bench.client.delete_records({TopicPartition(QUEUE, 0): lost})
    end = claim(source, start, limit)
    if lost == 6 and limit.max_delay_s is not None:
        assert end == start  # no row is left that could be old
        bench.send(1, b"c", timestamp=now_ms() - 10_000)
        end = claim(source, start, limit)
    assert end["orders/0"] == 6
    ranges = source.resolve(APP, start, end)
    if fails and lost > 1:
        with pytest.raises(errors.DataLoss, match=f"is lost: Kafka has {lost} to 6"):
            read(source, ranges)
    else:
        assert read(source, ranges, fail=fails)[: 6 - lost] == [b"%d" % n for n in range(lost - 1, 5)]


# -- acks ----------------------------------------------------------------------------------------------------


def test_s5_an_ack_is_durable_and_shown_as_the_offsets_of_a_group(bench: SourceBench) -> None:
    bench.send(0, b"a")
    source = bench.source()
    end = claim(source)
    source.ack(APP, end, ran=True)
    source.ack(APP, end, ran=True)
    assert bench.source().journal(APP).positions == {}
    other = bench.source().journal(APP)
    other.catch_up()
    assert other.positions[QUEUE].acked == {"orders/0": 1, "orders/1": 0}
    for thread in threading.enumerate():
        if thread.name == "txmq-lag":
            thread.join(60)
    assert bench.kafka.groups[names.producer_of(APP)] == {
        TopicPartition(QUEUE, 0): 1,
        TopicPartition(QUEUE, 1): 0,
    }
    with pytest.raises(errors.CheckpointMismatch):
        source.ack(APP, {"orders/0": 7, "orders/1": 0})


def test_s6_a_released_queue_starts_anew(bench: SourceBench) -> None:
    bench.send(0, b"a")
    source, other = bench.source(), bench.source()
    end = claim(source)
    with pytest.raises(errors.PreconditionFailed, match="has claimed nothing of queue 'events'"):
        other.release(APP, "events")
    other.release(APP, QUEUE)
    with pytest.raises(errors.CheckpointMismatch):
        claim(source, end)
    bench.send(0, b"b")
    assert claim(source) == {"orders/0": 2, "orders/1": 0}


# -- what may have happened to a topic -----------------------------------------------------------------------


def made_again(bench: SourceBench) -> None:
    bench.client.delete_topic(QUEUE)
    bench.client.create_topic(QUEUE, 2)
    bench.send(0, b"other", b"other")
    bench.now += 60


def test_a_topic_that_was_made_again_is_data_loss(bench: SourceBench) -> None:
    bench.send(0, b"a", b"b")
    source, task = bench.source(), bench.source()
    end = claim(source)
    ranges = task.resolve(APP, {QUEUE: START}, end)
    made_again(bench)
    for ask in (
        lambda: claim(source, end),
        lambda: claim(bench.source()),
        lambda: source.resolve(APP, {QUEUE: START}, end),
        lambda: read(task, ranges),
        lambda: read(bench.source(), ranges),
    ):
        with pytest.raises(errors.DataLoss, match="'orders' was deleted"):
            ask()
    source.release(APP, QUEUE)
    assert claim(source) == {"orders/0": 2, "orders/1": 0}
    assert read(task, {"orders/0": (0, 2)}, query="new") == [b"other", b"other"]


def test_what_is_no_queue_is_refused(bench: SourceBench) -> None:
    bench.client.create_topic("table", 1, configs={"cleanup.policy": "compact"})
    for queue, error in (
        ("missing", errors.QueueNotFound),
        ("table", errors.PreconditionFailed),
        ("_txmq.app.app", errors.OptionError),
    ):
        with pytest.raises(error):
            claim(bench.source(), queues=[queue])
        with pytest.raises(error):
            bench.source().logs([queue])


# -- logs ----------------------------------------------------------------------------------------------------


def test_logs_are_named_by_queue_and_partition(bench: SourceBench) -> None:
    bench.client.create_topic("events", 11)
    assert bench.source().logs([QUEUE, "events"]) == [
        "orders/0",
        "orders/1",
        *(f"events/{n}" for n in range(11)),
    ]


def test_what_is_available(bench: SourceBench) -> None:
    bench.send(0, *[bytes(1000)] * 5)
    bench.client.delete_records({TopicPartition(QUEUE, 0): 2})
    source = bench.source()
    found = source.available(["orders/0", "orders/1"])
    assert (found["orders/0"].start, found["orders/0"].end, found["orders/0"].rows) == (2, 5, 3)
    assert found["orders/1"].rows == found["orders/1"].size_bytes == 0
    assert found["orders/0"].size_bytes >= 3000
    from_there = source.available(["orders/0", "orders/1"], {"orders/0": 4, "orders/1": 0})
    assert (
        from_there["orders/0"].rows == 1
        and source.available(["orders/0"], {"orders/0": 0})["orders/0"].rows == 3
    )


def test_sizes_that_may_not_be_asked_for_are_unknown_but_a_limit_needs_them(bench: SourceBench) -> None:
    bench.send(0, b"a", b"b")
    bench.kafka.fault = lambda node, request: (
        Code.CLUSTER_AUTHORIZATION_FAILED if isinstance(request, port.LogSizes) else None
    )
    assert bench.source().available(["orders/0"])["orders/0"].size_bytes == 0
    with pytest.raises(errors.AccessRefused):
        claim(bench.source(), limit=Limit(max_bytes=10))


def waiting(
    source: KafkaSource, ends: Mapping[str, int], timeout_s: float = 60
) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(source.wait([QUEUE], ends, timeout_s)))
    thread.start()
    return thread, answers


def test_wait_ends_with_the_first_row_that_can_be_read(bench: SourceBench) -> None:
    bench.send(0, b"a")
    source = bench.source()
    assert source.wait([QUEUE], {"orders/0": 0, "orders/1": 0}, 60)
    assert source.wait([QUEUE], {}, 60)
    assert not source.wait([QUEUE], {"orders/0": 1, "orders/1": 0}, 0.05)
    assert not source.wait([QUEUE], {"orders/0": 1}, 0.05)  # an empty log counts from 0
    thread, answers = waiting(source, {"orders/0": 1, "orders/1": 0})
    bench.send(1, b"b")
    thread.join(60)
    assert answers == [True]


def test_wait_ends_with_a_transaction(bench: SourceBench) -> None:
    bench.send_in_transaction(0, b"open", commit=None)
    source = bench.source()
    assert not source.wait([QUEUE], {"orders/0": 0, "orders/1": 0}, 0.05)
    thread, answers = waiting(source, {"orders/0": 0, "orders/1": 0})
    txid = next(key for key in bench.kafka.transactions.all if key.startswith("other-"))
    bench.client.end_transaction(txid, bench.kafka.transactions.all[txid].producer, commit=True, bump=True)
    thread.join(60)
    assert answers == [True]


def test_wait_survives_a_leader_that_moves(bench: SourceBench) -> None:
    source = bench.source()
    thread, answers = waiting(source, {"orders/0": 0, "orders/1": 0})
    log = bench.kafka.log(TopicPartition(QUEUE, 0))
    assert log is not None
    bench.kafka.move_leader(TopicPartition(QUEUE, 0), log.leader % 3 + 1)
    bench.send(0, b"a")
    thread.join(60)
    assert answers == [True]
