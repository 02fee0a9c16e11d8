"""Exchanges of type x-message-deduplication: where their messages go, what an id is there, and for how long it is
remembered.

Not here: the ways of a message (``test_deduplication.py``), kills (``crash/test_deduplication_crash.py``).
"""

from __future__ import annotations

from typing import Any

import pytest

from broker_core.broker.message import delays, due_entries
from broker_core.core import errors
from broker_core.message.arguments.policy import NO_POLICY
from broker_core.message.deduplication import COST_BYTES, HEADER
from broker_core.message.properties import Properties
from broker_core.node import upkeep
from broker_core.node.committer import changes
from broker_core.routing import memory
from broker_core.server.http.management.rabbitmq_rows import exchange_row
from tests.broker.conftest import Node, declared
from tests.broker.test_deduplication import ONCE, QUEUE, records, with_id

TYPE = "x-message-deduplication"


def once(node: Node, name: str = ONCE, size: object = 1_000, **more: Any) -> None:
    with node.channel() as channel:
        channel.exchange_declare(name, TYPE, arguments={"x-cache-size": size, **more})


def bind(node: Node, exchange: str, *queues: str) -> None:
    with node.channel() as channel:
        for queue in queues:
            channel.queue_bind(queue, exchange, "any")


def chain(node: Node, source: str, destination: str) -> None:
    node.broker.run(changes(node.broker.state.topology.bind_exchange, destination, source, "#"))


def send(node: Node, *ids: str, exchange: str = ONCE, **more: Any) -> None:
    with node.channel() as channel:
        for id_ in ids:
            channel.publish(id_.encode(), exchange, "k", with_id(id_, **more))
    node.broker.upkeep.expire()


@pytest.fixture
def ready(node: Node) -> Node:
    """Two queues behind the exchange."""
    declared(node, QUEUE, "r")
    once(node)
    bind(node, ONCE, QUEUE, "r")
    return node


def test_it_goes_to_all_that_are_bound_whatever_the_key_and_counts_what_it_drops(ready: Node) -> None:
    send(ready, "a", "b", "a")
    ready.restart()
    send(ready, "b", "c")
    assert ready.browse(QUEUE) == ready.browse("r") == [b"a", b"b", b"c"]
    assert ready.broker.state.messages.admission.duplicates.total == 1  # since the start
    assert ready.broker.state.expiry.delays.unroutable.total == 0


def test_a_message_without_the_header_is_never_a_duplicate_and_waits_for_nothing(ready: Node) -> None:
    with ready.channel() as channel:
        for body in (b"1", b"2"):
            properties = Properties(message_id="m", headers={"x-delay": 5}).encode()
            assert channel.publish(body, ONCE, "k", properties, mandatory=True)
    assert ready.browse(QUEUE) == [b"1", b"2"]


def test_ids_stay_when_their_messages_are_consumed_and_leave_with_the_cache_and_after_their_time(
    node: Node,
) -> None:
    declared(node, QUEUE)
    once(node, size=2, **{"x-cache-ttl": 1_000})
    bind(node, ONCE, QUEUE)
    send(node, "a", "b")
    assert node.drain(QUEUE) == [b"a", b"b"]
    send(node, "b", "a", "c", "a")  # c takes the place of a
    assert node.drain(QUEUE) == [b"c", b"a"]
    node.clock.advance(0.9)
    node.restart()
    send(node, "a", "c")
    assert node.drain(QUEUE) == []
    node.clock.advance(0.2)
    send(node, "a", "c")
    assert node.drain(QUEUE) == [b"a", b"c"]


def test_a_message_with_x_delay_is_not_delayed_here(ready: Node) -> None:
    with ready.channel() as channel:
        headers = {HEADER: "a", "x-delay": 60_000}
        channel.publish(b"a", ONCE, "k", Properties(headers=headers).encode())
    ready.broker.upkeep.expire()
    assert ready.browse(QUEUE) == [b"a"]


# -- other exchanges -----------------------------------------------------------------------------------------
def test_it_drops_duplicates_also_behind_another_exchange_which_reaches_others_with_each(node: Node) -> None:
    declared(node, QUEUE, "all")
    once(node)
    bind(node, ONCE, QUEUE)
    bind(node, "amq.fanout", "all", QUEUE)  # this queue by both ways
    chain(node, "amq.fanout", ONCE)
    send(node, "a", "a", exchange="amq.fanout")
    assert (node.browse("all"), node.browse(QUEUE)) == ([b"a"] * 2, [b"a"] * 3)


@pytest.mark.parametrize("ttl", [{}, {"x-cache-ttl": 1}])
def test_exchanges_in_a_circle_end(node: Node, ttl: dict[str, Any]) -> None:
    declared(node, QUEUE)
    for name in (ONCE, "twice"):
        once(node, name, 1, **ttl)
        bind(node, name, QUEUE)
    chain(node, ONCE, "twice")
    chain(node, "twice", "amq.topic")
    chain(node, "amq.topic", ONCE)
    for number in range(10):
        send(node, f"{number}")
        node.clock.advance(1)
        node.broker.upkeep.expire()
    assert node.browse(QUEUE) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("first", ["once", "later"])
def test_it_stands_before_and_behind_an_exchange_that_delays(node: Node, first: str) -> None:
    declared(node, QUEUE)
    once(node)
    with node.channel() as channel:
        channel.exchange_declare("later", "x-delayed-message", arguments={"x-delayed-type": "fanout"})
    then = "later" if first == ONCE else ONCE
    chain(node, first, then)
    bind(node, then, QUEUE)
    for _ in range(2):
        send(node, "a", exchange=first, headers={HEADER: "a", "x-delay": 1_000})
    assert node.browse(QUEUE) == []
    node.clock.advance(1.1)
    node.broker.upkeep.expire()
    assert node.browse(QUEUE) == [b"a"]


def test_what_reaches_no_queue_goes_to_the_alternate_exchange_once_or_is_counted(node: Node) -> None:
    declared(node, QUEUE)
    once(node)
    send(node, "a", "a")
    assert node.broker.state.expiry.delays.unroutable.total == 1
    once(node, "other", **{"alternate-exchange": "amq.fanout"})
    bind(node, "amq.fanout", QUEUE)
    send(node, "a", "a", exchange="other")
    assert node.browse(QUEUE) == [b"a"]


def test_a_dead_letter_is_never_dropped(ready: Node) -> None:
    declared(ready, "work", **{"x-dead-letter-exchange": ONCE})
    for _ in range(2):
        send(ready, "a", exchange="amq.direct")
        with ready.channel() as channel:
            channel.publish(b"a", routing_key="work", properties=with_id("a"))
            delivery = channel.get("work")
            assert delivery is not None
            channel.reject(delivery.tag, requeue=False)
        ready.broker.upkeep.expire()
    assert ready.browse(QUEUE) == [b"a", b"a"]


def test_a_message_that_is_tried_again_later_does_not_go_by_it(ready: Node) -> None:
    declared(ready, "k")
    with ready.channel() as channel:
        channel.queue_unbind("r", ONCE, "any")
    assert ready.broker.state.topology.later(QUEUE) == ""


# -- atomic --------------------------------------------------------------------------------------------------
def test_a_delivery_that_fails_is_undone_and_repeated(ready: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, step in ((due_entries, "settle_parts"), (delays, "Publish")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, lambda *_: 1 / 0)
            send(ready, step)
        assert ready.browse(QUEUE) == []
    for _ in range(upkeep.COMPACT_TICKS):
        ready.broker.upkeep.tick()
    send(ready, "settle_parts", "Publish")
    assert ready.browse(QUEUE) == [b"settle_parts", b"Publish"]


def test_ids_and_messages_are_deleted_with_the_exchange(ready: Node) -> None:
    free = ready.broker.state.topology.memory.total
    once(ready, "more")
    send(ready, "a", exchange="more")
    assert records(ready)
    with ready.channel() as channel:
        channel.exchange_delete("more")
    assert (records(ready), ready.broker.state.topology.memory.total) == ([], free)
    once(ready, "more")
    bind(ready, "more", QUEUE)
    send(ready, "a", exchange="more")
    assert ready.browse(QUEUE) == [b"a"]


def test_an_exchange_that_is_not_durable_leaves_no_record(node: Node) -> None:
    with node.channel() as channel:
        channel.exchange_declare(ONCE, TYPE, durable=False, arguments={"x-cache-size": 5})
    send(node, "a")
    assert records(node) == []
    node.restart()
    assert ONCE not in node.broker.state.topology.exchanges


# -- arguments -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "'x-cache-size' must be an integer greater than 0"),
        ({"x-cache-size": True}, "must be an integer"),
        ({"x-cache-size": 0}, "must be an integer greater than 0"),
        ({"x-cache-size": 1_000_001}, "give at most 1000000"),
        ({"x-cache-size": 1, "x-cache-ttl": 0}, "give 1 or more"),
        ({"x-cache-size": 1, "x-cache-ttl": "5"}, "give a whole number"),
        ({"x-cache-size": 1, "x-cache-persistence": "tape"}, "give disk or memory"),
        ({"x-cache-size": 1, TYPE: True}, "a queue has it"),
    ],
)
def test_a_wrong_argument_is_refused_and_named(node: Node, arguments: dict[str, Any], why: str) -> None:
    with node.channel() as channel, pytest.raises(errors.PreconditionFailed, match=why):
        channel.exchange_declare(ONCE, TYPE, arguments=arguments)
    assert ONCE not in node.broker.state.topology.exchanges


def test_it_is_declared_again_with_the_same_cache_alone(ready: Node) -> None:
    send(ready, "a")
    once(ready, **{"x-cache-persistence": "memory"})
    with pytest.raises(errors.PreconditionFailed, match="inequivalent arg 'x-cache-size'"):
        once(ready, size=5)
    with pytest.raises(errors.PreconditionFailed, match="inequivalent arg 'x-cache-ttl'"):
        once(ready, **{"x-cache-ttl": 5})
    send(ready, "a")
    assert ready.browse(QUEUE) == [b"a"]


def test_the_room_for_ids_is_taken_when_it_is_declared(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "NAMES_BYTES", 4 * 3 * COST_BYTES * 1_000)  # room for three of these
    for number in range(2):
        once(node, f"once {number}")
    taken = node.broker.state.topology.memory.total
    with pytest.raises(errors.PreconditionFailed, match="cannot declare exchange 'once 2'"):
        once(node, "once 2")
    assert node.broker.state.topology.memory.total == taken
    node.restart()
    assert node.broker.state.topology.memory.total == taken
    once(node, "once 2", size=10)


def test_tools_see_its_type_and_its_arguments(ready: Node) -> None:
    once(ready, "shown", **{"x-cache-persistence": "memory"})
    exchange = ready.broker.state.topology.exchanges["shown"]
    row = exchange_row(exchange, "/", NO_POLICY)
    assert (row["type"], row["messages_delayed"]) == (TYPE, 0)
    assert row["arguments"] == {"x-cache-size": 1_000, "x-cache-persistence": "memory"}
    assert list(row["arguments_without_effect"]) == ["x-cache-persistence"]
