"""Peers that send HTTP and HTTP/2 as fast as they can, without a login: clients at every listener go on, and the broker
keeps nothing of it.

Not here: AMQP (``amqp/test_floods.py``), how long the others wait (``make bench ONLY=flood_p99_ms``).
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pika
import psutil
import pytest

import txmq
from bench.broker import Backend, serving
from bench.floods import OTHERS, flooding

pytestmark = pytest.mark.slow

PEERS = 10
PUBLISHES = 100
MEMORY = 64 << 20  # that a broker which is in use may grow by


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp("floods")
    with serving(folder / "data", "--http", "127.0.0.1:0", "--open-metrics", amqp=True) as found:
        everybody_is_served(found)
        yield found


def everybody_is_served(served: Backend) -> None:
    assert served.amqp is not None and served.http is not None
    with pika.BlockingConnection(pika.URLParameters(f"{served.amqp}?heartbeat=0")) as connection:
        channel = connection.channel()
        channel.queue_declare("served", durable=True)
        channel.queue_purge("served")
        channel.confirm_delivery()
        for _ in range(PUBLISHES):
            channel.basic_publish("", "served", b"x", pika.BasicProperties(delivery_mode=2))
    with txmq.connect(url=served.url) as client:
        (queue,) = client.queues()
        assert queue.name == "served"
    with urllib.request.urlopen(f"{served.http.rstrip('/')}/metrics", timeout=600) as answer:
        assert answer.status == 200 and b"txmq_build_info" in answer.read()


@pytest.mark.parametrize("name", OTHERS)
def test_everybody_is_served_while_peers_flood_a_listener(name: str, served: Backend) -> None:
    flood = OTHERS[name]
    broker = psutil.Process(served.pid)
    before = broker.memory_info().rss
    address = served.http if flood.server == "http" else served.url
    assert address is not None
    with flooding(address, flood, PEERS):
        everybody_is_served(served)
    assert broker.memory_info().rss < before + MEMORY
    everybody_is_served(served)
