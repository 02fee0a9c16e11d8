"""What one commit writes and takes back, over both stores: a restart finds what was there before it, no more
and no less.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from broker_core.broker.broker import BrokerState
from broker_core.broker.transaction.publish import Publish
from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.core.records import HoleRecord, OutcomeRecord, ProgressRecord, RunRecord
from broker_core.engine import BranchHeader
from broker_core.message.message import Message
from broker_core.node.engine import EmbeddedEngine
from tests.broker.conftest import Place
from tests.reading import fetched


def test_blocks_that_push_each_other_out_of_a_full_queue_leave_nothing_behind(place: Place) -> None:
    engine = EmbeddedEngine(place.broker)
    with place.broker.channel() as channel:
        channel.queue_declare("latest", arguments={"x-max-length": 100})
    named = []
    for task in range(3):
        block = pa.RecordBatch.from_pydict(
            {"body": pa.array([b"%d %d" % (task, n) for n in range(2000)], pa.binary())}
        )
        named.append(
            engine.stage(BranchHeader("t", f"b{task}", "publish", {"routing_key": "latest"}), [block])
        )
    engine.commit_branches("t", named)
    expected = [b"2 %d" % n for n in range(1900, 2000)]
    assert place.bodies("latest") == expected
    place.restart()
    assert place.bodies("latest") == expected
    assert len(place.kept(RunRecord)) == 1


def test_overflow_above_held_messages_that_the_same_commit_acks_leaves_no_holes(place: Place) -> None:
    with place.broker.channel() as channel, place.broker.channel() as other:
        channel.queue_declare("q", arguments={"x-max-length": 3})
        for body in (b"1", b"2", b"3"):
            other.publish(body, routing_key="q")
        channel.tx_select()
        held = [channel.get("q") for _ in range(3)]
        for number in range(8):
            channel.publish(b"n%d" % number, routing_key="q")
        for delivery in held:
            assert delivery is not None
            channel.ack(delivery.tag)
        channel.tx_commit()
        for number in range(60):
            other.publish(b"m%d" % number, routing_key="q")
            delivery = other.get("q")
            assert delivery is not None
            other.ack(delivery.tag)
    before = place.bodies("q")
    place.restart()
    queue = place.broker.state.topology.queue("q")
    assert place.bodies("q") == before and queue.messages == len(before) == 2
    with place.broker.channel() as channel:
        for number in range(10):
            channel.publish(b"more %d" % number, routing_key="q")
    assert place.bodies("q") == [b"more 7", b"more 8", b"more 9"]
    assert place.kept(HoleRecord) == []


def test_a_queue_that_is_filled_and_deleted_in_one_group_leaves_nothing_behind(place: Place) -> None:
    with place.broker.channel() as channel:
        channel.queue_declare("q", arguments={"x-max-length": 3})
        for number in range(9):
            channel.publish(b"%d" % number, routing_key="q")

    def work(state: BrokerState, change: Change, now: int) -> None:
        queue = state.topology.queue("q")
        queue.settle(7, 8)
        queue.record(change)
        state.topology.delete_unused(change, [queue])
        queue.settle(6, 7)  # whoever still held something
        queue.record(change)

    place.broker.run(work)
    place.restart()
    assert "q" not in place.broker.state.topology.queues
    for kind in (ProgressRecord, HoleRecord, RunRecord):
        assert place.kept(kind) == []


def test_a_message_that_cannot_be_stored_leaves_no_gap_among_those_that_can(place: Place) -> None:
    def send(body: bytes, key: str) -> None:
        def work(state: BrokerState, change: Change, now: int) -> None:
            state.messages.enqueue(
                change, [Publish(Message(body, key, "", b""), (state.topology.queue("q"),))], now
            )

        place.broker.run(work)

    with place.broker.channel() as channel:
        channel.queue_declare("q", arguments={"x-max-length-bytes": 1000})
    for number in range(20):
        send(b"%d" % number, "q")
        with pytest.raises(errors.OptionError, match="routing_key of a message"):
            send(b"bad", "\ud800")
    expected = [b"%d" % number for number in range(20)]
    assert place.bodies("q") == expected
    place.restart()
    assert place.bodies("q") == expected
    assert [
        fetched(place.broker, place.broker.state.topology.queue("q"), offset).body for offset in range(20)
    ] == expected


def test_a_work_whose_records_cannot_be_stored_fails_alone_and_writes_nothing(place: Place) -> None:
    def work(xid: object) -> None:
        place.broker.run(lambda state, change, now: change.put(OutcomeRecord(xid, "committed", now)))  # type: ignore[arg-type]

    work("good")
    for xid in (None, 7, "\ud800"):
        with pytest.raises(errors.OptionError, match=r"outcome\.xid"):
            work(xid)
    work("better")
    assert {record.key for record in place.kept(OutcomeRecord)} == {("better",), ("good",)}
