"""A broker that is killed while messages wait in an exchange that delays or expire behind the head of a queue, and
while they are delivered or dead-lettered from there: each message whose commit was answered arrives once, and a
transaction whose commit was not, as a whole or not.

Not here: power cuts (the machine ``OnDisk`` of ``model/whole_broker.py``).
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pika
import pytest
from pika.exceptions import AMQPError

from tests.amqp_server import AmqpServed, NotReady
from tests.crash.pika_channel import connected
from tests.crash.test_amqp_crash import STEPS
from tests.page_blocks import code
from tests.progress import wait_until

pytestmark = pytest.mark.crash

QUEUE, LATER, SHORT = "orders", "orders-later", "orders-short"
STAYS = "stays"  # at the head of ``SHORT``, and the last part of each transaction
SIZE = 3  # messages of a transaction
KILLS = 4


def declare(served: AmqpServed) -> None:
    with connected(served) as channel:
        channel.queue_declare(QUEUE, durable=True)
        channel.exchange_declare(
            LATER, "x-delayed-message", durable=True, arguments={"x-delayed-type": "direct"}
        )
        channel.queue_bind(QUEUE, LATER, QUEUE)
        letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": QUEUE}
        channel.queue_declare(SHORT, durable=True, arguments=letters)


def send(channel: Any, body: str, ms: int) -> None:
    """It comes to ``QUEUE`` after so long, delayed."""
    properties = pika.BasicProperties(delivery_mode=2, headers={"x-delay": ms})
    channel.basic_publish(LATER, QUEUE, body.encode(), properties)


def send_expiring(channel: Any, body: str, ms: int) -> None:
    """The same as a dead letter."""
    properties = pika.BasicProperties(delivery_mode=2, expiration=str(ms))
    channel.basic_publish("", SHORT, body.encode(), properties)


def stay(served: AmqpServed) -> None:
    with connected(served) as channel:
        channel.basic_publish("", SHORT, STAYS.encode(), pika.BasicProperties(delivery_mode=2))


def arrived(served: AmqpServed, expected: set[str]) -> Counter[str]:
    """All that has arrived: these, and what comes in the time of a delay behind them."""
    found: Counter[str] = Counter()
    with connected(served) as channel:

        def look(for_: set[str]) -> bool:
            while (delivery := channel.basic_get(QUEUE, auto_ack=True))[0] is not None:
                found[delivery[2].decode()] += 1
            return for_ <= found.keys()

        wait_until(lambda: look(expected), "all that was sent arrives")
        send(channel, "last", 200)
        wait_until(lambda: look({"last"}), "the last one arrives")
    del found["last"]
    return found


@pytest.mark.product
@pytest.mark.parametrize("way", [send, send_expiring])
@pytest.mark.parametrize("step", [step for step in STEPS if step.startswith(("store.commit", "committer"))])
def test_killed_while_messages_wait_and_are_delivered_each_arrives_once(
    served: AmqpServed, step: str, way: Callable[[Any, str, int], None]
) -> None:
    declare(served)
    stay(served)
    answered: set[str] = set()
    sent = 0
    kills, hit = 0, 1
    while kills < KILLS:
        try:
            served.restart(f"{step}@{hit}=kill")
        except NotReady:  # in a delivery, before it served
            kills, hit = kills + 1, hit + 1
            continue
        with contextlib.suppress(AMQPError, ConnectionError), connected(served) as channel:
            channel.tx_select()
            while sent < 1_000:  # deliveries are commits between these
                sent += 1
                for part in range(SIZE):
                    way(channel, f"{sent}.{part}", 1 + part * 20)
                channel.tx_commit()
                answered |= {f"{sent}.{part}" for part in range(SIZE)}
        assert served.wait() == -9
        kills, hit = kills + 1, hit + 3
    served.restart()
    found = arrived(served, answered)
    assert set(found.values()) <= {1}
    whole = Counter(body.partition(".")[0] for body in found)
    assert set(whole.values()) <= {SIZE}
    assert left(served) == [STAYS]


def left(served: AmqpServed) -> list[str]:
    with connected(served) as channel:
        bodies = iter(lambda: channel.basic_get(SHORT, auto_ack=True)[2], None)
        return [body.decode() for body in bodies]


@pytest.mark.parametrize("kills", [5, pytest.param(40, marks=pytest.mark.soak)])
def test_killed_at_random_each_message_is_in_its_queue_or_a_dead_letter(
    served: AmqpServed, kills: int, seed: int
) -> None:
    """Of those that expire, some stand behind others that stay, and some are held when they expire."""
    declare(served)
    stay(served)
    chance = random.Random(seed)
    answered: set[str] = set()
    sent = 0
    for _ in range(kills):
        killer = threading.Timer(chance.uniform(0.05, 0.8), served.kill)
        killer.start()
        with contextlib.suppress(AMQPError, ConnectionError), connected(served) as channel:
            channel.tx_select()
            while True:
                bodies = [f"{(sent := sent + 1)}.{ms}" for ms in chance.choices([0, 5, 60, 86_400_000], k=3)]
                for body in bodies:
                    ms = body.partition(".")[2]
                    properties = pika.BasicProperties(delivery_mode=2, expiration=ms if int(ms) else None)
                    channel.basic_publish("", SHORT, body.encode(), properties)
                channel.tx_commit()
                answered.update(bodies)
                channel.basic_get(SHORT)
        killer.join()
        served.restart()
    short = {body for body in answered if body.endswith((".5", ".60"))}
    found = arrived(served, short)
    stayed = Counter(left(served))
    del stayed[STAYS]
    assert not {body for body in found if body not in short and body in answered}
    assert set((found + stayed).values()) <= {1}, "a message is in one place"
    assert answered <= (found + stayed).keys()


def test_what_is_due_while_the_broker_is_down_arrives_when_it_is_back(served: AmqpServed) -> None:
    declare(served)
    with connected(served) as channel:
        channel.confirm_delivery()
        for number in range(100):
            send(channel, str(number), 1 + number)
        send(channel, "in an hour", 3_600_000)
    served.restart()
    expected = set(map(str, range(100)))
    assert arrived(served, expected) == Counter(expected)
    with served.client() as client:
        (later,) = [each for each in client.exchanges() if each.name == LATER]
    assert later.arguments == {"x-delayed-type": "direct"}


def test_a_consumer_tries_again_later_in_one_transaction_or_not_at_all(served: AmqpServed) -> None:
    """It publishes the message again with a delay and acknowledges the delivery; a kill before the commit undoes
    both, and so does a rollback.
    """
    declare(served)
    with connected(served) as channel:
        channel.basic_publish("", QUEUE, b"order", pika.BasicProperties(delivery_mode=2))
    for end in ("killed", "rolled back", "committed"):
        with contextlib.suppress(AMQPError, ConnectionError), connected(served) as channel:
            channel.tx_select()
            method, _properties, body = channel.basic_get(QUEUE)
            assert body == b"order", end
            assert method.redelivered == (end != "killed"), end
            send(channel, f"{body.decode()} again", 100)
            channel.basic_ack(method.delivery_tag)
            if end == "killed":
                served.restart()
            elif end == "rolled back":
                channel.tx_rollback()
            else:
                channel.tx_commit()
    assert arrived(served, {"order again"}) == Counter(["order again"])


def test_the_program_of_the_page_publishes_what_arrives_later(served: AmqpServed) -> None:
    names: dict[str, Any] = {}
    exec(code("docs/delays.md", "def remind("), names)
    names["remind"](served.amqp_url, b"first", 0.2)
    with connected(served) as channel:
        assert channel.basic_get("reminders")[0] is None
        wait_until(lambda: channel.basic_get("reminders", auto_ack=True)[2] == b"first", "it arrives")
