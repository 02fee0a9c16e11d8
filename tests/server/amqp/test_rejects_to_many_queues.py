"""Rejects of an AMQP client whose dead letters reach very many queues: several commits, in order, or written ahead
of a transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pamqp import commands

from broker_core.broker.message import removals
from broker_core.broker.message.settlement import Settlement
from broker_core.broker.transaction import transaction
from broker_core.core.errors import ResourceShortage
from broker_core.node import channel_commit
from tests.amqp_in_process import Leader, Served, serving
from tests.amqp_peer import Peer, peer
from tests.progress import wait_until
from tests.server.amqp.test_turns import COUNT, bodies, fanned, hold_all, publishes, sent

Q, B, T = commands.Queue, commands.Basic, commands.Tx


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.fixture
def to_many(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Peer, list[int]]]:
    """A client that holds all of ``q``, each dead letter of which reaches 20 queues, five times what a commit
    takes; and how many rejects each commit has left for the next one.
    """
    monkeypatch.setattr(removals, "ENTRIES", 80)
    left: list[int] = []
    settle = Settlement.settle

    def noted(self: Settlement, *args: Any, **named: Any) -> list[transaction.Settle]:
        found = settle(self, *args, **named)
        left.append(len(found))
        return found

    with peer(served.url, 1, 2) as client:
        fanned(client, 20)
        client.call(
            1, Q.Declare(queue="q", durable=True, arguments={"x-dead-letter-exchange": "f"}), Q.DeclareOk
        )
        hold_all(client)
        monkeypatch.setattr(Settlement, "settle", noted)
        yield client, left


@pytest.mark.parametrize("then", ["go on", "close"])
def test_rejects_whose_dead_letters_reach_very_many_queues_are_several_commits(
    served: Served, to_many: tuple[Peer, list[int]], then: str
) -> None:
    client, left = to_many
    requeues = [B.Reject(delivery_tag=tag, requeue=True) for tag in (2, 3, 50)]
    client.send(1, *requeues, B.Ack(delivery_tag=60), B.Nack(delivery_tag=0, multiple=True, requeue=False))
    if then == "close":
        client.call(1, commands.Channel.Close(200, "", 0, 0), commands.Channel.CloseOk)
        client.call(1, commands.Channel.Open(), commands.Channel.OpenOk)
    rejected = [number for number in range(COUNT) if number not in (1, 2, 49, 59)]
    assert client.count(1, "q") == 3
    for name in ("q0", "q19"):
        assert bodies(client, name) == sent(rejected)
    assert bodies(client, "q") == sent((1, 2, 49))
    assert len(left) > len(rejected) // 8 and max(left) > 0


def test_rejects_that_fail_in_a_later_commit_are_in_their_queue_again(
    served: Served, to_many: tuple[Peer, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, left = to_many
    settle = Settlement.settle

    def fails(self: Settlement, *args: Any, **named: Any) -> list[transaction.Settle]:
        if len(left) == 4:
            raise ResourceShortage("the disk is full", "make room")
        return settle(self, *args, **named)

    monkeypatch.setattr(Settlement, "settle", fails)
    client.send(1, B.Nack(delivery_tag=0, multiple=True, requeue=False))
    client.expect(commands.Channel.Close, 1)
    client.send(1, commands.Channel.CloseOk())
    monkeypatch.undo()
    with peer(served.url, 1) as other:
        dead = bodies(other, "q0")
        assert 0 < len(dead) < COUNT and dead == sent(range(len(dead)))
        assert bodies(other, "q19") == dead and bodies(other, "q") == sent(range(len(dead), COUNT))


def test_rejects_of_a_transaction_that_reach_very_many_queues_are_written_ahead(
    served: Served, to_many: tuple[Peer, list[int]]
) -> None:
    client, left = to_many
    client.call(1, T.Select(), T.SelectOk)
    client.send(1, B.Nack(delivery_tag=10, multiple=True, requeue=False))
    client.call(1, T.Commit(), T.CommitOk)
    assert left == [0] and bodies(client, "q0") == bodies(client, "q19") == sent(range(10))
    assert served.broker.state.topology.queue("q7").log.runs[0].count == 10


def test_rejects_of_a_later_tick_wait_for_those_that_are_left(
    served: Served, to_many: tuple[Peer, list[int]]
) -> None:
    """Another thread leads the commits meanwhile."""
    client, _ = to_many
    with Leader(served):
        client.send(1, B.Nack(delivery_tag=40, multiple=True, requeue=False))
        wait_until(lambda: bool(served.broker.committer.waiting), "the first tick waits for its commit")
        client.send(1, B.Nack(delivery_tag=0, multiple=True, requeue=False))
        client.call(2, B.Qos(), B.QosOk)  # the loop has taken both
    assert client.count(1, "q") == 0
    assert bodies(client, "q0") == bodies(client, "q19") == sent(range(COUNT))


def test_publishes_that_a_full_queue_dead_letters_to_very_many_queues_are_several_commits(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_commit, "COST", 400)
    with peer(served.url, 1) as client:
        fanned(client, 20)
        arguments = {"x-max-length": 1, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "f"}
        client.call(1, Q.Declare(queue="q", arguments=arguments), Q.DeclareOk)
        taken: list[int] = []
        pieces = channel_commit.ChannelCommits.pieces

        def noted(self: Any, whole: transaction.Transaction) -> list[transaction.Transaction]:
            found = pieces(self, whole)
            taken.extend(len(piece.publishes) for piece in found)
            return found

        monkeypatch.setattr(channel_commit.ChannelCommits, "pieces", noted)
        client.write(publishes(range(COUNT), "", "q"))
        assert client.count(1, "q") == 1
        assert max(taken) <= 5 and bodies(client, "q0") == sent(range(1, COUNT))
