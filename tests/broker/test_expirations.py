"""Messages with an expiration of their own behind a head that stays: they leave in time, whichever way they came.

Not here: what comes to the head (``message/test_expiry.py``), apps (``model/owned_queue.py``), kills
(``crash/test_delays_crash.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker.message import due_entries
from broker_core.broker.queue import due_index
from broker_core.broker.transaction.publish import Publish
from broker_core.core import errors
from broker_core.engine import START, BranchHeader, Limit, Origin
from broker_core.message.message import Message
from broker_core.message.properties import Properties
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.vhosts import Vhosts
from tests.broker.conftest import Node, declared
from tests.broker.queue.test_dispatch import Shell
from tests.make import planned, spill

QUEUE, DEAD = "q", "dead"
LETTERS = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
STAYS = (b"stays", 0)
numbers = itertools.count()
Sent = tuple[bytes, int]  # body, milliseconds; 0: it does not expire


def expiring(ms: int, **more: Any) -> bytes:
    return Properties(delivery_mode=2, expiration=str(ms) if ms else None, **more).encode()


def wait(node: Node, ms: int) -> None:
    node.clock.advance(ms / 1000 + 0.0001)  # each commit of a clock that stands takes a microsecond
    node.broker.upkeep.expire()


# -- the ways of a message -----------------------------------------------------------------------------------
def plain(node: Node, *messages: Sent) -> None:
    with node.channel() as channel:
        for body, ms in messages:
            channel.publish(body, "", QUEUE, expiring(ms))


def gathered(node: Node, *messages: Sent, large: bool = False, xid: str = "") -> None:
    with node.channel() as channel:
        channel.tx_select()
        for body, ms in messages:
            channel.publish(body, "", QUEUE, expiring(ms))
        if large:
            spill(node.broker, channel)
        channel.prepare(xid) if xid else channel.tx_commit()


def spilled(node: Node, *messages: Sent) -> None:
    gathered(node, *messages, large=True)


def prepared(node: Node, *messages: Sent) -> None:
    gathered(node, *messages, large=True, xid=(xid := f"x{next(numbers)}"))
    node.restart()
    node.broker.commit(xid)


def staged(node: Node, *messages: Sent, more: int = 0) -> None:
    """A batch write of Spark; a micro-batch publishes the same way. ``more`` rows go to another queue."""
    engine, token = EmbeddedEngine(node.broker), f"t{next(numbers)}"
    rows = [(QUEUE, *each) for each in messages] + [("other", b"", 0)] * more
    block = pa.RecordBatch.from_pydict(
        {
            "routing_key": pa.array([key for key, _, _ in rows]),
            "body": pa.array([body for _, body, _ in rows], pa.binary()),
            "properties": pa.array([expiring(ms) for _, _, ms in rows], pa.binary()),
        }
    )
    header = BranchHeader(token, f"b{next(numbers)}", "publish", {"exchange": ""})
    branch = engine.stage(header, [block])
    engine.commit_branches(token, [branch])


def staged_many(node: Node, *messages: Sent) -> None:
    """So many rows that they are a block of their own."""
    declared(node, "other")
    staged(node, *messages, more=3_000)


WAYS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (plain, gathered, spilled, prepared, staged, staged_many)
}


@pytest.mark.parametrize("arguments", [{}, LETTERS, {**LETTERS, "x-max-priority": 3}, {"x-max-length": 100}])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_message_leaves_at_its_time_behind_a_head_that_stays(
    node: Node, way: str, seal: bool, restart: bool, arguments: dict[str, Any]
) -> None:
    declared(node, DEAD)
    declared(node, QUEUE, **arguments)
    WAYS[way](node, STAYS, (b"third", 300), (b"first", 100), (b"second", 200), (b"late", 0))
    if seal:
        node.broker.upkeep.close_open()
        node.broker.upkeep.seal()
    if restart:
        node.restart()
    wait(node, 99)
    assert node.browse(QUEUE) == [b"stays", b"third", b"first", b"second", b"late"]
    wait(node, 1)
    assert node.browse(QUEUE) == [b"stays", b"third", b"second", b"late"]
    if restart:
        node.restart()
    wait(node, 200)
    assert node.browse(QUEUE) == [b"stays", b"late"]
    assert node.queue(QUEUE).messages == 2
    node.restart()
    assert node.drain(QUEUE) == [b"stays", b"late"]
    assert node.browse(DEAD) == (
        [b"first", b"second", b"third"] if LETTERS.keys() <= arguments.keys() else []
    )


def test_its_dead_letter_is_that_of_a_head(node: Node) -> None:
    declared(node, DEAD)
    declared(node, QUEUE, **LETTERS)
    plain(node, STAYS, (b"late", 100))
    wait(node, 100)
    with node.channel() as channel:
        delivery = channel.get(DEAD)
    assert delivery is not None
    properties = Properties.decode(delivery.message.properties)
    (death,) = properties.headers["x-death"]  # type: ignore[misc]
    assert (death["reason"], death["queue"], death["count"]) == ("expired", QUEUE, 1)  # type: ignore[index,call-overload]
    assert (death["original-expiration"], properties.expiration) == ("100", None)  # type: ignore[index,call-overload]


@pytest.mark.parametrize("end", ["ack", "requeue", "close", "prepared", "restart"])
def test_what_is_delivered_stays_and_leaves_once_it_is_given_back(node: Node, end: str) -> None:
    declared(node, QUEUE)
    plain(node, STAYS, (b"delivered", 100))
    channel = node.channel()
    if end == "prepared":
        channel.tx_select()
    tags = [found.tag for _ in range(2) if (found := channel.get(QUEUE)) is not None]
    if end == "prepared":
        for tag in tags:
            channel.ack(tag)
        channel.prepare("x")
        node.restart()
    wait(node, 200)
    assert node.browse(QUEUE) == [b"stays", b"delivered"]
    if end == "ack":
        channel.ack(tags[1])
    elif end == "requeue":
        channel.reject(tags[1], requeue=True)
    elif end == "close":
        channel.close()
    elif end == "prepared":
        node.broker.rollback("x")
    else:
        node.restart()
    wait(node, 1)
    assert node.browse(QUEUE) == [b"stays"]


@pytest.mark.parametrize("end", ["release", "replay"])
def test_what_an_app_has_claimed_stays_and_leaves_once_it_is_released(node: Node, end: str) -> None:
    declared(node, QUEUE)
    plain(node, STAYS, (b"claimed", 100), (b"unclaimed", 100))
    engine, start = EmbeddedEngine(node.broker), {QUEUE: START}
    claimed = engine.claim("app", [QUEUE], start, Limit(max_rows=2), Origin(), "fail")
    wait(node, 200)
    assert node.browse(QUEUE) == [b"stays", b"claimed"]
    if end == "replay":
        node.restart()
        engine = EmbeddedEngine(node.broker)
        wait(node, 1)
        assert engine.resolve("app", start, claimed) == {QUEUE: (0, 2)}
        assert node.browse(QUEUE) == [b"stays", b"claimed"]
    engine.release("app", QUEUE, force=True)
    wait(node, 1)
    assert node.browse(QUEUE) == [b"stays"]


def test_what_a_consumer_got_ahead_stays_until_it_is_given_back(node: Node) -> None:
    declared(node, QUEUE)
    plain(node, STAYS, *[(b"sent", 100)] * 3, (b"waits", 100))
    shell = Shell(node)
    channel = shell.channel(prefetch=4)
    consumer = shell.consume(channel, QUEUE, "c")
    assert len(shell.dispatch()) == 4
    wait(node, 200)
    assert len(node.browse(QUEUE)) == 4
    channel.cancel(consumer.tag)
    shell.settle(channel, 2, "ack")
    shell.settle(channel, 4, "requeue", multiple=True)
    wait(node, 1)
    assert node.browse(QUEUE) == [b"stays"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_open_transaction_keeps_what_it_acknowledges(node: Node, end: str) -> None:
    declared(node, QUEUE)
    plain(node, STAYS, (b"delivered", 100))
    with node.channel() as channel:
        channel.tx_select()
        tags = [found.tag for _ in range(2) if (found := channel.get(QUEUE)) is not None]
        channel.ack(tags[1])
        channel.publish(b"", "", QUEUE, expiring(100))
        wait(node, 200)
        assert node.browse(QUEUE) == [b"stays", b"delivered"]
        if end == "commit":
            channel.tx_commit()
            assert node.queue(QUEUE).messages == 2, "it expires from the commit on"
        else:
            channel.tx_rollback()
    wait(node, 100)
    assert node.browse(QUEUE) == [b"stays"]


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("mode", [1, 2])
def test_transient_messages_and_queues_too(node: Node, durable: bool, mode: int) -> None:
    with node.channel() as channel:
        channel.queue_declare(QUEUE, durable=durable, exclusive=not durable)
        for body, ms in (STAYS, (b"late", 100), (b"later", 200)):
            properties = Properties(delivery_mode=mode, expiration=str(ms) if ms else None)
            channel.publish(body, "", QUEUE, properties.encode())
        wait(node, 100)
        assert node.queue(QUEUE).messages == 2
        wait(node, 100)
        assert node.queue(QUEUE).messages == 1


@pytest.mark.parametrize("way", ["purge", "delete"])
def test_what_is_purged_or_deleted_expires_no_more(node: Node, way: str) -> None:
    declared(node, DEAD)
    declared(node, QUEUE, **LETTERS)
    plain(node, STAYS, (b"purged", 100))
    with node.channel() as channel:
        if way == "purge":
            assert channel.queue_purge(QUEUE) == 2
        else:
            channel.queue_delete(QUEUE)
            declared(node, QUEUE, **LETTERS)
    plain(node, STAYS, (b"late", 200))
    wait(node, 100)
    assert (len(node.browse(QUEUE)), node.browse(DEAD)) == (2, [])
    wait(node, 100)
    assert (node.browse(QUEUE), node.browse(DEAD)) == ([b"stays"], [b"late"])


def test_a_policy_that_changes_the_time_to_live_leaves_expirations_as_they_are(node: Node) -> None:
    declared(node, QUEUE)
    vhosts = Vhosts(node.broker, VhostEngines(node.broker))
    vhosts.set_policy("p", ".*", {"message-ttl": 1_000})
    plain(node, STAYS, (b"own", 100), (b"policy", 60_000))
    wait(node, 100)
    assert node.browse(QUEUE) == [b"stays", b"policy"]
    vhosts.set_policy("p", ".*", {"message-ttl": 70_000})
    wait(node, 2_000)
    assert node.browse(QUEUE) == [b"stays", b"policy"]
    vhosts.delete_policy("p")
    wait(node, 58_000)
    assert node.browse(QUEUE) == [b"stays"]
    vhosts.set_policy("p", ".*", {"message-ttl": 1_000})
    wait(node, 1)
    assert node.browse(QUEUE) == []


def test_what_expires_makes_room_in_a_queue_that_is_full(node: Node) -> None:
    declared(node, QUEUE, **{"x-max-length": 2, "x-overflow": "reject-publish"})
    plain(node, STAYS, (b"late", 100))
    with pytest.raises(errors.TxmqError):
        gathered(node, (b"refused", 0))
    wait(node, 100)
    gathered(node, (b"taken", 0))
    assert node.browse(QUEUE) == [b"stays", b"taken"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_steps_makes_messages_leave_early_or_late_and_loses_none(
    node: Node, restart: bool
) -> None:
    declared(node, QUEUE)
    plain(node, STAYS, (b"a", 60_000))
    node.clock.advance(-3_600)
    if restart:
        node.restart()
    plain(node, (b"b", 60_000))
    wait(node, 59_000)
    assert node.browse(QUEUE) == [b"stays", b"a", b"b"]
    wait(node, 3_600_000 + 2_000)
    assert node.browse(QUEUE) == [b"stays"]
    plain(node, (b"c", 60_000))
    node.clock.advance(7_200)
    node.broker.upkeep.expire()
    assert node.browse(QUEUE) == [b"stays"], "the hour has come"


def test_what_waits_in_an_exchange_expires_from_its_arrival_on(node: Node) -> None:
    declared(node, QUEUE)
    with node.channel() as channel:
        channel.exchange_declare("later", "x-delayed-message", arguments={"x-delayed-type": "fanout"})
        channel.queue_bind(QUEUE, "later")
        plain(node, STAYS)
        channel.publish(b"", "later", "", expiring(100, headers={"x-delay": 1_000}))
    wait(node, 500)
    ((_, waiting),) = node.broker.state.topology.delayed()
    assert waiting.messages == 1
    wait(node, 500)
    assert node.queue(QUEUE).messages == 2
    wait(node, 100)
    assert node.browse(QUEUE) == [b"stays"]


def test_the_upkeep_wakes_at_the_time_of_the_first_message(node: Node) -> None:
    declared(node, QUEUE)
    now = node.clock.now_us
    plain(node, STAYS, (b"", 5_000), (b"", 1_000), (b"", 3_000))
    checks = node.broker.state.pending_checks
    assert now + 1_000_000 <= checks.next_deadline < now + 1_001_000
    wait(node, 1_000)
    assert now + 3_000_000 <= checks.next_deadline < now + 3_001_000


@pytest.mark.parametrize("way", WAYS)
def test_messages_without_an_expiration_cost_nothing(
    node: Node, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an index nor a read of their blocks, also after a restart."""
    declared(node, QUEUE)
    WAYS[way](node, *[STAYS] * 50)
    node.broker.upkeep.close_open()
    node.broker.upkeep.seal()
    node.restart()
    state = node.broker.state
    monkeypatch.setattr(type(state.blocks), "read", lambda *_: pytest.fail("a block was read"))
    wait(node, 1_000)
    assert state.topology.queue(QUEUE).marks.expirations is None
    assert node.queue(QUEUE).messages == 50


@pytest.mark.parametrize("arguments", [{}, LETTERS])
@pytest.mark.parametrize("restart", [False, True])
def test_many_leave_in_several_commits(
    node: Node, restart: bool, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_index, "FRESH", 8)
    monkeypatch.setattr(due_index, "LARGEST", 64)
    monkeypatch.setattr(due_entries, "PIECE", 16)
    monkeypatch.setattr(due_entries, "LOOKED_AT", 10)
    declared(node, DEAD)
    declared(node, QUEUE, **arguments)
    times = [(number * 7) % 300 + 1 for number in range(300)]
    plain(node, STAYS)
    for start in range(0, 300, 100):
        part = times[start : start + 100]
        (gathered, spilled, staged)[start // 100](node, *((b"%d" % ms, ms) for ms in part))
    if restart:
        node.restart()
    for end in range(37, 371, 37):
        wait(node, 37)
        assert sorted(map(int, node.browse(QUEUE)[1:])) == [ms for ms in range(1, 301) if ms > end]
    assert len(node.browse(DEAD)) == (300 if arguments else 0)


def test_a_head_that_expires_before_an_unread_block_stays_expired_after_a_restart(node: Node) -> None:
    """Another queue expires in the same commit, which therefore goes on without the block."""
    declared(node, DEAD)
    declared(node, QUEUE, "other", **LETTERS)
    plain(node, (b"head", 20), STAYS)
    spilled(node, (b"consumed", 10), (b"later", 100_000))
    with node.channel() as channel:
        tags = [delivery.tag for _ in range(3) if (delivery := channel.get(QUEUE))]
        channel.ack(tags[2])
        channel.publish(b"other", "", "other", expiring(20))
    node.restart()
    wait(node, 50)
    node.restart()
    assert sorted(node.browse(DEAD)) == [b"head", b"other"]
    assert node.browse(QUEUE) == [b"stays", b"later"]


def test_what_is_consumed_leaves_the_index(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of replies, each of which may expire in a day, is read at once for a week."""
    monkeypatch.setattr(due_index, "FRESH", 8)
    monkeypatch.setattr(due_index, "LARGEST", 64)
    declared(node, QUEUE)
    for _ in range(100):
        plain(node, *[(b"reply", 86_400_000)] * 10)
        assert len(node.drain(QUEUE)) == 10
        node.broker.upkeep.expire()
    index = node.broker.state.topology.queue(QUEUE).marks.expirations
    assert index is not None
    assert len(planned(index)) < 200


def test_a_great_many_take_memory_only_where_some_are_due(node: Node) -> None:
    """Of each span of 4,096 one time is kept until the first of it is due."""
    declared(node, QUEUE)
    plain(node, STAYS)
    count = 8 * due_index.SPAN
    for first in range(0, count, 1_000):
        gathered(node, *((b"", 1_000_000 + number) for number in range(first, min(first + 1_000, count))))
    plain(node, *((b"", 2_000_000),) * 3)
    index = node.broker.state.topology.queue(QUEUE).marks.expirations
    assert index is not None
    assert (len(index.spans), planned(index)) == (9, [])
    wait(node, 1_000_100)
    assert node.queue(QUEUE).messages == count + 4 - 101
    assert len(planned(index)) <= due_index.SPAN


@pytest.mark.parametrize("size", [1, 3, 4_096])
def test_spans_of_commits_that_are_undone_hide_no_message(
    node: Node, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_index, "SPAN", size)
    declared(node, QUEUE)
    plain(node, STAYS)
    for number in range(5):
        with pytest.raises(errors.InternalFault):
            node.broker.run(publish_and_fail)
        plain(node, (b"", 100 + number))
    for left in (5, 4, 3, 2, 1):
        wait(node, 100 if left == 5 else 1)
        assert node.queue(QUEUE).messages == left


def publish_and_fail(state: Any, change: Any, now: int) -> None:
    queues = (state.topology.queue(QUEUE),)
    state.messages.enqueue(change, [Publish(Message(b"", QUEUE, "", expiring(1)), queues)] * 7, now)
    raise ZeroDivisionError


def test_an_expiry_that_fails_is_undone_and_repeated(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    declared(node, DEAD)
    declared(node, QUEUE, **LETTERS)
    plain(node, STAYS, (b"a", 10), (b"b", 20))
    node.clock.advance(1)
    with monkeypatch.context() as patch:
        patch.setattr(due_entries, "settle_parts", lambda *_: 1 / 0)
        with pytest.raises(errors.InternalFault):
            node.broker.run(lambda state, change, now: state.expiry.expire(change, now))
    assert (node.browse(QUEUE), node.browse(DEAD)) == ([b"stays", b"a", b"b"], [])
    node.broker.upkeep.expire()
    assert (node.browse(QUEUE), node.browse(DEAD)) == ([b"stays"], [b"a", b"b"])


@pytest.mark.parametrize("part", ["decode", "read"])
def test_one_that_cannot_be_read_stays_and_holds_up_no_other(
    node: Node, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared(node, DEAD)
    declared(node, QUEUE, **LETTERS)
    plain(node, STAYS)
    spilled(node, (b"damaged", 10), (b"damaged", 30))
    plain(node, (b"whole", 20), (b"whole", 40))
    node.restart()
    damaged = node.broker.state.topology.queue(QUEUE).log.locate(1)[0].block_id
    owner: Any = node.broker.state.blocks.__class__
    intact = getattr(owner, part)

    def fails(self: Any, place: Any, *rest: Any) -> Any:
        if place == damaged:
            raise errors.CorruptSegment("on purpose")
        return intact(self, place, *rest)

    monkeypatch.setattr(owner, part, fails)
    wait(node, 100)
    assert node.queue(QUEUE).messages == 3
    assert node.browse(DEAD) == [b"whole", b"whole"]
