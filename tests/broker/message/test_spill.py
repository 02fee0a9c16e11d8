"""A large transaction goes to a segment piece by piece, whatever is in it; nobody can tell from outside
(decisions 15, 18).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.broker.transaction.transaction import Limits
from broker_core.core import errors
from broker_core.engine import START, Limit, Origin, ReadTicket
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from broker_core.node.channel_commit import SPILL_BYTES, SPILL_ROWS
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from tests.broker.conftest import Node, declared, publish
from tests.make import beneath
from tests.reading import unsettled

TRANSIENT = Properties(delivery_mode=1).encode()
PERSISTENT = Properties(delivery_mode=2).encode()
DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
QUEUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "volatile": {"durable": False},
    "short": {"arguments": {"x-max-length": 7, **DEAD}},
    "small": {"arguments": {"x-max-length-bytes": 40, **DEAD}},
    "refusing": {"arguments": {"x-max-length": 60, "x-overflow": "reject-publish"}},
    "refusing-bytes": {"arguments": {"x-max-length-bytes": 300, "x-overflow": "reject-publish"}},
    "ranked": {"arguments": {"x-max-priority": 3}},
    "dead": {},
}
KINDS = [
    b"",
    TRANSIENT,
    PERSISTENT,
    Properties(priority=2).encode(),
    Properties(delivery_mode=1, expiration="600000").encode(),
]


def _history(node: Node, seed: int, spill_rows: int) -> Iterator[object]:
    """What is seen of a random history, step by step."""
    chance = random.Random(seed)
    with node.channel() as channel:
        for name, named in QUEUES.items():
            channel.queue_declare(name, **named)
        channel.exchange_declare("all", "topic")
        for name in QUEUES:
            channel.queue_bind(name, "all", f"#.{name}.#")
    for step in range(8):
        node.broker.channel_commits.spill_rows = spill_rows
        channel = node.channel()
        channel.tx_select()
        for number in range(chance.randrange(1, 60)):
            queues = [name for name in QUEUES if name != "dead" and chance.random() < 0.3]
            body = b"%d/%d" % (step, number)
            channel.publish(
                body, "all", ".".join(queues), chance.choice(KINDS), mandatory=chance.random() < 0.2
            )
        end = chance.choice(["commit", "commit", "prepare", "roll back", "delete"])
        try:
            yield _ended(node, channel, end, f"x{step}")
        except errors.PreconditionFailed as error:
            yield error.summary
        channel.close()
        if end == "delete":
            with node.channel() as other:
                other.queue_declare("volatile", durable=False)
        yield _seen(node)
        if chance.random() < 0.4:
            node.restart(clean=chance.random() < 0.5)
            with node.channel() as other:
                other.queue_declare("volatile", durable=False)
            yield _seen(node)
            for info in node.broker.prepared():
                yield node.broker.commit(info.xid)
            yield _seen(node)


def _ended(node: Node, channel: LocalChannel, end: str, xid: str) -> object:
    if end == "roll back":
        channel.tx_rollback()
    elif end == "prepare":
        channel.prepare(xid)
    else:
        if end == "delete":
            with node.channel() as other:
                other.queue_delete("volatile")
        channel.tx_commit()
    return [message.body for message in channel.returned]


def _seen(node: Node) -> dict[str, object]:
    return {
        **{
            name: node.browse(name)
            for name in QUEUES
            if name in node.broker.state.topology.queues and name != "dead"
        },
        # which of two queues overflows first is open
        "dead": {name: _dead_of(node, name) for name in ("short", "small")},
        "counts": [(info.name, info.messages, info.unacknowledged) for info in node.broker.queues()],
        "prepared": [(info.xid, info.publishes, info.dropped) for info in node.broker.prepared()],
    }


def _dead_of(node: Node, name: str) -> list[bytes]:
    state = node.broker.state
    queue = state.topology.queue("dead")
    rows = [state.messages.fetch(queue, offset) for offset in unsettled(queue)]
    return [
        row.body for row in rows if Properties.decode(row.properties).headers["x-first-death-queue"] == name
    ]


@pytest.mark.parametrize("seed", range(6))
def test_18_nobody_can_tell_whether_a_transaction_was_spilled(seed: int) -> None:
    small, large = Node(), Node()
    for number, (spilled, whole) in enumerate(
        zip(_history(small, seed, 4), _history(large, seed, SPILL_ROWS), strict=True)
    ):
        assert spilled == whole, f"step {number}"
    small.broker.close()
    large.broker.close()


@pytest.mark.parametrize("first", [TRANSIENT, PERSISTENT])
@pytest.mark.parametrize("queue", ["plain", "short", "volatile", "small"])
def test_18_no_open_transaction_keeps_its_messages_in_memory(node: Node, queue: str, first: bytes) -> None:
    with node.channel() as channel:
        channel.queue_declare(queue, **QUEUES[queue])
        channel.tx_select()
        channel.publish(b"first", routing_key=queue, properties=first)
        for number in range(2 * SPILL_ROWS):
            channel.publish(b"%d" % number, routing_key=queue, mandatory=number % 2 == 0)
            assert len(beneath(channel).transaction.publishes) < SPILL_ROWS
        for _ in range(5):
            channel.publish(bytes(SPILL_BYTES // 2), routing_key=queue)
            assert beneath(channel).transaction.unspilled_bytes < SPILL_BYTES
        assert node.broker.transaction_bytes() < 2 * SPILL_BYTES


def test_15_a_restart_ends_the_transient_messages_of_a_large_transaction_only(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    broker = LocalBroker(DurableStore(directory), upkeep=False)
    broker.channel_commits.spill_rows = 100
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for number in range(1_000):
            channel.publish(
                b"%d" % number, routing_key="q", properties=TRANSIENT if number % 3 == 0 else PERSISTENT
            )
        channel.tx_commit()
        assert [channel.get("q").body for _ in range(4)] == [b"0", b"1", b"2", b"3"]  # type: ignore[union-attr]
    broker.close()
    broker = LocalBroker(DurableStore(directory), upkeep=False)
    with broker.channel() as channel:
        found = []
        while (delivery := channel.get("q")) is not None:
            found.append(delivery.body)
            channel.ack(delivery.tag)
    assert found == [b"%d" % number for number in range(1_000) if number % 3]
    broker.upkeep.close_open()
    broker.upkeep.tick()
    assert broker.state.blocks.by_id == {}, "nothing is kept for messages that are gone"
    broker.close()


def test_s2_a_claimed_range_of_spilled_transient_messages_is_read_again_after_a_restart(node: Node) -> None:
    declared(node, "q")
    node.broker.channel_commits.spill_rows = 4
    with node.channel() as channel:
        channel.tx_select()
        for number in range(20):
            channel.publish(b"%d" % number, routing_key="q", properties=TRANSIENT if number % 2 else b"")
        channel.tx_commit()
    engine = EmbeddedEngine(node.broker)
    end = engine.claim("app", ["q"], {"q": START}, Limit(), Origin(), "fail")
    engine = EmbeddedEngine(node.restart())
    ranges = engine.resolve("app", {"q": START}, end)
    ticket = ReadTicket("app", "query", 0, ranges, (("q", 0, 20),))
    assert [body for rows in engine.read(ticket) for body in rows.column("body").to_pylist()] == [
        b"%d" % number for number in range(20)
    ]


def test_21_mandatory_messages_of_a_spilled_piece_come_back_when_their_queue_is_gone(node: Node) -> None:
    declared(node, "q", "other")
    node.broker.channel_commits.spill_rows = 3
    with node.channel() as channel:
        channel.tx_select()
        for number in range(8):
            channel.publish(
                b"%d" % number, routing_key="other" if number == 4 else "q", mandatory=number % 2 == 0
            )
            channel.publish(b"nowhere %d" % number, routing_key="nowhere", mandatory=number == 5)
        channel.queue_delete("q")
        channel.tx_commit()
        assert sorted(message.body for message in channel.returned) == [b"0", b"2", b"6", b"nowhere 5"]
        assert {message.routing_key for message in channel.returned} == {"q", "nowhere"}
    assert node.browse("other") == [b"4"]


def test_18_a_piece_whose_queues_are_all_gone_leaves_nothing_behind(node: Node) -> None:
    declared(node, "q")
    node.broker.channel_commits.spill_rows = 3
    with node.channel() as channel:
        channel.tx_select()
        for _ in range(9):
            channel.publish(b"x", routing_key="q", mandatory=True)
        channel.queue_delete("q")
        channel.tx_commit()
        assert len(channel.returned) == 9
    assert node.store.staged == {} and node.broker.state.blocks.by_id == {}


def test_18_open_and_prepared_transactions_are_counted_until_they_end(node: Node) -> None:
    declared(node, "q")
    held = node.broker.transaction_bytes
    channels = [node.channel() for _ in range(60)]
    for channel in channels:
        channel.tx_select()
        channel.publish(bytes(100_000), routing_key="q")
    assert held() >= 6_000_000
    for number, channel in enumerate(channels):
        [channel.tx_commit, channel.tx_rollback, channel.close, lambda channel=channel: channel.prepare("x")][
            number % 4 if number < 4 else number % 3
        ]()
    assert 100_000 <= held() < 110_000
    node.broker.rollback("x")
    assert held() == 0


def test_18_spilling_early_bounds_what_many_open_transactions_hold(node: Node) -> None:
    declared(node, "q")
    node.broker.channel_commits.spill_early(True)
    channels = [node.channel() for _ in range(20)]
    for channel in channels:
        channel.tx_select()
        for _ in range(10):
            channel.publish(bytes(100_000), routing_key="q")
    assert node.broker.transaction_bytes() <= 20 * SPILL_BYTES // 16
    node.broker.channel_commits.spill_early(False)
    for channel in channels:
        channel.tx_commit()
    assert node.queue("q").messages == 200


def test_18_a_publish_that_no_limit_allows_changes_nothing_of_a_spilled_transaction(node: Node) -> None:
    declared(node, "q")
    node.broker.channel_commits.spill_rows = 4
    with node.broker.channel(limits=Limits(messages=10)) as channel:
        channel.tx_select()
        for number in range(10):
            channel.publish(b"%d" % number, routing_key="q")
        with pytest.raises(errors.TransactionTooLarge):
            channel.publish(b"one more", routing_key="q")
        channel.tx_commit()
    assert node.browse("q") == [b"%d" % number for number in range(10)]


def test_an_owned_bounded_queue_takes_a_spilled_transaction_whole(node: Node) -> None:
    declared(node, "q", **{"x-max-length": 5})
    publish(node, "q", b"a", b"b")
    engine = EmbeddedEngine(node.broker)
    engine.claim("app", ["q"], {"q": START}, Limit(), Origin(), "fail")
    node.broker.channel_commits.spill_rows = 3
    with node.channel() as channel:
        channel.tx_select()
        for number in range(12):
            channel.publish(b"%d" % number, routing_key="q")
        channel.tx_commit()
    assert node.browse("q") == [b"a", b"b", *(b"%d" % number for number in range(7, 12))]
