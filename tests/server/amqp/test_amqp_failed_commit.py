"""A commit that fails on the disk is confirmed to nobody, at whichever step it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from pamqp import commands

from broker_core.core import failpoint
from broker_core.launcher import Broker
from tests.amqp_peer import Closed, Peer, contents

B, C, Q = commands.Basic, commands.Confirm, commands.Queue
STEPS = ("committer.planned", "store.commit.begin", "store.commit.synced", "store.commit.executed")
DURABLE = ("store.commit.committed", "committer.durable")  # behind the commit: it is there, and not confirmed


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("step", [*STEPS, *DURABLE])
def test_a_publish_whose_commit_fails_is_nacked_and_never_confirmed(
    tmp_path: Path, step: str, count: int
) -> None:
    bodies = [b"%d" % number for number in range(count)]
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as broker:
        with Peer(broker.amqp_urls[0]).opened(1) as peer:
            peer.call(1, Q.Declare(queue="q", durable=True), Q.DeclareOk)
            peer.call(1, C.Select(), C.SelectOk)
            failpoint.arm(step, "enospc")
            try:
                publish = B.Publish(exchange="", routing_key="q")
                peer.write(b"".join(contents(1, publish, bodies, delivery_mode=2)))  # in one tick
                answers = []
                while not answers or not isinstance(answers[-1], commands.Connection.Close):
                    answers.append(peer.receive()[1])
            finally:
                failpoint.disarm()
        assert broker.failure is not None
    *confirms, close = answers
    assert [type(confirm) for confirm in confirms] == [B.Nack] * count and close.reply_code == 541
    with Broker.open(tmp_path / "data") as broker:
        assert [queue.messages for queue in broker.queues()] == [count if step in DURABLE else 0]


def test_what_comes_after_a_failed_commit_is_neither_confirmed_nor_kept(tmp_path: Path) -> None:
    """AMQP lets nothing follow a connection.close: so the end of the connection is the answer to it."""
    publish = B.Publish(exchange="", routing_key="q")
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as broker:
        with Peer(broker.amqp_urls[0]).opened(1) as peer:
            peer.call(1, Q.Declare(queue="q", durable=True), Q.DeclareOk)
            peer.call(1, C.Select(), C.SelectOk)
            failpoint.arm("store.commit.synced", "enospc")
            try:
                peer.write(b"".join(contents(1, publish, [b"first"], delivery_mode=2)))
                nack, close = peer.receive()[1], peer.receive()[1]
            finally:
                failpoint.disarm()
            assert (type(nack), nack.delivery_tag, close.reply_code) == (B.Nack, 1, 541)
            peer.write(b"".join(contents(1, publish, [b"later"] * 3, delivery_mode=2)))  # another tick
            peer.send(0, commands.Connection.CloseOk())
            with pytest.raises(Closed) as ended:
                peer.receive()
            assert "left: b''" in str(ended.value)  # nothing else came
    with Broker.open(tmp_path / "data") as broker:
        assert [queue.messages for queue in broker.queues()] == [0]
