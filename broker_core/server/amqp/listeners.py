"""The listening sockets of AMQP: plain ones, and those with TLS, whose certificates can be renewed.

Not here: a connection (``connection.py``).
Invariant: a socket that listens is not closed while its certificates are renewed, so no client is refused.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from broker_core.address import bracketed
from broker_core.errors import OptionError
from broker_core.server.tls import TlsFiles

BACKLOG = 1024  # connections that wait for accept

Factory = Callable[[], asyncio.Protocol]


class AmqpListeners:
    """``plain`` and ``tls``: "HOST:PORT", IPv6 in brackets, port 0 for a free one. Raises OptionError.

    ``addresses``, ``tls_addresses``: where they listen, once opened.
    """

    def __init__(self, plain: Sequence[str], tls: Sequence[str], files: TlsFiles | None) -> None:
        if tls and files is None:
            raise OptionError(
                f"{tls[0]} is an address for AMQP with TLS, and there is no certificate",
                "give --tls-cert and --tls-key",
            )
        self._plain = [(text, *parse_listener(text)) for text in plain]
        self._tls = [(text, *parse_listener(text)) for text in tls]
        self._files = files
        self.addresses: list[str] = []
        self.tls_addresses: list[str] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._encrypted: list[tuple[socket.socket, asyncio.AbstractServer]] = []
        self._factory: Factory | None = None
        self._handshake_s = 0.0

    async def open(self, factory: Factory, tls_factory: Factory, handshake_s: float) -> None:
        """Listens on all addresses, or on none. Raises OptionError."""
        opened: list[socket.socket] = []
        try:
            for listener in (*self._plain, *self._tls):
                opened.append(_listening(*listener))
        except BaseException:
            for each in opened:
                each.close()
            raise
        loop = asyncio.get_running_loop()
        plain, encrypted = opened[: len(self._plain)], opened[len(self._plain) :]
        for each in plain:
            self._servers.append(await loop.create_server(factory, sock=each, backlog=BACKLOG))
        self.addresses += map(_address, plain)
        self._factory, self._handshake_s = tls_factory, handshake_s
        for each in encrypted:
            self._encrypted.append((each, await self._serve(each)))
        self.tls_addresses += map(_address, encrypted)

    async def renew(self) -> None:
        """New connections get the certificates of now. Those that are open go on with theirs."""
        for place, (each, old) in enumerate(self._encrypted):
            self._encrypted[place] = (each, await self._serve(each))
            old.close()

    async def _serve(self, listening: socket.socket) -> asyncio.AbstractServer:
        """A server on a descriptor of its own, so that closing it leaves the socket open."""
        assert self._files is not None and self._factory is not None
        return await asyncio.get_running_loop().create_server(
            self._factory,
            sock=listening.dup(),
            backlog=BACKLOG,
            ssl=self._files.now.context,
            ssl_handshake_timeout=self._handshake_s,
        )

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for each, server in self._encrypted:
            server.close()
            each.close()
        self._servers.clear()
        self._encrypted.clear()


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"{bracketed(host)}:{port}"


def parse_listener(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT". Raises OptionError."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not bare
        or (":" in bare and bare == host)
        or not (port.isascii() and port.isdigit())
        or int(port) > 65_535
    ):
        raise OptionError(
            f"AMQP listener {text!r} must be HOST:PORT, for example 127.0.0.1:5672 or "
            "[::1]:5672, with port 0 for a free one"
        )
    return bare, int(port)


def _listening(text: str, host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        made = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {text} for AMQP ({error.strerror or error}); choose another address, or port "
            "0 for a free one"
        ) from error
    made.setblocking(False)
    return made
