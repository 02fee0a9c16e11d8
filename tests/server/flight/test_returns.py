"""Messages of a transaction over Flight that no queue has come back a block at a time: an unread answer holds
little of the broker's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench import broker as bench
from broker_core.client.broker import BrokerClient
from broker_core.client.channel import RemoteChannel
from broker_core.core import errors, failpoint
from broker_core.launcher import Broker
from broker_core.node import channel_commit
from tests.make import around
from tests.server.flight.test_unread_streams import MiB, anonymous

COUNT = 200


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.setattr(channel_commit, "SPILL_BYTES", MiB // 4)
    with Broker.open(tmp_path / "data") as found:
        with found.channel() as channel:
            channel.queue_declare("q")
        yield found


@pytest.fixture
def channel(broker: Broker) -> Iterator[RemoteChannel]:
    with BrokerClient(broker.url) as client, client.channel() as found:
        found.tx_select()
        yield found


def publish(channel: RemoteChannel, count: int = COUNT, size: int = 10_000) -> list[int]:
    for number in range(count):
        channel.publish((b"%d " % number).ljust(size), routing_key="nowhere", mandatory=True)
    channel.publish(b"x", routing_key="q", mandatory=True)
    return [*range(count)]


def numbers(channel: RemoteChannel) -> list[int]:
    found, channel.returned = [int(each.body.split()[0]) for each in channel.returned], []
    return found


def blocks(broker: Broker) -> int:
    with broker.local.look as state:
        return sum(block.inbox is None for block in state.blocks.by_id.values())


@pytest.mark.parametrize("count", [0, 1, 3, 26, COUNT])
def test_all_come_back_in_order_and_their_blocks_are_forgotten(
    count: int, broker: Broker, channel: RemoteChannel
) -> None:
    for _ in range(2):
        sent = publish(channel, count)
        channel.tx_commit()
        assert numbers(channel) == sent
        assert blocks(broker) <= 1  # of the message that has a queue
    assert broker.queues()[0].messages == 2


def test_each_page_is_asked_for_again_if_its_answer_is_lost(broker: Broker, channel: RemoteChannel) -> None:
    sent = publish(channel)
    for hit in (1, 3, 5):
        failpoint.arm("server.reply.take_returned", _lost, hit=hit)
    failpoint.arm("server.reply.tx_commit", _lost)
    try:
        channel.tx_commit()
    finally:
        failpoint.disarm()
    assert numbers(channel) == sent and blocks(broker) <= 1


def _lost(_name: str) -> None:
    raise ConnectionResetError


def lose_returned(patch: pytest.MonkeyPatch) -> None:
    def lost(send: Any, channel: RemoteChannel, word: str, **rest: Any) -> object:
        if word == "take_returned":
            raise errors.ConnectionFailed("lost")
        return send(channel, word, **rest)

    around(patch, RemoteChannel, "_send", lost)


def test_what_is_not_asked_for_ends_with_the_next_commit_or_the_channel(
    broker: Broker, channel: RemoteChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        lose_returned(patch)
        publish(channel)
        channel.tx_commit()
        assert blocks(broker) > 5
    sent = publish(channel, 3)
    channel.tx_commit()
    assert numbers(channel) == sent and blocks(broker) <= 2
    with monkeypatch.context() as patch:
        lose_returned(patch)
        publish(channel)
        channel.tx_commit()
    assert blocks(broker) > 5
    channel.close()
    assert blocks(broker) <= 3


def test_a_commit_whose_broker_is_lost_before_all_came_back_has_taken_place(
    broker: Broker, channel: RemoteChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(channel)
    lose_returned(monkeypatch)
    channel.tx_commit()
    assert broker.queues()[0].messages == 1


def test_routed_counts_what_is_stored_and_commits_nothing(broker: Broker, channel: RemoteChannel) -> None:
    publish(channel)
    with pytest.raises(errors.Unroutable, match=f"{COUNT} messages of .* with the key 'nowhere'"):
        channel.tx_commit(routed=True)
    assert broker.queues()[0].messages == 0 and blocks(broker) == 0


def test_many_commits_at_once_hold_little_memory(tmp_path: Path) -> None:
    """12 MB of messages each, and in one answer their text, and gRPC's copy."""
    channels = 20  # their answers, texts and copies are 720 MB
    ready = threading.Barrier(channels + 1)
    with bench.serving(tmp_path / "data") as served:

        def commit(_number: int) -> int:
            with BrokerClient(served.url) as client, client.channel() as channel:
                channel.tx_select()
                for _ in range(120):
                    channel.publish(bytes(100_000), routing_key="nowhere", mandatory=True)
                for _ in range(2):
                    ready.wait()
                channel.tx_commit()
                return len(channel.returned)

        with ThreadPoolExecutor(channels) as pool:
            ended = [pool.submit(commit, number) for number in range(channels)]
            ready.wait()
            peak = before = anonymous(served.pid)
            ready.wait()
            while not all(each.done() for each in ended):
                peak = max(peak, anonymous(served.pid))
                threading.Event().wait(0.01)
        assert [each.result() for each in ended] == [120] * channels
    assert peak - before < 300, (before, peak)
