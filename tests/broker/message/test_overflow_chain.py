"""Full queues that dead-letter into each other: what one message drives out drives out the next, in a list
and not on the stack.
"""

from __future__ import annotations

import pytest

from broker_core.broker.message import removals
from tests.broker.conftest import Node, declared, publish


def chain(node: Node, count: int, *, closed: bool) -> None:
    """``q0`` to ``q{count - 1}``, of one message each, each the next one's source; ``closed``: the last one
    leads to the first.
    """
    for number in range(count):
        target = f"q{(number + 1) % count if closed else number + 1}"
        declared(
            node,
            f"q{number}",
            **{"x-max-length": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": target},
        )


@pytest.mark.slow
def test_a_chain_of_full_queues_of_any_length_moves_up_by_one_message(node: Node) -> None:
    chain(node, 2000, closed=False)
    declared(node, "q2000")
    for number in range(2000):
        publish(node, f"q{number}", b"%d" % number)
    publish(node, "q0", b"new")
    assert node.browse("q0") == [b"new"]
    assert [node.browse(f"q{number}") for number in range(1, 2001)] == [
        [b"%d" % (number - 1)] for number in range(1, 2001)
    ]
    assert node.broker.committer.failure is None


def test_in_a_ring_of_full_queues_each_message_dies_once_in_each(node: Node) -> None:
    chain(node, 5, closed=True)
    for number in range(5):
        publish(node, f"q{number}", b"%d" % number)
    for number in range(20):
        publish(node, "q0", b"new %d" % number)
    assert [len(node.browse(f"q{number}")) for number in range(5)] == [1] * 5
    assert node.browse("q0") == [b"new 19"]
    assert node.broker.committer.failure is None


def test_a_message_that_overflow_sends_back_to_its_own_queue_is_dropped(node: Node) -> None:
    chain(node, 1, closed=True)
    publish(node, "q0", b"1", b"2")
    assert node.browse("q0") == [b"2"]


def test_a_cascade_of_copies_without_end_is_cut_into_commits_of_bounded_work(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each full queue dead-letters to all of them: what one commit cannot move leaves in the next."""
    monkeypatch.setattr(removals, "ROWS", 8)
    names = [f"q{number}" for number in range(3)]
    with node.channel() as channel:
        channel.exchange_declare("all", "fanout")
    declared(node, *names, **{"x-max-length": 1, "x-dead-letter-exchange": "all"})
    with node.channel() as channel:
        for name in names:
            channel.queue_bind(name, "all")
    rounds = 0
    for _ in range(5):
        with node.channel() as channel:
            channel.publish(b"x" * 10, "all")
        state = node.broker.state
        while state.pending_checks.overfull:
            rounds += 1
            before = state.topology.queue("q0").log.next_offset
            node.broker.run(
                lambda state, change, now: state.expiry.expire(change, now, state.expiry.due(now))
            )
            assert state.topology.queue("q0").log.next_offset - before <= 3 * 8
        assert [len(node.browse(name)) for name in names] == [1] * 3
    assert rounds
    assert node.broker.committer.failure is None


def test_what_is_dead_lettered_in_bulk_by_one_overflow_is_all_there_in_order(node: Node) -> None:
    declared(node, "dead")
    declared(
        node, "q", **{"x-max-length": 2, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    )
    with node.channel() as channel:
        channel.tx_select()
        for number in range(900):
            channel.publish(b"%d" % number, routing_key="q")
        channel.tx_commit()
    assert node.browse("q") == [b"898", b"899"]
    assert node.browse("dead") == [b"%d" % number for number in range(898)]
    node.restart()
    assert node.browse("dead") == [b"%d" % number for number in range(898)]
