"""Declaring, dead-lettering, purging: what a queue's properties and arguments do."""

from __future__ import annotations

from decimal import Decimal

import pytest

from broker_core.core import errors
from broker_core.core.errors import PreconditionFailed
from broker_core.message.properties import Properties
from tests.broker.conftest import Node, declared, publish

# -- dead-lettering ------------------------------------------------------------------------------------------


def test_an_expired_message_is_dead_lettered_with_its_origin_and_the_copy_does_not_expire_again(
    node: Node,
) -> None:
    declared(node, "dead")
    declared(node, "q", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    publish(node, "q", b"1", properties=Properties(expiration="100", headers={"mine": 1}).encode())
    node.clock.advance(1)
    node.broker.upkeep.tick()
    node.clock.advance(1000)
    with node.channel() as channel:
        delivery = channel.get("dead")
        assert delivery and not delivery.redelivered
        properties = Properties.decode(delivery.message.properties)
    assert properties.expiration is None
    (death,) = properties.headers["x-death"]
    assert (
        death["queue"],
        death["reason"],
        death["count"],
        death["routing-keys"],
        death["original-expiration"],
    ) == ("q", "expired", 1, ["q"], "100")
    assert "x-original-transaction" not in properties.headers, "it was published outside a transaction"
    assert properties.headers["x-first-death-queue"] == "q"
    assert properties.headers["mine"] == 1
    assert node.browse("q") == []


def test_a_message_is_never_dead_lettered_back_into_the_same_queue_without_a_rejection(node: Node) -> None:
    declared(
        node, "q", **{"x-message-ttl": 100, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"}
    )
    publish(node, "q", b"1")
    node.clock.advance(1)
    node.broker.upkeep.tick()
    assert node.queue("q").messages == 0
    publish(node, "q", b"2")
    with node.channel() as channel:
        delivery = channel.get("q")
        assert delivery
        channel.reject(delivery.tag, requeue=False)
    assert node.browse("q") == [b"2"], "a rejection is somebody's wish: it may come round"


# -- declaring -----------------------------------------------------------------------------------------------


def test_a_server_named_and_an_exclusive_queue(node: Node) -> None:
    with node.channel() as other, node.channel() as channel:
        name = channel.queue_declare(exclusive=True)
        assert name.startswith("amq.gen-")
        with pytest.raises(errors.ResourceLocked, match="exclusive access to locked queue"):
            other.get(name)
        channel.publish(b"1", routing_key=name)
        delivery = channel.get(name, no_ack=True)
        assert delivery and delivery.body == b"1"
    assert node.broker.queues() == []


def test_a_new_queue_of_a_deleted_queues_name_holds_nothing_of_it(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"old")
    with node.channel() as channel:
        assert channel.queue_delete("q") == 1
    node.restart()
    declared(node, "q")
    node.restart()
    assert node.browse("q") == []


def test_purge_takes_what_nobody_holds(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2", b"3")
    with node.channel() as channel:
        first = channel.get("q")
        assert first
        assert channel.queue_purge("q") == 2
        assert channel.get("q") is None
        channel.reject(first.tag)
        assert node.browse("q") == [b"1"]


def test_decimals_and_bytes_in_arguments_are_the_same_after_a_restart(node: Node) -> None:
    arguments = {
        "a": Decimal("3.140"),
        "b": [Decimal("-0.5"), b"\xff\0"],
        "c": {"d": b"", "e": {"f": Decimal(0)}},
        "g": None,
    }
    with node.channel() as channel:
        channel.queue_declare("q", arguments=arguments)
        channel.exchange_declare("e", "headers", arguments=arguments)
        channel.queue_bind("q", "e", arguments={"x-match": "any", **arguments})
    node.restart()
    state = node.broker.state
    for found in (state.topology.queue("q").arguments.declared, state.topology.exchange("e").arguments):
        assert repr(dict(sorted(found.items()))) == repr(arguments)
    with node.channel() as channel:
        channel.queue_declare("q", arguments=arguments)
        channel.queue_unbind("q", "e", arguments={"x-match": "any", **arguments})
    assert not state.topology.exchange("e").bindings
    node.restart()
    assert not node.broker.state.topology.exchange("e").bindings


@pytest.mark.parametrize(
    "value", [Decimal("NaN"), Decimal("Infinity"), float("inf"), {"\0decimal": "1"}, object()]
)
def test_a_value_of_an_argument_that_could_not_be_read_back_is_refused(node: Node, value: object) -> None:
    with node.channel() as channel, pytest.raises(PreconditionFailed, match="unacceptable_type"):
        channel.queue_declare("q", arguments={"a": value})
    assert node.broker.queues() == []
