"""Prepared means committable (XA): a full queue refuses at prepare or never. Room is kept until the decision,
also over a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_core.core import errors
from broker_core.node.channel import LocalChannel
from broker_core.node.channel_commit import SPILL_ROWS
from tests.broker.conftest import Node, declared, publish

LIMITS: list[dict[str, Any]] = [
    {"x-max-length": 2, "x-overflow": "reject-publish"},
    {"x-max-length": 2, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "amq.fanout"},
    {"x-max-length-bytes": 2, "x-overflow": "reject-publish"},
]
limited = pytest.mark.parametrize("arguments", LIMITS, ids=["length", "dlx", "bytes"])


def prepare(node: Node, xid: str, *bodies: bytes, queue: str = "q") -> None:
    with node.channel() as channel:
        channel.tx_select()
        for body in bodies:
            channel.publish(body, routing_key=queue)
        channel.prepare(xid)


def refused(node: Node, *bodies: bytes) -> None:
    """Neither a publish, nor a commit, nor a prepare takes the room; and none changes anything."""
    before = (node.browse("q"), node.queue("q"))
    with pytest.raises(errors.PreconditionFailed, match="queue 'q' in vhost '/' is full"):
        publish(node, "q", *bodies)
    ends: list[Callable[[LocalChannel], object]] = [
        LocalChannel.tx_commit,
        lambda channel: channel.prepare("other"),
    ]
    for end in ends:
        channel = node.channel()
        channel.tx_select()
        for body in bodies:
            channel.publish(body, routing_key="q")
        with pytest.raises(errors.PreconditionFailed, match="is full"):
            end(channel)
        channel.close()
    assert (node.browse("q"), node.queue("q")) == before


@limited
@pytest.mark.parametrize("restart", [False, True])
def test_20_a_full_queue_never_refuses_what_is_prepared(
    node: Node, arguments: dict[str, Any], restart: bool
) -> None:
    declared(node, "q", **arguments)
    prepare(node, "x", b"1", b"2")
    refused(node, b"3")
    if restart:
        node.restart()
        refused(node, b"3")
    node.broker.commit("x")
    assert node.browse("q") == [b"1", b"2"]
    refused(node, b"3")
    assert node.drain("q") == [b"1", b"2"]
    publish(node, "q", b"3")


@limited
@pytest.mark.parametrize("restart", [False, True])
def test_20_a_rollback_gives_the_room_back(node: Node, arguments: dict[str, Any], restart: bool) -> None:
    declared(node, "q", **arguments)
    prepare(node, "x", b"1")
    prepare(node, "y", b"2")
    refused(node, b"3")
    if restart:
        node.restart()
    node.broker.rollback("x")
    publish(node, "q", b"3")
    refused(node, b"4")
    node.broker.commit("y")
    assert node.browse("q") == [b"3", b"2"]


@limited
def test_20_prepare_refuses_what_does_not_fit_and_the_transaction_can_go_on(
    node: Node, arguments: dict[str, Any]
) -> None:
    declared(node, "q", **arguments)
    declared(node, "in")
    publish(node, "in", b"work")
    with node.channel() as channel:
        channel.tx_select()
        delivery = channel.get("in")
        assert delivery is not None
        channel.ack(delivery.tag)
        for body in (b"1", b"2", b"3"):
            channel.publish(body, routing_key="q")
        with pytest.raises(errors.PreconditionFailed, match="is full"):
            channel.prepare("x")
        assert node.broker.prepared() == [] and node.browse("q") == []
        channel.tx_rollback()
        channel.publish(b"1", routing_key="q")
        channel.prepare("x")
    node.broker.commit("x")
    assert (node.browse("q"), node.queue("in").messages) == ([b"1"], 1)


def test_20_the_room_of_prepared_transactions_is_kept_once_for_each_of_them(node: Node) -> None:
    declared(node, "q", **{"x-max-length": 5, "x-overflow": "reject-publish"})
    for number in range(5):
        prepare(node, f"x{number}", b"%d" % number)
        node.restart()
    refused(node, b"no")
    for number in (3, 1, 4, 0, 2):
        node.broker.commit(f"x{number}")
        node.broker.commit(f"x{number}")
        refused(node, b"no")
    assert node.browse("q") == [b"3", b"1", b"4", b"0", b"2"]


def test_20_a_decision_goes_in_over_the_limit_where_messages_came_back_meanwhile(node: Node) -> None:
    """What a consumer held does not count; when it comes back there is less room than was promised, and the
    promise holds.
    """
    declared(node, "q", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    publish(node, "q", b"held")
    holder = node.channel()
    assert holder.get("q") is not None
    prepare(node, "x", b"prepared")
    holder.close()
    node.broker.commit("x")
    assert node.browse("q") == [b"held", b"prepared"]


def test_20_the_room_for_a_spilled_prepared_transaction_is_kept(node: Node) -> None:
    rows = SPILL_ROWS + 2
    declared(node, "q", **{"x-max-length": rows, "x-overflow": "reject-publish"})
    prepare(node, "x", *(b"%d" % number for number in range(rows)))
    node.restart()
    refused(node, b"no")
    node.broker.commit("x")
    assert node.queue("q").messages == rows


def test_20_dead_letters_and_confirms_see_the_room_that_is_kept(node: Node) -> None:
    """A publish outside a transaction is refused alone; a dead letter into a full queue is kept, and the
    decision too.
    """
    declared(node, "q", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    declared(node, "source", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"})
    prepare(node, "x", b"prepared")
    publish(node, "source", b"dead")
    with node.channel() as channel:
        delivery = channel.get("source")
        assert delivery is not None
        channel.reject(delivery.tag, requeue=False)
    assert node.browse("q") == [b"dead"]
    node.broker.commit("x")
    assert node.browse("q") == [b"dead", b"prepared"]


def test_20_a_queue_that_is_deleted_and_declared_anew_keeps_no_room_for_the_old_one(node: Node) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    declared(node, "q", **arguments)
    prepare(node, "x", b"prepared")
    with node.channel() as channel:
        channel.queue_delete("q")
    declared(node, "q", **arguments)
    publish(node, "q", b"1")
    assert node.broker.commit("x") == 1
    refused(node, b"2")
    assert node.drain("q") == [b"1"]
    publish(node, "q", b"2")
