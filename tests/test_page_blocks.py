"""Each Python block of a page is run by a test; here, those that need nothing but a broker."""

from __future__ import annotations

import os
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
from tests.page_blocks import BLOCKS, ROOT, blocks_of, code, pages


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
