"""The HTTP server: listeners, and a loop in a thread of its own, so that a slow page delays no commit.

Not here: one connection (``connection.py``), what is served (``application.py``).
Invariant: connections belong to the loop's thread. Other threads use only ``start``, ``stop`` and the
addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from uvicorn import Config
from uvicorn.server import ServerState

from broker_core.server.http.application import Application
from broker_core.server.http.backend import Backend
from broker_core.server.http.connection import HttpConnection
from broker_core.server.http.options import HttpOptions
from broker_core.server.http.page.sampling import Sampler
from broker_core.server.http.rates import INTERVAL_S
from broker_core.server.http.routes import ROUTES
from broker_core.server.listen.listeners import Listeners
from broker_core.server.listen.unauthenticated_limit import UnauthenticatedLimit
from broker_core.server.loop import LoopThread
from broker_core.server.quotas import Quota, busy, http_connection
from broker_core.server.threads import started_pool
from broker_core.server.tls import TlsFiles

logger = logging.getLogger("txmq.http")

THREADS = 4  # of each pool beside the loop: for what reads the disk or much, and for what commits
GRACE_S = 1.0  # for requests in progress when the server ends


class HttpServer(LoopThread):
    """``listeners``: "HOST:PORT"; with ``tls``, all speak HTTPS."""

    def __init__(
        self,
        backend: Backend,
        listeners: Sequence[str],
        *,
        options: HttpOptions | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__("txmq-http")
        self.options = options = options or HttpOptions()
        self.backend = backend
        self.connections = Quota(options.connections, http_connection)
        unauthenticated = UnauthenticatedLimit(options.max_unauthenticated)
        plain, encrypted = ((), listeners) if tls is not None else (listeners, ())
        self.listeners = Listeners(plain, encrypted, tls, unauthenticated, "HTTP")
        self._beside = started_pool(THREADS, "txmq-http")
        try:
            self._waiting = started_pool(THREADS, "txmq-http-commit")
        except BaseException:
            self._beside.shutdown(wait=False)
            raise
        self.requests = Quota(options.requests, busy("requests", "are in progress"))
        application = Application(backend, ROUTES, options, self.requests, self._beside, self._waiting)
        self.uvicorn = Config(
            application.asgi,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what clients send wrong is theirs
            access_log=False,
            proxy_headers=False,  # who names another address with a header has none of its own
            timeout_keep_alive=int(options.idle_s),
            server_header=False,
            date_header=False,
        )
        self.uvicorn.load()
        self.clients = ServerState()
        self._sampling: asyncio.Task[None] | None = None

    @property
    def unauthenticated(self) -> UnauthenticatedLimit:
        return self.listeners.unauthenticated

    @property
    def urls(self) -> list[str]:
        listeners = self.listeners
        return [
            *(f"http://{address}" for address in listeners.addresses),
            *(f"https://{address}" for address in listeners.tls_addresses),
        ]

    # -- from any thread -------------------------------------------------------------------------------------
    def start(self, *, serves: bool = True) -> None:
        try:
            super().start(serves=serves)
        except BaseException:
            for pool in (self._beside, self._waiting):
                pool.shutdown(wait=False)
            raise

    def stop(self) -> bool:
        stopped = super().stop()
        if stopped:
            for pool in (self._beside, self._waiting):
                pool.shutdown(wait=True)
        return stopped

    # -- the thread ------------------------------------------------------------------------------------------
    async def _listen(self) -> None:
        def make() -> HttpConnection:
            return HttpConnection(self)

        await self.listeners.open(make, make, self.options.head_s)
        self._sampling = self.loop.create_task(self._sample())

    async def _sample(self) -> None:
        sampler = Sampler(self.backend, self._beside)
        while True:
            try:
                await sampler.sample()
            except Exception as error:  # the next one may do
                logger.error("a sample of the numbers failed: %s", error)
            await asyncio.sleep(INTERVAL_S)

    async def _end(self) -> None:
        """Requests in progress get GRACE_S."""
        self.listeners.close()
        if self._sampling is not None:
            self._sampling.cancel()
        for connection in list(self.clients.connections):
            connection.shutdown()
        if self.clients.tasks:
            await asyncio.wait(list(self.clients.tasks), timeout=GRACE_S)
        for task in list(self.clients.tasks):
            task.cancel()
        for connection in list(self.clients.connections):
            with contextlib.suppress(AttributeError):  # it is not made yet
                connection.transport.abort()
        while self.clients.tasks or self.clients.connections:
            await asyncio.sleep(0.001)

    # -- called by connections -------------------------------------------------------------------------------
    def leave(self, connection: HttpConnection) -> None:
        self.unauthenticated.leave(connection)
        self.connections.leave(connection)
