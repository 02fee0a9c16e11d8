"""A producer that sends again whatever was not confirmed, while the broker is killed: each message is there once.

Not here: power cuts (the machine ``OnDisk`` of ``model/whole_broker.py``).
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pika
import pytest
from pika.exceptions import AMQPError

from broker_core.message.deduplication import HEADER
from tests.amqp_server import AmqpServed, NotReady
from tests.crash.pika_channel import connected
from tests.crash.test_amqp_crash import STEPS
from tests.page_blocks import code

pytestmark = pytest.mark.crash

QUEUE, END = "events", b"end"
MESSAGES = [b"%d" % number for number in range(9)]
KILLS = 3


def send(served: AmqpServed, exchange: str, size: int, messages: list[bytes] = MESSAGES) -> None:
    """All messages, also those of before; ``size`` of them in one transaction, or 1: each with its confirm."""
    with connected(served) as channel:
        channel.tx_select() if size > 1 else channel.confirm_delivery()
        for number, body in enumerate(messages, 1):
            properties = pika.BasicProperties(headers={HEADER: body.decode()}, delivery_mode=2)
            channel.basic_publish(exchange, QUEUE, body, properties)
            if size > 1 and number % size == 0:
                channel.tx_commit()


def take(served: AmqpServed, most: int) -> list[bytes]:
    found = []
    with connected(served) as channel:
        while len(found) < most and (delivery := channel.basic_get(QUEUE))[0] is not None:
            found.append(delivery[2])
            channel.basic_ack(delivery[0].delivery_tag)
        channel.queue_declare(QUEUE, passive=True)  # what was acked before is durable
    return found


def take_all(served: AmqpServed) -> list[bytes]:
    """What is there before one that is sent now."""
    found: list[bytes] = []
    while END not in found:
        found += take(served, 100)
    return found[:-1]


@pytest.mark.product
@pytest.mark.parametrize("exchange", ["", "once"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("step", [step for step in STEPS if step.startswith(("store.commit", "committer"))])
def test_what_is_sent_again_after_a_kill_is_dropped_if_and_only_if_the_first_was_committed(
    served: AmqpServed, step: str, size: int, exchange: str
) -> None:
    """Also of an exchange, which routes in a later commit what it has let through."""
    arguments = {"x-message-deduplication": True, "x-cache-size": 100}
    with connected(served) as channel:
        channel.queue_declare(QUEUE, durable=True, arguments=None if exchange else arguments)
        if exchange:
            arguments = {"x-cache-size": 100}
            channel.exchange_declare(exchange, "x-message-deduplication", durable=True, arguments=arguments)
            channel.queue_bind(QUEUE, exchange)
    taken: list[bytes] = []
    kills = 0
    hit = 1
    while kills < KILLS:
        try:
            served.restart(f"{step}@{hit}=kill")
        except NotReady:  # in a commit of its own
            hit += 1
            continue
        with contextlib.suppress(AMQPError, ConnectionError):
            send(served, exchange, size)
            break  # it made fewer commits than that
        assert served.wait() == -9
        kills += 1
        hit += 1
        served.start()
        taken += take(served, 1)  # consumed, and sent again all the same
    served.restart()
    send(served, exchange, size)
    send(served, exchange, 1, [END])
    assert kills > 0
    assert [*taken, *take_all(served)] == MESSAGES


def test_the_producer_of_the_page_sends_until_its_message_is_there_once(served: AmqpServed) -> None:
    names: dict[str, Any] = {}
    exec(code("docs/deduplication.md", "def send("), names)
    names["send"](served.amqp_url, b"first")
    with connected(served) as channel:
        properties = channel.basic_get(QUEUE, auto_ack=True)[1]
        names["uuid"] = SimpleNamespace(uuid4=lambda: properties.message_id)  # of the first: it was consumed
        names["send"](served.amqp_url, b"first")
        assert channel.basic_get(QUEUE) == (None, None, None)
