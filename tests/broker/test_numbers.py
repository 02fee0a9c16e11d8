"""Ids that are given once: after a restart, a rollback or a refusal nothing that is durable meets a later
thing of the same id.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.core import errors
from broker_core.core.change import Change, InboxRow
from broker_core.core.records import PreparedRecord
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from broker_core.node.channel_commit import SPILL_ROWS
from broker_core.node.local import LocalBroker
from tests.reading import fetched, unsettled

from .conftest import Node, Place, declared, publish

VOLATILE = {
    "not durable": {"durable": False},
    "exclusive": {"exclusive": True},
    "auto-delete": {"durable": False, "auto_delete": True},
    "exclusive, auto-delete": {"exclusive": True, "auto_delete": True},
}


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("kind", VOLATILE)
def test_no_prepared_publish_or_ack_reaches_a_later_queue_after_a_restart(
    place: Place, kind: str, clean: bool
) -> None:
    broker = place.broker
    channel = broker.channel()
    channel.queue_declare("reply", **VOLATILE[kind])  # type: ignore[arg-type]
    for body in (b"a", b"b"):
        channel.publish(body, routing_key="reply")
    channel.tx_select()
    delivery = channel.get("reply")
    assert delivery is not None
    channel.ack(delivery.tag)
    channel.publish(b"for reply", routing_key="reply")
    channel.prepare("x")

    broker = place.restart(clean=clean)
    with broker.channel() as later:
        for name in ("orders", "invoices"):
            later.queue_declare(name)
            for body in (b"1", b"2"):
                later.publish(body, routing_key=name, properties=Properties(delivery_mode=2).encode())
    broker = place.restart(clean=clean)
    (info,) = broker.prepared()
    assert (info.publishes, info.settles, info.dropped) == (1, 0, 2)
    assert [queue.unacknowledged for queue in broker.queues()] == [0, 0]
    assert broker.commit("x") == 2, "what names a queue that is gone is dropped, and counted"
    assert broker.commit("x") == 0
    assert (place.bodies("orders"), place.bodies("invoices")) == ([b"1", b"2"], [b"1", b"2"])


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_no_spilled_prepared_message_reaches_a_later_queue_after_a_restart(place: Place, clean: bool) -> None:
    with place.broker.channel() as channel:
        channel.exchange_declare("all", "fanout")
        channel.queue_declare("keep")
        channel.queue_declare("reply", durable=False)
        for name in ("keep", "reply"):
            channel.queue_bind(name, "all")
        channel.tx_select()
        for number in range(SPILL_ROWS + 3):
            channel.publish(b"%d" % number, exchange="all")
        channel.prepare("x")
    for name in ("orders", "invoices"):
        with place.restart(clean=clean).channel() as later:
            later.queue_declare(name)
    assert place.broker.commit("x") == SPILL_ROWS + 3
    assert (
        len(place.bodies("keep")) == SPILL_ROWS + 3
        and place.bodies("orders") == place.bodies("invoices") == []
    )


def test_a_prepared_transaction_counts_what_a_deleted_queue_costs_it(node: Node) -> None:
    declared(node, "in", "out", "gone")
    publish(node, "gone", b"work")
    with node.channel() as channel:
        channel.tx_select()
        delivery = channel.get("gone")
        assert delivery is not None
        channel.ack(delivery.tag)
        channel.publish(b"1", routing_key="gone")
        channel.publish(b"2", routing_key="out")
        channel.prepare("x")
        channel.queue_delete("gone")
        channel.queue_declare("gone")
    (info,) = node.broker.prepared()
    assert info.dropped == 2 and node.broker.commit("x") == 2
    assert (node.browse("gone"), node.browse("out")) == ([], [b"2"])


def test_no_queue_id_and_no_sequence_is_given_twice_in_random_histories_of_restarts(place: Place) -> None:
    """An id belongs to one queue for ever, durable or not; commit sequence numbers rise."""
    chance = random.Random(7)
    owners: dict[int, str] = {}  # queue id -> the queue, as it was once declared
    last = 0
    for round_number in range(12):
        broker = place.broker
        channel = broker.channel()
        for number in range(chance.randrange(1, 8)):
            name = f"q{round_number}-{number}"
            kind = chance.choice([{"durable": True}, *VOLATILE.values()])
            channel.queue_declare(name, **kind)  # type: ignore[arg-type]
            queue_id = broker.state.topology.queue(name).queue_id
            assert queue_id not in owners, f"{name} got the id of {owners[queue_id]}"
            owners[queue_id] = name
            step = chance.choice(["prepare", "publish", "refuse", "delete", "nothing"])
            if step == "prepare":
                _prepared(broker, name)
            elif step == "publish":
                channel.publish(
                    b"x",
                    routing_key=name,
                    properties=Properties(delivery_mode=chance.choice([1, 2])).encode(),
                )
            elif step == "refuse":
                _refused(broker)
            elif step == "delete":
                channel.queue_delete(name)
        rows = [row.sequence for row in _rows(broker)]
        assert not rows or min(rows) > last, "a commit sequence number was given again"
        last = max([last, *rows])
        place.restart(clean=chance.random() < 0.5)
        for queue in list(place.broker.state.topology.queues):
            with place.broker.channel() as cleaner:
                cleaner.queue_delete(queue)


def _rows(broker: LocalBroker) -> Iterator[InboxRow]:
    for queue in broker.state.topology.queues.values():
        yield from (fetched(broker, queue, offset) for offset in unsettled(queue))


def _prepared(broker: LocalBroker, queue: str) -> None:
    source = broker.state.topology.queue(queue)
    with (
        broker.channel() if not source.exclusive else broker.channel(connection=source.connection) as channel
    ):
        channel.tx_select()
        channel.publish(b"prepared", routing_key=queue)
        channel.prepare(f"x-{queue}")


def _refused(broker: LocalBroker) -> None:
    """A work that has taken a number when it is refused."""

    def work(state: BrokerState, _change: Change, _now: int) -> None:
        state.numbers.next_sequence()
        raise errors.PreconditionFailed("refused")

    with pytest.raises(errors.PreconditionFailed):
        broker.run(work)


def test_an_id_that_an_older_version_left_in_a_prepared_transaction_is_never_given(node: Node) -> None:
    declared(node, "q")
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"for nobody", routing_key="q")
        channel.prepare("x")
    broker = node.broker
    # above the durable mark, as numbers of volatile queues once were
    lost = broker.state.numbers.sequence + 5_000

    def as_before(_state: BrokerState, change: Change, _now: int) -> None:
        (record,) = [
            record for record in node.store.reopened().load().records if isinstance(record, PreparedRecord)
        ]
        change.put(PreparedRecord(record.xid, record.prepared_at, record.publishes, [[lost]], []))

    broker.run(as_before)
    broker = node.restart()
    with node.channel() as channel:
        channel.queue_declare("later")
    assert broker.state.topology.queue("later").queue_id > lost
    assert broker.commit("x") == 1


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_blocks_and_segments_of_a_rollback_give_their_numbers_to_nothing_else(
    tmp_path: Path, clean: bool
) -> None:
    place = Place(tmp_path / "data")
    expected: list[bytes] = []
    numbers: set[int] = set()
    for round_number in range(4):
        with place.broker.channel() as channel:
            channel.queue_declare("q")
            channel.tx_select()
            for end in (LocalChannel.tx_rollback, LocalChannel.tx_commit):
                for number in range(SPILL_ROWS + 1):
                    channel.publish(b"%d/%d" % (round_number, number), routing_key="q")
                end(channel)
        expected += [b"%d/%d" % (round_number, number) for number in range(SPILL_ROWS + 1)]
        found = {
            run.block_id
            for run in place.broker.state.topology.queue("q").log.runs_between(
                len(expected) - SPILL_ROWS - 1, len(expected)
            )
        }
        assert not found & numbers
        numbers |= found
        place.restart(clean=clean)
        assert place.bodies("q") == expected
    place.broker.close()


@pytest.mark.parametrize("end", [LocalChannel.tx_rollback, LocalChannel.recover])
def test_17_no_delivery_tag_of_a_channel_is_given_twice(
    node: Node, end: Callable[[LocalChannel], object]
) -> None:
    declared(node, "q")
    publish(node, "q", *(b"%d" % number for number in range(3)))
    with node.channel() as channel:
        channel.tx_select()
        seen: set[int] = set()
        for _ in range(3):
            tags = [delivery.tag for _ in range(3) if (delivery := channel.get("q")) is not None]
            assert not seen & set(tags)
            seen |= set(tags)
            if tags:
                channel.ack(tags[0])
            end(channel)
            channel.recover()
