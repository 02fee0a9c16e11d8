"""``txmq message publish`` with properties and headers."""

from __future__ import annotations

import pytest

from broker_core.launcher import Broker
from broker_core.message.properties import Properties
from txmq import cli


@pytest.fixture
def queue(broker: Broker) -> Broker:
    with broker.channel() as channel:
        channel.queue_declare("q")
    return broker


def _properties(broker: Broker) -> Properties:
    with broker.channel() as channel:
        delivery = channel.get("q", no_ack=True)
        assert delivery is not None and delivery.body == b"m"
        return Properties.decode(delivery.message.properties)


def test_a_message_has_the_properties_and_headers_that_were_given(queue: Broker, url: str) -> None:
    given = ["content-type=text/plain", "correlation_id=a=b", "priority=3", "expiration=60000", "timestamp=7"]
    words = [word for each in given for word in ("--property", each)]
    words += ["--header", "n=9007199254740993", "--header", "name=grün", "--header", "empty="]
    assert cli.main(["message", "publish", "--queue", "q", *words, "m", "--url", url]) == 0
    assert _properties(queue) == Properties(
        content_type="text/plain",
        correlation_id="a=b",
        priority=3,
        expiration="60000",
        timestamp=7,
        delivery_mode=2,
        headers={"n": 9007199254740993, "name": "grün", "empty": ""},
    )
    assert cli.main(["message", "publish", "--queue", "q", "m", "--url", url]) == 0
    assert _properties(queue) == Properties(delivery_mode=2)
    assert cli.main(["message", "publish", "--queue", "q", "--transient", "m", "--url", url]) == 0
    assert _properties(queue) == Properties(delivery_mode=1)


def test_copies_go_to_a_list_of_routing_keys(
    queue: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["message", "publish", "--queue", "q", "m", "--url", url, "--header"]
    assert cli.main([*words, "CC=r"]) == 1 and "give a list of routing keys" in capsys.readouterr().err
    with queue.channel() as channel:
        channel.queue_declare("r")
    assert cli.main([*words, 'CC=["r"]', "--header", "text=[r"]) == 0
    assert _properties(queue).headers == {"CC": ["r"], "text": "[r"}
    assert [each.messages for each in queue.queues()] == [0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--property", "priority=999"), "priority"),
        (("--property", f"type={'x' * 300}"), "type"),
        (("--property", "expiration=soon"), "expiration"),
        (("--property", "user_id=ann"), "user_id"),
        (("--property", "type=\udc80"), "a property does not fit"),
        (("--header", f"n={1 << 70}"), "a property does not fit"),
        (("--header", f"{'k' * 300}=1"), "a property does not fit"),
        (("--header", "k=\udc80"), "a property does not fit"),
    ],
)
def test_a_property_that_does_not_fit_is_one_error(
    queue: Broker, url: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["message", "publish", "--queue", "q", *words, "m", "--url", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err
    assert [each.messages for each in queue.queues()] == [0]


@pytest.mark.parametrize(
    "words", [("--property", "colour=red"), ("--property", "priority=high"), ("--header", "k")]
)
def test_a_property_that_does_not_exist_is_a_wrong_command_line(
    url: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["message", "publish", "--queue", "q", *words, "m", "--url", url])
    assert ended.value.code == 2 and words[1].partition("=")[0] in capsys.readouterr().err
