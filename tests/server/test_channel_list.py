"""``txmq connection channels`` and ``close``: who holds what at each listener, and how an operator gets it free."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest

from broker_core.client import connection as client_connection
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.engine import START, Limit, Origin
from broker_core.launcher import Broker
from tests.progress import wait_until
from txmq import cli

HASH = passwords.hashed("p", passwords.Cost(4))


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


def _rows(
    capsys: pytest.CaptureFixture[str], broker: Broker, *arguments: str, command: str = "connection channels"
) -> list[dict[str, Any]]:
    assert cli.main([*command.split(), "--json", "--url", broker.url, *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def _of(listener: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [row for row in rows if row["listener"] == listener]
    return found


def test_each_listener_shows_who_holds_what(
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
        amqp, flight, process = (_of(listener, rows) for listener in ("amqp", "flight", "process"))
        assert (amqp["user"], amqp["address"], amqp["client"][:7]) == ("guest", "127.0.0.1", "billing")
        assert len(amqp["client"]) == 255
        assert (amqp["publishes"], amqp["acks"], amqp["consumes"]) == (1, 1, ["b"])
        assert amqp["unacknowledged"] == {"a": 2, "b": 3} and amqp["size_bytes"] >= 5
        assert amqp["age_s"] >= amqp["open_s"] > 0
        assert amqp["id"].endswith(f" -> {broker.amqp_urls[0].removeprefix('amqp://')} (7)")
        assert flight["unacknowledged"] == {"a": 1} and flight["id"] == remote.id
        assert (process["unacknowledged"], process["publishes"]) == ({}, 0) and not ours.closed
        assert [row["listener"] for row in _rows(capsys, broker, "--queue", "b")] == ["amqp"]
        assert [row["listener"] for row in _rows(capsys, broker, "--open")] == ["amqp"]
    assert cli.main(["connection", "channels", "--url", broker.url]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert [row["listener"] for row in _rows(capsys, broker)] == ["amqp"]


def test_the_id_of_an_open_transaction_is_that_which_an_operator_and_the_log_have(
    broker: Broker, peer: pika.BlockingConnection, caplog: pytest.LogCaptureFixture
) -> None:
    current = "amq.transaction@current"
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="channel is not transactional"):
        peer.channel().basic_get(current, auto_ack=True)
    channel = peer.channel()
    channel.tx_select()
    ids: list[str] = []
    with BrokerClient(broker.url) as client:
        for number in (1, 2, 3):
            channel.basic_publish("", "b", b"1")
            ids.append(channel.basic_get(current, auto_ack=True)[2].decode())
            (row,) = [each for each in client.channels() if each.transaction]
            assert row.transaction == ids[-1] == f"{row.id}/{number}"
            assert row.age_s >= row.open_s > 0, "also of a later transaction"
            if number < 3:
                channel.tx_commit()
                assert not [each for each in client.channels() if each.transaction]
    caplog.set_level("INFO", "txmq.amqp")
    channel.basic_ack(77)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.tx_commit()
    assert f"unknown delivery tag 77; transaction {ids[-1]} is rolled back" in caplog.text


def test_a_refused_claim_names_the_command_that_names_the_holders(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = peer.channel()
    theirs.basic_get("a")
    claim = lambda: broker.engine.claim("app", ["a"], {"a": START}, Limit(), Origin(), "fail")  # noqa: E731
    with pytest.raises(errors.ResourceLocked, match="txmq connection channels --queue a") as refused:
        claim()
    (row,) = _rows(capsys, broker, "--queue", "a")
    text = str(refused.value)
    assert "\x1b" not in text and "x" * 100 not in text
    assert re.search(r"billing .* of user 'guest' at 127\.0\.0\.1 since \d{4}-\d\d-\d\d .*UTC", text)
    assert f"`txmq connection close '{row['id']}'`" in text
    assert cli.main(["connection", "close", row["id"], "--url", broker.url]) == 1
    assert "1 messages go back to their queues" in capsys.readouterr().err
    assert cli.main(["connection", "close", row["id"], "--yes", "--url", broker.url]) == 0
    capsys.readouterr()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="operator"):
        wait_until(lambda: theirs.basic_get("b"))
    wait_until(lambda: not _rows(capsys, broker, "--queue", "a"))
    claim()
    assert peer.channel().is_open  # the connection goes on


def test_a_refused_claim_names_three_holders_and_says_that_there_are_more(
    broker: Broker, peer: pika.BlockingConnection
) -> None:
    claim = lambda: broker.engine.claim("app", ["a"], {"a": START}, Limit(), Origin(), "fail")  # noqa: E731
    with broker.channel() as ours:
        assert ours.get("a") is not None
        ours.tx_select()
        ours.ack(1)
        ours.prepare("it's mine")
    with pytest.raises(errors.ResourceLocked, match="a prepared transaction of user ''") as refused:
        claim()
    assert "`txmq tx rollback 'it'\"'\"'s mine'`" in str(refused.value)
    for channel in [peer.channel() for _ in range(3)]:
        channel.basic_consume("a", lambda *_: None)
    with pytest.raises(errors.ResourceLocked) as refused:
        claim()
    assert str(refused.value).count("of user 'guest'") == 3 and "; others: " in str(refused.value)
    broker.rollback("it's mine")


def test_a_whole_connection_and_a_channel_of_flight_are_closed(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    channels = [peer.channel() for _ in range(3)]
    channels[0].basic_get("a")
    name = _rows(capsys, broker)[0]["id"].rpartition(" (")[0]
    with BrokerClient(broker.url) as client, client.channel() as remote:
        assert remote.get("b") is not None
        for id in (name, remote.id):
            assert cli.main(["connection", "close", id, "--yes", "--url", broker.url]) == 0
        with pytest.raises(errors.ConnectionFailed):
            remote.get("b")
    capsys.readouterr()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="operator"):
        wait_until(lambda: channels[1].basic_get("b"))
    wait_until(lambda: _rows(capsys, broker) == [])
    assert {queue.name: queue.unacknowledged for queue in broker.queues()} == {"a": 0, "b": 0}
    wait_until(lambda: cli.main(["connection", "close", name, "--yes", "--url", broker.url]) == 1)
    assert "no channel or connection has the id" in capsys.readouterr().err


def test_connections_of_both_listeners_are_listed_with_their_clients_and_closed(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.channel()
    rows = _rows(capsys, broker, command="connection list")
    amqp, flight = (_of(listener, rows) for listener in ("amqp", "flight"))
    assert (amqp["user"], amqp["vhost"], amqp["address"], amqp["channels"]) == ("guest", "/", "127.0.0.1", 1)
    assert amqp["client"].startswith("billing") and amqp["age_s"] >= amqp["silent_s"] >= 0
    assert flight["client"].endswith(f"{socket.gethostname()[:60]} {os.getpid()}")
    assert flight["address"] == "127.0.0.1" and flight["age_s"] >= flight["silent_s"] >= 0
    assert cli.main(["connection", "close", amqp["id"], "--url", broker.url]) == 1
    assert "the connection and 1 channels of user 'guest'" in capsys.readouterr().err
    assert cli.main(["connection", "close", amqp["id"], "--yes", "--url", broker.url]) == 0
    capsys.readouterr()
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        wait_until(lambda: peer.process_data_events(0.1))
    assert closed.value.reply_code == 320
    assert [row["listener"] for row in _rows(capsys, broker, command="connection list")] == ["flight"]


def test_consumers_are_listed_by_queue(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = peer.channel()
    channel.basic_qos(prefetch_count=2)
    channel.basic_consume("a", lambda *_: None, consumer_tag="first")
    channel.basic_consume("b", lambda *_: None, auto_ack=True, exclusive=True, consumer_tag="second")
    channel.basic_consume("amq.rabbitmq.reply-to", lambda *_: None, auto_ack=True)
    wait_until(lambda: _rows(capsys, broker, command="connection consumers")[0]["unacknowledged"] == 2)
    first, second = _rows(capsys, broker, command="connection consumers")  # a direct reply is not shown
    assert (first["queue"], first["tag"], first["prefetch"], first["acks"]) == ("a", "first", 2, True)
    assert (second["acks"], second["exclusive"], second["active"]) == (False, True, True)
    (channel_row,) = _rows(capsys, broker)
    assert first["channel"] == second["channel"] == channel_row["id"]
    assert channel_row["consumes"] == ["a", "b"]
    assert [row["tag"] for row in _rows(capsys, broker, "--queue", "b", command="connection consumers")] == [
        "second"
    ]


def test_prepared_transactions_are_listed_with_their_queues_and_open_ones_with_their_channel(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    with broker.channel() as channel:
        channel.queue_declare("c")
        assert channel.get("a") is not None
        channel.tx_select()
        channel.ack(1)
        for number in range(5):
            channel.publish(b"%d" % number * 300, routing_key="b")
        (opened,) = _rows(capsys, broker, "--open")
        assert (opened["publishes"], opened["acks"]) == (5, 1)
        assert _rows(capsys, broker, "--open", "--queue", "a") != []
        assert _rows(capsys, broker, "--open", "--queue", "c") == []
        channel.prepare("order-7")
    (row,) = _rows(capsys, broker, command="tx list")
    assert (row["xid"], row["to"], row["acked"]) == ("order-7", {"b": 5}, {"a": 1})
    assert row["first"] == ["0" * 200, "1" * 200, "2" * 200]
    for queue in ("a", "b"):
        assert len(_rows(capsys, broker, "--queue", queue, command="tx list")) == 1
    assert _rows(capsys, broker, "--queue", "c", command="tx list") == []
    broker.rollback("order-7")


def test_bodies_of_a_prepared_transaction_are_shown_to_whom_may_read_the_queue(broker: Broker) -> None:
    with broker.channel() as channel:
        channel.tx_select()
        channel.publish(b"secret", routing_key="a")
        channel.prepare("order-7")
    broker.accounts.add_user("root", HASH, ("administrator",))
    for name, reads in (("wanda", "b"), ("rita", "a")):
        broker.accounts.add_user(name, HASH, ("monitoring",))
        broker.accounts.set_permissions(name, "", "", reads)
    for name, shown in (("wanda", ()), ("rita", (b"secret",))):
        with BrokerClient(broker.url, credentials=Credentials(user=name, password="p")) as client:
            (found,) = client.prepared()
            assert (found.to, found.first) == ({"a": 1}, shown)


def test_an_attempt_shows_the_process_that_opened_it(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    with BrokerClient(broker.url) as client:
        opened = client.open_batch("app", "query", 0, "fail")
        assert opened.token
    (row,) = _rows(capsys, broker, command="app staged")
    assert row["client"].endswith(f"{socket.gethostname()[:60]} {os.getpid()}") and row["idle_s"] < 60


def test_each_list_is_of_one_virtual_host(
    broker: Broker, peer: pika.BlockingConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = peer.channel()
    channel.basic_consume("a", lambda *_: None)
    channel.tx_select()
    channel.basic_publish("", "b", b"m")
    wait_until(lambda: len(_rows(capsys, broker, "--open")) == 1)
    broker.vhosts.add_vhost("side")
    for command in ("connection list", "connection channels", "connection consumers"):
        assert [row for row in _rows(capsys, broker, command=command) if row.get("listener") != "flight"]
        assert cli.main([*command.split(), "--json", "--url", f"{broker.url}/side"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [row for row in found if row.get("listener") != "flight"] == []


def test_who_only_looks_closes_nothing_and_who_has_no_tag_sees_nothing(
    broker: Broker, peer: pika.BlockingConnection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.channel()
    (row,) = [row for row in _rows(capsys, broker, command="connection list") if row["listener"] == "amqp"]
    broker.accounts.add_user("guest", HASH, ("administrator",))  # stays logged in
    for name, tags in (("plain", ()), ("wanda", ("monitoring",)), ("olga", ("operator",))):
        broker.accounts.add_user(name, HASH, tags)
        broker.accounts.set_permissions(name, ".*", ".*", ".*")
    secret = tmp_path / "secret"
    secret.write_text("p")
    secret.chmod(0o600)

    def run(user: str, *words: str) -> tuple[int, str]:
        login = ("--user", user, "--login-password-file", str(secret), "--url", broker.url)
        code = cli.main([*words, *login])
        return code, capsys.readouterr().err

    for words in (
        ["connection", "list"],
        ["connection", "consumers"],
        ["connection", "channels"],
        ["tx", "list"],
    ):
        code, said = run("plain", *words)
        assert code == 1 and "refused for user 'plain': it needs the tag" in said
        assert run("wanda", *words) == (0, "")
    code, said = run("wanda", "connection", "close", row["id"], "--yes")
    assert code == 1 and "refused for user 'wanda': it needs the tag administrator or operator" in said
    assert run("olga", "connection", "close", row["id"], "--yes") == (0, "")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="operator"):
        wait_until(lambda: peer.process_data_events(0.1))
    log = (tmp_path / "data" / "audit.log").read_text().splitlines()
    (closed,) = [each for each in map(json.loads, log) if each["event"] == "admin.close"]
    assert (closed["user"], closed["id"]) == ("olga", row["id"])


def test_what_a_client_of_flight_calls_itself_is_cut_and_printed_without_escapes(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "client_name", lambda: "\x1b[2J\n" + "é" * 500)
    with BrokerClient(broker.url) as client, client.channel() as channel:
        channel.tx_select()
        (row,) = [each for each in client.channels() if each.listener == "flight"]
        assert row.client.startswith("\x1b[2J\n") and len(row.client) <= 255
        assert cli.main(["connection", "channels", "--url", broker.url]) == 0
        assert all(map(str.isprintable, capsys.readouterr().out.splitlines()))
