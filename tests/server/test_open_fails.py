"""A broker that cannot open undoes what it has done, whichever step fails: nothing listens, no thread stays,
no client finds an address, and the directory can be opened.

Not here: the death of a process at these steps (``tests/crash``).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.certificates import Authority
from broker_core.core import endpoint, failpoint
from broker_core.core.errors import TxmqError
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.options import ServeOptions
from broker_core.server.tls import TlsOptions
from tests.progress import wait_until

FREE = "127.0.0.1:0"


def state(options: ServeOptions, directory: Path, _: int) -> ServeOptions:
    """Step 1: the file of the directory's id cannot be written."""
    (directory / endpoint.ID).mkdir()
    return options


def certificates(options: ServeOptions, directory: Path, _: int) -> ServeOptions:
    """Step 2."""
    missing = TlsOptions(str(directory / "no.pem"), str(directory / "no.key"))
    return replace(options, listeners=replace(options.listeners, tls=missing))


def flight(options: ServeOptions, _: Path, taken: int) -> ServeOptions:
    """Step 8."""
    return replace(options, port=taken)


def amqp(options: ServeOptions, _: Path, taken: int) -> ServeOptions:
    """Step 5: the last listener, when the others listen."""
    return replace(options, listeners=replace(options.listeners, amqps=[FREE, f"127.0.0.1:{taken}"]))


def http(options: ServeOptions, _: Path, taken: int) -> ServeOptions:
    """Step 7."""
    return replace(options, listeners=replace(options.listeners, http=[FREE, f"127.0.0.1:{taken}"]))


def address(options: ServeOptions, _: Path, __: int) -> ServeOptions:
    """Step 9: all listeners are open."""
    failpoint.arm("launcher.open.listening", "raise")
    return options


def listening() -> set[int]:
    """The ports at which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def opened(directory: Path, options: ServeOptions) -> Broker:
    return Broker.open(
        directory, port=options.port, amqp=options.amqp, users=options.users, listeners=options.listeners
    )


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (state, "Is a directory"),
        (certificates, "--tls-cert"),
        (flight, "cannot listen"),
        (amqp, "for AMQP"),
        (http, "for HTTP"),
        (address, "launcher.open.listening"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broker_that_cannot_open_leaves_nothing_behind(
    tmp_path: Path, step: Callable[[ServeOptions, Path, int], ServeOptions], error: str
) -> None:
    pair, directory = Authority(tmp_path).sign(), tmp_path / "data"
    directory.mkdir()
    listeners = ListenerOptions(TlsOptions(pair.cert, pair.key), [FREE], http=[FREE])
    options = ServeOptions(amqp=[FREE], users={"guest": "guest"}, listeners=listeners)
    opened(directory, options).close()  # a first broker starts threads that stay
    (directory / endpoint.ID).unlink()

    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        threads, ports = set(threading.enumerate()), listening()
        failing = step(options, directory, other.getsockname()[1])
        with pytest.raises((TxmqError, OSError), match=error):
            opened(directory, failing)
        failpoint.disarm()
        assert listening() == ports
    assert not list(directory.glob(f"{endpoint.ENDPOINT}*"))
    wait_until(lambda: set(threading.enumerate()) <= threads, "its threads have ended")
    if (directory / endpoint.ID).is_dir():
        (directory / endpoint.ID).rmdir()
    with opened(directory, options) as broker:
        assert (directory / endpoint.ENDPOINT).exists()
        assert broker.amqp_urls and broker.http_urls
