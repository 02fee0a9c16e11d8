"""What a dead letter has in x-death and under BCC after a client wrote its own x-death: as RabbitMQ 3.10.8, but
where RabbitMQ's queue crashes and loses the message.

The expected values stand here, so that they hold without a RabbitMQ; tests whose names begin with
``test_rabbitmq`` compare them with one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from bench.rabbitmq import Node
from tests.interop.asking import get, get_one, publish
from tests.interop.conftest import Fresh
from tests.interop.rabbitmq_node import rabbit
from tests.progress import wait_until

OTHER = {"queue": "other", "reason": "expired"}
OWN = {"queue": "SELF", "reason": "rejected"}
NEW = {**OWN, "count": 1, "exchange": "", "routing-keys": ["SELF"]}
FIRST = {f"x-first-death-{name}": OWN.get(name, "") for name in ("queue", "reason", "exchange")}
ODD = {"count": 4, "routing-keys": "k", "exchange": 4, "more": [{}]}

Headers = dict[str, Any]

# the headers of a message that is rejected from the queue SELF, and those of its dead letter
ALIKE: dict[str, tuple[Headers, Headers]] = {
    "none": ({}, {"x-death": [NEW], **FIRST}),
    "text": ({"x-death": "rejected"}, {"x-death": [NEW]}),
    "a table": ({"x-death": OWN}, {"x-death": [NEW]}),
    "nothing": ({"x-death": None}, {"x-death": [NEW]}),
    "a number": ({"x-death": 7}, {"x-death": [NEW]}),
    "an empty list": ({"x-death": []}, {"x-death": [NEW]}),
    "a count alone": ({"x-death": [{**OWN, "count": 5}]}, {"x-death": [{**OWN, "count": 6}]}),
    "a count below zero": ({"x-death": [{**OWN, "count": -7}]}, {"x-death": [{**OWN, "count": -6}]}),
    "no count": ({"x-death": [OWN]}, {"x-death": [{**OWN, "count": 1}]}),
    "no count beside another": (
        {"x-death": [OWN, {**OTHER, "count": 2}]},
        {"x-death": [{**OWN, "count": 2}, {**OTHER, "count": 2}]},
    ),
    "no count twice": ({"x-death": [OWN, OWN]}, {"x-death": [{**OWN, "count": 3}]}),
    "another without a count": ({"x-death": [OTHER]}, {"x-death": [NEW, OTHER]}),
    "others without a count": (
        {"x-death": [OTHER, OTHER, {**OWN, "count": 1}]},
        {"x-death": [{**OWN, "count": 2}, {**OTHER, "count": 2}]},
    ),
    "each twice": (
        {"x-death": [{**entry, "count": count} for entry in (OWN, OTHER) for count in (2, 9)]},
        {"x-death": [{**OWN, "count": 3}, {**OTHER, "count": 2}]},
    ),
    "another with a text as its count": (
        {"x-death": [{**OTHER, "count": "5"}]},
        {"x-death": [NEW, {**OTHER, "count": "5"}]},
    ),
    "an empty entry": ({"x-death": [{}]}, {"x-death": [NEW, {}]}),
    "no reason": ({"x-death": [{"queue": "SELF"}]}, {"x-death": [NEW, {"queue": "SELF"}]}),
    "a reason that is a list": (
        {"x-death": [{**OWN, "reason": ["rejected"]}]},
        {"x-death": [NEW, {**OWN, "reason": ["rejected"]}]},
    ),
    "other fields": ({"x-death": [{**OWN, **ODD}]}, {"x-death": [{**OWN, **ODD, "count": 5}]}),
    "a first death that is none": ({"x-first-death-queue": "a"}, {"x-death": [NEW], **FIRST}),
    "first deaths of other types": (
        {"x-first-death-queue": 1, "x-first-death-reason": [None], "x-first-death-exchange": None},
        {"x-death": [NEW], **FIRST},
    ),
    "a first death beside another": (
        {"x-first-death-queue": "a", "x-death": [OTHER]},
        {"x-first-death-queue": "a", "x-death": [NEW, OTHER]},
    ),
}
AGAIN = {"x-death": [{**OWN, "count": 1}]}
# RabbitMQ's queue crashes at these; its third crash within seconds takes the queue away
CRASHES: dict[str, tuple[Headers, Headers]] = {
    "numbers": ({"x-death": [1, 2]}, {"x-death": [NEW]}),
    "a table and a number": ({"x-death": [{**OWN, "count": 1}, 3]}, {"x-death": [{**OWN, "count": 2}]}),
    "a text as the count": ({"x-death": [{**OWN, "count": "5"}]}, AGAIN),
    "a bool as the count": ({"x-death": [{**OWN, "count": True}]}, AGAIN),
    "a decimal as the count": ({"x-death": [{**OWN, "count": Decimal("1.5")}]}, AGAIN),
}
# and leaves these as they are: nothing as a count, the order of others turned round at each death
DIFFERENT: dict[str, tuple[Headers, Headers]] = {
    "nothing as the count": ({"x-death": [{**OWN, "count": None}]}, AGAIN),
    "three others": (
        {"x-death": [{**OTHER, "queue": name, "count": 1} for name in "abc"]},
        {"x-death": [NEW, *({**OTHER, "queue": name, "count": 1} for name in "abc")]},
    ),
}


def _named(value: Any, queue: str) -> Any:
    if isinstance(value, dict):
        return {name: _named(each, queue) for name, each in value.items()}
    if isinstance(value, list):
        return [_named(each, queue) for each in value]
    return queue if value == "SELF" else value


def _reject(channel: BlockingChannel, queue: str, dead: str, headers: Headers) -> None:
    channel.queue_declare(dead)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    channel.basic_publish("", queue, b"m", pika.BasicProperties(headers=_named(headers, queue)))
    channel.basic_reject(get_one(channel, queue).tag, requeue=False)


def _letter(channel: BlockingChannel, queue: str, dead: str, headers: Headers) -> Headers:
    """Returns the headers of the dead letter of a message with ``headers``, the time aside."""
    _reject(channel, queue, dead, headers)
    found: Headers = get_one(channel, dead, auto_ack=True).properties.headers
    found["x-death"][0].pop("time", None)
    return found


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with rabbit(tmp_path_factory.mktemp("rabbit")) as running:
        yield running


@pytest.fixture
def rabbitmq_channel(rabbitmq: Node) -> Iterator[BlockingChannel]:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.uri)) as connection:
        yield connection.channel()


@pytest.mark.parametrize("name", ALIKE)
def test_x_death_of_a_client_is_read_as_rabbitmq_reads_it(
    channel: BlockingChannel, fresh: Fresh, name: str
) -> None:
    headers, expected = ALIKE[name]
    queue = fresh("queue")
    assert _letter(channel, queue, fresh("dead"), headers) == _named(expected, queue)


def test_rabbitmq_gives_the_same_headers(rabbitmq_channel: BlockingChannel) -> None:
    found = {name: _letter(rabbitmq_channel, name, "dead", headers) for name, (headers, _) in ALIKE.items()}
    assert found == {name: _named(expected, name) for name, (_, expected) in ALIKE.items()}


@pytest.mark.txmq_only
@pytest.mark.parametrize("name", CRASHES | DIFFERENT)
def test_a_damaged_x_death_loses_no_message(channel: BlockingChannel, fresh: Fresh, name: str) -> None:
    headers, expected = (CRASHES | DIFFERENT)[name]
    queue = fresh("queue")
    assert _letter(channel, queue, fresh("dead"), headers) == _named(expected, queue)


def test_rabbitmq_crashes_at_a_damaged_x_death(rabbitmq: Node, rabbitmq_channel: BlockingChannel) -> None:
    def crashes() -> int:
        logs = (path.read_text() for path in (rabbitmq.folder / "log").rglob("*.log"))
        return sum(len(re.findall("reason: {(?:function_clause|badarith)", log)) for log in logs)

    for count, (name, (headers, _)) in enumerate(CRASHES.items()):
        assert crashes() == count
        _reject(rabbitmq_channel, name, "dead", headers)
        wait_until(lambda count=count: crashes() > count, f"a crash at {name}")
    assert get(rabbitmq_channel, "dead") is None
    for name, (headers, expected) in DIFFERENT.items():
        assert _letter(rabbitmq_channel, name, "dead", headers) != _named(expected, name)


def _by_key(channel: BlockingChannel, fresh: Fresh) -> dict[str, list[str]]:
    """Returns the routing keys in x-death of each dead letter, by the key that its queue is bound with."""
    exchange, queue, places = fresh("dlx"), fresh("queue"), {key: fresh(key) for key in ("to", "cc", "bcc")}
    channel.exchange_declare(exchange, "direct")
    for key, place in places.items():
        channel.queue_declare(place)
        channel.queue_bind(place, exchange, queue if key == "to" else key)
    channel.queue_declare(queue, arguments={"x-dead-letter-exchange": exchange})
    publish(channel, queue, "m", headers={"CC": ["cc"], "BCC": ["bcc"]})
    channel.basic_reject(get_one(channel, queue).tag, requeue=False)
    found = {}
    get_one(channel, places["cc"])  # they all come in one commit
    publish(channel, places["bcc"], "end")
    for key in ("to", "bcc"):
        letter = get_one(channel, places[key])
        if letter.body == b"m":
            assert "BCC" not in letter.properties.headers
            found[key] = [
                "to" if k == queue else k for k in letter.properties.headers["x-death"][0]["routing-keys"]
            ]
    return found


@pytest.mark.txmq_only
def test_a_dead_letter_goes_by_the_keys_under_cc_and_not_by_those_under_bcc(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    assert _by_key(channel, fresh) == {"to": ["to", "cc"]}


def test_rabbitmq_sends_a_dead_letter_by_the_keys_under_bcc_too(rabbitmq_channel: BlockingChannel) -> None:
    names = iter("abcdef")
    assert _by_key(rabbitmq_channel, lambda word: word + next(names)) == {
        "to": ["to", "cc"],
        "bcc": ["to", "cc"],
    }
