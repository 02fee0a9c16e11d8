"""Policies: what a queue obeys, whose policy it is, and that a change of one is one commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_core.broker.access.permission import check_pattern
from broker_core.broker.topology.policies import MOST
from broker_core.core import failpoint
from broker_core.core.change import Change
from broker_core.core.errors import OptionError, PreconditionFailed, StoreFailed
from broker_core.core.records import PolicyRecord
from broker_core.message.arguments.policy import SETTINGS, Policy, check_definition, combine, effective
from broker_core.message.arguments.table import QUEUE
from broker_core.server.access.vhosts import Vhosts
from tests.broker.conftest import Node

DLX = {"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}


class Host:
    """A node, and its operator."""

    def __init__(self) -> None:
        self.node = Node()

    def set(self, name: str, pattern: str, definition: dict[str, object], **rest: Any) -> None:
        Vhosts(self.node.broker, None).set_policy(name, pattern, definition, **rest)  # type: ignore[arg-type]

    def delete(self, name: str, **rest: Any) -> None:
        Vhosts(self.node.broker, None).delete_policy(name, **rest)  # type: ignore[arg-type]

    def declare(self, *names: str, **arguments: object) -> None:
        with self.node.channel() as channel:
            for name in names:
                channel.queue_declare(
                    name, arguments={f"x-{each.replace('_', '-')}": arguments[each] for each in arguments}
                )

    def publish(self, queue: str, *bodies: bytes) -> None:
        with self.node.channel() as channel:
            for body in bodies:
                channel.publish(body, "", queue)

    def policy(self, queue: str) -> Policy:
        return self.node.broker.state.topology.queues[queue].arguments.policy

    def alternates(self) -> dict[str, str]:
        topology = self.node.broker.state.topology
        return {exchange.name: name for exchange, name in topology.alternates.chosen.items()}

    def upkeep(self) -> None:
        self.node.broker.upkeep.expire_due()


@pytest.fixture
def host() -> Host:
    return Host()


# -- what a queue obeys --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("declared", "policy", "operator", "holds"),
    [
        ({}, {"max-length": 5}, {}, {"x-max-length": 5}),
        ({"x-max-length": 3}, {"max-length": 5}, {}, {"x-max-length": 3}),
        ({"x-max-length": 9}, {"max-length": 5}, {"max-length": 4}, {"x-max-length": 4}),
        ({"x-max-length": 3}, {"overflow": "reject-publish"}, {}, {"x-max-length": 3, "x-overflow": "reject-publish"}),
        ({"x-overflow": "drop-head"}, {"overflow": "reject-publish"}, {}, {"x-overflow": "drop-head"}),
        ({"x-delivery-limit": -1}, {"delivery-limit": 4}, {}, {"x-delivery-limit": 4}),
        ({"x-delivery-limit": 7}, {"delivery-limit": -1}, {}, {"x-delivery-limit": 7}),
        ({"x-dead-letter-exchange": "a"}, DLX, {}, {"x-dead-letter-exchange": "a"}),
        ({}, {**DLX, "alternate-exchange": "e"}, {}, {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}),
    ],
)  # fmt: skip
def test_of_two_limits_the_lower_one_holds_and_else_what_the_queue_says(
    declared: dict[str, object],
    policy: dict[str, object],
    operator: dict[str, object],
    holds: dict[str, object],
) -> None:
    assert effective(declared, Policy(combine(policy, operator)), QUEUE) == holds


@pytest.mark.parametrize(
    ("definition", "operator", "why"),
    [
        ({}, False, "sets nothing"),
        ({"max-lenght": 5}, False, "'max-lenght', which is no setting"),
        ({"max-length": "5"}, False, "max-length"),
        ({"expires": 0}, False, "expires"),
        ({"max-length": 1 << 63}, False, "value_too_large"),
        ({"delivery-limit": -(1 << 63) - 1}, False, "value_negative"),
        ({"dead-letter-routing-key": "k"}, False, "alone: it needs dead-letter-exchange"),
        ({"x-cache-size": 5}, False, "sets x-cache-size alone: it needs x-message-deduplication too"),
        ({"x-cache-ttl": 5, "max-length": 5}, False, "x-cache-ttl alone: it needs x-message-deduplication"),
        ({"x-deduplication-header": "id"}, False, "alone: it needs x-message-deduplication"),
        ({"overflow": "reject-publish"}, True, "which is no limit"),
    ],
)
def test_a_definition_that_is_none_is_refused_and_named(
    definition: dict[str, object], operator: bool, why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        check_definition("policy 'p'", definition, operator=operator)


def test_every_setting_is_an_argument_of_the_table() -> None:
    for setting in SETTINGS.values():
        assert setting.argument in setting.table and not setting.table[setting.argument].refused


# -- whose policy ---------------------------------------------------------------------------------------------
def test_a_name_has_the_policy_of_the_highest_priority_and_one_of_the_operator(host: Host) -> None:
    host.declare("orders", "orders.eu", "other")
    host.set("all", ".*", {"max-length": 9})
    host.set("orders", "^orders", {"max-length": 5}, priority=1)
    host.set("b", "^orders", {"max-length": 1}, priority=1)  # of two alike the first by name
    host.set("caps", "eu$", {"max-length": 3}, operator=True, apply_to="queues")
    host.set("quorum", ".*", {"max-length": 2}, priority=9, apply_to="quorum_queues")
    host.set("exchanges", ".*", {"alternate-exchange": "amq.fanout"}, priority=8, apply_to="exchanges")

    def told() -> dict[str, tuple[object, ...]]:
        return {name: tuple(host.policy(name)) for name in ("orders", "orders.eu", "other")}

    wanted = {
        "orders": ({"max-length": 1}, "b", None),
        "orders.eu": ({"max-length": 1}, "b", "caps"),
        "other": ({"max-length": 9}, "all", None),
    }
    assert told() == wanted
    host.node.restart()
    assert told() == wanted
    host.declare("quorum", queue_type="quorum")
    assert host.policy("quorum").name == "quorum"
    assert host.alternates()["amq.topic"] == "amq.fanout"
    host.delete("b")
    assert host.policy("orders").settings == {"max-length": 5}
    assert host.policy("orders.eu").settings == {"max-length": 3}
    host.node.restart()
    assert host.policy("orders.eu").operator == "caps"
    with pytest.raises(OptionError, match=r"has no policy 'b'.*txmq policy list"):
        host.delete("b")


# -- what is there obeys ----------------------------------------------------------------------------------------
def test_messages_that_are_there_are_dropped_expired_and_dead_lettered(host: Host) -> None:
    host.declare("long", "old", "dead")
    host.publish("long", b"1", b"2", b"3", b"4")
    host.publish("old", b"5")
    host.node.clock.advance(2)
    host.set("p", "^(?!dead$).*", {"max-length": 2, "message-ttl": 1000, **DLX})
    host.upkeep()
    assert sorted(host.node.drain("dead")) == [b"1", b"2", b"3", b"4", b"5"]
    host.publish("long", b"6", b"7", b"8")
    assert host.node.drain("dead") == [b"6"]
    host.node.clock.advance(2)
    host.upkeep()
    assert host.node.drain("dead") == [b"7", b"8"]
    host.delete("p")
    host.publish("long", *[b"%d" % number for number in range(9)])
    host.node.clock.advance(9)
    host.upkeep()
    assert host.node.drain("dead") == [] and len(host.node.drain("long")) == 9


def test_a_queue_of_bytes_is_measured_when_the_policy_comes_and_forgets_when_it_goes(host: Host) -> None:
    host.declare("q")
    host.publish("q", b"a" * 10, b"b" * 10, b"c" * 10)
    for _ in range(2):
        host.set("p", "q", {"max-length-bytes": 25})
        host.upkeep()
        host.publish("q", b"d" * 10)
        assert host.node.broker.state.topology.queues["q"].room.total == 20
        host.delete("p")
        host.publish("q", b"e" * 10, b"f" * 10)
        assert host.node.queue("q").messages == 4
    assert host.node.drain("q")[-1] == b"f" * 10


def test_a_full_queue_refuses_and_one_that_was_prepared_before_is_committed(host: Host) -> None:
    host.declare("q")
    prepared = host.node.channel()
    prepared.tx_select()
    for body in (b"1", b"2"):
        prepared.publish(body, "", "q")
    prepared.prepare("x")
    host.set("p", "q", {"max-length": 1, "overflow": "reject-publish"})
    host.publish("q", b"3")
    with host.node.channel() as channel:
        channel.tx_select()
        channel.publish(b"4", "", "q")
        with pytest.raises(PreconditionFailed, match=r"is full.*x-max-length 1"):
            channel.tx_commit()
    host.node.broker.commit("x")
    assert host.node.queue("q").messages == 3
    host.delete("p")
    host.publish("q", b"5")
    assert host.node.drain("q") == [b"3", b"1", b"2", b"5"]


def test_deliveries_are_counted_from_the_policy_on_and_survive_its_end(host: Host) -> None:
    host.declare("q", "dead")
    host.publish("q", b"x")
    host.set("p", "^q$", {"delivery-limit": 1, **DLX})

    def give_back() -> None:
        with host.node.channel() as channel:
            delivery = channel.get("q")
            assert delivery is not None
            channel.nack(delivery.tag, requeue=True)

    give_back()
    host.node.restart()
    give_back()
    host.upkeep()
    assert host.node.drain("dead") == [b"x"] and host.node.drain("q") == []
    host.publish("q", b"y")
    give_back()
    host.delete("p")
    host.node.restart()
    for _ in range(5):
        give_back()
    assert host.node.drain("q") == [b"y"] and host.node.drain("dead") == []


def test_a_queue_that_nobody_uses_is_deleted_after_the_time_of_the_policy(host: Host) -> None:
    host.declare("q", "stays")
    host.set("p", "^q$", {"expires": 1000})
    for _ in range(2):
        host.node.broker.upkeep.tick()
        host.node.clock.advance(2)
    host.node.broker.upkeep.tick()
    assert set(host.node.broker.state.topology.queues) == {"stays"}


def test_messages_without_a_binding_go_to_the_alternate_exchange_while_the_policy_is_there(
    host: Host,
) -> None:
    host.declare("rest")
    with host.node.channel() as channel:
        channel.exchange_declare("e", "direct")
        channel.exchange_declare("rest", "fanout")
        channel.queue_bind("rest", "rest")
        channel.publish(b"1", "e", "k")
        host.set("p", "^e$", {"alternate-exchange": "rest"})
        channel.publish(b"2", "e", "k")
        host.set("p", "^e$", {"alternate-exchange": "gone"})
        channel.publish(b"3", "e", "k")
        channel.exchange_declare("gone", "fanout")
        channel.queue_bind("rest", "gone")
        channel.publish(b"4", "e", "k")
        host.delete("p")
        channel.publish(b"5", "e", "k")
    assert host.node.drain("rest") == [b"2", b"4"]


# -- one commit ---------------------------------------------------------------------------------------------------
def obeys(host: Host) -> dict[str, Any]:
    topology = host.node.broker.state.topology
    return {
        "queues": {queue.name: queue.arguments for queue in topology.queues.values()},
        "rooms": {queue.name: queue.room.sizes for queue in topology.queues.values()},
        "counts": {queue.name: queue.ready.deliveries is None for queue in topology.queues.values()},
        "alternates": host.alternates(),
        "policies": dict(topology.policies.by_key),
        "leased": [queue.name for queue in topology.leases.queues],
    }


EVERYTHING = {
    "max-length": 3, "max-length-bytes": 100, "message-ttl": 5, "expires": 9_000, "delivery-limit": 2,
    "overflow": "reject-publish", "alternate-exchange": "amq.fanout", **DLX,
}  # fmt: skip


@pytest.mark.parametrize("step", ["store.commit.begin", "store.commit.synced"])
@pytest.mark.parametrize(
    "change", [lambda host: host.set("p", ".*", {"max-length": 1}), lambda host: host.delete("p")]
)
def test_a_policy_that_is_not_committed_changes_nothing(
    host: Host, step: str, change: Callable[[Host], None]
) -> None:
    host.declare("q", "dead")
    host.publish("q", b"1", b"2")
    host.set("p", ".*", EVERYTHING)
    before = obeys(host)
    failpoint.arm(step, "raise")
    with pytest.raises((StoreFailed, OSError)):
        change(host)
    failpoint.disarm()
    host.node.restart()
    assert {**obeys(host), "rooms": None} == {**before, "rooms": None}


@pytest.mark.parametrize("limit", [{"max-length": 2}, {"max-length-bytes": 2}])
def test_a_kill_between_a_policy_and_its_cut_leaves_no_queue_that_is_too_long(
    host: Host, limit: dict[str, object]
) -> None:
    host.declare("q", "dead")
    host.publish("q", b"1", b"2", b"3", b"4")
    failpoint.arm("store.commit.committed", "raise")
    with pytest.raises((StoreFailed, OSError)):
        host.set("p", "^q$", {**limit, **DLX})
    failpoint.disarm()
    host.node.restart()
    host.upkeep()
    assert (host.node.drain("q"), host.node.drain("dead")) == ([b"3", b"4"], [b"1", b"2"])


def test_a_work_that_fails_after_its_policy_leaves_no_trace(host: Host) -> None:
    host.declare("q", "dead")
    host.publish("q", b"1", b"2")
    record = PolicyRecord("/", "policy", "p", ".*", "all", 0, dict(EVERYTHING))

    def fails(state: Any, change: Change, _now: int) -> None:
        state.topology.policies.put(change, record)
        raise OptionError("not this time")

    for steps in range(2):
        before = obeys(host)
        with pytest.raises(OptionError, match="not this time"):
            host.node.broker.run(fails)
        assert obeys(host) == before
        if not steps:
            host.set("p", ".*", {"max-length-bytes": 1_000, "delivery-limit": 9})
            host.publish("q", b"3")


def test_a_virtual_host_has_so_many_policies_and_they_go_with_it(host: Host) -> None:
    vhosts = Vhosts(host.node.broker, None)  # type: ignore[arg-type]
    vhosts.add_vhost("sales")
    for number in range(MOST):
        host.set(f"p{number}", ".*", {"max-length": number}, vhost="sales")
    with pytest.raises(OptionError, match=f"has {MOST} of its kind"):
        host.set("more", ".*", {"max-length": 1}, vhost="sales")
    host.set("p0", ".*", {"max-length": 1}, vhost="sales")
    assert [each.vhost for each in vhosts.policies()] == ["sales"] * MOST and vhosts.policies("/") == []
    with pytest.raises(OptionError, match="does not exist"):
        host.set("p", ".*", {"max-length": 1}, vhost="nowhere")
    with pytest.raises(OptionError, match="not a regular expression"):
        host.set("p", "(", {"max-length": 1})
    with pytest.raises(OptionError):
        check_pattern("(")
