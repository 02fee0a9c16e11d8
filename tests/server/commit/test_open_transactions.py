"""Open transactions and memory: many small ones count for the alarm, and are spilled before it stops a
publisher.
"""

from __future__ import annotations

import contextlib

from pamqp import commands as c

from broker_core.node.channel_commit import SPILL_BYTES
from broker_core.server.alarm import AlarmLimits
from broker_core.server.amqp.options import AmqpOptions
from tests.amqp_in_process import serving
from tests.amqp_peer import Peer, peer
from tests.progress import wait_until

MiB = 1024 * 1024
OPEN = 40


def answered(client: Peer, answer: type) -> None:
    """An alarm may be on for the moment between two pieces of what is spilled."""
    while not isinstance(client.receive()[1], answer):
        pass


def test_18_many_open_transactions_are_spilled_before_the_alarm_and_commit_whole() -> None:
    with (
        serving(options=AmqpOptions(alarms=AlarmLimits(memory_bytes=24 * MiB))) as broker,
        contextlib.ExitStack() as stack,
    ):
        peers: list[Peer] = [stack.enter_context(peer(broker.url, 1)) for _ in range(OPEN)]
        peers[0].call(1, c.Queue.Declare(queue="q", arguments={"x-max-length": 1_000_000}), c.Queue.DeclareOk)
        for one in peers:
            one.call(1, c.Tx.Select(), c.Tx.SelectOk)
            one.publish(1, "", "q", b"x" * MiB)
            one.send(1, c.Queue.Declare(queue="q", passive=True))
            answered(one, c.Queue.DeclareOk)
        wait_until(lambda: broker.broker.transaction_bytes() <= 6 * MiB)
        wait_until(lambda: not broker.server.shortages.reason)
        for one in peers:
            one.send(1, c.Tx.Commit())
            answered(one, c.Tx.CommitOk)
        assert [queue.messages for queue in broker.broker.queues()] == [OPEN]


def test_18_open_transactions_that_stay_in_memory_raise_the_alarm_until_they_end() -> None:
    with serving(options=AmqpOptions(alarms=AlarmLimits(memory_bytes=2 * MiB))) as broker:
        # of threads in the process: nobody else may touch their transactions
        channels = [broker.broker.channel() for _ in range(20)]
        channels[0].queue_declare("q")
        for channel in channels:
            channel.tx_select()
            channel.publish(bytes(SPILL_BYTES // 32), routing_key="q")
        wait_until(lambda: broker.server.shortages.reason == "low on memory")
        for channel in channels:
            channel.tx_rollback()
        wait_until(lambda: not broker.server.shortages.reason)
