"""Each Python block of a page is run by a test, or the table says why not; and those that need nothing but a broker."""

from __future__ import annotations

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

from bench.ports import free_ports
from tests.page_blocks import BLOCKS, ROOT, blocks_of, code, pages


def test_each_block_of_each_page_stands_in_the_table_with_a_file_that_runs_it_or_a_reason() -> None:
    for page in pages():
        name = str(page.relative_to(ROOT))
        known = [block.words for block in BLOCKS if block.page == name]
        found = blocks_of(name)
        assert [sum(words in text for text in found) for words in known] == [1] * len(known), name
        assert (
            len(known) == len(found) == len({words for text in found for words in known if words in text})
        ), name
    for block in BLOCKS:
        files = re.findall(r"tests/[\w/]+\.py", block.how)
        assert files, block
        assert [file for file in files if not (ROOT / file).exists()] == [], block
        if block.how == files[0] and block.how.endswith("test_page_blocks.py"):
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
