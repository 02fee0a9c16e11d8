"""``txmq exchange list``, ``bindings``, ``unbind``, ``purge`` and ``delete`` against a broker."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from broker_core.client.broker import BrokerClient
from broker_core.launcher import Broker
from txmq import cli


@pytest.fixture
def run(broker: Broker, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs a command: its JSON, or the line of its error."""

    def txmq(*arguments: str) -> Any:
        code = cli.main([*arguments, "--json", "--url", broker.url])
        captured = capsys.readouterr()
        if code:
            assert (code, captured.out) == (1, "")
            return captured.err
        return json.loads(captured.out)

    yield txmq
    BrokerClient(broker.url).close()


def test_exchanges_and_bindings_are_listed_and_unbound(broker: Broker, run: Any) -> None:
    with broker.channel() as channel:
        channel.exchange_declare("events", "topic", arguments={"alternate-exchange": "amq.fanout"})
        channel.queue_declare("q")
        channel.queue_bind("q", "events", "a.#")
        channel.queue_bind("q", "amq.headers", "", {"x-match": "all", "n": 1})
    listed = {row["name"]: row for row in run("exchange", "list")}
    assert listed["events"] == {
        "name": "events",
        "type": "topic",
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "bindings": 1,
        "arguments": {"alternate-exchange": "amq.fanout"},
    }
    assert set(listed) >= {"", "amq.direct", "amq.topic", "amq.headers"}
    both = [
        {"exchange": "amq.headers", "routing_key": "", "arguments": {"x-match": "all", "n": 1}},
        {"exchange": "events", "routing_key": "a.#", "arguments": {}},
    ]
    assert run("exchange", "bindings") == [{**each, "destination": "q", "kind": "queue"} for each in both]
    run("exchange", "unbind", "--yes", "amq.headers", "q", "--argument", "x-match=all", "--argument", "n=1")
    assert "removes the binding of events to q by 'a.#'" in run("exchange", "unbind", "events", "q", "a.#")
    assert run("exchange", "unbind", "--yes", "events", "q", "a.#")["queue"] == "q"
    assert run("exchange", "bindings") == []


def test_what_drops_messages_is_asked_first(
    broker: Broker, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker.channel() as channel:
        channel.exchange_declare("x", "fanout")
        channel.queue_declare("q")
        for _ in range(3):
            channel.publish(b"m", routing_key="q")
    counts = lambda: {row["name"]: row["messages"] for row in run("queue", "list")}  # noqa: E731
    assert "purge drops 3 messages of queue q, which needs --yes" in run("queue", "purge", "q")
    assert "delete drops queue q with 3 messages, and its bindings, which needs --yes" in run(
        "queue", "delete", "q"
    )
    assert "delete drops exchange x and its bindings, which needs --yes" in run("exchange", "delete", "x")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert "you did not agree" in run("queue", "purge", "q")
    assert counts() == {"q": 3}
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert cli.main(["queue", "purge", "q", "--url", broker.url]) == 0
    assert capsys.readouterr().out == "purged 3 from q\n"
    assert run("exchange", "delete", "x", "--yes") == {"exchange": "x"}
    assert run("queue", "delete", "q", "--yes") == {"queue": "q"}
    assert counts() == {} and "x" not in {row["name"] for row in run("exchange", "list")}


def test_an_exchange_that_is_not_there_is_not_deleted_and_a_queue_without_a_name_not_declared(
    broker: Broker, run: Any
) -> None:
    assert "no exchange 'x'" in run("exchange", "delete", "x", "--yes")
    assert "a queue without a name" in run("queue", "declare", "")
    assert broker.queues() == []


def test_names_that_look_alike_do_not_in_a_table(
    broker: Broker, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["pay", "pay ", " pay", "p  ay", "pay\n", "pay\\n", "\u202epay"]
    with broker.channel() as channel:
        for name in names:
            channel.queue_declare(name)
    assert {row["name"] for row in run("queue", "list")} == {*names}, "JSON has them as they are"
    assert cli.main(["queue", "list", "--url", broker.url]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(shown) == sorted(["pay", "pay\\x20", "\\x20pay", "p", "pay\\n", "pay\\\\n", "\\u202epay"])


def test_a_queue_that_is_not_there_or_that_an_app_reads_is_not_purged_or_deleted(
    broker: Broker, run: Any
) -> None:
    for words in (("queue", "purge", "x"), ("queue", "delete", "x")):
        assert "no queue 'x'" in run(*words, "--yes") or words[1] == "delete"
        assert "no queue 'x'" in run(*words)
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.publish(b"m", routing_key="q")
    engine = broker.engine
    from broker_core.engine import START, Limit, Origin

    engine.claim("app", ["q"], {"q": START}, Limit(), Origin("earliest"), "fail")
    assert "TXMQ_RESOURCE_LOCKED" in run("queue", "purge", "q", "--yes")
    assert "(app app reads it)" in run("queue", "delete", "q")
    assert "TXMQ_RESOURCE_LOCKED" in run("queue", "delete", "q", "--yes")
    assert [row["messages"] for row in run("queue", "list")] == [1]


def test_what_is_named_twice_is_refused(broker: Broker, run: Any) -> None:
    """Which of the two would count is a guess."""
    twice = ("--argument", "x-max-length=1", "--argument", "x-max-length=2")
    for command in (("queue", "declare", "q"), ("exchange", "declare", "e", "direct")):
        assert "the key 'x-max-length' is given twice" in run(*command, *twice)
    assert "the key 'max-length' is given twice" in run(
        "policy", "set", "p", ".*", '{"max-length": 1, "max-length": 2}'
    )
    assert run("queue", "list") == run("policy", "list") == []
