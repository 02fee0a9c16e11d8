"""``txmq channels`` and ``close``: who holds what at each door, and how an operator gets it free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest

from broker_core import errors
from broker_core.client.broker import BrokerClient
from broker_core.engine import START, Limit, Origin
from broker_core.launcher import Broker
from tests.progress import wait_until
from txmq import cli


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as opened:
        with opened.channel() as channel:
            for name in ("a", "b"):
                channel.queue_declare(name)
                for _ in range(3):
                    channel.publish(b"m", routing_key=name)
        yield opened


@pytest.fixture
def peer(broker: Broker) -> Iterator[pika.BlockingConnection]:
    host, _, port = broker.amqp_urls[0].rpartition("/")[2].rpartition(":")
    told = {"connection_name": "billing \x1b[31m" + "x" * 300}
    parameters = pika.ConnectionParameters(host, int(port), client_properties=told)
    connection = pika.BlockingConnection(parameters)
    yield connection
    if connection.is_open:
        connection.close()


def _rows(capsys: pytest.CaptureFixture[str], broker: Broker, *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["channels", "--json", "--url", broker.url, *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def _of(door: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [row for row in rows if row["door"] == door]
    return found


def test_each_door_shows_who_holds_what(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = peer.channel(7)
    theirs.tx_select()
    theirs.basic_publish("", "b", b"12345")
    delivered = [theirs.basic_get("a")[0] for _ in range(2)]
    theirs.basic_ack(delivered[0].delivery_tag)
    theirs.basic_consume("b", lambda *_: None)
    with BrokerClient(broker.url) as client, client.channel() as remote, broker.channel() as ours:
        remote.tx_select()
        assert remote.get("a") is not None
        wait_until(lambda: "b" in _of("amqp", _rows(capsys, broker))["unacknowledged"])
        rows = _rows(capsys, broker)
        amqp, flight, process = (_of(door, rows) for door in ("amqp", "flight", "process"))
        assert (amqp["user"], amqp["address"], amqp["client"][:7]) == ("guest", "127.0.0.1", "billing")
        assert len(amqp["client"]) == 255
        assert (amqp["publishes"], amqp["acks"], amqp["consumes"]) == (1, 1, ["b"])
        assert amqp["unacknowledged"] == {"a": 2, "b": 3} and amqp["size_bytes"] >= 5
        assert amqp["age_s"] >= amqp["open_s"] > 0
        assert amqp["id"].endswith(f" -> {broker.amqp_urls[0].removeprefix('amqp://')} (7)")
        assert flight["unacknowledged"] == {"a": 1} and flight["id"] == remote._id
        assert (process["unacknowledged"], process["publishes"]) == ({}, 0) and not ours.closed
        assert [row["door"] for row in _rows(capsys, broker, "--queue", "b")] == ["amqp"]
        assert [row["door"] for row in _rows(capsys, broker, "--open")] == ["amqp"]
    assert cli.main(["channels", "--url", broker.url]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert [row["door"] for row in _rows(capsys, broker)] == ["amqp"]


def test_a_refused_claim_names_the_command_that_names_the_holders(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = peer.channel()
    theirs.basic_get("a")
    claim = lambda: broker.engine.claim("app", ["a"], {"a": START}, Limit(), Origin(), "fail")  # noqa: E731
    with pytest.raises(errors.ResourceLocked, match="txmq channels --queue a"):
        claim()
    (row,) = _rows(capsys, broker, "--queue", "a")
    assert cli.main(["close", row["id"], "--url", broker.url]) == 1
    assert "1 messages go back to their queues" in capsys.readouterr().err
    assert cli.main(["close", row["id"], "--yes", "--url", broker.url]) == 0
    capsys.readouterr()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="operator"):
        wait_until(lambda: theirs.basic_get("b"))
    wait_until(lambda: not _rows(capsys, broker, "--queue", "a"))
    claim()
    assert peer.channel().is_open  # the connection goes on


def test_a_whole_connection_and_a_channel_of_flight_are_closed(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    channels = [peer.channel() for _ in range(3)]
    channels[0].basic_get("a")
    name = _rows(capsys, broker)[0]["id"].rpartition(" (")[0]
    with BrokerClient(broker.url) as client, client.channel() as remote:
        assert remote.get("b") is not None
        for id in (name, remote._id):
            assert cli.main(["close", id, "--yes", "--url", broker.url]) == 0
        with pytest.raises(errors.ConnectionFailed):
            remote.get("b")
    capsys.readouterr()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="operator"):
        wait_until(lambda: channels[1].basic_get("b"))
    wait_until(lambda: _rows(capsys, broker) == [])
    assert {queue.name: queue.unacknowledged for queue in broker.queues()} == {"a": 0, "b": 0}
    assert cli.main(["close", name, "--yes", "--url", broker.url]) == 1
    assert "no channel or connection has the id" in capsys.readouterr().err
