"""Queues and exchanges that drop duplicates: which message is one, whichever way both came, and for how long
an id is remembered.

Not here: what exchanges have of their own (``test_deduplication_exchange.py``), that AMQP confirms a duplicate (``interop/test_pika_confirms.py``), kills
(``crash/test_deduplication_crash.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker.queue.message_ids import MessageIds
from broker_core.core import errors, failpoint
from broker_core.core.records import MessageIdsRecord
from broker_core.engine import BranchHeader
from broker_core.message.deduplication import COST_BYTES, HEADER, Deduplication
from broker_core.message.properties import Properties
from broker_core.node.committer import changes
from broker_core.node.engine import EmbeddedEngine
from broker_core.routing import memory
from broker_core.server.access.vhosts import Vhosts
from tests.broker.conftest import Node, declared
from tests.make import spill

QUEUE, ONCE = "q", "once"
WINDOW = {"x-message-deduplication": True, "x-cache-size": 1_000}
PENDING = {"x-message-deduplication": True}
RULE = Deduplication(HEADER, 10, None, True)
numbers = itertools.count()


def with_id(id_: str, **more: Any) -> bytes:
    """The header is the id of both kinds of queues."""
    return Properties(**{"headers": {HEADER: id_}, "delivery_mode": 2, **more}).encode()


def through_exchange(node: Node) -> None:
    declared(node, QUEUE)
    with node.channel() as channel:
        channel.exchange_declare(ONCE, "x-message-deduplication", arguments={"x-cache-size": 1_000})
        channel.queue_bind(QUEUE, ONCE)


# -- the ways of a message -----------------------------------------------------------------------------------
def entrance(node: Node) -> str:
    """The exchange to which all ways publish."""
    return ONCE if ONCE in node.broker.state.topology.exchanges else ""


def plain(node: Node, ids: Sequence[str]) -> None:
    with node.channel() as channel:
        for id_ in ids:
            channel.publish(id_.encode(), entrance(node), QUEUE, with_id(id_))
    node.broker.upkeep.expire()


def gathered(node: Node, ids: Sequence[str], *, spilled: bool = False, prepared: str = "") -> None:
    """One transaction."""
    with node.channel() as channel:
        channel.tx_select()
        for id_ in ids:
            channel.publish(id_.encode(), entrance(node), QUEUE, with_id(id_))
        if spilled:
            spill(node.broker, channel)
        if prepared:
            channel.prepare(prepared)
        else:
            channel.tx_commit()
    node.broker.upkeep.expire()


def spilled(node: Node, ids: Sequence[str]) -> None:
    gathered(node, ids, spilled=True)


def prepared(node: Node, ids: Sequence[str]) -> None:
    gathered(node, ids, prepared=(xid := f"x{next(numbers)}"))
    node.broker.commit(xid)
    node.broker.upkeep.expire()


def prepared_before_a_restart(node: Node, ids: Sequence[str]) -> None:
    gathered(node, ids, spilled=True, prepared=(xid := f"x{next(numbers)}"))
    node.restart()
    node.broker.commit(xid)
    node.broker.upkeep.expire()


def staged(node: Node, ids: Sequence[str], *, copies: int = 1) -> None:
    """A batch write of Spark; a micro-batch publishes the same way."""
    engine = EmbeddedEngine(node.broker)
    target = {"exchange": entrance(node), "routing_key": QUEUE}
    header = BranchHeader(token := f"t{next(numbers)}", f"b{next(numbers)}", "publish", target)
    rows = [id_ for id_ in ids for _ in range(copies)]
    block = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([id_.encode() for id_ in rows], pa.binary()),
            "properties": pa.array(map(with_id, rows), pa.binary()),
        }
    )
    engine.commit_branches(token, [engine.stage(header, [block])])
    node.broker.upkeep.expire()


def staged_many(node: Node, ids: Sequence[str]) -> None:
    """So many rows that they are a block of their own."""
    staged(node, ids, copies=2_000)


def delayed(node: Node, ids: Sequence[str]) -> None:
    through(node, ids, "x-delayed-message", {"x-delayed-type": "fanout"}, {"x-delay": 20})


def through_another(node: Node, ids: Sequence[str]) -> None:
    """An exchange that drops duplicates too, if the queue does: behind one, another one lets each pass."""
    if entrance(node) == "":
        through(node, ids, "x-message-deduplication", {"x-cache-size": 1}, {})
    else:
        plain(node, ids)


def through(
    node: Node, ids: Sequence[str], kind: str, arguments: dict[str, Any], headers: dict[str, Any]
) -> None:
    """They wait in an exchange, and their commit is one of the broker."""
    with node.channel() as channel:
        channel.exchange_declare(kind, kind, arguments=arguments)
        if ONCE in node.broker.state.topology.exchanges:
            node.broker.run(changes(node.broker.state.topology.bind_exchange, ONCE, kind))
        else:
            channel.queue_bind(QUEUE, kind)
        for id_ in ids:
            properties = with_id(id_, headers={HEADER: id_, **headers})
            channel.publish(id_.encode(), kind, "", properties)
            node.clock.advance(0.03)
            for _ in range(2):  # exchanges
                node.broker.upkeep.expire()


WAYS: dict[str, Callable[[Node, Sequence[str]], None]] = {
    each.__name__: each
    for each in (
        plain,
        gathered,
        spilled,
        prepared,
        prepared_before_a_restart,
        staged,
        staged_many,
        delayed,
        through_another,
    )
}


@pytest.fixture(params=[WINDOW, PENDING, {}], ids=["window", "pending", "exchange"])
def queue(request: pytest.FixtureRequest, node: Node) -> Node:
    declared(node, QUEUE, **request.param) if request.param else through_exchange(node)
    return node


@pytest.mark.product
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("again", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_a_duplicate_is_dropped_whichever_way_both_came(
    queue: Node, first: str, again: str, restart: bool
) -> None:
    WAYS[first](queue, ["a", "b", "a"])
    if restart:
        queue.restart()
    WAYS[again](queue, ["b", "c", "a", "c"])
    assert queue.browse(QUEUE) == [b"a", b"b", b"c"]
    queue.restart()
    assert queue.browse(QUEUE) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("way", WAYS)
def test_the_size_of_the_cache_holds_whichever_way_messages_come(node: Node, way: str) -> None:
    """Without it ids that are forgotten still drop messages, and memory grows."""
    declared(node, QUEUE, **{**WINDOW, "x-cache-size": 2})
    WAYS[way](node, ["a", "b", "c", "d"])
    WAYS[way](node, ["a", "d"])
    assert node.drain(QUEUE) == [b"a", b"b", b"c", b"d", b"a"]
    ids = node.broker.state.topology.queues[QUEUE].log.ids
    assert ids is not None and len(ids) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_commit_of_nothing_but_duplicates_succeeds_and_leaves_nothing_behind(queue: Node, way: str) -> None:
    WAYS[way](queue, ["a", "b"])
    before = queue.browse(QUEUE)
    WAYS[way](queue, ["b", "a"])
    assert queue.browse(QUEUE) == before == [b"a", b"b"]
    queue.drain(QUEUE)
    queue.broker.upkeep.close_open()
    queue.broker.upkeep.tick()
    assert {block for block in queue.broker.state.blocks.by_id if block > 0} == set()


def test_what_a_prepared_transaction_has_is_a_duplicate_once_somebody_else_was_first(queue: Node) -> None:
    gathered(queue, ["a", "b"], prepared="x")
    plain(queue, ["a"])
    queue.broker.commit("x")
    queue.broker.upkeep.expire()
    assert queue.browse(QUEUE) == [b"a", b"b"]


@pytest.mark.parametrize("prepare", [False, True])
def test_a_transaction_that_is_rolled_back_leaves_no_id(queue: Node, prepare: bool) -> None:
    if prepare:
        gathered(queue, ["a"], prepared="x")
        queue.broker.rollback("x")
    else:
        with queue.channel() as channel:
            channel.tx_select()
            channel.publish(b"a", entrance(queue), QUEUE, with_id("a"))
            channel.tx_rollback()
    plain(queue, ["a"])
    assert queue.browse(QUEUE) == [b"a"]


@pytest.mark.parametrize("step", ["store.commit.begin", "store.commit.executed", "store.commit.committed"])
def test_an_id_is_there_after_a_failure_if_and_only_if_its_message_is(queue: Node, step: str) -> None:
    failpoint.arm(step, "raise")
    try:
        with pytest.raises(errors.StoreFailed):
            plain(queue, ["a"])
    finally:
        failpoint.disarm()
    queue.restart()
    plain(queue, ["a"])
    assert queue.browse(QUEUE) == [b"a"]


def test_each_queue_of_a_message_has_ids_of_its_own(node: Node) -> None:
    declared(node, "one", **WINDOW)
    declared(node, "two", **{**WINDOW, HEADER: "other"})
    declared(node, "all")
    with node.channel() as channel:
        for name in ("one", "two", "all"):
            channel.queue_bind(name, "amq.fanout")
        for first, other in (("a", "x"), ("a", "y"), ("b", "y")):
            properties = Properties(headers={HEADER: first, "other": other}).encode()
            channel.publish(f"{first}{other}".encode(), "amq.fanout", "", properties)
    assert [node.browse(name) for name in ("one", "two", "all")] == [
        [b"ax", b"by"], [b"ax", b"ay"], [b"ax", b"ay", b"by"],
    ]  # fmt: skip


# -- what an id is -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"headers": {HEADER: "a"}}, {"headers": {HEADER: "a"}, "message_id": "b"}, True),
        ({"headers": {HEADER: "a"}}, {"headers": {HEADER: "b"}}, False),
        ({"headers": {HEADER: "1"}}, {"headers": {HEADER: 1}}, False),
        ({"headers": {HEADER: 1}}, {"headers": {HEADER: True}}, False),
        ({"headers": {HEADER: 0}}, {"headers": {HEADER: 0}}, True),
        ({"headers": {HEADER: 1.5}}, {"headers": {HEADER: 1.5}}, True),
        ({"headers": {HEADER: Decimal("1.5")}}, {"headers": {HEADER: Decimal("1.5")}}, True),
        ({"headers": {HEADER: b"\xff"}}, {"headers": {HEADER: b"\xff", "more": "x" * 300}}, True),
        ({"message_id": "a", "content_type": "t", "priority": 3}, {"message_id": "a", "expiration": "9"}, True),
        ({"message_id": "a"}, {"headers": {HEADER: "a"}}, False),
        ({"message_id": "a", "delivery_mode": 1}, {"message_id": "a", "delivery_mode": 2}, False),
        ({"message_id": "a"}, {"message_id": "a", "delivery_mode": 2}, True),
    ],
)  # fmt: skip
def test_equal_ids_are_of_equal_values(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    first, second = (RULE.id_of(Properties(**each).encode()) for each in (one, other))
    assert first and second and (first == second) == same


@pytest.mark.parametrize(
    "properties",
    [
        b"",
        Properties(content_type="t").encode(),
        Properties(message_id="").encode(),
        Properties(headers={HEADER: ""}).encode(),
        Properties(headers={HEADER: ["a"]}).encode(),
        Properties(headers={HEADER: {"a": 1}}).encode(),
        Properties(headers={"other": HEADER}).encode(),
        *(Properties(message_id="a" * 20).encode()[:end] for end in (1, 2, 3, 10)),
        *(Properties(headers={HEADER: "a"}).encode()[:end] for end in (1, 2, 8, 20)),
        b"\xff\xff\xff",
    ],
)
def test_a_message_without_an_id_or_with_damaged_properties_is_always_new(properties: bytes) -> None:
    assert RULE.id_of(properties) == b""


def test_the_message_id_counts_only_where_ids_stay_as_in_the_plugin(node: Node) -> None:
    declared(node, "window", **WINDOW)
    declared(node, "pending", **PENDING)
    for queue in ("window", "pending"):
        with node.channel() as channel:
            for body in (b"1", b"2"):
                channel.publish(body, routing_key=queue, properties=Properties(message_id="m").encode())
    assert (node.browse("window"), node.browse("pending")) == ([b"1"], [b"1", b"2"])


def test_a_persistent_message_is_no_duplicate_of_a_transient_one_which_a_crash_would_lose(node: Node) -> None:
    declared(node, QUEUE, **WINDOW)
    with node.channel() as channel:
        for mode in (1, 1, 2, 2):
            channel.publish(b"%d" % mode, routing_key=QUEUE, properties=with_id("a", delivery_mode=mode))
    assert node.browse(QUEUE) == [b"1", b"2"]
    node.restart()
    with node.channel() as channel:
        for mode in (2, 1):
            channel.publish(b"%d" % mode, routing_key=QUEUE, properties=with_id("a", delivery_mode=mode))
    assert node.browse(QUEUE) == [b"2", b"1"]  # the id of the transient one went with it


# -- how long it is remembered -------------------------------------------------------------------------------
def leave(node: Node, how: str) -> None:
    """The one message of the queue leaves it."""
    with node.channel() as channel:
        if how == "purged":
            channel.queue_purge(QUEUE)
            return
        delivery = channel.get(QUEUE)
        assert delivery is not None
        channel.ack(delivery.tag) if how == "acked" else channel.nack(delivery.tag, requeue=False)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["acked", "rejected", "purged"])
@pytest.mark.parametrize(("arguments", "stays"), [(WINDOW, True), (PENDING, False)])
def test_an_id_outlives_its_message_where_the_queue_has_a_cache_and_else_leaves_with_it(
    node: Node, arguments: dict[str, Any], stays: bool, how: str, restart: bool
) -> None:
    declared(node, QUEUE, **arguments)
    plain(node, ["a"])
    leave(node, how)
    if restart:
        node.restart()
    plain(node, ["a", "a"])
    assert node.browse(QUEUE) == ([] if stays else [b"a"])


def test_a_message_that_a_consumer_holds_or_gave_back_is_still_in_the_queue(node: Node) -> None:
    declared(node, QUEUE, **PENDING)
    plain(node, ["a"])
    with node.channel() as channel:
        assert channel.get(QUEUE) is not None
        plain(node, ["a"])
    assert node.browse(QUEUE) == [b"a"]


@pytest.mark.parametrize("restart", [False, True])
def test_the_oldest_ids_leave_first_and_there_are_never_more_than_the_cache_has(
    node: Node, restart: bool
) -> None:
    declared(node, QUEUE, **{**WINDOW, "x-cache-size": 3})
    plain(node, ["a", "b", "c", "d"])  # a is forgotten
    gathered(node, ["e", "f", "g", "h", "i"])  # all but the last three are
    if restart:
        node.restart()
    plain(node, ["i", "h", "g"])
    assert node.browse(QUEUE) == [b"%c" % c for c in b"abcdefghi"]
    plain(node, ["a", "i"])
    assert node.browse(QUEUE) == [b"%c" % c for c in b"abcdefghia"]
    assert len(ids(node)) == 3
    for number in range(300):
        plain(node, [f"n{number}"])
    assert len(records(node)) < 100, "old records leave together"
    node.restart()
    plain(node, ["n296", "n299"])
    assert node.browse(QUEUE)[-2:] == [b"n299", b"n296"]


@pytest.mark.parametrize("restart", [False, True])
def test_of_a_stored_block_too_the_last_ids_stay(node: Node, restart: bool) -> None:
    declared(node, QUEUE, **{**WINDOW, "x-cache-size": 3})
    plain(node, ["before"])
    rows = [f"n{number}" for number in range(3_000)]
    staged(node, rows)
    if restart:
        node.restart()
    assert len(ids(node)) == 3
    staged(node, rows[-3:])
    plain(node, rows[-3:])
    assert len(node.browse(QUEUE)) == 3_001
    plain(node, ["before", "n2996"])
    assert node.browse(QUEUE)[3_001:] == [b"before", b"n2996"]


def test_an_id_is_forgotten_after_its_time_by_the_clock_of_the_broker(node: Node) -> None:
    declared(node, QUEUE, **{"x-message-deduplication": True, "x-cache-ttl": 1_000})
    plain(node, ["a"])
    node.clock.advance(0.9)
    plain(node, ["a", "b"])
    node.clock.advance(0.2)
    plain(node, ["a", "b"])
    assert node.browse(QUEUE) == [b"a", b"b", b"a"]
    node.clock.advance(2)
    plain(node, ["c"])
    assert len(ids(node)) == 1


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_is_set_back_drops_nothing_that_is_new(node: Node, restart: bool) -> None:
    declared(node, QUEUE, **{"x-message-deduplication": True, "x-cache-ttl": 1_000})
    plain(node, ["a"])
    node.drain(QUEUE)
    node.clock.advance(-3600)
    if restart:
        node.restart()
    plain(node, ["b", "a", "c"])
    assert node.browse(QUEUE) == [b"b", b"c"]
    node.clock.advance(3600 + 2)
    plain(node, ["a"])
    assert node.browse(QUEUE) == [b"b", b"c", b"a"]


def ids(node: Node) -> MessageIds:
    topology = node.broker.state.topology
    queues = dict(topology.delayed()) or {ONCE: topology.queue(QUEUE)}
    found = queues[ONCE].log.ids
    assert found is not None
    return found


def records(node: Node) -> list[MessageIdsRecord]:
    return [each for each in node.store.reopened().load().records if isinstance(each, MessageIdsRecord)]


def test_duplicates_are_counted_also_if_their_commit_is_tried_again(queue: Node) -> None:
    plain(queue, ["a", "b", "a"])
    spilled(queue, ["a", "c", "b"])  # tried again when the block is loaded
    assert ids(queue).duplicates.total == queue.broker.state.messages.admission.duplicates.total == 3


# -- what is not a duplicate ---------------------------------------------------------------------------------
def test_a_dead_letter_that_comes_back_is_not_lost(node: Node) -> None:
    """The usual way to try again later: rejected, kept in another queue for a while, and back."""
    declared(node, QUEUE, **{**WINDOW, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "later"})
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": QUEUE, "x-message-ttl": 1_000}
    declared(node, "later", **{**WINDOW, **back})
    plain(node, ["a"])
    for _ in range(3):
        leave(node, "rejected")
        assert (node.browse(QUEUE), node.browse("later")) == ([], [b"a"])
        node.clock.advance(1.1)
        node.broker.upkeep.expire()
        assert (node.browse(QUEUE), node.browse("later")) == ([b"a"], [])
    plain(node, ["a"])
    assert node.browse(QUEUE) == [b"a"]


@pytest.mark.parametrize("large", [False, True])
def test_what_is_moved_back_by_an_operator_is_not_dropped(node: Node, large: bool) -> None:
    """``txmq message move`` commits with ``routed``."""
    declared(node, QUEUE, **WINDOW)
    plain(node, ["a"])
    node.drain(QUEUE)
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"a", routing_key=QUEUE, properties=with_id("a"), mandatory=True)
        if large:
            spill(node.broker, channel)
        channel.tx_commit(routed=True)
    assert node.browse(QUEUE) == [b"a"]


def test_what_a_full_queue_refused_may_be_sent_again(node: Node) -> None:
    declared(node, QUEUE, **{**WINDOW, "x-max-length": 1, "x-overflow": "reject-publish"})
    plain(node, ["a"])
    for id_ in ("b", "b"):
        with pytest.raises(errors.PreconditionFailed), node.channel() as channel:
            channel.publish(b"b", routing_key=QUEUE, properties=with_id(id_))
    for _ in range(2):
        node.drain(QUEUE)
        plain(node, ["b"])
    assert node.browse(QUEUE) == []


# -- arguments and policies ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"x-message-deduplication": "yes"}, "give true or false"),
        ({**PENDING, "x-cache-size": 0}, "give 1 or more"),
        ({**PENDING, "x-cache-size": 1_000_001}, "give at most 1000000"),
        ({**PENDING, "x-cache-ttl": 0}, "give 1 or more"),
        ({**PENDING, "x-cache-ttl": "5"}, "give a whole number"),
        ({**PENDING, HEADER: 5}, "give text"),
        ({**PENDING, "x-cache-persistence": "tape"}, "give disk or memory"),
        ({"x-cache-size": 5}, "needs x-message-deduplication"),
        ({"x-cache-ttl": 5}, "needs x-message-deduplication"),
    ],
)
def test_a_wrong_argument_is_refused_and_named(node: Node, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(errors.PreconditionFailed, match=why):
        declared(node, QUEUE, **arguments)


def test_a_queue_that_is_deleted_takes_its_ids_with_it(queue: Node) -> None:
    plain(queue, ["a"])
    with queue.channel() as channel:
        channel.queue_delete(QUEUE)
        channel.exchange_delete(ONCE)
    assert records(queue) == []
    declared(queue, QUEUE, **WINDOW)
    plain(queue, ["a"])
    assert queue.browse(QUEUE) == [b"a"]


def test_a_policy_sets_changes_and_ends_it(node: Node) -> None:
    vhosts = Vhosts(node.broker, None)  # type: ignore[arg-type]
    declared(node, QUEUE)
    plain(node, ["a", "a"])
    vhosts.set_policy("p", ".*", dict(WINDOW))
    plain(node, ["b", "b", "a"])
    vhosts.set_policy("p", ".*", {**WINDOW, "x-cache-size": 1})  # b is forgotten by the next commit
    node.restart()
    plain(node, ["a", "c", "b"])
    vhosts = Vhosts(node.broker, None)  # type: ignore[arg-type]
    vhosts.delete_policy("p")
    assert records(node) == []
    plain(node, ["b"])
    vhosts.set_policy("p", ".*", dict(WINDOW))
    plain(node, ["b"])
    assert node.browse(QUEUE) == [b"%c" % c for c in b"aabacbbb"]


@pytest.mark.parametrize("way", ["delete some", "lower x-cache-size in the policy"])
def test_who_has_no_room_for_ids_makes_it_as_the_error_says(
    node: Node, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(memory, "NAMES_BYTES", 4 * 10 * COST_BYTES * 1_000)  # room for ten of these
    vhosts = Vhosts(node.broker, None)  # type: ignore[arg-type]
    vhosts.set_policy("p", "of policy", dict(WINDOW))
    for number in range(9):
        declared(node, f"of policy {number}")
    with pytest.raises(errors.PreconditionFailed, match=way):
        declared(node, "q", **WINDOW)
    if way == "delete some":
        with node.channel() as channel:
            channel.queue_delete("of policy 0")
    else:
        vhosts.set_policy("p", "of policy", {**WINDOW, "x-cache-size": 10})
    declared(node, "q", **WINDOW)


def test_the_room_for_ids_is_taken_when_a_queue_is_declared_and_is_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no publish is ever refused for it, and no id leaves early."""
    monkeypatch.setattr(memory, "NAMES_BYTES", 4 * 10 * COST_BYTES * 1_000)  # room for ten of these
    topology = node.broker.state.topology
    free = topology.memory.total
    for number in range(9):
        declared(node, f"q{number}", **WINDOW)
    with pytest.raises(errors.PreconditionFailed, match="delete some, or lower x-cache-size in the policy"):
        declared(node, "q9", **WINDOW)
    declared(node, "q9")
    vhosts = Vhosts(node.broker, None)  # type: ignore[arg-type]
    vhosts.set_policy("p", "q9", {**WINDOW, "x-cache-size": 10})
    before = topology.memory.total
    with pytest.raises(errors.PreconditionFailed, match="cannot set policy 'p'"):
        vhosts.set_policy("p", "q9", {**WINDOW, "x-cache-size": 5_000})
    assert topology.memory.total == before and topology.queue("q9").arguments.id_bytes == 10 * COST_BYTES
    node.restart()
    topology = node.broker.state.topology
    assert topology.memory.total == before
    with node.channel() as channel:
        for number in range(10):
            channel.queue_delete(f"q{number}")
    assert topology.memory.total == free
