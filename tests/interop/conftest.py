"""One broker for all client libraries, one with TLS, and queue names that no two tests share.

``TXMQ_INTEROP_URL`` (``amqp://user:password@host:port/vhost``) runs the same tests against another AMQP 0-9-1
server; tests of what only txmq promises are skipped there.
Not here: brokers that are killed, a test that does that starts its own (``tests/amqp_server.py``). Invariant:
what a test declared under a name of ``fresh`` is deleted after it, and its connections are closed.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPConnectionError

from bench.certificates import Authority
from broker_core.core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.tls import TlsOptions
from tests.amqp_server import AmqpServed, endpoint, serving

pytest.register_assert_rewrite("tests.interop.asking")

Fresh = Callable[[str], str]
Connect = Callable[..., BlockingConnection]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("TXMQ_INTEROP_URL"):
        return
    skip = pytest.mark.skip(reason="only txmq promises this, and TXMQ_INTEROP_URL names another server")
    for item in items:
        if item.path.is_relative_to(HERE) and (
            item.get_closest_marker("txmq_only") or "served" in getattr(item, "fixturenames", ())
        ):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``amqp://`` of the broker that all tests share."""
    with endpoint(tmp_path_factory.mktemp("interop")) as found:
        yield found


class Encrypted(NamedTuple):
    """A txmq with AMQPS alone. ``orders`` and ``invoices`` are declared; ``clerk`` may declare, read and publish
    to these two, ``guard`` may declare and read ``orders``. ``other``: an authority that it does not have.
    """

    address: str
    ca: str
    other: str

    def url(self, user: str) -> str:
        return f"amqps://{user}:{SECRET}@{self.address}/%2F"

    def parameters(self, user: str) -> pika.URLParameters:
        """For pika."""
        made = pika.URLParameters(self.url(user))
        made.ssl_options = pika.SSLOptions(ssl.create_default_context(cafile=self.ca), "localhost")
        return made


SECRET = "of-this-test"
REFUSED = "ACCESS_REFUSED - access to {} in vhost '/' refused for user '{}'"


@pytest.fixture(scope="session")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    folder = tmp_path_factory.mktemp("encrypted")
    authority = Authority(folder)
    pair = authority.sign()
    listeners = ListenerOptions(TlsOptions(pair.cert, pair.key), amqps=["127.0.0.1:0"])
    with Broker.open(folder / "data", listeners=listeners) as broker:
        with broker.channel() as channel:
            for queue in ("orders", "invoices"):
                channel.queue_declare(queue)
        for user, patterns in (
            ("clerk", ("^(orders|invoices)$", "^amq\\.default$", "^(orders|invoices)$")),
            ("guard", ("^orders$", "^$", "^orders$")),
        ):
            broker.accounts.add_user(user, passwords.hashed(SECRET, passwords.Cost(4)))
            broker.accounts.set_permissions(user, *patterns)
        port = broker.amqp_urls[0].rpartition(":")[2]
        yield Encrypted(f"localhost:{port}", authority.ca, Authority(folder, "other").ca)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[AmqpServed]:
    """A txmq of this test alone, which may be killed."""
    with serving(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
def fresh(url: str) -> Iterator[Fresh]:
    """Names of queues and exchanges; what has them is deleted afterwards."""
    names: list[str] = []
    run = uuid.uuid4().hex[:8]

    def name(word: str) -> str:
        names.append(f"{word}-{run}")
        return names[-1]

    yield name
    with BlockingConnection(pika.URLParameters(url)) as connection:
        for one in names:
            channel = connection.channel()
            channel.queue_delete(one)
            channel.exchange_delete(one)
            channel.close()


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    """Connections of pika; keyword arguments are attributes of its parameters."""
    opened: list[BlockingConnection] = []

    def open_one(**attributes: object) -> BlockingConnection:
        parameters = pika.URLParameters(url)
        for attribute, value in attributes.items():
            setattr(parameters, attribute, value)
        opened.append(BlockingConnection(parameters))
        return opened[-1]

    yield open_one
    for connection in opened:
        with contextlib.suppress(AMQPConnectionError):  # the broker may have ended it in the test
            connection.close()


@pytest.fixture
def connection(connect: Connect) -> BlockingConnection:
    return connect()


@pytest.fixture
def channel(connection: BlockingConnection) -> BlockingChannel:
    return connection.channel()


@pytest.fixture
def other(connect: Connect) -> BlockingChannel:
    """A channel of another connection."""
    return connect().channel()
