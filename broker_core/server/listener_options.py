"""Who may connect to the listeners of a broker, and whether connections are encrypted.

Not here: certificates (``tls.py``), users (``access/``).
Invariant: a broker that other hosts can reach has TLS, or the option that allows plaintext.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from broker_core.core.address import parse_listen
from broker_core.core.errors import OptionError
from broker_core.server.access.throttle import parse_ip
from broker_core.server.tls import TlsOptions

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """``amqps``: HOST:PORT of each AMQP listener with TLS. ``token_only``: Flight accepts only clients that
    can read the data directory. ``allow_plaintext``: also other hosts are served without TLS. ``http``:
    HOST:PORT of each listener of HTTP, which is HTTPS with ``tls``. ``open_metrics``: /metrics has no login.
    """

    tls: TlsOptions | None = None
    amqps: Sequence[str] = ()
    token_only: bool = False
    allow_plaintext: bool = False
    http: Sequence[str] = ()
    open_metrics: bool = False

    @property
    def scheme(self) -> str:
        return "txmq" if self.tls is None else "txmqs"

    def check(self, host: str, amqp: Sequence[str]) -> None:
        """``host`` of Flight, HOST:PORT of ``amqp``. Raises OptionError for a listener that other hosts reach
        without TLS.
        """
        if self.allow_plaintext:
            return
        if self.tls is None and not is_loopback(host):
            raise _refused("--listen", host, "--tls-cert and --tls-key")
        for text in amqp:
            if not is_loopback(parse_listen(text, "AMQP")[0]):
                raise _refused("--amqp", text, "--amqps with --tls-cert and --tls-key")
        for text in self.http:
            if self.tls is None and not is_loopback(parse_listen(text, "HTTP")[0]):
                raise _refused("--http", text, "--tls-cert and --tls-key")


def _refused(option: str, address: str, instead: str) -> OptionError:
    return OptionError(
        f"{option} is {address}, which other hosts can reach, and they would send everything as plain "
        "text, passwords too",
        f"give {instead}, or --allow-plaintext if the network between is safe",
    )


def is_loopback(host: str) -> bool:
    """Whether all addresses of ``host`` are of this host alone; False for a name without an address."""
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(parse_ip(str(each).partition("%")[0]).is_loopback for each in found)
