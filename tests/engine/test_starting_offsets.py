"""What an app skips by its starting offsets stays in the queue, beside what it claims, until somebody else
takes it.
"""

from __future__ import annotations

from typing import Any

import pytest

from broker_core.core.errors import OptionError, ResourceLocked
from broker_core.engine import START, Limit, Origin
from tests.engine.bench import APP, Bench

LATEST = Origin("latest")


def backlog(bench: Bench, count: int = 5, **queue: Any) -> list[bytes]:
    if queue:
        with bench.local.channel() as channel:
            channel.queue_delete("in")
            channel.queue_declare("in", arguments=queue)
    sent = [b"old %d" % number for number in range(count)]
    for body in sent:
        bench.produce(body)
        bench.now += 1_000_000
    return sent


def consume(bench: Bench, origin: Origin, *bodies: bytes) -> Any:
    """One batch with what comes after the start; its end, not acked yet."""
    bench.claim(origin=origin)
    bench.produce(*bodies)
    end = bench.claim(origin=origin)
    bench.run("q", 0, {"in": START}, end)
    return end


ORIGINS = {
    "latest": lambda: LATEST,
    "an offset": lambda: Origin(offsets={"in": 5}),
    "a timestamp": lambda: Origin(timestamp_us=10_000_000),
}


@pytest.mark.parametrize("kind", ORIGINS)
@pytest.mark.parametrize("crash", [False, True])
def test_what_an_app_skips_stays_over_decision_acks_and_release(bench: Bench, kind: str, crash: bool) -> None:
    old = backlog(bench)
    origin = ORIGINS[kind]()
    end = consume(bench, origin, b"new")
    assert bench.visible("in") == old
    bench.produce(b"newer")
    first, end = end, bench.claim(end)
    bench.run("q", 1, first, end)
    if crash:
        bench.crash()
    queue = bench.local.state.topology.queue("in")
    assert queue.progress.needed_within(0, 7) == [[0, 7]], "the last finished range stays for a replay"
    bench.engine.ack(APP, end)
    assert bench.visible("in") == old, "the ack consumes its range, and nothing below"
    assert queue.progress.needed_within(0, 7) == [[0, 5], [6, 7]]
    if crash:
        bench.crash()
    (app,) = bench.engine.apps()
    assert app.lag == 0, "the backlog is not the app's to read"
    assert {queue.name: queue.messages for queue in bench.local.queues()}["in"] == 5, "the depth counts it"
    bench.engine.release(APP, "in")
    with bench.local.channel() as channel:
        got = [channel.get("in") for _ in range(6)]
        assert [delivery and delivery.body for delivery in got] == [*old, None]
        assert crash or not any(delivery and delivery.redelivered for delivery in got), "nobody had it before"


@pytest.mark.parametrize("crash", [False, True])
def test_a_skipped_backlog_can_be_purged_while_the_app_goes_on_and_nothing_else(
    bench: Bench, crash: bool
) -> None:
    old = backlog(bench)
    end = consume(bench, LATEST, b"new")
    bench.produce(b"newer")
    if crash:
        bench.crash()
    with bench.local.channel() as channel:
        with pytest.raises(ResourceLocked):
            channel.get("in")
    with bench.local.channel() as channel:
        assert channel.queue_purge("in") == len(old)
    assert bench.visible("in") == [b"newer"]
    with bench.local.channel() as channel, pytest.raises(ResourceLocked, match="belongs to app"):
        channel.queue_purge("in")
    second = bench.claim(end)
    assert bench.read("q", 1, bench.ranges(end, second)) == [b"newer"]


def test_a_skipped_backlog_expires_and_what_is_claimed_does_not(bench: Bench) -> None:
    backlog(bench, **{"x-message-ttl": 60_000})
    bench.claim(origin=LATEST)
    bench.produce(b"claimed")
    end = bench.claim(origin=LATEST)
    bench.produce(b"unclaimed")
    bench.now += 61_000_000
    bench.local.upkeep.tick()
    assert bench.visible("in") == [b"claimed"]
    assert bench.read("q", 0, bench.ranges({"in": START}, end)) == [b"claimed"]


def test_a_skipped_backlog_makes_room_first_where_the_length_is_limited(bench: Bench) -> None:
    backlog(bench, **{"x-max-length": 5})
    bench.claim(origin=LATEST)
    bench.produce(b"claimed")
    end = bench.claim(origin=LATEST)
    bench.produce(b"a", b"b")
    assert bench.visible("in") == [b"old 2", b"old 3", b"old 4", b"claimed", b"a", b"b"]
    bench.produce(*(b"%d" % number for number in range(7)))
    assert bench.visible("in") == [b"claimed", *(b"%d" % number for number in range(2, 7))]
    assert bench.read("q", 0, bench.ranges({"in": START}, end)) == [b"claimed"]


@pytest.mark.parametrize("crash", [False, True])
def test_a_new_checkpoint_that_resumes_goes_on_where_its_app_was_and_not_in_the_backlog(
    bench: Bench, crash: bool
) -> None:
    """Also where another system is the sink, so that no ledger knows how far the app came."""
    backlog(bench)
    bench.claim(origin=LATEST)
    bench.produce(b"new")
    end = bench.claim(origin=LATEST)
    bench.ack(end)
    bench.produce(b"newer")
    if crash:
        bench.crash()
    second = bench.claim(origin=LATEST, on_new="resume")
    assert bench.ranges({"in": START}, second) == {"in": (6, 7)}


def test_a_released_app_that_starts_at_the_beginning_reads_what_it_had_skipped(bench: Bench) -> None:
    old = backlog(bench)
    consume(bench, LATEST, b"new")
    bench.engine.release(APP, "in")
    end = bench.claim(origin=Origin())
    assert bench.read("q2", 0, bench.ranges({"in": START}, end)) == old


def test_the_other_queue_of_a_released_claim_is_claimed_anew_with_what_was_skipped(bench: Bench) -> None:
    """A claim over two queues ends as a whole; the queue that stays the app's keeps what nobody consumed,
    over restarts too.
    """
    start = {"in": START, "in2": START}
    for queue in start:
        bench.produce(b"old", queue=queue)
    bench.claim(start, origin=LATEST)
    for queue in start:
        bench.produce(b"new", queue=queue)
    bench.claim(start, origin=LATEST)
    bench.engine.release(APP, "in", force=True)
    for _ in range(2):
        queue = bench.local.state.topology.queue("in2")
        assert (queue.owner, list(queue.progress.claimed), bench.visible("in2")) == (
            APP,
            [],
            [b"old", b"new"],
        )
        bench.crash()
    end = bench.claim(start, origin=Origin())
    assert bench.ranges(start, end) == {"in": (0, 2), "in2": (0, 2)}
    assert sorted(bench.read("q", 0, bench.ranges(start, end))) == [b"new", b"new", b"old", b"old"]


def test_a_limited_claim_behind_a_backlog_ends_within_its_limit(bench: Bench) -> None:
    backlog(bench)
    bench.claim(origin=LATEST)
    bench.produce(b"a")
    bench.produce(b"b")
    assert bench.claim(origin=LATEST, limit=Limit(max_rows=1)) == {"in": 6}


def test_a_queue_that_joins_a_stream_starts_at_its_offset_beside_those_that_went_on(bench: Bench) -> None:
    with bench.local.channel() as channel:
        channel.queue_declare("in2")
    bench.produce(b"0", b"1", b"2")
    origin = Origin(offsets={"in": 1})
    end = bench.claim(origin=origin)
    assert end == {"in": 3}
    bench.produce(b"a", b"b", queue="in2")
    both = Origin(offsets={"in": 1, "in2": 1})
    later = bench.claim({**end, "in2": START}, origin=both)
    assert bench.engine.resolve(APP, {**end, "in2": START}, later) == {"in": (3, 3), "in2": (1, 2)}
    unknown = Origin(offsets={"in3": 0})
    with pytest.raises(OptionError, match="in3"):
        bench.claim({"out": START}, origin=unknown, app="another")
