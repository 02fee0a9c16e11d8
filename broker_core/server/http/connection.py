"""One connection of HTTP: uvicorn's protocol, with limits in bytes and seconds.

Not here: the login (``gate.py``), what a request is answered (``application.py``).

Why uvicorn's protocol is extended: as it is, it has no time for headers, for a body or for an answer that
nobody reads, httptools bounds no headers, ``limit_concurrency`` counts neither users nor logins, and an
application does not see which connection a request came on. Without this class the tests of large headers,
bytes that are no request, slow senders, slow readers and connections of a user fail
(``test_http_listener.py``).

Invariant: a client holds a connection no longer than it sends or reads: headers, bodies and answers have
their time, and nothing that it sends before its headers are complete takes more than ``head_bytes``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Protocol

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from broker_core.server.http.options import HttpOptions
from broker_core.server.listen.unauthenticated_limit import UnauthenticatedLimit
from broker_core.server.quotas import Quota

PIPELINED = 8  # requests that wait behind the one in hand; no client known sends more than one
PROVED = 16  # logins of one connection that are remembered: a proxy has many


class EndOfInput(Exception):
    """Ends the parsing of what a connection has read."""


class HttpListener(Protocol):
    """What a connection uses of its server."""

    options: HttpOptions
    uvicorn: Config
    clients: ServerState
    connections: Quota

    @property
    def unauthenticated(self) -> UnauthenticatedLimit: ...

    def leave(self, connection: HttpConnection) -> None: ...


class HttpConnection(HttpToolsProtocol):
    """``user``: who has logged in on it last; "" for nobody. ``proved``: logins on it, by their digests: the
    user and the basis (``Logins.basis``).
    """

    def __init__(self, listener: HttpListener) -> None:
        self.listener, self.user = listener, ""
        self.proved: dict[bytes, tuple[str, str]] = {}
        super().__init__(listener.uvicorn, listener.clients, {"connection": self}, asyncio.get_running_loop())
        self._head_bytes = 0  # read, of a request that is not complete
        self._parsed_bytes = 0  # of its first line and headers
        self._waits_for: asyncio.TimerHandle | None = None  # the client has to send or to read something

    @property
    def address(self) -> str:
        return self.client[0].partition("%")[0] if self.client else ""

    # -- the transport ---------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.listener.options.connections.total
        if most is not None and len(self.connections) > most:
            self._refuse(503, "unavailable", f"{most} connections of HTTP are open, the limit; close some")
            return
        self.listener.unauthenticated.enter(self, transport.abort)
        self._limit(self.listener.options.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unlimit()
        self._unset_keepalive_if_required()
        self.listener.leave(self)
        super().connection_lost(exc)
        # each request refers to this connection: without it their headers wait for the collector
        self.pipeline.clear()
        self.app_state, self.headers = {}, []
        self.cycle = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._waits_for is None and (self.cycle is None or self.cycle.response_complete):
            self._head_bytes = 0
            self._limit(self.listener.options.head_s)
        before = self.cycle
        super().data_received(data)
        if self.cycle is before and (before is None or before.response_complete):
            self._head_bytes += len(data)
            if self._head_bytes > self.listener.options.head_bytes:
                self._too_large()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._parsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._parse(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parse(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unlimit()
        # one read holds thousands of requests, and each would be an object until it is answered
        if len(self.pipeline) == PIPELINED:
            self.transport.abort()
            raise EndOfInput
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit(self.listener.options.send_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unlimit()

    # -- limits ----------------------------------------------------------------------------------------------
    def _limit(self, seconds: float) -> None:
        self._unlimit()
        self._waits_for = self.loop.call_later(seconds, self.transport.abort)

    def _unlimit(self) -> None:
        if self._waits_for is not None:
            self._waits_for.cancel()
            self._waits_for = None

    def _parse(self, size: int) -> None:
        """Counts a part of the head of a request. Raises Refused, which ends the parsing of what was read."""
        self._parsed_bytes += size
        options = self.listener.options
        if self._parsed_bytes > options.head_bytes or len(self.headers) == options.headers:
            self._too_large()
            raise EndOfInput

    def _too_large(self) -> None:
        self._refuse(
            431,
            "headers_too_large",
            f"a request has more than {self.listener.options.headers} headers, or more than "
            f"{self.listener.options.head_bytes} bytes of them",
        )

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # else it is refused already
            self._refuse(400, "bad_request", msg)

    def _refuse(self, status: int, error: str, reason: str) -> None:
        """Before there is a request: answer, and close."""
        body = json.dumps({"error": error, "reason": reason}).encode()
        kind = "content-type: application/json\r\nx-content-type-options: nosniff"
        head = f"{kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    # -- the login -------------------------------------------------------------------------------------------
    def logged_in(self, user: str) -> None:
        """Raises NotAllowed: the user has too many connections, and nobody is logged in on this one."""
        if user == self.user:
            return
        if self.user:
            self.listener.connections.leave(self)
            self.user = ""
            self.listener.unauthenticated.enter(self, self.transport.abort)
        self.listener.connections.enter(self, user)
        self.user = user
        self.listener.unauthenticated.leave(self)

    def has_proved(self, digest: bytes, user: str, basis: str) -> None:
        if len(self.proved) == PROVED:
            self.proved.clear()
        self.proved[digest] = user, basis
