"""Queues: arguments, redeclaration, exclusive ones, deletion, x-expires. Texts and codes were taken from
RabbitMQ 3.10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.topology.ownership import own, release
from broker_core.broker.topology.topology import Topology
from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.core.records import DeliveryRecord, QueueRecord
from broker_core.message.arguments import ARGUMENT_BYTES, check_binding, check_consumer_arguments
from broker_core.message.arguments.table import (
    CONSUMER,
    EXCHANGE,
    QUEUE,
    QUEUE_TYPES,
    ArgumentRule,
    without_effect,
)
from broker_core.message.field_table import MAX_NESTING, Timestamp
from broker_core.message.properties import Properties
from tests.broker.conftest import Node, declared, publish
from tests.routing.test_exchange import topology

LOCKED = (
    "cannot obtain exclusive access to locked queue 'q' in vhost '/'. It could be originally declared on "
    "another connection or the"
    " exclusive property value does not match that of the original declaration."
)

# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x-message-ttl": -1}, "{value_negative,-1}"),
        ({"x-message-ttl": "5"}, '"expected integer, got longstr"'),
        ({"x-message-ttl": True}, '"expected integer, got bool"'),
        ({"x-message-ttl": 1.5}, '"expected integer, got double"'),
        ({"x-message-ttl": None}, '"expected integer, got void"'),
        ({"x-message-ttl": Timestamp(5)}, '"expected integer, got timestamp"'),
        ({"x-message-ttl": 315_360_000_001}, "{value_too_large,315360000001}"),
        ({"x-expires": 0}, "{value_zero,0}"),
        ({"x-expires": -5}, "{value_negative,-5}"),
        ({"x-expires": 2**40}, "{value_too_large,1099511627776}"),
        ({"x-max-length": -1}, "{value_negative,-1}"),
        ({"x-max-length": [1]}, '"expected integer, got array"'),
        ({"x-max-length-bytes": {"a": 1}}, '"expected integer, got table"'),
        ({"x-overflow": "foo"}, "invalid_overflow"),
        ({"x-overflow": 5}, "{unacceptable_type,signedint}"),
        ({"x-overflow": 2**40}, "{unacceptable_type,long}"),
        ({"x-dead-letter-routing-key": "k"}, "routing_key_but_no_dlx_defined"),
        ({"x-dead-letter-routing-key": 7, "x-dead-letter-exchange": ""}, "{unacceptable_type,signedint}"),
        ({"x-max-priority": -1}, "{value_negative,-1}"),
        ({"x-max-priority": 256}, "{max_value_exceeded,256}"),
        ({"x-single-active-consumer": 1}, "{unacceptable_type,signedint}"),
        ({"x-delivery-limit": "x"}, '"expected integer, got longstr"'),
        ({"x-consumer-timeout": 0}, "{value_zero,0}"),
        ({"x-consumer-timeout": "1h"}, '"expected integer, got longstr"'),
        ({"x-queue-leader-locator": "here"}, "invalid_queue_locator_arg"),
        ({"x-queue-type": "stream"}, "\"unsupported queue type 'stream'\""),
        ({"x-queue-type": 5}, "{unacceptable_type,signedint}"),
        ({"x-queue-mode": "foo"}, "\"unsupported queue mode 'foo'\""),
        ({"x-queue-version": 3}, "\"unsupported queue version '3'\""),
        ({"x-queue-version": "1"}, '"expected integer, got longstr"'),
        ({"mine": {1}}, "{unacceptable_type,set}"),
        ({"mine": [{"deep": {1}}]}, "{unacceptable_type,array}"),
    ],
    ids=repr,
)
def test_an_argument_with_a_wrong_value_is_refused_in_rabbitmqs_words_and_no_queue_is_made(
    arguments: dict[str, Any], text: str
) -> None:
    found, change = topology(), Change()
    with pytest.raises(errors.PreconditionFailed) as caught:
        found.declare_queue(change, "q", arguments=arguments)
    assert caught.value.summary == f"invalid arg '{next(iter(arguments))}' for queue 'q' in vhost '/': {text}"
    assert not found.queues and not change.puts


def test_a_dead_letter_exchange_that_is_no_text_is_refused_in_rabbitmqs_words() -> None:
    with pytest.raises(errors.PreconditionFailed) as caught:
        topology().declare_queue(Change(), "q", arguments={"x-dead-letter-exchange": 5})
    assert (
        caught.value.summary
        == "invalid type 'signedint' for arg 'x-dead-letter-exchange' in queue 'q' in vhost '/'"
    )


@pytest.mark.parametrize(
    ("arguments", "properties", "text"),
    [
        ({"x-quorum-initial-group-size": 3}, {}, "{arg} of queue type rabbit_classic_queue"),
        ({"x-max-age": "1D"}, {}, "{arg} of queue type rabbit_classic_queue"),
        ({"x-queue-type": "quorum", "x-max-priority": 5}, {}, "{arg} of queue type rabbit_quorum_queue"),
        ({"x-queue-type": "quorum", "x-queue-mode": "lazy"}, {}, "{arg} of queue type rabbit_quorum_queue"),
        ({"x-queue-type": "quorum"}, {"durable": False}, "invalid property 'non-durable' {of}"),
        ({"x-queue-type": "quorum"}, {"exclusive": True}, "invalid property 'exclusive-owner' {of}"),
        ({"x-queue-type": "quorum"}, {"auto_delete": True}, "invalid property 'auto-delete' {of}"),
    ],
    ids=repr,
)
def test_an_argument_of_another_type_of_queue_is_refused_and_named(
    arguments: dict[str, Any], properties: dict[str, bool], text: str
) -> None:
    found = topology()
    with pytest.raises(errors.PreconditionFailed) as caught:
        found.declare_queue(Change(), "q", arguments=arguments, **properties)
    of = "for queue 'q' in vhost '/'"
    arg = f"invalid arg '{[*arguments][-1]}' {of}"
    assert caught.value.summary == text.format(arg=arg, of=of)
    assert not found.queues


def test_every_argument_at_the_ends_of_its_range_survives_a_restart_and_so_does_a_clients_own(
    node: Node,
) -> None:
    arguments = {
        "x-expires": 315_360_000_000,
        "x-message-ttl": 0,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "é",
        "x-max-length": 2**62,
        "x-max-length-bytes": 0,
        "x-max-priority": 255,
        "x-overflow": "reject-publish-dlx",
        "x-queue-mode": "lazy",
        "x-queue-version": 2,
        "x-single-active-consumer": True,
        "x-delivery-limit": 0,
        "x-queue-type": "classic",
        "x-internal-purpose": "federation",
        "x-consumer-timeout": 1,
        "x-queue-master-locator": "min-masters",
        "x-queue-leader-locator": "balanced",
        "x-ha-policy": "all",
        "x-ha-policy-params": ["a"],
        "x-ha-nodes": None,
        "x-message-deduplication": False,
        "x-deduplication-header": "é",
        "x-cache-size": 1_000_000,
        "x-cache-ttl": 315_360_000_000,
        "x-cache-persistence": "disk",
        "x-cancel-on-ha-failover": True,
        "x-nonsense": {"any": 1},
        "mine": [1, 2.5, None, {"a": "b"}],
    }
    quorum = {
        "x-queue-type": "quorum",
        "x-delivery-limit": -1,
        "x-dead-letter-strategy": "at-least-once",
        "x-max-in-memory-length": 0,
        "x-max-in-memory-bytes": 2**62,
        "x-quorum-initial-group-size": 1,
        "x-quorum-target-group-size": 5,
    }
    taken = {name for name, each in QUEUE.items() if not each.refused}
    assert taken <= {*arguments, *quorum} and not set(arguments) & {
        name for name in QUEUE if name not in taken
    }
    declared(node, "q", **arguments)
    declared(node, "r", **quorum)
    node.restart()
    assert node.broker.state.topology.queue("q").arguments.declared == arguments
    assert node.broker.state.topology.queue("r").arguments.declared == quorum
    declared(node, "q", **arguments)
    declared(node, "r", **quorum)


# -- declared again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declaration", "argument", "received", "current"),
    [
        ({"durable": False}, "durable", "'false'", "'true'"),
        ({"auto_delete": True}, "auto_delete", "'true'", "'false'"),
        ({"arguments": {}}, "x-max-length", "none", "the value '5' of type 'signedint'"),
        ({"arguments": {"x-max-length": "5"}}, "x-max-length", "'5'", "'5'"),
        ({"arguments": {"x-max-length": -6}}, "x-max-length", "'-6'", "'5'"),
        ({"arguments": {"x-max-length": True}}, "x-max-length", "'true'", "'5'"),
        ({"arguments": {"x-max-length": 5, "x-expires": 2**33}}, "x-expires", "the value '8589934592' of type 'long'", "none"),
        ({"arguments": {"x-max-length": 5, "x-single-active-consumer": True}}, "x-single-active-consumer", "the value 'true' of type 'bool'", "none"),
        ({"arguments": {"x-max-length": 5, "x-queue-type": "quorum"}}, "x-queue-type", "the value 'quorum' of type 'longstr'", "none"),
    ],
)  # fmt: skip
def test_a_queue_declared_again_otherwise_is_refused_in_rabbitmqs_words(
    declaration: dict[str, Any], argument: str, received: str, current: str
) -> None:
    found = topology()
    found.declare_queue(Change(), "q", arguments={"x-max-length": 5})
    change = Change()
    with pytest.raises(errors.PreconditionFailed) as caught:
        found.declare_queue(change, "q", **{"arguments": {"x-max-length": 5}, **declaration})
    text = f"'{argument}' for queue 'q' in vhost '/': received {received} but current is {current}"
    assert caught.value.summary == f"inequivalent arg {text}"
    same = found.declare_queue(
        change, "q", arguments={"x-max-length": 5, "x-queue-type": "classic", "mine": 1}
    )
    assert same is found.queue("q") and not change.puts


@pytest.mark.parametrize(
    "name", ["x-nonsense", "x-ha-policy", "x-queue-leader-locator", "x-consumer-timeout"]
)
@pytest.mark.parametrize("there", [False, True])
def test_a_strict_broker_refuses_an_argument_without_effect_and_no_other(name: str, there: bool) -> None:
    found = topology("q") if there else topology()
    arguments = {name: 5 if name == "x-consumer-timeout" else "random"}
    if name != "x-consumer-timeout":  # what has no effect may differ in a declaration that is repeated
        assert found.declare_queue(Change(), "q", arguments=arguments).name == "q"
        with_effect = without_effect(QUEUE, arguments)
        assert list(with_effect) == [name] and with_effect[name]
    found.strict = True
    if name != "x-consumer-timeout":
        with pytest.raises(errors.PreconditionFailed, match=f"invalid arg '{name}' for queue 'q'"):
            found.declare_queue(Change(), "q", arguments=arguments)
        with pytest.raises(errors.PreconditionFailed, match="invalid arg 'x-nonsense' for exchange 'x'"):
            found.declare_exchange(Change(), "x", arguments={"x-nonsense": 1})
        with pytest.raises(errors.PreconditionFailed, match=f"invalid arg '{name}' for queue 'q'"):
            check_consumer_arguments("q", "/", arguments, strict=True)
    else:
        assert found.declare_queue(Change(), "new", arguments=arguments).arguments.consumer_timeout_ms == 5
    lazy = {"x-queue-mode": "lazy", "x-internal-purpose": "federation"}
    assert found.declare_queue(Change(), "lazy", arguments=lazy).arguments.declared == lazy


@pytest.mark.parametrize("table", [QUEUE, EXCHANGE, CONSUMER], ids=["queue", "exchange", "consumer"])
def test_every_argument_has_a_meaning_or_a_reason(table: Mapping[str, ArgumentRule]) -> None:
    for name, each in table.items():
        assert not (each.void and each.refused), name
        assert set(each.types) <= set(QUEUE_TYPES) or each.refused, name
        assert name.startswith("x-") or not each.void


def test_a_delivery_limit_below_zero_is_none_and_still_counts() -> None:
    found = topology().declare_queue(Change(), "q", arguments={"x-delivery-limit": -1})
    assert (found.arguments.delivery_limit, found.arguments.counts_deliveries) == (None, True)


# -- exclusive -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda t: t.declare_queue(Change(), "q", exclusive=True, connection="other"),
        lambda t: t.declare_queue(Change(), "q", connection="other"),
        lambda t: t.declare_queue(Change(), "q", connection="mine"),
        lambda t: t.visible_to("q", "other"),
        lambda t: t.usable("q", "other"),
        lambda t: t.bind(Change(), "q", "amq.topic", connection="other"),
        lambda t: t.unbind(Change(), "q", "amq.fanout", connection="other"),
        lambda t: t.delete_queue(Change(), "q", connection="other"),
        lambda t: t.delete_queue(Change(), "q", if_unused=True),
    ],
)
def test_another_connections_exclusive_queue_is_locked_in_rabbitmqs_words(
    act: Callable[[Topology], object],
) -> None:
    found = topology()
    found.declare_queue(Change(), "q", exclusive=True, connection="mine")
    found.bind(Change(), "q", "amq.fanout", connection="mine")
    with pytest.raises(errors.ResourceLocked) as caught:
        act(found)
    assert (caught.value.summary, caught.value.reply_code) == (LOCKED, 405)
    assert found.declare_queue(Change(), "q", exclusive=True, connection="mine") is found.visible_to(
        "q", "mine"
    )
    assert len(found.exchange("amq.fanout").bindings) == 1 and not found.exchange("amq.topic").bindings
    found.unbind(Change(), "q", "amq.topic", connection="other")  # not bound: as RabbitMQ


def test_a_queue_that_is_not_exclusive_cannot_be_declared_so_later() -> None:
    with pytest.raises(errors.ResourceLocked) as caught:
        topology("q").declare_queue(Change(), "q", exclusive=True)
    assert caught.value.summary == LOCKED


def test_the_exclusive_queues_of_a_connection_are_known_until_they_are_deleted() -> None:
    found = topology("plain")
    for name, connection in (("a", "one"), ("b", "one"), ("c", "two")):
        found.declare_queue(Change(), name, exclusive=True, connection=connection)
    found.declare_queue(Change(), "shared", connection="one")
    assert [queue.name for queue in found.exclusive_queues("one")] == ["a", "b"]
    found.delete_queue(Change(), "a", connection="one")
    assert [queue.name for queue in found.exclusive_queues("one")] == ["b"]
    assert [queue.name for queue in found.exclusive_queues("two")] == ["c"]
    assert found.exclusive_queues("three") == []


# -- deleting ------------------------------------------------------------------------------------------------


def consume(state: BrokerState, name: str, tag: str = "c") -> Channel:
    channel = Channel(state)
    channel.consume(state.topology.queue(name), tag, lambda *_: None, lambda _: None)
    return channel


def test_deleting_if_unused_looks_at_consumers_and_if_empty_at_ready_messages_and_the_count_is_of_ready_ones(
    node: Node,
) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2")
    state = node.broker.state
    with node.channel() as channel:
        assert channel.get("q")
        assert state.topology.queue_counts("q") == (1, 0)
        with pytest.raises(errors.PreconditionFailed) as caught:
            channel.queue_delete("q", if_empty=True)
        assert caught.value.summary == "queue 'q' in vhost '/' not empty"
        consumer = consume(state, "q")
        assert state.topology.queue_counts("q") == (1, 1)
        with pytest.raises(errors.PreconditionFailed) as caught:
            channel.queue_delete("q", if_unused=True, if_empty=True)
        assert caught.value.summary == "queue 'q' in vhost '/' in use"
        consumer.cancel("c")
        assert channel.queue_delete("q", if_unused=True) == 1, (
            "a message that is held is no use and is not counted"
        )
        assert channel.queue_delete("q", if_unused=True) == 0


def test_a_queue_whose_only_message_is_held_is_empty(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1")
    with node.channel() as channel:
        assert channel.get("q")
        assert channel.queue_delete("q", if_empty=True) == 0


def test_the_consumers_of_a_deleted_queue_are_cancelled_and_handed_to_the_shell(node: Node) -> None:
    declared(node, "q")
    state = node.broker.state
    channels = [consume(state, "q", tag) for tag in ("one", "two")]
    node.broker.run(lambda state, change, _now: state.topology.delete_queue(change, "q"))
    assert sorted(consumer.tag for consumer in state.virtual_hosts.registry.cancelled) == ["one", "two"]
    assert not any(channel.consumers for channel in channels)


def test_a_queue_that_an_app_owns_is_neither_deleted_nor_expired(node: Node) -> None:
    declared(node, "q", **{"x-expires": 1000})
    state = node.broker.state
    node.broker.run(lambda state, change, _now: own(change, state.topology.queue("q"), "etl"))
    now = node.clock()
    assert state.topology.leases.unused(now) == state.topology.leases.unused(now + 10**9) == []
    node.broker.run(
        lambda state, change, _now: state.topology.delete_unused(change, [state.topology.queue("q")])
    )
    with node.channel() as channel, pytest.raises(errors.ResourceLocked) as caught:
        channel.queue_delete("q")
    assert caught.value.summary.startswith("queue 'q' belongs to app 'etl': ")
    node.broker.run(lambda state, change, _now: release(change, state.topology.queue("q")))
    assert state.topology.leases.unused(now + 10**9) == []
    assert state.topology.leases.unused(now + 2 * 10**9) == [state.topology.queue("q")]


def test_unused_queues_are_deleted_with_their_records_and_those_that_are_used_again_are_not(
    node: Node,
) -> None:
    for name in ("gone", "used"):
        declared(node, name)
    state = node.broker.state
    publish(node, "gone", b"1")
    queues = [state.topology.queue("gone"), state.topology.queue("used")]
    consume(state, "used")
    node.broker.run(lambda state, change, _now: state.topology.delete_unused(change, [*queues, queues[0]]))
    assert list(state.topology.queues) == ["used"]
    assert list(node.restart().state.topology.queues) == ["used"]


def test_delivery_counts_of_a_deleted_queue_go_with_it(node: Node) -> None:
    declared(node, "q", **{"x-delivery-limit": 5})
    publish(node, "q", b"1")
    with node.channel() as channel:
        delivery = channel.get("q")
        assert delivery
        channel.reject(delivery.tag, requeue=True)
    queue_id = node.broker.state.topology.queue("q").queue_id
    assert DeliveryRecord(queue_id, 0, 1) in node.store.reopened().load().records
    node.broker.run(lambda state, change, _now: state.topology.delete_queue(change, "q"))
    left = node.store.reopened().load().records
    assert not [record for record in left if isinstance(record, (DeliveryRecord, QueueRecord))]


def test_delivery_counts_survive_a_restart(node: Node) -> None:
    declared(node, "dead")
    declared(
        node,
        "q",
        **{"x-delivery-limit": 2, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"},
    )
    publish(node, "q", b"1")
    for _ in range(3):
        assert node.browse("dead") == []
        with node.channel() as channel:
            delivery = channel.get("q")
            assert delivery
            channel.reject(delivery.tag, requeue=True)
        node.restart()
    with node.channel() as channel:
        assert channel.get("q") is None
        found = channel.get("dead")
        assert (
            found
            and Properties.decode(found.message.properties).headers["x-first-death-reason"]
            == "delivery_limit"
        )


# -- x-expires -----------------------------------------------------------------------------------------------

MS = 1000
START = 1_700_000_000_000_000


def leased() -> Topology:
    found = topology("other")
    found.declare_queue(Change(), "q", arguments={"x-expires": 100}).marks.used_at_us = START
    return found


def test_a_queue_expires_when_it_was_not_used_for_its_time_and_each_use_starts_it_again() -> None:
    found = leased()
    queue = found.queue("q")
    assert found.leases.unused(START + 99 * MS) == []
    assert found.leases.unused(START + 100 * MS) == [queue]
    queue.marks.used_at_us = START + 60 * MS
    assert found.leases.unused(START + 159 * MS) == []
    assert found.leases.unused(START + 160 * MS) == [queue]
    found.delete_unused(Change(), found.leases.unused(START + 160 * MS))
    assert list(found.queues) == ["other"] and found.leases.unused(START + 10**12) == []


def test_a_queue_with_consumers_does_not_expire_and_its_time_starts_when_they_have_gone(node: Node) -> None:
    declared(node, "q", **{"x-expires": 100})
    state = node.broker.state
    channel = consume(state, "q")
    assert state.topology.leases.unused(START) == state.topology.leases.unused(START + 10**9) == []
    channel.cancel("c")
    assert state.topology.leases.unused(START + 2 * 10**9) == [], (
        "the time starts when it is first seen without them"
    )
    assert state.topology.leases.unused(START + 2 * 10**9 + 100 * MS) == [state.topology.queue("q")]


def test_the_time_of_a_queue_starts_again_with_the_broker(node: Node) -> None:
    declared(node, "q", **{"x-expires": 100})
    state = node.restart().state
    assert state.topology.leases.unused(START + 10**12) == []
    assert state.topology.leases.unused(START + 10**12 + 100 * MS) == [state.topology.queue("q")]


def test_the_mark_of_a_federation_is_kept_and_must_be_text() -> None:
    names, mark = topology(), {"x-internal-purpose": "federation"}
    names.declare_queue(Change(), "q", arguments=mark)
    names.declare_exchange(Change(), "x", "fanout", arguments=mark)
    assert names.queues["q"].arguments.declared == names.exchanges["x"].arguments == mark
    for wrong in (5, True, None, b"federation", ["federation"]):
        with pytest.raises(errors.PreconditionFailed, match="x-internal-purpose"):
            names.declare_queue(Change(), "p", arguments={"x-internal-purpose": wrong})
        with pytest.raises(errors.PreconditionFailed, match="x-internal-purpose"):
            names.declare_exchange(Change(), "y", "fanout", arguments={"x-internal-purpose": wrong})


LARGE: dict[str, object] = {
    "text": "x" * ARGUMENT_BYTES,
    "bytes": b"x" * ARGUMENT_BYTES,
    "numbers": [1] * ARGUMENT_BYTES,
    "tables": [{}] * ARGUMENT_BYTES,
    "names": {f"n{number}": None for number in range(ARGUMENT_BYTES // 4)},
    "texts": ["x" * 1_000] * (ARGUMENT_BYTES // 1_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_arguments_are_no_larger_than_a_frame_at_any_listener(node: Node, value: object) -> None:
    channel = node.channel()
    channel.queue_declare("q")
    calls: tuple[Callable[[], object], ...] = (
        lambda: channel.queue_declare("new", arguments={"mine": value}),
        lambda: channel.exchange_declare("new", "direct", arguments={"mine": value}),
        lambda: channel.queue_bind("q", "amq.topic", "k", {"mine": value}),
        lambda: channel.queue_unbind("q", "amq.topic", "k", {"mine": value}),
    )
    for call in calls:
        with pytest.raises(
            errors.PreconditionFailed, match="are larger than 131072 bytes, or nested deeper than 64"
        ):
            call()
    assert [queue.name for queue in node.broker.queues()] == ["q"]


def test_arguments_are_nested_no_deeper_than_in_a_frame() -> None:
    value: object = 1
    for _ in range(MAX_NESTING):
        value = [value]
    check_binding("queue 'q'", {"mine": value})
    with pytest.raises(errors.PreconditionFailed, match="nested deeper than 64"):
        check_binding("queue 'q'", {"mine": [value]})


def test_arguments_that_a_frame_can_have_are_kept(node: Node) -> None:
    arguments: dict[str, object] = {"text": "x" * 60_000, "numbers": [1] * 60_000, "table": {"a": [[[b"1"]]]}}
    node.channel().queue_declare("q", arguments=arguments)
    assert node.broker.queues()[0].arguments == arguments
