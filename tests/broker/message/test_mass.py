"""A great many messages that expire, are rejected or come back at once: in pieces, in order, none lost and
none twice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker_core.broker.message import expiry
from broker_core.broker.message.settlement import MANY_REJECTS
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from tests.broker.conftest import Node, declared, publish
from tests.reading import fetched

MANY = MANY_REJECTS + 300
TO_DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def filled(node: Node, queue: str, count: int) -> None:
    with node.channel() as channel:
        channel.tx_select()
        for body in numbered(count):
            channel.publish(body, routing_key=queue)
        channel.tx_commit()


def held(node: Node, queue: str, count: int) -> LocalChannel:
    channel = node.channel()
    for _ in range(count):
        assert channel.get(queue) is not None
    return channel


# -- expiry --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [TO_DEAD, {}, {**TO_DEAD, "x-max-priority": 3}, {**TO_DEAD, "x-max-length-bytes": 1 << 30}]
)
def test_mass_expiry_takes_a_bounded_number_in_each_commit_and_all_in_order(
    node: Node, arguments: dict[str, object]
) -> None:
    declared(node, "dead")
    declared(node, "q", **{"x-message-ttl": 1000, **arguments})
    filled(node, "q", MANY)
    node.clock.advance(5)
    state = node.broker.state
    left, counts = state.expiry.due(node.clock()), []
    while left:
        before = state.topology.queue("q").messages
        left = node.broker.run(lambda state, change, now, due=left: state.expiry.expire(change, now, due))
        counts.append(before - state.topology.queue("q").messages)
    assert sum(counts) == MANY
    assert max(counts) <= expiry.SLICE or not arguments, "what nobody looks at may go at once"
    dead = numbered(MANY) if arguments else []
    assert (node.browse("q"), node.browse("dead")) == ([], dead)
    node.restart()
    assert (node.browse("q"), node.browse("dead")) == ([], dead)


def test_mass_expiry_of_large_messages_is_bounded_in_bytes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "SLICE_BYTES", 10_000)
    declared(node, "dead")
    declared(node, "q", **{"x-message-ttl": 1000, **TO_DEAD})
    publish(node, "q", *[b"x" * 3_000] * 20)
    node.clock.advance(5)
    state = node.broker.state
    left = state.expiry.due(node.clock())
    while left:
        before = state.topology.queue("q").messages
        left = node.broker.run(lambda state, change, now, due=left: state.expiry.expire(change, now, due))
        assert before - state.topology.queue("q").messages <= 5
    assert len(node.browse("dead")) == 20


def test_no_queue_waits_for_all_of_another_one_to_expire(node: Node) -> None:
    declared(node, "dead")
    declared(node, "great", "small", **{"x-message-ttl": 1000, **TO_DEAD})
    filled(node, "great", 4 * expiry.SLICE)
    publish(node, "small", b"one")
    node.clock.advance(5)
    state = node.broker.state
    left = state.expiry.due(node.clock())
    for _ in range(2):
        left = node.broker.run(lambda state, change, now, due=left: state.expiry.expire(change, now, due))
    assert node.browse("small") == [] and node.browse("great") != []


def test_what_expires_leaves_at_the_head_and_behind_a_message_that_stays(node: Node) -> None:
    declared(node, "dead")
    declared(node, "q", **TO_DEAD)
    for body, time in ((b"1", "1000"), (b"2", "1000"), (b"3", ""), (b"4", "1000")):
        publish(node, "q", body, properties=Properties(expiration=time or None).encode())
    node.clock.advance(5)
    node.broker.upkeep.expire()
    assert (node.browse("q"), node.browse("dead")) == ([b"3"], [b"1", b"2", b"4"])


def test_upkeep_expires_all_of_a_great_many_and_seals_meanwhile(node: Node) -> None:
    declared(node, "dead")
    declared(node, "q", **{"x-message-ttl": 1000, **TO_DEAD})
    filled(node, "q", MANY)
    node.clock.advance(5)
    node.broker.upkeep.expire()
    assert (node.browse("q"), node.browse("dead")) == ([], numbered(MANY))


def test_get_gives_the_first_message_behind_a_great_many_that_expired(node: Node) -> None:
    declared(node, "dead")
    declared(node, "q", **{"x-message-ttl": 1000, **TO_DEAD})
    filled(node, "q", MANY)
    node.clock.advance(5)
    publish(node, "q", b"fresh")
    with node.channel() as channel:
        found = channel.get("q")
        assert found is not None and found.body == b"fresh"


def test_a_queue_that_cannot_be_expired_is_set_aside_and_said_once_and_the_others_go_on(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    declared(node, "dead")
    declared(node, "bad", "good", **{"x-message-ttl": 1000, **TO_DEAD})
    queue = node.broker.state.topology.queue("bad")
    right, queue.arguments = queue.arguments, replace(queue.arguments, ttl_ms="soon")  # type: ignore[arg-type]
    for _ in range(3):
        publish(node, "bad", b"stays")
        publish(node, "good", b"goes")
        node.clock.advance(5)
        node.broker.upkeep.expire()
    assert (len(node.browse("bad")), node.browse("good"), len(node.browse("dead"))) == (3, [], 3)
    assert len([record for record in caplog.records if record.name == "txmq.upkeep"]) == 1
    queue.arguments = right
    with node.channel() as channel:  # its head is another one: it is looked at again
        assert channel.get("bad") is None
    assert len(node.browse("dead")) == 6


# -- rejects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("exchange", ["direct", "fanout", "topic", "headers"])
def test_a_great_many_rejects_of_one_channel_are_dead_lettered_once_and_in_order(
    node: Node, exchange: str, transactional: bool
) -> None:
    declared(node, "dead", "other")
    with node.channel() as channel:
        channel.exchange_declare("dlx", exchange)
        channel.queue_bind(
            "dead",
            "dlx",
            "q",
            {"x-match": "any-with-x", "x-first-death-queue": "q"} if exchange == "headers" else None,
        )
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    filled(node, "q", MANY)
    channel = held(node, "q", MANY)
    if transactional:
        channel.tx_select()
        channel.publish(b"effect", routing_key="other")
    channel.nack(0, multiple=True, requeue=False)
    if transactional:
        assert (node.browse("dead"), len(node.browse("q"))) == ([], MANY)
        channel.tx_commit()
    expected = [[], numbered(MANY), [b"effect"] * transactional]
    assert [node.browse(name) for name in ("q", "dead", "other")] == expected
    node.restart()
    assert [node.browse(name) for name in ("q", "dead", "other")] == expected


def test_what_a_great_many_rejects_become_has_the_same_headers_as_one_has(node: Node) -> None:
    declared(node, "dead")
    declared(node, "q", **TO_DEAD)
    filled(node, "q", MANY + 1)
    with node.channel() as channel:
        found = channel.get("q")
        assert found is not None
        channel.reject(found.tag, requeue=False)
    held(node, "q", MANY).nack(0, multiple=True, requeue=False)
    queue = node.broker.state.topology.queue("dead")
    rows = [
        fetched(node.broker, queue, offset) for offset in range(queue.progress.floor, queue.log.next_offset)
    ]
    assert len(rows) == MANY + 1 and len({row.properties for row in rows}) == 1


def test_a_rolled_back_transaction_with_a_great_many_rejects_changes_nothing(node: Node) -> None:
    declared(node, "dead")
    declared(node, "q", **TO_DEAD)
    filled(node, "q", MANY)
    channel = held(node, "q", MANY)
    channel.tx_select()
    channel.nack(0, multiple=True, requeue=False)
    channel.tx_rollback()
    channel.close()
    assert (node.browse("dead"), node.browse("q")) == ([], numbered(MANY))


def test_a_transaction_of_many_rejects_that_is_refused_leaves_them_in_the_queue(node: Node) -> None:
    declared(node, "dead")
    declared(node, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    publish(node, "full", b"full")
    declared(node, "q", **TO_DEAD)
    filled(node, "q", MANY)
    channel = held(node, "q", MANY)
    channel.tx_select()
    channel.publish(b"too much", routing_key="full")
    channel.nack(0, multiple=True, requeue=False)
    with pytest.raises(Exception, match="full"):
        channel.tx_commit()
    assert (node.browse("dead"), node.browse("q")) == ([], numbered(MANY))
    node.restart()
    assert (node.browse("dead"), node.browse("q")) == ([], numbered(MANY))


@pytest.mark.parametrize("limit", ["x-max-length", "x-max-length-bytes"])
def test_many_rejects_reach_a_short_queue_and_leave_it_as_its_limit_says(node: Node, limit: str) -> None:
    declared(node, "last")
    declared(
        node,
        "dead",
        **{
            limit: 2 if limit == "x-max-length" else 8,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "last",
        },
    )
    declared(node, "q", **TO_DEAD)
    filled(node, "q", MANY)
    held(node, "q", MANY).nack(0, multiple=True, requeue=False)
    node.broker.upkeep.expire()
    assert node.browse("dead") == numbered(MANY)[-2:]
    assert node.browse("last") == numbered(MANY)[:-2]


@pytest.mark.parametrize("gone", ["queue", "exchange"])
def test_many_rejects_into_what_is_gone_go_nowhere(node: Node, gone: str) -> None:
    declared(node, "dead")
    with node.channel() as channel:
        channel.exchange_declare("dlx", "fanout")
        channel.queue_bind("dead", "dlx")
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    filled(node, "q", MANY)
    channel = held(node, "q", MANY)
    channel.tx_select()
    channel.nack(0, multiple=True, requeue=False)
    with node.channel() as other:
        if gone == "queue":
            other.queue_delete("q")
        else:
            other.exchange_delete("dlx")
    channel.tx_commit()
    assert node.browse("dead") == []
    assert gone == "queue" or node.browse("q") == []


# -- coming back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{}, {"x-queue-type": "quorum"}, {"x-max-priority": 3}, {"x-max-length-bytes": 1 << 30}]
)
def test_all_that_a_lost_connection_held_comes_back_in_order_and_redelivered(
    node: Node, arguments: dict[str, object]
) -> None:
    declared(node, "q", **arguments)
    filled(node, "q", 50)
    channel = held(node, "q", 40)
    channel.ack(7)
    channel.ack(23)
    channel.close()
    expected = [body for body in numbered(50) if body not in (b"6", b"22")]
    assert node.browse("q") == expected
    with node.channel() as other:
        found = [other.get("q") for _ in expected]
        assert [one.body for one in found if one] == expected
        assert [one.redelivered for one in found if one] == [True] * 38 + [False] * 10
