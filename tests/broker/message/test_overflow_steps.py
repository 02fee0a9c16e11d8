"""A queue that is limited in bytes drops many messages in one step, and the same ones as one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from broker_core.broker.message import overflow
from broker_core.message.properties import Properties
from tests.broker.conftest import Node

KINDS: dict[str, dict[str, object]] = {"plain": {}, "ranked": {"x-max-priority": 3}}


def history(node: Node, seed: int, arguments: dict[str, object]) -> Iterator[list[bytes]]:
    """What the queue has after each commit, while some messages are held and some come back."""
    chance = random.Random(seed)
    with node.channel() as publisher, node.channel() as taker:
        publisher.queue_declare("q", arguments={"x-max-length-bytes": 400, **arguments})
        publisher.tx_select()
        tags: list[int] = []
        for step in range(30):
            for number in range(chance.randrange(40)):
                body = (b"%d/%d " % (step, number)) * chance.choice([0, 1, 1, 2, 30])
                publisher.publish(body, "", "q", Properties(priority=chance.randrange(4)).encode())
            publisher.tx_commit()
            yield node.browse("q")
            for _ in range(chance.randrange(4)):
                taken = taker.get("q")
                if taken is not None:
                    tags.append(taken.tag)
            if tags and chance.random() < 0.5:
                taker.nack(tags.pop(chance.randrange(len(tags))), requeue=chance.random() < 0.7)
            yield node.browse("q")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_many_in_a_step_are_those_that_leave_one_by_one(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = list(history(Node(), seed, KINDS[kind]))
    monkeypatch.setattr(overflow, "STEP", 1)
    assert together == list(history(Node(), seed, KINDS[kind]))
    assert any(together)


@pytest.mark.parametrize("end", ["close", "recover"])
def test_what_comes_back_from_a_channel_counts_again_and_the_oldest_leave(node: Node, end: str) -> None:
    with node.channel() as channel:
        channel.queue_declare("letters")
        limits = {"x-max-length": 2, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "letters"}
        channel.queue_declare("q", arguments=limits)
        taker = node.channel()
        for body in (b"0", b"1", b"2", b"3"):
            channel.publish(body, "", "q")
            if body < b"2":
                assert taker.get("q")
        assert node.browse("q") == [b"0", b"1", b"2", b"3"]  # two of them held
        taker.close() if end == "close" else taker.recover()
        node.clock.advance(1)
        node.broker.upkeep.expire_due()
        assert node.browse("q") == [b"2", b"3"] and node.browse("letters") == [b"0", b"1"]
        taker.close()
