"""A commit that fails on the disk is confirmed to nobody, at whichever step it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from pamqp import commands

from broker_core import failpoint
from broker_core.launcher import Broker
from tests.amqp_peer import Peer, contents

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
