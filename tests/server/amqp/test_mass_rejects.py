"""One AMQP client rejects a great many messages at once: the others are answered meanwhile, and a transaction
stays whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp.commands import Basic, Confirm, Queue, Tx

from broker_core.broker.message.settlement import MANY_REJECTS
from broker_core.message.field_table import MAX_VALUES
from tests.amqp_peer import Peer, content, encoded, raw
from tests.amqp_server import AmqpServed, serving

MANY = 6 * MANY_REJECTS


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[AmqpServed]:
    with serving(tmp_path / "data") as broker:
        yield broker


def holding(broker: AmqpServed) -> Peer:
    """A client that holds all messages of ``q``, whose dead letters go to ``dead``."""
    peer = Peer(broker.amqp_url)
    peer.opened(1)
    peer.call(1, Queue.Declare(queue="dead", durable=True), Queue.DeclareOk)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    peer.call(1, Queue.Declare(queue="q", durable=True, arguments=arguments), Queue.DeclareOk)
    peer.write(
        b"".join(
            content(1, Basic.Publish(routing_key="q"), b"%d" % number, delivery_mode=2)
            for number in range(MANY)
        )
    )
    peer.call(1, Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
    for _ in range(MANY):
        peer.expect(Basic.Deliver, 1)
        peer.content(1)
    return peer


def counts(broker: AmqpServed, peer: Peer, request: bytes, answer: type | None) -> list[int]:
    """How many dead letters another client sees, from before ``peer`` asks until all are there."""
    seen: list[int] = []
    with Peer(broker.amqp_url) as other:
        other.opened(1)
        peer.write(request)
        while not seen or seen[-1] < MANY:
            seen.append(other.count(1, "dead"))
    if answer is not None:
        peer.expect(answer, 1)
    return seen


def test_others_are_answered_between_the_commits_of_a_great_many_rejects(broker: AmqpServed) -> None:
    with holding(broker) as peer:
        seen = counts(
            broker, peer, encoded(1, Basic.Nack(delivery_tag=0, multiple=True, requeue=False)), None
        )
        assert len({count for count in seen if 0 < count < MANY}) >= 2
        assert seen == sorted(seen)
        assert peer.count(1, "q") == 0
    assert broker.running


def test_publishes_beside_a_great_many_rejects_are_confirmed_in_order(broker: AmqpServed) -> None:
    publishes = 50
    publish = content(1, Basic.Publish(routing_key="other"), b"x", delivery_mode=2)
    with holding(broker) as peer, Peer(broker.amqp_url) as other:
        other.opened(1)
        peer.call(1, Queue.Declare(queue="other", durable=True), Queue.DeclareOk)
        peer.call(1, Confirm.Select(), Confirm.SelectOk)
        peer.write(publish + encoded(1, Basic.Nack(delivery_tag=0, multiple=True, requeue=False)))
        confirmed = [0]
        for _ in range(publishes - 1):
            peer.write(publish)
            other.count(1, "dead")  # so that they come in several ticks
        while confirmed[-1] < publishes:
            ack = peer.expect(Basic.Ack, 1)
            assert ack.multiple or ack.delivery_tag == confirmed[-1] + 1
            confirmed.append(ack.delivery_tag)
        assert confirmed == sorted(set(confirmed))
        assert peer.count(1, "other") == publishes


def test_others_are_answered_while_a_transaction_of_a_great_many_rejects_commits_whole(
    broker: AmqpServed,
) -> None:
    with holding(broker) as peer:
        peer.call(1, Tx.Select(), Tx.SelectOk)
        request = encoded(1, Basic.Nack(delivery_tag=0, multiple=True, requeue=False)) + encoded(
            1, Tx.Commit()
        )
        assert set(counts(broker, peer, request, Tx.CommitOk)) <= {0, MANY}
    broker.kill()
    broker.start()
    with Peer(broker.amqp_url) as peer:
        peer.opened(1)
        assert (peer.count(1, "q"), peer.count(1, "dead")) == (0, MANY)


def test_a_client_that_leaves_in_such_a_commit_leaves_all_of_it_or_nothing(broker: AmqpServed) -> None:
    with holding(broker) as peer:
        peer.call(1, Tx.Select(), Tx.SelectOk)
        peer.write(
            encoded(1, Basic.Nack(delivery_tag=0, multiple=True, requeue=False)) + encoded(1, Tx.Commit())
        )
        peer.abort()
    with Peer(broker.amqp_url) as other:
        other.opened(1)
        found = (0, 0)
        while sum(found) < MANY:
            found = (other.count(1, "q"), other.count(1, "dead"))
        assert found in ((MANY, 0), (0, MANY))


@pytest.mark.parametrize("value", [b"V", b"A\0\0\0\0"])
def test_others_are_answered_between_dead_letters_whose_headers_have_very_many_values(
    broker: AmqpServed, value: bytes
) -> None:
    """Headers take time by their values, not by their bytes, and a whole table is read for each dead letter."""
    table = b"\x01aA" + (len(value) * (MAX_VALUES - 1)).to_bytes(4, "big") + value * (MAX_VALUES - 1)
    header = struct.pack(">HHQHI", 60, 0, 1, 0x3000, len(table)) + table + b"\x02"
    message = encoded(1, Basic.Publish(routing_key="q")) + raw(2, 1, header) + raw(3, 1, b"x")
    many = 300
    with Peer(broker.amqp_url) as peer, Peer(broker.amqp_url) as other:
        peer.opened(1)
        other.opened(1)
        peer.call(1, Queue.Declare(queue="dead", durable=True), Queue.DeclareOk)
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        peer.call(1, Queue.Declare(queue="q", durable=True, arguments=arguments), Queue.DeclareOk)
        peer.write(message * many)
        peer.call(1, Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
        for _ in range(many):
            peer.expect(Basic.Deliver, 1)
            peer.content(1)
        peer.send(1, Basic.Nack(delivery_tag=0, multiple=True, requeue=False))
        seen = [0]
        while seen[-1] < many:
            seen.append(other.count(1, "dead"))
        assert len({count for count in seen if 0 < count < many}) >= 2, seen
