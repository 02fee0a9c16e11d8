"""Each Python and shell block of a page is run by a test; here, those that need nothing but a broker."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

import txmq
from bench.certificates import Authority
from bench.ports import free_ports
from broker_core.core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.tls import TlsOptions
from tests.forked import program
from tests.page_blocks import BLOCKS, HERE, ROOT, SHELL, Shell, blocks_of, code, pages
from tests.progress import GUARD_S


def test_each_block_of_each_page_stands_in_the_table_with_a_file_that_runs_it() -> None:
    for page in pages():
        name = str(page.relative_to(ROOT))
        known = [block.words for block in BLOCKS if block.page == name]
        found = blocks_of(name)
        assert [sum(words in text for text in found) for words in known] == [1] * len(known), name
        assert (
            len(known) == len(found) == len({words for text in found for words in known if words in text})
        ), name
    for block in BLOCKS:
        assert (ROOT / block.how).is_file(), block
        if block.how.endswith("test_page_blocks.py"):
            assert block.words in (ROOT / block.how).read_text().replace('\\"', '"'), block


def test_each_shell_block_stands_in_the_table_with_what_runs_it_or_why_nothing_does() -> None:
    for page in pages():
        name = str(page.relative_to(ROOT))
        found = blocks_of(name, "sh")
        words = [block.words for block in SHELL if block.page == name]
        assert [[each for each in words if each in text] for text in found] == [[each] for each in words], (
            name
        )
    assert [each for each in SHELL if each.how.startswith("tests/") and not (ROOT / each.how).is_file()] == []


def test_a_block_of_commands_says_that_it_is_one() -> None:
    """Without its language, the table would not have it."""
    command = re.compile(
        r"^(?:\$ )?(?:txmq|pip|python3?|databricks|spark-\w+|celery|rabbitmqctl) [a-z-]+(?: |$)", re.MULTILINE
    )
    unmarked = {
        str(page.relative_to(ROOT)): [block for block in _unmarked(page.read_text()) if command.search(block)]
        for page in pages()
    }
    assert {name: blocks for name, blocks in unmarked.items() if blocks} == {}


def _unmarked(text: str) -> list[str]:
    """The blocks of a page without a language."""
    return [
        block
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if not language
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [each for each in SHELL if each.how == HERE], ids=lambda each: f"{each.page} {each.words}"
)
def test_a_shell_block_runs(block: Shell, tmp_path: Path) -> None:
    """Line by line, as far as ``txmq serve``, which listens then. A broker of ``data`` is there for those that name none."""
    (text,) = [each for each in blocks_of(block.page, "sh") if block.words in each]
    for page, here in block.changed.items():
        assert page in text
        text = text.replace(page, here)
    for number, port in enumerate(free_ports(3), 1):
        text = text.replace(f"PORT{number}", str(port))
    command = tmp_path / "bin" / "txmq"
    command.parent.mkdir()
    command.write_text(program("txmq"))
    command.chmod(0o700)
    pair = Authority(tmp_path).sign()
    for made, name in ((pair.cert, "broker.pem"), (pair.key, "broker.key")):
        (tmp_path / name).write_bytes(Path(made).read_bytes())
    listens = contextlib.nullcontext() if "serve " in text else Broker.open(tmp_path / "data")
    with listens as broker:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{command.parent}:{os.environ['PATH']}",
        }
        environment |= {"TXMQ_URL": broker.url} if broker else {}
        running = subprocess.Popen(
            ["sh", "-eu", "-c", f"{block.before}\n{text.replace('txmq serve', 'exec txmq serve')}"],
            cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert running.stdout is not None
        if broker is None:
            assert running.stdout.readline().startswith("ready ")
            running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=GUARD_S)
        assert running.returncode == 0, errors


@pytest.mark.slow
def test_the_handler_of_the_page_is_served_and_refuses_what_it_says(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    text = code("docs/handlers.md", "class Namespaces") + code("docs/handlers.md", "serve(")
    text = text.replace("127.0.0.1:5672", f"127.0.0.1:{port}")
    running = subprocess.Popen(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None and running.stdout.readline().startswith("ready ")
        with pika.BlockingConnection(
            pika.URLParameters(f"amqp://guest:guest@127.0.0.1:{port}/%2F")
        ) as client:
            client.channel().queue_declare("guest.orders")
            with pytest.raises(ChannelClosedByBroker, match="queue 'orders' in vhost '/' refused"):
                client.channel().queue_declare("orders")
            channel = client.channel()
            for number in range(9):
                channel.queue_declare(f"guest.{number}")
            with pytest.raises(ChannelClosedByBroker, match="declares more than 10 queues"):
                channel.queue_declare("guest.9")
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate()
    assert running.returncode == 0


def test_the_broker_in_the_process_moves_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code("docs/clients.md", "Broker.open"), names)
    assert names["delivery"].message.body == b"UA 1"


def test_the_login_over_tls_reaches_the_broker(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign()
    (tmp_path / "secret").write_text("of orders\n")
    with Broker.open(tmp_path / "data", listeners=ListenerOptions(TlsOptions(pair.cert, pair.key))) as broker:
        with broker.channel() as channel:
            channel.queue_declare("orders")
        broker.accounts.add_user("orders", passwords.hashed("of orders", passwords.Cost(4)))
        broker.accounts.set_permissions("orders", "", "", "orders")
        text = code("docs/tls.md", "txmq.Credentials").replace(
            "/run/secrets/orders", str(tmp_path / "secret")
        )
        text = text.replace("/etc/txmq/ca.pem", authority.ca).replace(
            "broker.example.org:5673", f"localhost:{broker.port}"
        )
        names: dict[str, Any] = {"txmq": txmq}
        exec(text, names)
        assert names["client"].logs(["orders"]) == ["orders"]
        names["client"].close()
