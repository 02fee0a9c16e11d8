"""A channel that closes, or whose operation is refused, while it has something in flight: what it settles has
one holder.

That is the channel, a prepared transaction, or nobody any more; never two.
Not here: AMQP sessions (``tests/server/amqp/test_amqp_lost_connection.py``), and interrupts
(``node/test_interrupts.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker_core.broker.channel import Channel
from broker_core.broker.transaction.transaction import State
from broker_core.core.change import Change
from broker_core.core.errors import PreconditionFailed, TransactionState
from broker_core.message.message import Message
from broker_core.node.channel import LocalChannel
from tests.broker.conftest import Node, declared, publish

REFUSED = PreconditionFailed("refused by the test")


class Refusing:
    """The next commit of a transaction is refused, with nothing changed."""

    def __init__(self, node: Node) -> None:
        self._state = node.broker.state

    def __enter__(self) -> None:
        self._state.transactions.commit = self._refuse  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        del self._state.transactions.commit  # type: ignore[method-assign]

    def _refuse(self, *_: object, **__: object) -> None:
        raise REFUSED


ALONE: dict[str, Callable[[LocalChannel], object]] = {
    "ack": lambda channel: channel.ack(1),
    "ack of several": lambda channel: channel.ack(2, multiple=True),
    "ack of all": lambda channel: channel.ack(0, multiple=True),
    "reject": lambda channel: channel.reject(1, requeue=False),
    "requeue": lambda channel: channel.nack(1),
}


@pytest.mark.parametrize("word", ALONE)
def test_what_a_refused_ack_would_settle_is_ready_again_and_held_by_nobody(node: Node, word: str) -> None:
    declared(node, "in")
    publish(node, "in", b"1", b"2", b"3")
    channel = node.channel()
    for _ in range(3):
        assert channel.get("in") is not None
    with Refusing(node), pytest.raises(PreconditionFailed):
        ALONE[word](channel)
    assert (node.queue("in").messages, node.queue("in").unacknowledged) == (
        3,
        {"ack of several": 1, "ack of all": 0}.get(word, 2),
    )
    channel.close()
    assert node.queue("in").unacknowledged == 0
    assert node.drain("in") == [b"1", b"2", b"3"]


def test_an_ack_of_an_unknown_tag_leaves_the_other_deliveries_as_they_are(node: Node) -> None:
    declared(node, "in")
    publish(node, "in", b"1", b"2")
    channel = node.channel()
    for _ in range(2):
        assert channel.get("in") is not None
    for tag, multiple in ((9, False), (9, True)):
        with pytest.raises(PreconditionFailed):
            channel.ack(tag, multiple=multiple)
    channel.ack(2)
    channel.ack(1)
    assert node.queue("in").messages == 0


@pytest.mark.parametrize("transactional", [False, True], ids=["", "tx"])
def test_a_message_of_a_refused_get_without_ack_is_ready_again(node: Node, transactional: bool) -> None:
    declared(node, "in")
    publish(node, "in", b"1")
    channel = node.channel()
    if transactional:
        channel.tx_select()
    with Refusing(node), pytest.raises(PreconditionFailed):
        channel.get("in", no_ack=True)
    assert (node.queue("in").messages, node.queue("in").unacknowledged) == (1, 0)
    assert node.drain("in") == [b"1"]


def test_a_work_of_a_channel_that_is_closed_meanwhile_is_not_carried_out(node: Node) -> None:
    """It waits in a group, and the channel is closed: nobody would ever delete the queue again."""
    channel = node.channel()
    works = []
    real = node.broker.committer.run
    node.broker.committer.run = works.append  # type: ignore[method-assign,assignment]
    channel.queue_declare("mine", exclusive=True)
    node.broker.committer.run = real  # type: ignore[method-assign]
    channel.close()
    with pytest.raises(TransactionState):
        node.broker.run(works[0])
    assert node.broker.queues() == []


# -- the channel itself: its connection is gone while the answer to its commit is on its way -----------------


def tx_channel(node: Node, outcome: str) -> Channel:
    """It holds two deliveries of ``in``, and its open transaction settles the first one."""
    declared(node, "in", "out")
    publish(node, "in", b"1", b"2")
    state = node.broker.state
    channel = Channel(state)
    channel.tx_select()
    for _ in range(2):
        assert channel.get(state.topology.queue("in")) is not None
    channel.settle(1, outcome, False, 0)  # type: ignore[arg-type]
    channel.publish(Message(b"result", "out"), (state.topology.queue("out"),), False, 0)
    return channel


def close(node: Node, channel: Channel) -> list[int]:
    found: list[int] = node.broker.run(
        lambda _state, change, _now: channel.close("its connection was lost", change)
    )
    return found


@pytest.mark.parametrize("decided", [None, "commit", "rollback"])
def test_deliveries_of_a_prepared_transaction_stay_with_it_when_its_channel_closes(
    node: Node, decided: str | None
) -> None:
    channel = tx_channel(node, "ack")
    transaction = channel.transaction
    node.broker.run(lambda state, change, now: state.prepared.prepare(change, transaction, "xid", now))
    other = node.channel()
    if decided == "commit":
        node.broker.commit("xid")
    elif decided == "rollback":
        node.broker.rollback("xid")
        assert other.get("in").body == b"1"  # type: ignore[union-attr]
    assert close(node, channel) == []
    assert node.queue("in").unacknowledged == (0 if decided == "commit" else 1)
    assert node.drain("in") == [b"2"]


@pytest.mark.parametrize("word", ["close", "rollback"])
def test_what_a_committed_transaction_requeued_and_another_holds_is_not_taken_from_it(
    node: Node, word: str
) -> None:
    channel = tx_channel(node, "requeue")
    transaction = channel.transaction
    node.broker.run(lambda state, change, now: state.transactions.commit(change, transaction, now))
    other = node.channel()
    assert other.get("in").body == b"1"  # type: ignore[union-attr]
    if word == "rollback":
        assert channel.rollback() == []
        assert transaction.state is State.COMMITTED
    close(node, channel)
    assert node.drain("in") == [b"2"]
    other.close()
    assert node.drain("in") == [b"1"]


def test_a_transaction_that_is_rolled_back_before_its_group_is_planned_is_not_committed(node: Node) -> None:
    channel = tx_channel(node, "ack")
    transaction = channel.transaction
    close(node, channel)
    with pytest.raises(TransactionState):
        node.broker.run(lambda state, change, now: state.transactions.commit(change, transaction, now))
    with pytest.raises(TransactionState):
        node.broker.run(lambda state, change, now: state.prepared.prepare(change, transaction, "xid", now))
    assert node.browse("out") == []
    assert node.drain("in") == [b"1", b"2"]


def test_credit_comes_back_while_another_thread_deletes_a_queue_of_the_same_channel(node: Node) -> None:
    declared(node, *(f"q{number}" for number in range(3)))
    publish(node, "q0", b"1")
    state = node.broker.state
    channel = Channel(state)
    channel.qos(1, True)
    for number in range(3):
        channel.consume(
            state.topology.queue(f"q{number}"), str(number), lambda *sent: len(sent[-1]), lambda _: None
        )
    state.dispatch.send(0)
    for number in range(3):
        publish(node, f"q{number}", b"2")
    state.dispatch.send(0)  # all three are out of credit now
    wake = state.pending_checks.wake

    def wake_beside_a_deletion(queue) -> None:
        """The other thread has its turn in the middle of the loop over the channel's consumers."""
        wake(queue)
        if queue.name == "q1" and "q2" in state.topology.queues:
            state.topology.delete_queue(Change(), "q2")

    state.pending_checks.wake = wake_beside_a_deletion  # type: ignore[method-assign]
    channel.settle(1, "ack", False, 0)
    assert channel.consuming == 0
    channel.take()
