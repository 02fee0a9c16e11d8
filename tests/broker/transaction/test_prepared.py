"""Prepared transactions (decision 20): durable, invisible, transferable, never timed out."""

from __future__ import annotations

import pytest

from broker_core.broker.transaction.transaction import Limits, State, Transaction
from broker_core.core import errors
from broker_core.message.properties import Properties
from broker_core.node.channel_commit import SPILL_ROWS
from tests.broker.conftest import Node, declared, publish

# -- XA (decision 20) ----------------------------------------------------------------------------------------


def prepared(node: Node, xid: str = "x1") -> None:
    declared(node, "in", "out")
    publish(node, "in", b"work")
    channel = node.channel()
    channel.tx_select()
    delivery = channel.get("in")
    assert delivery
    channel.publish(b"result", routing_key="out", properties=Properties(message_id="m").encode())
    channel.ack(delivery.tag)
    assert channel.prepare(xid) == "prepared"
    channel.close()


@pytest.mark.parametrize("restart", [False, True])
def test_20_a_prepared_transaction_is_invisible_outlives_its_channel_and_a_crash_and_is_committed_by_name(
    node: Node, restart: bool
) -> None:
    prepared(node)
    if restart:
        node.restart()
    node.clock.advance(100_000)
    assert node.drain("in") == node.browse("out") == []
    (info,) = node.broker.prepared()
    assert (info.xid, info.publishes, info.settles, info.size_bytes, info.age_s > 99_999) == (
        "x1",
        1,
        1,
        6,
        True,
    )
    node.broker.commit("x1")
    assert (node.browse("in"), node.browse("out"), node.broker.prepared()) == ([], [b"result"], [])
    node.restart()
    assert (node.browse("in"), node.browse("out"), node.broker.prepared()) == ([], [b"result"], [])


@pytest.mark.parametrize("restart", [False, True])
def test_20_a_prepared_transaction_that_is_rolled_back_gives_its_deliveries_back_as_redelivered(
    node: Node, restart: bool
) -> None:
    prepared(node)
    if restart:
        node.restart()
    node.broker.rollback("x1")
    assert node.broker.outcome("x1") == "rolled_back"
    with node.channel() as channel:
        again = channel.get("in")
        assert again and (again.body, again.redelivered) == (b"work", True)
    assert node.browse("out") == []


def test_20_unknown_xid_and_wrong_state_are_different_errors_and_a_repeated_decision_is_fine(
    node: Node,
) -> None:
    prepared(node)
    for call in (node.broker.commit, node.broker.rollback):
        with pytest.raises(errors.UnknownTransaction, match="no transaction has the xid 'nobody'"):
            call("nobody")
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"x", routing_key="out")
        with pytest.raises(errors.TransactionState, match="'x1' is prepared"):
            channel.prepare("x1")
    node.broker.commit("x1")
    node.broker.commit("x1")
    with pytest.raises(errors.TransactionState, match="'x1' is committed, it cannot become rolled_back"):
        node.broker.rollback("x1")
    assert node.browse("out") == [b"result"]


def test_20_prepare_with_no_work_answers_read_only(node: Node) -> None:
    with node.channel() as channel:
        channel.tx_select()
        assert channel.prepare("x") == "read_only"
    assert node.broker.prepared() == []


@pytest.mark.slow
def test_20_a_large_prepared_transaction_keeps_its_spilled_rows_over_a_crash(node: Node) -> None:
    declared(node, "q", "r")
    for xid in ("commit", "rollback"):
        with node.channel() as channel:
            channel.tx_select()
            for number in range(SPILL_ROWS + 5):
                channel.publish(b"%d" % number, routing_key="q")
            channel.prepare(xid)
    node.restart()
    node.broker.upkeep.tick()
    assert [info.publishes for info in node.broker.prepared()] == [SPILL_ROWS + 5] * 2
    node.broker.commit("commit")
    node.broker.rollback("rollback")
    assert node.browse("q") == [b"%d" % number for number in range(SPILL_ROWS + 5)]
    node.restart()
    assert len(node.browse("q")) == SPILL_ROWS + 5
    assert len(node.store.reopened().load().blocks) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        (State.COMMITTED, State.ROLLED_BACK),
        (State.ROLLED_BACK, State.COMMITTED),
        (State.PREPARED, State.PREPARED),
    ],
)
def test_20_a_transaction_goes_only_through_its_states(wrong: tuple[State, State]) -> None:
    transaction = Transaction(Limits(), 0, "x")
    transaction.become(wrong[0])
    with pytest.raises(
        errors.TransactionState,
        match=f"transaction 'x' is {wrong[0].value}, it cannot become {wrong[1].value}",
    ):
        transaction.become(wrong[1])
