"""The streaming reader of Spark 4.1 on a broker in memory: the start is what Spark named or was told last.

Not here: the calls of a real Spark 4.1 (``tests/spark/test_unadmitted.py``), every order of crashes
(``tests/model``).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest

from broker_core.core.errors import CheckpointMismatch, OptionError
from connector.options import AddressOptions, read_options
from connector.stream import reader_lock, source
from connector.stream.without_admission_control import WRAPPER, UnadmittedReader
from tests.connector.stream.test_stream_reader import Here
from tests.engine.bench import APP, Bench

START = {"in": "start"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(source, "POLL_S", 0.0)
    drivers = itertools.count()  # each reader is one of another driver
    monkeypatch.setattr(reader_lock, "driver", lambda: f"{next(drivers)}")
    return Bench()


def reader(bench: Bench, **options: str) -> UnadmittedReader:
    raw = {"url": "txmq://here:1", "queue": "in", "appId": APP, **options}
    return UnadmittedReader(
        replace(read_options(raw, "stream read"), address=cast(AddressOptions, Here(bench.engine)))
    )


def acked(bench: Bench) -> int:
    return bench.local.state.topology.queue("in").progress.acked


def ranges(found: Any) -> list[Any]:
    return [each.ranges for each in found]


def test_s2_limits_are_kept_without_a_start_and_a_limit_from_spark(bench: Bench) -> None:
    for number in range(5):
        bench.produce(b"%d" % number)
    stream = reader(bench, maxOffsetsPerTrigger="2")
    start: dict[str, Any] = START
    for end in ({"in": 2}, {"in": 4}, {"in": 5}):
        assert stream.latestOffset() == end
        assert stream.initialOffset() == START
        assert ranges(stream.partitions(start, end)) == [
            {"in": (start["in"] if start != START else 0, end["in"])}
        ]
        start = end
    assert stream.latestOffset() == start


def test_s2_a_batch_that_spark_logged_and_one_that_it_did_not_have_the_same_end_after_a_restart(
    bench: Bench,
) -> None:
    bench.produce(b"a")
    assert reader(bench, maxOffsetsPerTrigger="1").latestOffset() == {"in": 1}
    bench.produce(b"b")
    again = reader(bench)  # nothing is logged: Spark names no end, and the limit is another
    assert again.latestOffset() == {"in": 1}
    planned = reader(bench)  # logged: Spark names it first
    planned.partitions({"in": 1}, {"in": 1})
    assert ranges(planned.partitions(START, {"in": 1})) == [{"in": (0, 1)}]
    assert planned.latestOffset() == {"in": 2}


def test_s2_an_end_that_spark_asks_for_and_does_not_plan_is_not_acknowledged(bench: Bench) -> None:
    for number in range(4):
        bench.produce(b"%d" % number)
    stream = reader(bench, maxOffsetsPerTrigger="1")
    assert [stream.latestOffset()["in"] for _ in range(4)] == [1, 2, 3, 4]
    assert acked(bench) == 0
    stream.partitions(START, {"in": 1})
    assert stream.latestOffset() == {"in": 2}
    stream.partitions({"in": 1}, {"in": 2})
    assert stream.latestOffset() == {"in": 3}
    assert acked(bench) == 1, "the last range stays for a replay"


def test_s2_a_batch_whose_source_is_left_out_is_followed_by_the_next_one(bench: Bench) -> None:
    bench.produce(b"a")
    stream = reader(bench)
    assert stream.latestOffset() == {"in": 1}
    bench.produce(b"b")  # no partitions between
    assert stream.latestOffset() == {"in": 2}
    stream.commit({"in": 1})
    assert ranges(stream.partitions({"in": 1}, {"in": 2})) == [{"in": (1, 2)}]


def test_s2_a_new_checkpoint_is_refused_and_resumes_behind_what_is_decided(bench: Bench) -> None:
    bench.produce(b"a")
    first = reader(bench)
    end = first.latestOffset()
    bench.run("q1", 0, START, end)
    bench.produce(b"b")
    with pytest.raises(CheckpointMismatch, match=f"set onNewCheckpoint=resume.*set {WRAPPER} to false"):
        reader(bench).latestOffset()
    resumed = reader(bench, onNewCheckpoint="resume")
    assert resumed.latestOffset() == {"in": 2}
    assert ranges(resumed.partitions(START, {"in": 2})) == [{"in": (1, 2)}]


def test_an_end_asked_for_before_the_checkpoint_is_named_is_refused_with_the_setting_that_does_it(
    bench: Bench,
) -> None:
    bench.produce(b"a")
    first = reader(bench)
    first.partitions(START, first.latestOffset())
    wrapped = reader(bench, onNewCheckpoint="resume")
    bench.run("q1", 0, START, {"in": 1})
    bench.produce(b"b")
    wrapped.latestOffset()
    with pytest.raises(OptionError, match=f"set {WRAPPER} to false"):
        wrapped.partitions({"in": 1}, {"in": 1})


def test_an_end_asked_for_before_the_checkpoint_is_named_is_refused_if_it_is_that_end_too(
    bench: Bench,
) -> None:
    """The wrapper would take it for the end of all that is there, and never read what came behind it."""
    bench.produce(b"a")
    first = reader(bench)
    first.partitions(START, first.latestOffset())
    bench.produce(b"b")
    wrapped = reader(bench)
    assert wrapped.latestOffset() == {"in": 1}
    with pytest.raises(OptionError, match=f"set {WRAPPER} to false"):
        wrapped.partitions({"in": 1}, {"in": 1})
