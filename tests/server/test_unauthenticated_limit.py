"""Connections that do not log in: they end in time, and their number ends the oldest, at both listeners of
AMQP.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.certificates import Authority
from broker_core.node.local import LocalBroker
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.server import AmqpServer
from broker_core.server.listen.unauthenticated_limit import UnauthenticatedLimit
from broker_core.server.tls import TlsFiles, TlsOptions
from broker_core.store.memory import MemoryStore
from tests.amqp_peer import HEADER, peer
from tests.progress import wait_until

LIMIT = 20


@contextlib.contextmanager
def serving(folder: Path, **options: float) -> Iterator[tuple[AmqpServer, int, int]]:
    """The server, its plain port and its port with TLS."""
    pair = Authority(folder).sign()
    with contextlib.closing(LocalBroker(MemoryStore())) as broker:
        server = AmqpServer(
            broker,
            ["127.0.0.1:0"],
            options=AmqpOptions(max_unauthenticated=LIMIT, **options),
            tls_listeners=["127.0.0.1:0"],
            tls=TlsFiles(TlsOptions(pair.cert, pair.key)),
        )
        server.start()
        try:
            yield (
                server,
                *(
                    int(each[0].rpartition(":")[2])
                    for each in (server.addresses, server.listeners.tls_addresses)
                ),
            )
        finally:
            server.stop()


def _ended(client: socket.socket) -> bool:
    """Whether the broker has closed it; what it said before is read."""
    client.settimeout(0)
    try:
        return client.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("said", [b"", HEADER, b"\x16\x03\x01"])
def test_more_than_the_limit_ends_the_oldest_and_honest_clients_are_served(
    tmp_path: Path, encrypted: bool, said: bytes
) -> None:
    with contextlib.ExitStack() as stack:
        server, plain, tls = stack.enter_context(serving(tmp_path, handshake_timeout_s=600.0))
        url = f"amqp://127.0.0.1:{plain}"
        honest = stack.enter_context(peer(url, 1))
        held = []
        for _ in range(3 * LIMIT):
            client = stack.enter_context(
                socket.create_connection(("127.0.0.1", tls if encrypted else plain), 10)
            )
            client.sendall(said)
            held.append(client)
        wait_until(lambda: sum(map(_ended, held)) >= 2 * LIMIT and len(server.unauthenticated) <= LIMIT)
        late = stack.enter_context(peer(url, 1))  # it takes the place of the oldest, and leaves it
        for client in (honest, late):
            client.publish(1, "", "nowhere", b"x")
            client.end()
        assert len(server.connections) <= LIMIT + 2


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_time_to_log_in_is_limited_with_tls_too(tmp_path: Path, encrypted: bool) -> None:
    with serving(tmp_path, handshake_timeout_s=0.5) as (server, plain, tls):
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", tls if encrypted else plain), 10) as client:
            client.settimeout(30)
            with contextlib.suppress(OSError):
                assert client.recv(100) == b""
        assert 0.4 < time.monotonic() - began < 20
        if encrypted:  # behind the handshake it is AMQP's time
            anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
            with anybody.wrap_socket(socket.create_connection(("127.0.0.1", tls), 10)) as inside:
                inside.settimeout(30)
                with contextlib.suppress(OSError):
                    assert inside.recv(100) == b""
        wait_until(lambda: len(server.unauthenticated) == 0 and not server.connections)


def test_the_one_that_waits_longest_is_ended() -> None:
    ended: list[int] = []
    unauthenticated = UnauthenticatedLimit(2)
    for number in range(5):
        unauthenticated.enter(number, lambda number=number: ended.append(number))
        if number == 1:
            unauthenticated.leave(0)
            unauthenticated.leave(0)
    assert ended == [1, 2] and len(unauthenticated) == 2
