"""Exchanges: declared, redeclared and deleted in RabbitMQ's words; texts and codes were taken from RabbitMQ
3.10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.broker.topology.topology import Topology
from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.core.records import BindingRecord, ExchangeBindingRecord, ExchangeRecord
from tests.broker.conftest import Node
from tests.routing.test_exchange import names, topology


@pytest.mark.parametrize(
    ("declaration", "argument", "received", "current"),
    [
        ({"type": "fanout"}, "type", "'fanout'", "'direct'"),
        ({"durable": False}, "durable", "'false'", "'true'"),
        ({"auto_delete": True}, "auto_delete", "'true'", "'false'"),
        ({"internal": True}, "internal", "'true'", "'false'"),
        ({"arguments": {}}, "alternate-exchange", "none", "the value 'a' of type 'longstr'"),
        ({"arguments": {"alternate-exchange": "b"}}, "alternate-exchange", "'b'", "'a'"),
    ],
)
def test_an_exchange_declared_again_otherwise_is_refused_and_stays_as_it_is(
    declaration: dict[str, Any], argument: str, received: str, current: str
) -> None:
    found = topology()
    found.declare_exchange(Change(), "x", "direct", arguments={"alternate-exchange": "a"})
    change = Change()
    with pytest.raises(errors.PreconditionFailed) as caught:
        found.declare_exchange(
            change, "x", **{"type": "direct", "arguments": {"alternate-exchange": "a"}, **declaration}
        )
    text = f"'{argument}' for exchange 'x' in vhost '/': received {received} but current is {current}"
    assert caught.value.summary == f"inequivalent arg {text}"
    same = found.declare_exchange(change, "x", "direct", arguments={"alternate-exchange": "a", "mine": 1})
    assert same is found.exchange("x") and same.arguments == {"alternate-exchange": "a"} and not change.puts


OF_THE_DEFAULT = errors.AccessRefused, "operation not permitted on the default exchange"


CODES = {
    errors.AccessRefused: 403,
    errors.ExchangeNotFound: 404,
    errors.QueueNotFound: 404,
    errors.PreconditionFailed: 406,
    errors.CommandInvalid: 503,
}


def absent(name: str) -> tuple[type[errors.TxmqError], str]:
    return errors.ExchangeNotFound, f"no exchange '{name}' in vhost '/'"


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (
            lambda t, c: t.declare_exchange(c, "x", "nonsense"),
            errors.CommandInvalid,
            "unknown exchange type 'nonsense'",
        ),
        (lambda t, c: t.declare_exchange(c, "x", ""), errors.CommandInvalid, "invalid exchange type ''"),
        (
            lambda t, c: t.declare_exchange(c, "amq.direct", "nonsense"),
            errors.CommandInvalid,
            "unknown exchange type 'nonsense'",
        ),
        (lambda t, c: t.declare_exchange(c, ""), *OF_THE_DEFAULT),
        (lambda t, c: t.exchange(""), *OF_THE_DEFAULT),
        (lambda t, c: t.delete_exchange(c, ""), *OF_THE_DEFAULT),
        (lambda t, c: t.bind(c, "q", ""), *OF_THE_DEFAULT),
        (lambda t, c: t.unbind(c, "q", ""), *OF_THE_DEFAULT),
        (lambda t, c: t.bind_exchange(c, "amq.topic", ""), *OF_THE_DEFAULT),
        (lambda t, c: t.bind_exchange(c, "", "amq.topic"), *OF_THE_DEFAULT),
        (lambda t, c: t.unbind_exchange(c, "", "amq.topic"), *OF_THE_DEFAULT),
        (
            lambda t, c: t.declare_exchange(c, "amq.x"),
            errors.AccessRefused,
            "exchange name 'amq.x' contains reserved prefix 'amq.*'",
        ),
        (
            lambda t, c: t.delete_exchange(c, "amq.direct"),
            errors.AccessRefused,
            "deletion of system exchange 'amq.direct' in vhost '/' not allowed",
        ),
        (
            lambda t, c: t.delete_exchange(c, "amq.none"),
            errors.AccessRefused,
            "deletion of system exchange 'amq.none' in vhost '/' not allowed",
        ),
        (
            lambda t, c: t.route("amq.rabbitmq.trace", "k"),
            errors.AccessRefused,
            "cannot publish to internal exchange 'amq.rabbitmq.trace' in vhost '/'",
        ),
        (lambda t, c: t.exchange("none"), *absent("none")),
        (lambda t, c: t.route("none", "k"), *absent("none")),
        (lambda t, c: t.bind(c, "gone", "none"), *absent("none")),
        (lambda t, c: t.bind(c, "gone", "amq.topic"), errors.QueueNotFound, "no queue 'gone' in vhost '/'"),
        (lambda t, c: t.bind_exchange(c, "to", "from"), *absent("from")),
        (lambda t, c: t.bind_exchange(c, "to", "amq.topic"), *absent("to")),
        (
            lambda t, c: t.declare_exchange(c, "x", arguments={"alternate-exchange": 5}),
            errors.PreconditionFailed,
            "invalid type 'signedint' for arg 'alternate-exchange' in exchange 'x' in vhost '/'",
        ),
        (
            lambda t, c: t.declare_exchange(c, "x", "x-delayed-message"),
            errors.PreconditionFailed,
            "Invalid argument, 'x-delayed-type' must be an existing exchange type",
        ),
    ],
)
def test_what_an_exchange_cannot_be_asked_is_refused_with_rabbitmqs_code_and_text_and_changes_nothing(
    act: Callable[[Topology, Change], object], error: type[errors.TxmqError], text: str
) -> None:
    found, change = topology("q"), Change()
    before = set(found.exchanges)
    with pytest.raises(error) as caught:
        act(found, change)
    assert (caught.value.summary, getattr(caught.value, "reply_code", None)) == (text, CODES[error])
    assert (set(found.exchanges), change.puts, change.drops) == (before, (), ())


def test_deleting_and_unbinding_what_is_not_there_is_fine() -> None:
    found, change = topology("q"), Change()
    found.delete_exchange(change, "none", if_unused=True)
    found.unbind(change, "none", "amq.topic")
    found.unbind(change, "q", "none")
    found.unbind(change, "q", "amq.topic", "not bound")
    found.unbind_exchange(change, "none", "amq.topic")
    found.unbind_exchange(change, "amq.topic", "none")
    found.unbind_exchange(change, "amq.topic", "amq.fanout", "not bound")
    assert change.drops == ()


def test_an_exchange_is_in_use_while_it_has_bindings_to_others_and_not_while_others_have_bindings_to_it() -> (
    None
):
    found = topology()
    found.declare_exchange(Change(), "from", "fanout")
    found.declare_exchange(Change(), "to", "fanout")
    found.bind_exchange(Change(), "to", "from")
    with pytest.raises(errors.PreconditionFailed) as caught:
        found.delete_exchange(Change(), "from", if_unused=True)
    assert caught.value.summary == "exchange 'from' in vhost '/' in use"
    change = Change()
    found.delete_exchange(change, "to", if_unused=True)
    assert change.drops == (
        (ExchangeBindingRecord, ("from", "to", "", {}, "/")),
        (ExchangeRecord, ("to", "/")),
    )
    found.delete_exchange(Change(), "from", if_unused=True)
    assert not {"from", "to"} & set(found.exchanges)


# -- auto-delete ---------------------------------------------------------------------------------------------


def auto_delete(*queues: str) -> Topology:
    found = topology(*queues)
    found.declare_exchange(Change(), "auto", "fanout", auto_delete=True)
    return found


def test_an_auto_delete_exchange_goes_with_its_last_binding_and_not_before_it_had_one() -> None:
    found = auto_delete("a", "b")
    found.unbind(Change(), "a", "auto")
    assert "auto" in found.exchanges
    found.bind(Change(), "a", "auto")
    found.bind(Change(), "b", "auto")
    found.unbind(Change(), "a", "auto")
    assert names(found, "auto") == ["b"]
    change = Change()
    found.unbind(change, "b", "auto")
    assert "auto" not in found.exchanges
    assert change.drops == ((BindingRecord, ("auto", "b", "", {}, "/")), (ExchangeRecord, ("auto", "/")))


def test_an_auto_delete_exchange_goes_when_the_queue_or_the_exchange_that_it_was_bound_to_is_deleted() -> (
    None
):
    found = auto_delete("a")
    found.bind(Change(), "a", "auto")
    found.delete_queue(Change(), "a")
    assert "auto" not in found.exchanges
    found = auto_delete()
    found.declare_exchange(Change(), "to", "fanout")
    found.bind_exchange(Change(), "to", "auto")
    found.delete_exchange(Change(), "to")
    assert "auto" not in found.exchanges


def test_a_binding_to_an_auto_delete_exchange_does_not_count_and_one_that_goes_takes_those_before_it_along() -> (
    None
):
    found = auto_delete("q")
    found.declare_exchange(Change(), "first", "fanout", auto_delete=True)
    found.bind_exchange(Change(), "auto", "amq.fanout")
    found.unbind_exchange(Change(), "auto", "amq.fanout")
    assert "auto" in found.exchanges
    found.bind_exchange(Change(), "auto", "first")
    found.bind(Change(), "q", "auto")
    found.delete_queue(Change(), "q")
    assert not {"auto", "first"} & set(found.exchanges)


# -- durable -------------------------------------------------------------------------------------------------


def test_exchanges_with_their_arguments_and_bindings_between_durable_ones_survive_a_restart_and_no_others(
    node: Node,
) -> None:
    def work(state: BrokerState, change: Change, _now: int) -> None:
        state.topology.declare_exchange(
            change,
            "kept",
            "topic",
            internal=True,
            arguments={"alternate-exchange": "other", "mine": [1, {"a": None}]},
        )
        state.topology.declare_exchange(change, "other", "fanout", auto_delete=True)
        state.topology.declare_exchange(change, "lost", "fanout", durable=False)
        state.topology.declare_queue(change, "q")
        state.topology.bind(change, "q", "other")
        state.topology.bind_exchange(change, "kept", "amq.topic", "a.#", {"n": 1})
        state.topology.bind_exchange(change, "lost", "amq.topic", "#")
        state.topology.bind_exchange(change, "kept", "lost")

    node.broker.run(work)
    state = node.restart().state
    kept = state.topology.exchange("kept")
    assert (kept.type, kept.durable, kept.auto_delete, kept.internal) == ("topic", True, False, True)
    assert kept.arguments == {"alternate-exchange": "other", "mine": [1, {"a": None}]}
    assert state.topology.exchange("other").auto_delete and "lost" not in state.topology.exchanges
    (binding,) = state.topology.exchange("amq.topic").bindings
    assert binding == (kept, "a.#", {"n": 1})
    assert [queue.name for queue in state.topology.route("amq.topic", "a.b")] == ["q"], (
        "by the binding, then by the alternate exchange"
    )
    node.broker.run(
        lambda state, change, _now: state.topology.unbind_exchange(
            change, "kept", "amq.topic", "a.#", {"n": 1}
        )
    )
    node.broker.run(lambda state, change, _now: state.topology.delete_queue(change, "q"))
    state = node.restart().state
    assert not state.topology.exchange("amq.topic").bindings and "other" not in state.topology.exchanges
