"""minOffsetsPerTrigger, maxTriggerDelay: a claim takes nothing while too few messages wait; what a start
means is fixed all the same.
"""

from __future__ import annotations

import pytest

from broker_core.core.errors import ResourceLocked
from broker_core.engine import START, Limit, Origin, Vector
from tests.engine.bench import Bench

S: Vector = {"in": START}
BOTH: Vector = {"in": START, "in2": START}
LATEST = Origin("latest")
SECOND_US = 1_000_000


def at_least(rows: int, delay_s: float | None = None, **more: int) -> Limit:
    return Limit(min_rows=rows, max_delay_s=delay_s, **more)  # type: ignore[arg-type]


def test_a_claim_waits_for_the_least_number_of_messages_and_then_takes_all(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    assert bench.claim(limit=at_least(3)) == S
    bench.produce(b"c", b"d")
    assert bench.claim(limit=at_least(3)) == {"in": 4}
    bench.produce(b"e")
    assert bench.claim({"in": 4}, limit=at_least(2)) == {"in": 4}


def test_a_claim_takes_what_waits_when_the_delay_of_its_oldest_is_over(bench: Bench) -> None:
    bench.produce(b"a")
    bench.now += 20 * SECOND_US
    bench.produce(b"b")
    assert bench.claim(limit=at_least(3, 30)) == S
    bench.now += 9 * SECOND_US
    assert bench.claim(limit=at_least(3, 30)) == S
    bench.now += 2 * SECOND_US
    assert bench.claim(limit=at_least(3, 30)) == {"in": 2}
    assert bench.claim({"in": 2}, limit=at_least(3, 30)) == {"in": 2}


@pytest.mark.parametrize("seal", [False, True])
def test_the_delay_is_not_counted_anew_after_restarts_of_driver_and_broker(bench: Bench, seal: bool) -> None:
    """A driver that restarts more often than maxTriggerDelay would never come to read anything."""
    bench.produce(b"a")
    for _ in range(5):
        assert bench.claim(limit=at_least(2, 30)) == S
        bench.now += 5 * SECOND_US
        if seal:
            bench.local.upkeep.close_open()
            bench.local.upkeep.seal()
        bench.crash()
    bench.now += 6 * SECOND_US
    assert bench.claim(limit=at_least(2, 30)) == {"in": 1}


def test_the_delay_counts_from_the_oldest_message_that_is_not_settled(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    with bench.local.channel() as channel:
        channel.get("in", no_ack=True)
        channel.get("in", no_ack=True)
    bench.now += 60 * SECOND_US
    bench.produce(b"c")
    assert bench.claim(limit=at_least(2, 30)) == S
    bench.now += 31 * SECOND_US
    assert bench.claim(limit=at_least(2, 30)) == {"in": 3}


@pytest.mark.parametrize(
    ("origin", "first"),
    [(LATEST, 1), (Origin(offsets={"in": -1}), 1), (Origin(offsets={"in": 0}), 0), (Origin(), 0)],
)
def test_a_stream_that_waits_for_more_messages_knows_where_it_starts(
    bench: Bench, origin: Origin, first: int
) -> None:
    """The start is fixed by the first question, not by the first answer that has messages."""
    bench.produce(b"old")
    for _ in range(2):
        assert bench.claim(origin=origin, limit=at_least(4)) == S
        bench.produce(b"new")
        bench.crash()
    bench.produce(b"new", b"new")
    end = bench.claim(origin=origin, limit=at_least(4))
    assert bench.ranges(S, end) == {"in": (first, 5)}


def test_a_stream_that_waits_for_more_messages_owns_its_queue(bench: Bench) -> None:
    bench.produce(b"a")
    assert bench.claim(limit=at_least(2)) == S
    with bench.local.channel() as channel, pytest.raises(ResourceLocked):
        channel.get("in")


def test_an_empty_queue_waits_and_then_starts(bench: Bench) -> None:
    assert bench.claim(limit=at_least(2, 0.001), origin=LATEST) == S
    bench.now += 60 * SECOND_US
    assert bench.claim(limit=at_least(2, 0.001), origin=LATEST) == S
    bench.produce(b"a")
    bench.now += SECOND_US
    assert bench.claim(limit=at_least(2, 0.001), origin=LATEST) == {"in": 1}


def test_messages_and_delays_are_counted_over_all_queues(bench: Bench) -> None:
    bench.produce(b"old", queue="in2")
    assert bench.claim(BOTH, limit=at_least(3, 30), origin=LATEST) == BOTH
    bench.produce(b"a", queue="in2")
    bench.now += 25 * SECOND_US
    bench.produce(b"b")
    assert bench.claim(BOTH, limit=at_least(3, 30), origin=LATEST) == BOTH
    bench.now += 10 * SECOND_US
    end = bench.claim(BOTH, limit=at_least(3, 30), origin=LATEST)
    assert bench.ranges(BOTH, end) == {"in": (0, 1), "in2": (1, 2)}
    bench.produce(b"c")
    bench.produce(b"d", b"e", queue="in2")
    assert bench.claim(end, limit=at_least(3)) == {"in": 2, "in2": 4}


def test_the_most_messages_of_a_batch_still_count_when_the_least_wait(bench: Bench) -> None:
    for number in range(5):
        bench.produce(b"%d" % number)
    assert bench.claim(limit=at_least(2, max_rows=3)) == {"in": 3}
    assert bench.claim({"in": 3}, limit=at_least(2, max_rows=3)) == {"in": 5}


def test_a_claim_that_was_made_is_given_again_whatever_waits_now(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    assert bench.claim(limit=at_least(1000)) == end


def test_a_starting_timestamp_in_the_future_is_the_end_of_the_queue_at_the_first_question(
    bench: Bench,
) -> None:
    start = Origin(timestamp_us=bench.now + 100 * SECOND_US)
    bench.produce(b"old")
    for _ in range(2):
        assert bench.claim(origin=start, limit=at_least(3)) == S
        bench.produce(b"new")
        bench.crash()
    bench.produce(b"new")
    end = bench.claim(origin=start, limit=at_least(3))
    assert bench.ranges(S, end) == {"in": (1, 4)}
