"""The log of ``txmq serve``: what it says of a start, refusals, errors, alarms and the end; and what it never
says.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest

from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.launcher import Broker
from broker_core.node import committer
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.log_file import INFOS, JsonFormatter, Seldom
from tests.progress import GUARD_S, wait_until
from tests.server.http.http_client import Api

BODY = "the-body-of-a-message"
HASH = passwords.hashed("p", passwords.Cost(4))


class Process:
    """``txmq serve`` whose log is ``log``."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:1] == ["ready"]
        self.url, self.amqp = words[1], int(words[2].rpartition(":")[2])

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def says(self, text: str) -> bool:
        return any(text in line["message"] for line in self.lines())


@contextmanager
def serving(tmp_path: Path, *options: str, failpoints: str = "") -> Iterator[Process]:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "txmq", "serve", "--data", str(tmp_path / "data")]
    command += ["--listen", "127.0.0.1:0", "--amqp", "127.0.0.1:0", "--log-format", "json", *options]
    with log.open("a") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TXMQ_FAILPOINTS": failpoints},
        )
    with process:
        try:
            yield Process(process, log)
        finally:
            process.kill()


def test_a_log_of_json_has_start_recovery_channel_errors_refusals_and_the_end_and_no_body(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as broker:
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.amqp)) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.confirm_delivery()
            channel.basic_publish("", "q", BODY.encode(), pika.BasicProperties(delivery_mode=2))
            for properties in (pika.BasicProperties(expiration="x"), pika.BasicProperties(user_id="ann")):
                other = connection.channel()
                other.confirm_delivery()
                with pytest.raises(pika.exceptions.ChannelClosedByBroker):
                    other.basic_publish("", "q", BODY.encode(), properties)
        with BrokerClient(broker.url, credentials=Credentials(user="eve", password="wrong")) as client:
            with pytest.raises(errors.LoginRefused):
                client.queues()
        wait_until(lambda: broker.says("login of 'eve'"))
        assert broker.says("recovered 0 queues with 0 messages")
        assert broker.says(f"serves {tmp_path / 'data'} at {broker.url}")
        (closed, _) = [line for line in broker.lines() if "is closed: PRECONDITION_FAILED" in line["message"]]
        assert (closed["level"], closed["logger"]) == ("info", "txmq.amqp")
        assert "of user 'guest': channel 2 is closed" in closed["message"]
        broker.process.terminate()
        assert broker.process.wait(GUARD_S) == 0
        assert broker.lines()[-1]["message"] == "the broker ends: it got a signal"
    with serving(tmp_path) as broker:
        assert broker.says("recovered 1 queues with 1 messages and 0 prepared transactions")
        assert all(set(line) == {"time", "level", "logger", "message"} for line in broker.lines())
    assert BODY not in broker.log.read_text()


def test_a_refused_call_is_logged(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("ann:secret-of-ann\n")
    users.chmod(0o600)
    with serving(tmp_path, "--users", str(users)) as broker:
        with BrokerClient(broker.url, credentials=Credentials(user="ann", password="secret-of-ann")) as ann:
            ann.administer(type(None), "add_user", name="bob", password_hash=HASH, tags=[])
        with BrokerClient(broker.url, credentials=Credentials(user="bob", password="p")) as bob:
            with pytest.raises(errors.AccessRefused):
                bob.queues()
        wait_until(lambda: broker.says("a call of user 'bob' at 127.0.0.1 is refused"))
    assert "secret-of-ann" not in broker.log.read_text()


def test_a_call_that_fails_on_a_channel_of_flight_is_logged_without_its_body(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "txmq.flight")
    with Broker.open(tmp_path / "data") as broker, BrokerClient(broker.url) as client:
        with client.channel() as channel:
            channel.queue_declare("full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
            channel.tx_select()
            for _ in range(3):
                channel.publish(BODY.encode(), routing_key="full")
            with pytest.raises(errors.TxmqError):
                channel.tx_commit()
    (line,) = [text for text in caplog.messages if "tx_commit" in text]
    assert "of user 'guest' at 127.0.0.1: tx_commit failed: [TXMQ_PRECONDITION_FAILED]" in line
    assert BODY not in caplog.text


def test_a_request_of_http_that_is_refused_is_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "txmq.http")
    with Broker.open(tmp_path / "data", listeners=ListenerOptions(http=["127.0.0.1:0"])) as broker:
        broker.accounts.add_user("bob", HASH, ["management"])
        api = Api(broker.http_urls[0], "bob", "p")
        assert api.ask("PUT", "/api/vhosts/other", {"description": BODY}).status == 401
        api.close()
    (line,) = [text for text in caplog.messages if "is refused" in text]
    assert line == ("PUT /api/vhosts/{vhost} of user 'bob' at 127.0.0.1 is refused: Not administrator user")
    assert BODY not in caplog.text


def test_a_broker_whose_store_fails_says_why_and_ends(tmp_path: Path) -> None:
    with serving(tmp_path, failpoints="store.commit.synced=raise") as broker:
        with BrokerClient(broker.url, reconnect_s=0) as client, pytest.raises(errors.TxmqError):
            with client.channel() as channel:
                channel.queue_declare("q")
        assert broker.process.wait(GUARD_S) == 1
        line = broker.lines()[-1]
        assert line["level"] == "error" and "the store has failed" in line["message"]
        assert "failpoint store.commit.synced" in line["message"]


def test_a_slow_commit_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with Broker.memory() as broker, broker.channel() as channel:
        channel.queue_declare("q")
        assert "to become durable" not in caplog.text
        monkeypatch.setattr(committer, "SLOW_S", 0.0)
        channel.publish(BODY.encode(), routing_key="q")
    assert "a commit of 1 changes took 0.0 s to become durable" in caplog.text and BODY not in caplog.text


def test_lines_that_clients_cause_are_bounded_and_counted() -> None:
    now = [0.0]
    seldom = Seldom(lambda: now[0])
    record = lambda level: logging.LogRecord("txmq", level, "", 0, "line %d", (1,), None)  # noqa: E731
    assert sum(seldom.filter(record(logging.INFO)) for _ in range(INFOS + 5)) == INFOS
    assert all(seldom.filter(record(logging.WARNING)) for _ in range(INFOS))
    now[0] = 1.0
    first, second = record(logging.INFO), record(logging.INFO)
    assert seldom.filter(first) and seldom.filter(second)
    assert first.getMessage() == "line 1 (5 lines before were left out)"
    assert second.getMessage() == "line 1"


def test_a_record_of_json_is_one_line_whatever_it_says() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("txmq", logging.ERROR, "", 0, "%s", ("\x1b[2J\n\udc80",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert line.isascii() and "\n" not in line and "\x1b" not in line
    row = json.loads(line)
    assert row["message"] == "\x1b[2J\n\udc80" and "ValueError" in row["exception"]
