"""``x-original-transaction`` of a dead letter: the id of the transaction that published it, and nothing where
there was none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker_core.broker.message.settlement import MANY_REJECTS as MANY
from broker_core.engine import BranchHeader
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from broker_core.node.engine import EmbeddedEngine
from tests.broker.conftest import Node, declared, publish
from tests.reading import unsettled

DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


def headers(node: Node, queue: str = "dead") -> list[dict[str, Any]]:
    state = node.broker.state
    found = state.topology.queue(queue)
    rows = [state.messages.fetch(found, offset) for offset in unsettled(found)]
    return [Properties.decode(row.properties).headers for row in rows]


def ids(node: Node) -> list[object]:
    return [found.get("x-original-transaction") for found in headers(node)]


def reject_all(node: Node, queue: str = "q") -> None:
    with node.channel() as channel:
        while (delivery := channel.get(queue)) is not None:
            channel.reject(delivery.tag, requeue=False)


def transaction(
    node: Node, *bodies: bytes, end: Callable[[LocalChannel], object] = LocalChannel.tx_commit
) -> None:
    with node.channel() as channel:
        channel.tx_select()
        for body in bodies:
            channel.publish(body, routing_key="q")
        end(channel)


@pytest.mark.parametrize("restart", [False, True])
def test_a_dead_letter_names_the_token_or_xid_of_its_transaction(node: Node, restart: bool) -> None:
    declared(node, "q", **DEAD)
    declared(node, "dead")
    transaction(node, b"1", b"2", end=lambda channel: channel.tx_commit("order 7"))
    transaction(node, b"3", end=lambda channel: channel.prepare("order 8"))
    node.broker.commit("order 8")
    if restart:
        node.restart()
    reject_all(node)
    assert ids(node) == ["order 7", "order 7", "order 8"]
    assert node.broker.outcome("order 7") == node.broker.outcome("order 8") == "committed", (
        "the same name answers"
    )


def test_a_dead_letter_of_a_transaction_without_a_name_has_an_id_of_its_own() -> None:
    nodes = [Node(), Node()]
    found: list[object] = []
    for node in nodes:
        declared(node, "q", **DEAD)
        declared(node, "dead")
        transaction(node, b"1", b"2")
        transaction(node, b"3")
        reject_all(node)
        first, second, third = ids(node)
        assert first == second != third
        found += [first, third]
        node.broker.close()
    assert len(set(found)) == 4 and all(isinstance(one, str) for one in found), "two brokers share none"


@pytest.mark.parametrize("restart", [False, True])
def test_a_dead_letter_of_a_plain_publish_names_no_transaction(node: Node, restart: bool) -> None:
    """Nor the transaction of whoever rejects it, nor that of a later death."""
    declared(node, "q", **DEAD)
    declared(node, "dead", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "end"})
    declared(node, "end")
    publish(node, "q", b"1")
    if restart:
        node.restart()
    for queue in ("q", "dead"):
        with node.channel() as channel:
            channel.tx_select()
            delivery = channel.get(queue)
            assert delivery is not None
            channel.reject(delivery.tag, requeue=False)
            channel.publish(b"other", routing_key="elsewhere")
            channel.tx_commit("rejected") if queue == "q" else channel.tx_commit("again")
    (found,) = headers(node, "end")
    assert "x-original-transaction" not in found and len(found["x-death"]) == 2


def test_a_dead_letter_keeps_the_id_through_expiry_overflow_and_every_later_death(node: Node) -> None:
    declared(node, "q", **{**DEAD, "x-max-length": 1})
    declared(
        node,
        "dead",
        **{"x-message-ttl": 1000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "end"},
    )
    declared(node, "end")
    transaction(node, b"1", b"2", end=lambda channel: channel.tx_commit("t"))
    assert ids(node) == ["t"]
    node.clock.advance(2)
    node.broker.upkeep.tick()
    (found,) = headers(node, "end")
    assert (found["x-original-transaction"], found["x-first-death-reason"], len(found["x-death"])) == (
        "t",
        "maxlen",
        2,
    )


def test_a_dead_letter_of_a_spilled_transaction_names_it_too(node: Node) -> None:
    declared(node, "q", **DEAD)
    declared(node, "dead")
    node.broker.channel_commits.spill_rows = 2
    transaction(node, b"1", b"2", b"3", end=lambda channel: channel.tx_commit("t"))
    node.restart()
    reject_all(node)
    assert ids(node) == ["t"] * 3


def test_each_of_many_dead_letters_names_its_transaction(node: Node) -> None:
    declared(node, "q", **DEAD)
    declared(node, "dead")
    transaction(node, *[b"1"] * MANY, end=lambda channel: channel.tx_commit("t"))
    publish(node, "q", b"2", b"3")
    with node.channel() as channel:
        channel.tx_select()
        while (delivery := channel.get("q")) is not None:
            channel.reject(delivery.tag, requeue=False)
        channel.tx_commit()
    assert ids(node) == ["t"] * MANY + [None, None]


def test_a_dead_letter_of_a_micro_batch_names_its_token(node: Node) -> None:
    declared(node, "q", **DEAD)
    declared(node, "dead")
    engine = EmbeddedEngine(node.broker)
    opened = engine.open_batch("app", "query", 0, "fail")
    from tests.engine.bench import rows

    staged = engine.stage(
        BranchHeader(opened.token, "branch", "publish", {"routing_key": "q"}), [rows([b"1"])]
    )
    engine.commit_batch("app", "query", 0, opened.token, [staged])
    node.restart()
    reject_all(node)
    assert ids(node) == [opened.token]


def test_many_transactions_of_one_group_commit_keep_their_names(node: Node) -> None:
    """Works that are committed together have commit times of their own."""
    declared(node, "q", **DEAD)
    declared(node, "dead")
    for number in range(50):
        transaction(
            node,
            b"%d" % number,
            end=lambda channel, number=number: (
                channel.tx_commit(f"t{number}") if number % 2 else channel.tx_commit()
            ),
        )
    reject_all(node)
    assert [one for one in ids(node) if str(one).startswith("t")] == [
        f"t{number}" for number in range(1, 50, 2)
    ]


# -- x-delivery-limit ----------------------------------------------------------------------------------------


def _returned(node: Node, give_back: str) -> None:
    channel = node.channel()
    if "tx" in give_back:
        channel.tx_select()
    delivery = channel.get("q")
    assert delivery is not None
    if give_back in ("nack", "tx nack"):
        channel.nack(delivery.tag, requeue=True)
    if give_back == "recover":
        channel.recover()
    if give_back == "tx nack":
        assert node.queue("q").unacknowledged and node.browse("dead") == [], "not before the commit"
        channel.tx_commit()
    if give_back == "tx prepared":
        channel.ack(delivery.tag)
        channel.prepare("x")
        node.broker.rollback("x")


@pytest.mark.parametrize("give_back", ["nack", "tx nack", "recover", "tx prepared"])
@pytest.mark.parametrize("ahead", [False, True])
def test_10_a_requeue_past_the_delivery_limit_dead_letters_in_the_same_commit(
    node: Node, give_back: str, ahead: bool
) -> None:
    """No upkeep runs here, and nobody gets from the queue in between."""
    declared(node, "q", **{**DEAD, "x-delivery-limit": 0})
    declared(node, "dead")
    publish(node, "q", *([b"ahead"] if ahead else []), b"poison")
    if ahead:
        holder = node.channel()
        first = holder.get("q")
        assert first is not None
    _returned(node, give_back)
    assert node.browse("dead") == [b"poison"] and node.browse("q") == ([b"ahead"] if ahead else [])
    assert headers(node)[0]["x-first-death-reason"] == "delivery_limit"
    node.restart()
    assert node.browse("dead") == [b"poison"] and node.browse("q") == ([b"ahead"] if ahead else [])
