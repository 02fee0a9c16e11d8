"""What ``txmq serve`` says and does about AMQP: addresses, users, handlers, limits of transactions."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pika
import pytest
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, ProbableAuthenticationError

from bench.broker import serve_command
from tests.amqp_server import serving
from tests.forked import Forked


def connect(url: str, user: str = "guest", password: str = "guest") -> pika.BlockingConnection:
    parameters = pika.URLParameters(url)
    parameters.credentials = pika.PlainCredentials(user, password)
    return pika.BlockingConnection(parameters)


def refused(capfd: pytest.CaptureFixture[str], directory: Path, *arguments: str) -> str:
    """What ``txmq serve`` says when it does not start."""
    command = ["serve", "--data", str(directory / "data"), "--listen", "127.0.0.1:0", *arguments]
    process = Forked("txmq", command, os.environ)
    with process.stdout:
        assert process.wait(600) == 1 and process.stdout.read() == ""
    return capfd.readouterr().err.strip()


def test_a_broker_does_not_load_pandas(tmp_path: Path) -> None:
    """pyarrow would, at its first conversion: half a second of each start."""
    with serving(tmp_path) as served, closing(connect(served.amqp_url)) as connection:
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.tx_select()
        channel.basic_publish("", "q", b"body", pika.BasicProperties(delivery_mode=2))
        channel.tx_commit()
        loaded = Path(f"/proc/{served.pid}/maps").read_text()
    assert "/pyarrow/" in loaded and "/pandas/" not in loaded


@pytest.mark.parametrize(
    "address", ["localhost", "5672", ":5672", "127.0.0.1:", "127.0.0.1:70000", "::1:5672", "127.0.0.1:amqp"]
)
def test_an_address_that_is_none_is_refused_with_an_example(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    said = refused(capfd, tmp_path, "--amqp", address)
    assert (
        f"AMQP listener {address!r} must be HOST:PORT, for example 127.0.0.1:5672" in said
        and "\n" not in said
    )


def test_a_port_that_is_taken_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capfd, tmp_path, "--amqp", f"127.0.0.1:{port}")
    assert f"cannot listen on 127.0.0.1:{port} for AMQP" in said and "choose another address" in said


def test_none_takes_no_amqp_clients(tmp_path: Path) -> None:
    command = serve_command(tmp_path, "--amqp", "none")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert len(process.stdout.readline().split()) == 2  # ready txmq://HOST:PORT
        process.terminate()


def test_a_users_file_says_who_may_connect_and_guest_is_not_among_them(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("# who may connect\nada:love:lace\n\nbob:builder\n")
    users.chmod(0o600)
    with serving(tmp_path / "data", "--users", str(users)) as broker:
        for user, password in (("ada", "love:lace"), ("bob", "builder")):
            connect(broker.amqp_url, user, password).close()
        for user, password in (("guest", "guest"), ("ada", "love"), ("bob", "x")):
            with pytest.raises(ProbableAuthenticationError, match="ACCESS_REFUSED - Login was refused"):
                connect(broker.amqp_url, user, password)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ada", "line 1 of the users file"),
        ("# nobody\n", "has no user"),
        (":secret", "line 1 of the users file"),
        (None, "cannot be read"),
    ],
)
def test_a_users_file_that_says_nothing_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    users = tmp_path / "users"
    if text is not None:
        users.write_text(text)
        users.chmod(0o600)
    assert said in refused(capfd, tmp_path, "--users", str(users), "--amqp", "127.0.0.1:0")


def test_18_a_transaction_over_its_limit_of_messages_is_refused_with_406_and_the_channel_rolled_back(
    tmp_path: Path,
) -> None:
    with (
        serving(tmp_path / "data", "--transaction-messages", "3") as broker,
        closing(connect(broker.amqp_url)) as connection,
    ):
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.tx_select()
        for _ in range(4):
            channel.basic_publish("", "q", b"m")
        with pytest.raises(ChannelClosedByBroker) as closed:
            channel.tx_commit()
        assert (
            closed.value.reply_code,
            "holds 3 messages, which is the limit" in closed.value.reply_text,
        ) == (406, True)
        assert connection.channel().queue_declare("q", passive=True).method.message_count == 0


def test_18_a_transaction_over_its_limit_of_bytes_is_refused_with_406(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data", "--transaction-bytes", "1000") as broker,
        closing(connect(broker.amqp_url)) as connection,
    ):
        channel = connection.channel()
        channel.tx_select()
        channel.queue_declare("q", durable=True)
        channel.basic_publish("", "q", b"m" * 600)
        channel.basic_publish("", "q", b"m" * 600)
        with pytest.raises(ChannelClosedByBroker, match="more than 1000 bytes of bodies, which is the limit"):
            channel.tx_commit()


def test_18_a_transaction_that_is_open_for_too_long_is_rolled_back_and_what_it_acked_comes_back(
    tmp_path: Path,
) -> None:
    with (
        serving(tmp_path / "data", "--transaction-time", "0.5") as broker,
        closing(connect(broker.amqp_url)) as connection,
    ):
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.basic_publish("", "q", b"m", pika.BasicProperties(delivery_mode=2))
        channel.tx_select()
        method, _, _ = channel.basic_get("q")
        channel.basic_ack(method.delivery_tag)
        closed: list[Exception] = []
        channel._impl.add_on_close_callback(lambda _channel, reason: closed.append(reason))
        deadline = time.monotonic() + 600
        while not closed and time.monotonic() < deadline:
            connection.process_data_events(0.1)
        (reason,) = closed
        assert isinstance(reason, ChannelClosedByBroker)
        assert (reason.reply_code, "is open for longer than 0.5 s, the limit" in reason.reply_text) == (
            406,
            True,
        )
        method, _, body = connection.channel().basic_get("q", auto_ack=True)
        assert (method.redelivered, body) == (True, b"m")


@pytest.mark.parametrize("option", [("--transaction-time", "-1"), ("--transaction-messages", "-1")])
def test_a_limit_that_is_none_is_a_wrong_command_line(tmp_path: Path, option: Sequence[str]) -> None:
    command = [sys.executable, "-m", "txmq", "serve", "--data", str(tmp_path), *option]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2 and "must" in ended.stderr


def test_sigterm_tells_clients_that_the_broker_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as broker, closing(connect(broker.amqp_url)) as connection:
        channel = connection.channel()
        broker.terminate()
        with pytest.raises(AMQPConnectionError, match=r"320.*CONNECTION_FORCED - broker is shutting down"):
            channel.queue_declare("q")
        connection.close = lambda: None  # it is closed
