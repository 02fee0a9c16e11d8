"""The journal over FakeKafka: races, lost answers, leaders that move, compaction."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from broker_core.core import errors
from broker_core.core.records import ReadRecord
from broker_core.engine import START, Limit
from broker_core.kafka import names
from broker_core.kafka.journal import history, journal
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.micro_batch.claims import claim as claims_module
from tests.kafka.bench.fake_kafka import LOST, REFUSED, UNANSWERED
from tests.kafka.bench.source_bench import APP, QUEUE, SourceBench, claim

TOPIC = names.app_topic(APP)
JOURNAL = TopicPartition(TOPIC, names.JOURNAL)


@pytest.fixture
def bench() -> SourceBench:
    bench = SourceBench()
    bench.send(0, b"a", b"b")
    bench.send(1, b"c")
    return bench


def records(bench: SourceBench) -> int:
    found = bench.kafka.log(JOURNAL)
    assert found is not None
    return found.end


FAULTS: list[Any] = [
    REFUSED,
    LOST,
    UNANSWERED,
    Code.NOT_LEADER_OR_FOLLOWER,
    Code.REQUEST_TIMED_OUT,
    Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    "moved",
]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in (port.Produce, port.Fetch, port.ListOffsets) for fault in FAULTS]
    + [(port.Metadata, fault) for fault in (REFUSED, LOST, UNANSWERED, "moved")],
)
@pytest.mark.parametrize("times", [1, 3])
def test_a_claim_is_one_whatever_happens_to_its_requests(
    bench: SourceBench, kind: type[port.Request[Any]], fault: Any, times: int
) -> None:
    first = bench.source()
    end = claim(first)
    bench.send(0, b"d")

    def moved() -> None:
        for log in (JOURNAL, TopicPartition(QUEUE, 0)):
            found = bench.kafka.log(log)
            assert found is not None
            bench.kafka.move_leader(log, found.leader % 3 + 1, ends_unknown=2)

    bench.failing([moved if fault == "moved" else fault] * times, kind)
    later = claim(first, end)
    assert later == {"orders/0": 3, "orders/1": 1}
    bench.kafka.fault = lambda node, request: None
    for source in (bench.source(), bench.source()):
        assert claim(source, end) == later and source.resolve(APP, end, later) == {
            "orders/0": (2, 3),
            "orders/1": (1, 1),
        }


def test_a_change_whose_answer_was_lost_is_found_and_not_made_again(bench: SourceBench) -> None:
    source = bench.source()
    source.journal(APP).ensure()
    bench.failing([UNANSWERED], port.Produce, topic=TOPIC)
    end = claim(source)
    before = records(bench)
    assert claim(source) == claim(bench.source()) == end and records(bench) == before


def test_another_process_that_comes_between_wins(bench: SourceBench) -> None:
    first, second = bench.source(), bench.source()
    start = claim(first)
    won: list[Any] = []

    def between() -> None:
        bench.send(0, b"e")
        won.append(claim(second, start))

    bench.send(1, b"d")
    bench.failing([between], port.Produce, topic=TOPIC)
    assert claim(first, start) == won[0] == {"orders/0": 3, "orders/1": 2}


def test_a_fact_between_makes_no_change_void(bench: SourceBench) -> None:
    first, second = bench.source(), bench.source()
    end = claim(first)
    ranges = second.resolve(APP, {QUEUE: START}, end)
    bench.send(0, b"d")
    before = records(bench)
    bench.failing([lambda: second.journal(APP).note_read("q", 0, ranges)], port.Produce, topic=TOPIC)
    claim(first, end)
    assert records(bench) == before + 1 + 3  # the fact; origin, position and claim


def test_threads_and_processes_that_race_get_one_end(bench: SourceBench) -> None:
    """Every one asks for the same starts, and rows arrive meanwhile."""
    workers, rounds = 4, 12
    answers: list[list[Any]] = [[] for _ in range(workers)]
    barrier = threading.Barrier(workers)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        source = bench.source() if number else shared
        try:
            start: Any = {QUEUE: START}
            for turn in range(rounds):
                barrier.wait(60)
                if number == 0:
                    bench.send(turn % 2, b"x")
                end = start
                while end == start:
                    end = claim(source, start, Limit(max_rows=2))
                answers[number].append(end)
                start = end
                barrier.wait(60)
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    shared = bench.source()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert all(found == answers[0] for found in answers)
    assert claim(bench.source(), answers[0][-2]) == answers[0][-1]


def test_what_compaction_leaves_is_read_as_the_same(
    bench: SourceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "KEPT_CLAIMS", 3)
    monkeypatch.setattr(history, "GARBAGE", 4)
    first, second = bench.source(), bench.source()
    ends, gone = [claim(first)], 0
    for turn in range(12):
        bench.send(0, b"x")
        if turn % 3 == 0:  # a loser: it computed its claim before the winner's was there
            bench.failing([lambda: claim(first, ends[-1])], port.Produce, topic=TOPIC)
            ends.append(claim(second, ends[-1]))
        else:
            ends.append(claim(first, ends[-1]))
        assert first.resolve(APP, ends[-2], ends[-1]) == second.resolve(APP, ends[-2], ends[-1])
        if turn % 4 == 3:
            gone += bench.kafka.compact(JOURNAL)
        late = bench.source()
        assert claim(late, ends[-2]) == ends[-1]
    assert gone > 20


def test_a_process_that_slept_for_long_begins_again(
    bench: SourceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bench.source()
    end = claim(source)
    bench.source().release(APP, QUEUE)
    log = bench.kafka.log(JOURNAL)
    assert log is not None
    log.batches, log.start = [], 0  # compacted, and no tombstone is left
    monkeypatch.setattr(journal, "LATEST_S", -1.0)
    assert source.journal(APP).exists()
    source.journal(APP)._history.version = 99
    log.end = 0
    assert claim(source) == end
    assert source.journal(APP)._history.version == 1


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "made again"])
@pytest.mark.parametrize("later_s", [0, 60])
def test_an_app_topic_that_was_deleted_is_one_error_that_says_what_is_lost(
    bench: SourceBench, again: bool, later_s: int
) -> None:
    """In the process that runs, and in the next one."""
    source = bench.source()
    end = claim(source)
    bench.client.delete_topic(TOPIC)
    if again:
        bench.client.create_topic(
            TOPIC, 2, configs={"cleanup.policy": "compact", "delete.retention.ms": "86400000"}
        )
    bench.now += later_s
    lost = f"topic {TOPIC} .*the claims and decisions of app 'app' are lost with it: start the query in a new process"
    for _ in range(2):
        if again and not later_s:
            break  # until its metadata are asked for again, a process takes it for the topic of before
        with pytest.raises(errors.LedgerLost, match=lost):
            claim(source, end)
    known = "_txmq.app.app has no claim of the app.*and with it what the app has claimed and decided: use"
    with pytest.raises(errors.CheckpointMismatch, match=known):
        claim(bench.source(), end)


def test_facts_are_written_once_by_a_process(bench: SourceBench) -> None:
    first, second = bench.source().journal(APP), bench.source().journal(APP)
    first.note({"applied/1": True})
    before = records(bench)
    first.note({"applied/1": True})
    assert records(bench) == before
    second.note({"applied/1": True, "applied/2": True})
    first.catch_up()
    assert first.facts == {"applied/1": True, "applied/2": True}
    first.forget(["applied/1"])
    second.catch_up()
    assert second.facts == {"applied/2": True}


def test_s4_reads_are_facts_and_two_ranges_of_one_batch_are_refused(bench: SourceBench) -> None:
    source, task = bench.source(), bench.source()
    end = claim(source)
    ranges = source.resolve(APP, {QUEUE: START}, end)
    task.journal(APP).note_read("q", 0, ranges)
    task.journal(APP).catch_up()
    with pytest.raises(errors.CheckpointMismatch, match="batch 0 of query q has read"):
        task.journal(APP).note_read("q", 0, {**ranges, "orders/0": (1, 2)})
    source.journal(APP).catch_up()
    found = source.journal(APP).look(lambda claims: [*claims.reads.of_batch("q", 0)])
    assert found == [
        ReadRecord(APP, "q", 0, '["orders/0","orders/1"]', {"orders/0": [0, 2], "orders/1": [0, 1]})
    ]
