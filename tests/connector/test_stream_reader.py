"""The streaming reader's driver side on a broker in memory: when latestOffset claims, and what it waits
for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from broker_core.errors import ResourceLocked
from connector import reader_lock, source
from connector.options import Address, read_options
from connector.source import TxmqStreamReader
from tests.engine.bench import APP, Bench

START = {"in": "start"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(source, "POLL_S", 0.0)
    return Bench()


@dataclass(frozen=True)
class Here:
    """The address of a broker in this process."""

    bench: Bench

    def engine(self) -> Any:
        return self.bench.engine


def reader(bench: Bench, **options: str) -> TxmqStreamReader:
    raw = {"url": "txmq://here:1", "queue": "in", "appId": APP, **options}
    return TxmqStreamReader(replace(read_options(raw, "stream read"), address=cast(Address, Here(bench))))


def ask(stream: TxmqStreamReader, start: dict[str, Any] | None = None) -> dict[str, Any]:
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
