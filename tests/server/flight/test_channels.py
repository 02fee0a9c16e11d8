"""Channels of other processes: a call is done once, however often and however late it arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from broker_core.broker.access.rights import Rights
from broker_core.core import errors, failpoint
from broker_core.flight import contract
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.audit import Audit
from broker_core.server.access.caller import Caller
from broker_core.server.access.identity import OWNER
from broker_core.server.flight.call_permissions import CallPermissions
from broker_core.server.flight.channels import FlightChannels
from broker_core.server.quotas import Quotas
from broker_core.store.memory import MemoryStore
from tests.reading import fetched


class Calls:
    def __init__(self) -> None:
        self.broker = LocalBroker(MemoryStore(), upkeep=False)
        permits = CallPermissions(VhostEngines(self.broker), self.broker, Audit())
        self.channels = FlightChannels(self.broker, permits, Quotas().channels)
        state = self.broker.state
        self.owner = Caller(OWNER, Rights(state.users, "", owner=True), "", state)
        with self.broker.channel() as channel:
            channel.queue_declare("q")

    def say(self, word: str, number: int, channel: str = "c1", **arguments: Any) -> Any:
        return self.channels.call(word, contract.ChannelCall(channel, number, arguments), self.owner)

    def publish(self, number: int, body: bytes) -> Any:
        return self.say(
            "publish", number, body=body, exchange="", routing_key="q", properties=b"", mandatory=False
        )

    def bodies(self) -> list[bytes]:
        queue = self.broker.state.topology.queue("q")
        return [
            fetched(self.broker, queue, offset).body
            for offset in range(queue.progress.floor, queue.log.visible_end)
        ]


@pytest.fixture
def calls() -> Iterator[Calls]:
    found = Calls()
    found.say("open", 0)
    yield found
    found.channels.close()
    found.broker.close()


def test_a_call_sent_twice_is_done_once_and_answered_twice(calls: Calls) -> None:
    for _ in range(2):
        assert calls.say("queue_declare", 1, queue="") == calls.say("queue_declare", 1, queue="")
    calls.publish(2, b"order")
    calls.publish(2, b"order")
    for _ in range(2):
        with pytest.raises(errors.QueueNotFound):
            calls.say("get", 3, queue="nowhere")
    assert calls.bodies() == [b"order"]


def test_an_older_call_that_arrives_late_is_refused_and_not_made_again(calls: Calls) -> None:
    calls.publish(1, b"order")
    calls.publish(2, b"next")
    for number in (1, 0, -1):
        with pytest.raises(errors.RemoteProtocolError, match="is not repeated"):
            calls.publish(number, b"order")
    calls.publish(3, b"last")
    assert calls.bodies() == [b"order", b"next", b"last"]


def test_a_call_behind_a_gap_is_refused_and_the_next_one_is_taken(calls: Calls) -> None:
    calls.publish(1, b"order")
    with pytest.raises(errors.RemoteProtocolError, match="calls are missing"):
        calls.publish(3, b"too early")
    calls.publish(2, b"next")
    assert calls.bodies() == [b"order", b"next"]


def test_a_call_with_a_bad_argument_takes_its_number(calls: Calls) -> None:
    for _ in range(2):
        with pytest.raises(errors.OptionError, match="durable"):
            calls.say("queue_declare", 1, queue="w", durable="yes")
    calls.publish(2, b"order")
    assert calls.bodies() == [b"order"]


def test_a_late_open_of_a_channel_that_has_ended_opens_none_so_its_calls_are_not_made_again(
    calls: Calls,
) -> None:
    calls.publish(1, b"order")
    calls.say("close", 0)
    with pytest.raises(errors.RemoteProtocolError, match="has ended"):
        calls.say("open", 0)
    with pytest.raises(errors.ConnectionFailed, match="is gone"):
        calls.publish(1, b"order")
    assert calls.bodies() == [b"order"]


def test_a_channel_is_gone_for_nobody_before_its_last_call_is_answered(calls: Calls) -> None:
    """Who is told that it is gone asks whether its commit took place: it must be over by then."""
    entered, leave = threading.Event(), threading.Event()

    def slow(_name: str) -> None:
        entered.set()
        assert leave.wait(600)

    calls.say("tx_select", 1)
    calls.publish(2, b"order")
    failpoint.arm("committer.planned", slow)
    first = threading.Thread(target=calls.say, args=("tx_commit", 3))
    first.start()
    assert entered.wait(600)
    ending = threading.Thread(target=calls.say, args=("close", 0))
    ending.start()
    answers: list[Any] = []

    def again() -> None:
        try:
            answers.append(calls.say("tx_commit", 3))
        except errors.ConnectionFailed as error:
            answers.append((error, calls.bodies()))

    retry = threading.Thread(target=again)
    retry.start()
    retry.join(0.1)
    assert answers == []
    leave.set()
    failpoint.disarm()
    for thread in (first, ending, retry):
        thread.join()
    (answer,) = answers
    assert answer == 0 or answer[1] == [b"order"]  # that none came back, or that the channel is gone
    assert calls.bodies() == [b"order"]
