"""Dispatch against a plain list of messages: any order of consuming, cancelling, settling, commits, rollbacks
and closing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_core.broker.channel import Channel
from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer
from broker_core.core.change import Change, InboxRow
from broker_core.message.message import Message
from broker_core.message.properties import Properties
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.broker.conftest import Clock
from tests.gates import examples


@dataclass
class Sent:
    """A message of the model: where it is, and whether somebody had it before."""

    number: int
    priority: int
    delivered: bool = False
    holder: tuple[Channel, int] | None = None  # and the tag
    marked: str = ""  # how the open transaction of its holder settles it
    gone: bool = False


@dataclass
class Peer:
    channel: Channel
    consumers: list[Consumer] = field(default_factory=list)


class DispatchModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.broker = LocalBroker(MemoryStore(), self.clock, upkeep=False)
        self.state = self.broker.state
        self.messages: list[Sent] = []
        self.peers: list[Peer] = []
        self.consumers: list[Consumer] = []
        self.taken: dict[Consumer, int] = {}
        self.holding: dict[tuple[Channel, int], Consumer] = {}  # by channel and tag
        self.auto: list[Sent] = []  # sent to consumers that do not ack, in this call
        self.active: Consumer | None = None  # the single active one
        self.ranked = self.single = False
        self.tags = 0
        self.queue: Queue | None = None

    def teardown(self) -> None:
        for peer in self.peers:
            self._close(peer)
        if self.queue is None:
            return
        left = [message.number for message in self.messages if not message.gone]
        with self.broker.channel() as channel:
            found = []
            while (delivery := channel.get("q")) is not None:
                found.append(int(delivery.body))
        assert sorted(found) == left, "nothing is lost, nothing comes back"
        self.broker.close()

    @initialize(
        arguments=st.sampled_from(
            [{}, {"x-max-priority": 3}, {"x-single-active-consumer": True}, {"x-delivery-limit": 1000}]
        )
    )
    def declare(self, arguments: dict[str, Any]) -> None:
        self.ranked = "x-max-priority" in arguments
        self.single = "x-single-active-consumer" in arguments
        self.broker.run(
            lambda state, change, _now: state.topology.declare_queue(change, "q", arguments=arguments)
        )
        self.queue = self.state.topology.queue("q")
        self._publish([0, 1, 0, 3, 2, 0, 1, 0])
        for transactional, prefetch in ((True, 2), (False, 0)):
            self._open(transactional, prefetch, 0)
            self._consume(self.peers[-1], no_ack=False, priority=0)

    # -- what consumers see ----------------------------------------------------------------------------------
    def _order(self, message: Sent) -> tuple[int, int]:
        return (-message.priority if self.ranked else 0, message.number)

    def _ready(self) -> list[Sent]:
        """In the order in which they have to come."""
        return sorted(
            (message for message in self.messages if not message.gone and message.holder is None),
            key=self._order,
        )

    def _holds(self, consumer: Consumer) -> int:
        return sum(
            message.holder is not None
            and self.holding.get((message.holder[0], message.holder[1])) is consumer
            for message in self.messages
        )

    def _credit(self, consumer: Consumer) -> bool:
        """From first principles: what is delivered to it and not settled, in a transaction not committed,
        counts.

        The limit of a channel holds up its consumers without acks too, as in RabbitMQ.
        """
        if not consumer.writable:
            return False
        channel = consumer.channel
        if not consumer.no_ack and consumer.prefetch and self._holds(consumer) >= consumer.prefetch:
            return False
        together = sum(self._holds(other) for other in self._known(channel))
        return not channel.prefetch or together < channel.prefetch

    def _known(self, channel: Channel) -> set[Consumer]:
        return {consumer for (owner, _), consumer in self.holding.items() if owner is channel}

    def send(
        self, consumer: Consumer, first_tag: int, redelivered: Sequence[bool], rows: Sequence[InboxRow]
    ) -> int:
        for tag, (row, again) in enumerate(zip(rows, redelivered, strict=True), first_tag):
            self.sent(consumer, tag, again, row)
        return len(rows)

    def sent(self, consumer: Consumer, tag: int, redelivered: bool, row: InboxRow) -> None:
        message = self.messages[int(row.body)]
        assert consumer in self.consumers, "a cancelled consumer gets nothing"
        assert self._ready()[0] is message, "the next one in the order of the queue, and nobody else has it"
        assert redelivered == message.delivered
        assert self._credit(consumer), "prefetch is never exceeded"
        if self.single:
            assert consumer is self.active, (
                "the first one stays it until it goes; then the one of the highest priority"
            )
        else:
            better = [
                other
                for other in self.consumers
                if other.priority > consumer.priority and self._credit(other)
            ]
            assert not better, "a consumer of higher priority comes first"
        message.delivered = True
        self.taken[consumer] = self.taken.get(consumer, 0) + 1
        if consumer.no_ack:
            message.holder = (consumer.channel, -1)
            self.auto.append(message)
        else:
            message.holder = (consumer.channel, tag)
            self.holding[(consumer.channel, tag)] = consumer

    # -- rules -----------------------------------------------------------------------------------------------
    @rule(
        count=st.integers(1, 6),
        priorities=st.lists(st.integers(0, 4), min_size=6, max_size=6),
        how=st.sampled_from(["plain", "open", "sealed"]),
    )
    def publish(self, count: int, priorities: list[int], how: str) -> None:
        self._publish(priorities[:count])
        if how == "open":
            self.broker.upkeep.close_open()
        elif how == "sealed":
            self.broker.upkeep.close_open()
            self.broker.upkeep.seal()

    def _publish(self, priorities: list[int]) -> None:
        assert self.queue is not None
        channel = Channel(self.state)
        for priority in priorities:
            number = len(self.messages)
            self.messages.append(Sent(number, min(priority, 3)))
            encoded = Properties(priority=priority).encode() if self.ranked else b""
            channel.publish(Message(b"%d" % number, "q", "", encoded), (self.queue,), False, 0)
        transaction = channel.take()
        self.broker.run(lambda state, change, now: state.transactions.commit(change, transaction, now))

    @precondition(lambda self: len(self.peers) < 4)
    @rule(transactional=st.booleans(), prefetch=st.integers(0, 6), together=st.sampled_from([0, 0, 1, 4]))
    def open_channel(self, transactional: bool, prefetch: int, together: int) -> None:
        self._open(transactional, prefetch, together)

    def _open(self, transactional: bool, prefetch: int, together: int) -> None:
        peer = Peer(Channel(self.state))
        if transactional:
            peer.channel.tx_select()
        peer.channel.qos(prefetch, False)
        peer.channel.qos(together, True)
        self.peers.append(peer)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), no_ack=st.booleans(), priority=st.sampled_from([0, 0, 0, 5]))
    def consume(self, data: st.DataObject, no_ack: bool, priority: int) -> None:
        self._consume(data.draw(st.sampled_from(self.peers)), no_ack, priority)

    def _consume(self, peer: Peer, no_ack: bool, priority: int) -> None:
        assert self.queue is not None
        self.tags += 1
        consumer = peer.channel.consume(
            self.queue, f"c{self.tags}", self.send, lambda _: None, no_ack=no_ack, priority=priority
        )
        peer.consumers.append(consumer)
        self.consumers.append(consumer)
        if self.active is None:
            self.active = consumer

    def _gone(self, consumer: Consumer) -> None:
        self.consumers.remove(consumer)
        if self.active is consumer:
            self.active = max(self.consumers, key=lambda other: other.priority, default=None)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        assert consumer.channel.cancel(consumer.tag) is consumer
        self._gone(consumer)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def its_connection_is_full_or_drained(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.consumers))
        consumer.writable = not consumer.writable
        self.state.pending_checks.wake(self.queue)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), prefetch=st.integers(0, 5))
    def qos_of_a_channel(self, data: st.DataObject, prefetch: int) -> None:
        data.draw(st.sampled_from(self.peers)).channel.qos(prefetch, True)

    @rule(budget=st.integers(1, 5))
    def dispatch_a_little(self, budget: int) -> None:
        self._dispatch(budget)

    @rule()
    def dispatch_again(self) -> None:
        self.dispatch_all()

    @rule()
    def dispatch_all(self) -> None:
        while self.state.pending_checks.runnable:
            self._dispatch(1000)

    def _dispatch(self, budget: int) -> None:
        self.auto, self.taken = [], {}
        before = [consumer for consumer in self.consumers if self._credit(consumer)]
        dispatched = self.state.dispatch.send(self.clock(), budget)
        assert dispatched.sent == sum(self.taken.values()) <= budget
        assert not dispatched.due and not dispatched.failed
        self.broker.run(lambda state, change, now: state.settlement.settle(change, dispatched.settles, now))
        for message in self.auto:
            message.gone, message.holder = True, None
        if not self.single and not self.state.pending_checks.runnable:
            for priority in {consumer.priority for consumer in before}:
                counts = [
                    self.taken.get(one, 0) for one in before if one.priority == priority and self._credit(one)
                ]
                assert not counts or max(counts) - min(counts) <= 1, (
                    "who could take more all the time got as much as the others"
                )

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        channel = data.draw(st.sampled_from(self.peers)).channel
        delivery = channel.get(self.queue)
        ready = self._ready()
        assert (delivery is None) == (not ready)
        if delivery is not None:
            assert int(delivery.body) == ready[0].number
            assert delivery.redelivered == ready[0].delivered
            ready[0].delivered, ready[0].holder = True, (channel, delivery.tag)

    def _held(self, channel: Channel) -> dict[int, Sent]:
        held = [
            message
            for message in self.messages
            if message.holder is not None and message.holder[0] is channel
        ]
        return {message.holder[1]: message for message in held if message.holder is not None}

    @precondition(lambda self: any(peer.channel.unacked for peer in self.peers))
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["ack", "requeue", "reject"]),
        multiple=st.booleans(),
        every=st.booleans(),
    )
    def settle(self, data: st.DataObject, outcome: Any, multiple: bool, every: bool) -> None:
        channel = data.draw(st.sampled_from([peer.channel for peer in self.peers if peer.channel.unacked]))
        tag = data.draw(st.sampled_from(list(channel.unacked)))
        held = {held: message for held, message in self._held(channel).items() if not message.marked}
        settled = [
            message
            for number, message in held.items()
            if number == tag or (multiple and (number < tag or every))
        ]
        channel.settle(0 if multiple and every else tag, outcome, multiple, 0)
        for message in settled:
            message.marked = outcome
        if not channel.transactional:
            transaction = channel.take()
            self.broker.run(lambda state, change, now: state.transactions.commit(change, transaction, now))
            self._settled(settled)

    def _settled(self, messages: list[Sent]) -> None:
        for message in messages:
            assert message.holder is not None
            self.holding.pop(message.holder, None)
            message.gone = message.marked != "requeue"
            message.holder, message.marked = None, ""

    @precondition(lambda self: any(peer.channel.transactional for peer in self.peers))
    @rule(data=st.data(), commit=st.booleans())
    def end_a_transaction(self, data: st.DataObject, commit: bool) -> None:
        channel = data.draw(
            st.sampled_from([peer.channel for peer in self.peers if peer.channel.transactional])
        )
        marked = [message for message in self._held(channel).values() if message.marked]
        if commit:
            transaction = channel.transaction
            self.broker.run(lambda state, change, now: state.transactions.commit(change, transaction, now))
            channel.finish()
            self._settled(marked)
        else:
            channel.rollback()
            for message in marked:
                message.marked = ""

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        channel = data.draw(st.sampled_from(self.peers)).channel
        held = [message for message in self._held(channel).values() if not message.marked]
        assert channel.recover(Change()) == len(held)
        for message in held:
            assert message.holder is not None
            self.holding.pop(message.holder, None)
            message.holder = None

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        self.peers.remove(peer)
        self._close(peer)

    def _close(self, peer: Peer) -> None:
        peer.channel.close()
        for consumer in peer.consumers:
            if consumer in self.consumers:
                self._gone(consumer)
        for message in self._held(peer.channel).values():
            assert message.holder is not None
            self.holding.pop(message.holder, None)
            message.holder, message.marked = None, ""

    @invariant()
    def nothing_stays_while_somebody_may_have_it(self) -> None:
        if self.queue is not None and not self.state.pending_checks.runnable and self._ready():
            asked = [self.active] if self.single and self.active else [] if self.single else self.consumers
            assert not [consumer for consumer in asked if self._credit(consumer)], "the queue is not woken"

    @invariant()
    def channels_hold_what_the_model_says(self) -> None:
        for peer in self.peers:
            held = self._held(peer.channel)
            assert list(peer.channel.unacked) == sorted(
                tag for tag, message in held.items() if not message.marked
            ), "in tag order"
            assert set(peer.channel.marked) == {tag for tag, message in held.items() if message.marked}
            assert peer.channel.consuming == sum((peer.channel, tag) in self.holding for tag in held)


TestDispatchModel = pytest.mark.slow(DispatchModel.TestCase)
TestDispatchModel.settings = settings(
    examples(150),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
