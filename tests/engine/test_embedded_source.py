"""What the rules S2 to S6 mean where the broker has transactions, channels and settled messages."""

from __future__ import annotations

import pytest

from broker_core.core.errors import (
    ResourceLocked,
)
from broker_core.core.records import ReadRecord
from broker_core.engine import START, Limit, ReadTicket, Vector
from broker_core.micro_batch.claims import claim as claim_rules
from tests.engine.bench import APP, Bench


def test_s2_a_claim_over_several_queues_is_cut_at_one_transaction(bench: Bench) -> None:
    for number in range(3):
        with bench.local.channel() as channel:
            channel.tx_select()
            channel.publish(b"%d" % number, routing_key="in")
            channel.publish(b"%d" % number, routing_key="in2")
            channel.tx_commit()
    start: Vector = {"in": START, "in2": START}
    assert bench.claim(start, limit=Limit(max_rows=5)) == {"in": 2, "in2": 2}


def test_s2_a_transaction_is_split_only_when_it_alone_is_over_the_limit(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.produce(b"c", b"d", b"e")
    assert bench.claim(limit=Limit(max_rows=4)) == {"in": 2}
    assert bench.claim({"in": 2}, limit=Limit(max_rows=2)) == {"in": 4}
    assert bench.claim({"in": 4}, limit=Limit(max_rows=2)) == {"in": 5}


def test_s2_a_limit_of_bytes_takes_whole_transactions(bench: Bench) -> None:
    bench.produce(b"x" * 100)
    bench.produce(b"x" * 100)
    assert bench.claim(limit=Limit(max_bytes=150)) == {"in": 1}


def test_s4_what_was_settled_before_the_claim_is_skipped_on_every_replay_and_is_no_data_loss(
    bench: Bench,
) -> None:
    bench.produce(b"a", b"b", b"c")
    channel = bench.local.channel()
    first, second = channel.get("in"), channel.get("in")
    assert first is not None and second is not None
    channel.ack(second.tag)
    channel.reject(first.tag, requeue=True)
    channel.close()
    end = bench.claim()
    ranges = bench.ranges({"in": START}, end)
    assert bench.read("q", 0, ranges) == [b"a", b"c"]
    assert bench.engine.count(APP, ranges)["in"].rows == 2
    entry = bench.run("q", 0, {"in": START}, end)
    assert entry.messages == 2
    bench.crash()
    assert bench.read("q", 0, ranges) == [b"a", b"c"]


def test_s4_redelivered_is_frozen_by_the_claim(bench: Bench) -> None:
    bench.produce(b"a")
    channel = bench.local.channel()
    channel.get("in")
    channel.close()
    bench.produce(b"b")
    ranges = bench.ranges({"in": START}, bench.claim())
    ticket = ReadTicket(APP, "q", 0, ranges, (("in", 0, 2),))

    def flags() -> list[bool]:
        return [
            flag for found in bench.engine.read(ticket) for flag in found.column("redelivered").to_pylist()
        ]

    assert flags() == [True, False]
    bench.crash()
    assert flags() == [True, False]


def test_s6_an_owned_queue_refuses_other_consumers_apps_purge_and_delete(bench: Bench) -> None:
    bench.produce(b"a")
    bench.claim()
    with bench.local.channel() as channel:
        with pytest.raises(ResourceLocked, match=APP):
            channel.get("in")
    for word in ("queue_purge", "queue_delete"):
        with bench.local.channel() as channel:
            with pytest.raises(ResourceLocked, match=APP):
                getattr(channel, word)("in")
    with pytest.raises(ResourceLocked, match=f"txmq app release {APP} in"):
        bench.claim(app="another")
    bench.crash()
    with pytest.raises(ResourceLocked):
        bench.claim(app="another")


def test_s6_an_app_cannot_claim_while_a_channel_holds_deliveries(bench: Bench) -> None:
    bench.produce(b"a")
    channel = bench.local.channel()
    assert channel.get("in") is not None
    with pytest.raises(ResourceLocked, match="hold"):
        bench.claim()
    channel.close()
    assert bench.claim() == {"in": 1}


def test_s6_a_refused_claim_owns_none_of_its_queues(bench: Bench) -> None:
    bench.produce(b"a", queue="in2")
    channel = bench.local.channel()
    assert channel.get("in2") is not None
    with pytest.raises(ResourceLocked):
        bench.claim({"in": START, "in2": START})
    assert bench.local.state.topology.queue("in").owner == ""
    channel.close()


def test_s6_claimed_messages_do_not_expire_or_overflow(bench: Bench) -> None:
    with bench.local.channel() as channel:
        channel.queue_declare("short", arguments={"x-message-ttl": 1, "x-max-length": 2})
    bench.produce(b"a", b"b", queue="short")
    end = bench.claim({"short": START})
    bench.now += 10_000_000
    bench.local.upkeep.tick()
    bench.produce(b"c", b"d", b"e", queue="short")
    assert bench.read("q", 0, bench.ranges({"short": START}, end)) == [b"a", b"b"]


def test_s6_a_released_queue_is_there_for_others_with_what_was_not_consumed(bench: Bench) -> None:
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, {"in": START}, end)
    bench.produce(b"b")
    bench.claim(end)
    bench.engine.release(APP, "in", force=True)
    with bench.local.channel() as channel:
        delivery = channel.get("in", no_ack=True)
        assert delivery is not None and (delivery.body, delivery.redelivered) == (b"b", True)
    bench.produce(b"c")
    assert bench.ranges({"in": START}, bench.claim(app="next"), "next") == {"in": (2, 3)}


def test_s4_reads_are_forgotten_by_number_as_claims_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_rules, "KEPT_CLAIMS", 3)
    at: Vector = {"in": START}
    for batch in range(10):
        bench.produce(b"%d" % batch)
        end = bench.claim(at)
        bench.run("q", batch, at, end)
        at = end
        bench.crash()
    kept = [record for record in bench.store.reopened().load().records if isinstance(record, ReadRecord)]
    assert sorted(record.batch_id for record in kept) == [7, 8, 9]
