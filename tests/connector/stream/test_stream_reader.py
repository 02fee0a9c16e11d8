"""The streaming reader's driver side on a broker in memory: when latestOffset claims, and what it waits
for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from broker_core.core.errors import CheckpointMismatch, ResourceLocked
from broker_core.engine import Limit, Origin
from connector.options import AddressOptions, read_options
from connector.stream import reader_lock, source
from connector.stream.with_admission_control import AdmittedReader
from tests.engine.bench import APP, Bench
from tests.micro_batch.partitions import PartitionedEngine, Partitions

START = {"in": "start"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(source, "POLL_S", 0.0)
    return Bench()


@dataclass(frozen=True)
class Here:
    """The address of an engine in this process."""

    found: Any

    def engine(self) -> Any:
        return self.found


def over(engine: Any, **options: str) -> AdmittedReader:
    raw = {"url": "txmq://here:1", "queue": "in", "appId": APP, **options}
    return AdmittedReader(
        replace(read_options(raw, "stream read"), address=cast(AddressOptions, Here(engine)))
    )


def reader(bench: Bench, **options: str) -> AdmittedReader:
    return over(bench.engine, **options)


def ask(stream: AdmittedReader, start: dict[str, Any] | None = None) -> dict[str, Any]:
    return stream.latestOffset(start or stream.initialOffset(), stream.getDefaultReadLimit())


@pytest.mark.parametrize("origin", [{"startingOffsets": "latest"}, {"startingTimestamp": "2999-01-01"}, {}])
def test_min_offsets_of_a_new_stream_are_counted_from_its_first_question(
    bench: Bench, origin: dict[str, str]
) -> None:
    stream = reader(bench, minOffsetsPerTrigger="3", **origin)
    assert ask(stream) == START
    for number in range(3):
        assert ask(stream) == START
        bench.produce(b"%d" % number)
    assert ask(stream) == {"in": 3}


def test_max_trigger_delay_ends_without_any_news(bench: Bench) -> None:
    stream = reader(bench, minOffsetsPerTrigger="3", maxTriggerDelay="30s", startingOffsets="latest")
    assert ask(stream) == START
    bench.produce(b"a")
    assert ask(stream) == START
    bench.now += 31_000_000
    assert ask(stream) == {"in": 1}


def test_max_trigger_delay_goes_on_in_a_driver_that_is_started_again(bench: Bench) -> None:
    bench.produce(b"a")
    for _ in range(3):
        assert ask(reader(bench, minOffsetsPerTrigger="3", maxTriggerDelay="35s")) == START
        bench.now += 12_000_000
    assert ask(reader(bench, minOffsetsPerTrigger="3", maxTriggerDelay="35s")) == {"in": 1}


def test_available_now_and_once_do_not_wait_for_min_offsets(bench: Bench) -> None:
    bench.produce(b"a")
    now = reader(bench, minOffsetsPerTrigger="3")
    now.prepareForTriggerAvailableNow()
    assert ask(now) == {"in": 1}
    bench.produce(b"b")
    del now
    assert reader(bench, minOffsetsPerTrigger="3").latestOffset({"in": 1}, ReadAllAvailable()) == {"in": 2}


def test_a_stream_without_min_offsets_claims_what_comes_after_an_idle_answer(bench: Bench) -> None:
    stream = reader(bench)
    assert ask(stream) == ask(stream) == START
    bench.produce(b"a")
    assert ask(stream) == {"in": 1}


def test_a_second_readstream_of_a_queue_is_refused_before_it_claims_anything(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message between the two questions of a trigger would put them out of step, which no restart cures."""
    monkeypatch.setattr(reader_lock, "PATIENCE_S", 0.0)
    first, second = reader(bench), reader(bench, queue="in2,in")
    start = first.initialOffset()
    second.prepareForTriggerAvailableNow()  # Spark would not end the first source if this raised
    for call in (second.initialOffset, lambda: ask(second, {"in": 1, "in2": 1})):
        with pytest.raises(ResourceLocked, match="one readStream and its DataFrame twice"):
            call()
    assert bench.local.state.topology.queue("in2").owner == ""
    bench.produce(b"a")
    assert ask(first, start) == {"in": 1}
    del first
    assert ask(reader(bench), {"in": 1}) == {"in": 1}


def test_two_readstreams_of_two_queues_are_read_side_by_side(bench: Bench) -> None:
    first, second = reader(bench), reader(bench, queue="in2")
    bench.produce(b"a")
    bench.produce(b"b", queue="in2")
    assert (ask(first), ask(second)) == ({"in": 1}, {"in2": 1})


# -- what a trigger asks of the engine
# -------------------------------------------------------------------------


class Recorded:
    """An engine, and the names of the calls that it got."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.calls = engine, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.engine, name)


def test_a_small_batch_of_a_stream_is_planned_by_one_call_beside_its_progress(bench: Bench) -> None:
    recorded = Recorded(bench.engine)
    stream = over(recorded, maxOffsetsPerTrigger="1")
    for body in (b"a", b"b", b"c"):
        bench.produce(body)
    first = ask(stream)
    stream.partitions(START, first)
    recorded.calls.clear()
    second = ask(stream, first)
    assert stream.reportLatestOffset() == {"in": 3}
    stream.commit(first)
    (task,) = stream.partitions(first, second)
    assert recorded.calls == ["claim", "available"]
    assert (task.ranges, task.slices) == ({"in": (1, 2)}, (("in", 1, 2),))  # type: ignore[attr-defined]


def test_an_end_that_no_claim_has_acknowledged_is(bench: Bench) -> None:
    recorded = Recorded(bench.engine)
    stream = over(recorded, maxOffsetsPerTrigger="1")
    bench.produce(b"a")
    bench.produce(b"b")
    first = ask(stream)
    recorded.calls.clear()
    stream.commit(first)
    assert recorded.calls == ["ack"]
    second = ask(stream, first)
    recorded.calls.clear()
    stream.commit(second)
    assert recorded.calls == ["ack"]


def test_a_batch_that_may_have_several_tasks_is_counted(bench: Bench) -> None:
    recorded = Recorded(bench.engine)
    stream = over(recorded, minPartitions="2")
    for body in (b"a", b"b"):
        bench.produce(body)
    assert len(stream.partitions(START, ask(stream))) == 2
    assert recorded.calls[-2:] == ["resolve", "count"]


# -- queues of several logs ----------------------------------------------------------------------------------


def test_a_partition_that_is_added_is_read_from_the_next_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "POLL_S", 0.0)
    logs = Partitions(**{"in": [2, 1]})
    stream = over(PartitionedEngine(logs), startingOffsets="latest")
    assert ask(stream) == ask(stream) == START
    logs.ends["in"].append(0)
    assert ask(stream) == START
    logs.ends["in"][2] = 4
    end = ask(stream)
    assert end == {"in/0": 2, "in/1": 1, "in/2": 4}
    (task,) = stream.partitions(START, end)
    assert task.ranges == {"in/0": (2, 2), "in/1": (1, 1), "in/2": (0, 4)}  # type: ignore[attr-defined]
    assert ask(stream, end) == ask(stream, end) == end
    stream.commit(end)


def test_a_reader_that_knows_fewer_partitions_than_the_checkpoint_looks_again() -> None:
    logs = Partitions(**{"in": [2]})
    engine = PartitionedEngine(logs)
    early = over(engine)
    first = ask(early)
    logs.ends["in"].append(3)
    end = engine.claim(APP, ["in"], first, Limit(), Origin(), "fail")
    assert [task.ranges for task in early.partitions(first, end)] == [  # type: ignore[attr-defined]
        {"in/0": (2, 2), "in/1": (0, 3)}
    ]
    with pytest.raises(CheckpointMismatch, match="the query reads in"):
        early.partitions(first, {"in/0": 2, "in/7": 3})


def test_available_now_takes_nothing_from_a_partition_that_came_after_its_start() -> None:
    logs = Partitions(**{"in": [2]})
    stream = over(PartitionedEngine(logs))
    stream.prepareForTriggerAvailableNow()
    logs.ends["in"] = [3, 4]
    end = ask(stream)
    assert end == {"in/0": 2, "in/1": 0}
    assert ask(stream, end) == end
