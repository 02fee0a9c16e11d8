"""The listening sockets of a protocol: plain ones, and those with TLS, whose certificates can be renewed.

Not here: a connection (each protocol has its own), and how many may wait for their login
(``unauthenticated_limit.py``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from broker_core.core.address import bracketed, parse_listen
from broker_core.core.errors import OptionError
from broker_core.server.listen.unauthenticated_limit import UnauthenticatedLimit
from broker_core.server.tls import TlsFiles

logger = logging.getLogger("txmq.listen")

BACKLOG = 1024  # connections that wait for accept
AGAIN_S = 0.1  # after accepting failed

Factory = Callable[[], asyncio.Protocol]


class Listeners:
    """``plain`` and ``tls``: "HOST:PORT", IPv6 in brackets, port 0 for a free one. Raises OptionError.

    ``addresses``, ``tls_addresses``: where they listen, once opened. ``protocol``: its name for texts.
    """

    def __init__(
        self,
        plain: Sequence[str],
        tls: Sequence[str],
        files: TlsFiles | None,
        unauthenticated: UnauthenticatedLimit,
        protocol: str = "AMQP",
    ) -> None:
        if tls and files is None:
            raise OptionError(
                f"{tls[0]} is an address for {protocol} with TLS, and there is no certificate",
                "give --tls-cert and --tls-key",
            )
        self._protocol = protocol
        self._plain = [(text, *parse_listen(text, protocol)) for text in plain]
        self._tls = [(text, *parse_listen(text, protocol)) for text in tls]
        self._files = files
        self.unauthenticated = unauthenticated
        self.addresses: list[str] = []
        self.tls_addresses: list[str] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._accepting: dict[asyncio.Task[None], socket.socket] = {}
        self._handshakes: set[asyncio.Task[None]] = set()

    async def open(self, factory: Factory, tls_factory: Factory, handshake_s: float) -> None:
        """Listens on all addresses, or on none. Raises OptionError."""
        opened: list[socket.socket] = []
        try:
            for listener in (*self._plain, *self._tls):
                opened.append(_listening(self._protocol, *listener))
        except BaseException:
            for each in opened:
                each.close()
            raise
        loop = asyncio.get_running_loop()
        plain, encrypted = opened[: len(self._plain)], opened[len(self._plain) :]
        for each in plain:
            self._servers.append(await loop.create_server(factory, sock=each, backlog=BACKLOG))
        self.addresses += map(_address, plain)
        for each in encrypted:
            task = loop.create_task(self._accept(each, tls_factory, handshake_s))
            self._accepting[task] = each
        self.tls_addresses += map(_address, encrypted)

    async def _accept(self, listening: socket.socket, factory: Factory, handshake_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, or the client is gone already
                logger.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            task = loop.create_task(self._shake_hands(accepted, factory, handshake_s))
            self._handshakes.add(task)
            self.unauthenticated.enter(task, task.cancel)
            task.add_done_callback(self._handshake_done)

    async def _shake_hands(self, accepted: socket.socket, factory: Factory, handshake_s: float) -> None:
        """A new connection gets the certificates of now. Those that are open go on with theirs."""
        assert self._files is not None
        try:
            accepted.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                factory, accepted, ssl=self._files.now.context, ssl_handshake_timeout=handshake_s
            )
        except (OSError, ValueError, asyncio.TimeoutError) as error:  # every error of TLS is an OSError
            logger.info("no TLS with a client: %s", error)
            accepted.close()
        except BaseException:
            accepted.close()
            raise

    def _handshake_done(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self.unauthenticated.leave(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a handshake of TLS failed", exc_info=task.exception())

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task, listening in self._accepting.items():
            task.cancel()
            listening.close()
        for task in list(self._handshakes):
            task.cancel()
        self._servers.clear()
        self._accepting.clear()


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"{bracketed(host)}:{port}"


def _listening(protocol: str, text: str, host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        opened = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {text} for {protocol} ({error.strerror or error}); choose another address, or "
            "port 0 for a free one"
        ) from error
    opened.setblocking(False)
    return opened
