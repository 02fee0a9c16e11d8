"""The AMQP 0-9-1 server: listeners, the event loop in its one thread, and periodic work for all connections.

Not here: one connection (``connection.py``), one channel (``session.py``), commits and dispatch
(``commit_queue.py``).

Invariant: connections, sessions and ``commits`` belong to the loop's thread. Other threads use only
``start``, ``stop``, ``idle_s``, ``users_changed`` and the addresses of ``listeners``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from broker_core.admin import ConnectionInfo
from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.core.errors import ConnectionForced
from broker_core.node.local import LocalBroker
from broker_core.server.access.logins import Logins
from broker_core.server.alarm import Alarm
from broker_core.server.amqp import handshake
from broker_core.server.amqp.closing import close
from broker_core.server.amqp.commands import COMMANDS, ack_timeout, open_time
from broker_core.server.amqp.connection import Connection, Unwritten
from broker_core.server.amqp.connection_rows import clients, connection_info
from broker_core.server.amqp.handlers.handler import Handler, Handlers
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.commit_queue import CommitQueue
from broker_core.server.listen.listeners import Listeners
from broker_core.server.listen.unauthenticated_limit import UnauthenticatedLimit
from broker_core.server.loop import LoopThread
from broker_core.server.quotas import Quotas, sockets
from broker_core.server.tls import TlsFiles
from broker_core.server.turns import Turns

logger = logging.getLogger("txmq.amqp")

SWEEP_S = 0.5
SPILL_S = 0.05  # for spilling within one sweep
CHECK_S = 5.0
STOP_S = 1.0  # for clients to answer connection.close


class AmqpServer(LoopThread):
    """``listeners``, and ``tls_listeners`` with the certificates of ``tls``: "HOST:PORT", IPv6 in brackets,
    port 0 for a free one.

    ``directory``: its free disk space is watched; "": none.
    """

    commands = COMMANDS

    def __init__(
        self,
        broker: LocalBroker,
        listeners: Sequence[str],
        *,
        handlers: Sequence[Handler] = (),
        options: AmqpOptions | None = None,
        logins: Logins | None = None,
        directory: str = "",
        tls_listeners: Sequence[str] = (),
        tls: TlsFiles | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        super().__init__("txmq-amqp")
        self.broker = broker
        self.handlers = Handlers(handlers)
        self.options = options or AmqpOptions()
        self.logins = logins or Logins(broker.state.users)
        self.tls = tls
        self.quotas = quotas or Quotas()
        # of the half of the files that ``Quotas`` leaves, one half is for the store
        unauthenticated = UnauthenticatedLimit(min(self.options.max_unauthenticated, max(sockets() // 2, 1)))
        self.listeners = Listeners(listeners, tls_listeners, tls, unauthenticated)
        self.connections: dict[Connection, float] = {}  # when each was opened, since the epoch
        self.stopping = False
        self.commits: CommitQueue
        self.turns: Turns
        self.unwritten: Unwritten
        self.shortages = Shortages(self, self.quotas.alarm or Alarm(broker, directory, self.options.alarms))
        broker.open_channels.add_listener(partial(close, self), partial(clients, self.connections))
        self._idle_since: float | None = time.monotonic()
        self._empty: asyncio.Event

    # -- from any thread -------------------------------------------------------------------------------------
    def users_changed(self) -> None:
        """Users or virtual hosts. Check every connection again; done when this returns."""
        if self._thread is threading.current_thread():
            self._check_users()
        elif self._thread is not None:
            checked = threading.Event()
            self.loop.call_soon_threadsafe(self._check_users)
            self.loop.call_soon_threadsafe(checked.set)
            checked.wait(CHECK_S)  # a loop that is busy for longer will check them

    @property
    def addresses(self) -> list[str]:
        """Of the plain listeners, once started."""
        return self.listeners.addresses

    @property
    def unauthenticated(self) -> UnauthenticatedLimit:
        return self.listeners.unauthenticated

    def idle_s(self) -> float:
        """Seconds since the last connection ended; 0 while there is one."""
        since = self._idle_since
        return 0.0 if since is None else time.monotonic() - since

    # -- the thread ------------------------------------------------------------------------------------------
    async def _listen(self) -> None:
        _allow_many_sockets()
        self.commits = CommitQueue(self.loop, self.broker)
        self.turns = Turns(self.loop)
        self.unwritten = Unwritten(self.loop)
        self.commits.answered = self.unwritten.flush
        self._empty = asyncio.Event()
        offer = handshake.offer(self.options)
        asks = self.tls is not None and bool(self.tls.options.ca)
        tls_offer = handshake.offer(self.options, external=asks)
        try:
            await self.listeners.open(
                lambda: Connection(self, offer),
                lambda: Connection(self, tls_offer),
                self.options.handshake_timeout_s,
            )
        except BaseException:
            self.commits.close()
            raise
        self.loop.call_later(SWEEP_S, self._sweep)

    async def _end(self) -> None:
        """Sends connection.close 320 to every client, and closes."""
        self.stopping = True
        self.listeners.close()
        for connection in list(self.connections):
            connection.fail(0, ConnectionForced("broker is shutting down"))
        await self._wait_until_empty(STOP_S)
        for connection in list(self.connections):
            connection.abort("the broker is shutting down and it did not answer")
        await self._wait_until_empty(STOP_S)
        while not (self.commits.idle and self.turns.idle):  # what sessions asked for when they ended
            await asyncio.sleep(0.001)
        self.commits.close()

    async def _wait_until_empty(self, timeout_s: float) -> None:
        if self.connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)

    # -- called by connections --------------------------------------------------------------------------
    def opened(self, connection: Connection) -> None:
        self.connections[connection] = time.time()
        self.unauthenticated.enter(connection, lambda: connection.abort("too many have not logged in"))
        self._idle_since = None
        self._empty.clear()
        if self.shortages.reason:
            connection.points.guard(self.shortages.reason)

    def closed(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self.unauthenticated.leave(connection)
        self.quotas.connections.leave(connection)
        self.quotas.content_bytes.leave(connection)
        self.quotas.unread_bytes.leave(connection)
        if not self.connections:
            self._idle_since = time.monotonic()
            self._empty.set()

    def connections_to(self, vhost: str, user: str | None = None) -> int:
        """For any thread: how many have entered a virtual host, of one user or of all."""
        return sum(
            each in self.quotas.connections and each.seen.vhost == vhost and user in (None, each.user)
            for each in tuple(self.connections)
        )

    def connection_infos(self) -> list[ConnectionInfo]:
        """For any thread: those that are open, oldest first."""
        found = list(self.connections.items())
        return [connection_info(each, at) for each, at in found if each.state is ConnectionState.open]

    def _check_users(self) -> None:
        users = self.broker.state.users
        for connection in list(self.connections):
            connection.rights.forget()
            if connection.user and not users.exists(connection.user):
                connection.fail(0, ConnectionForced(f"user '{connection.user}' was deleted"))
            elif connection.seen.topology.deleted:
                connection.fail(0, ConnectionForced(f"vhost '{connection.seen.vhost}' is deleted"))

    # -- periodic work ----------------------------------------------------------------------------------
    def _sweep(self) -> None:
        if self.stopping:
            return
        self.loop.call_later(SWEEP_S, self._sweep)
        now = time.monotonic()
        steps: list[Callable[[], None]] = [self.shortages.spill, self.shortages.look]
        for connection in self.connections:
            steps += [
                partial(connection.sweep, now),
                partial(ack_timeout.sweep, connection, now),
                partial(open_time.sweep, connection),
            ]
        for step in steps:
            try:
                step()
            except Exception as error:  # no step keeps the others from the heartbeats
                logger.error("a periodic step failed, and is repeated: %s", error)


class Shortages:
    """Memory or the disk is short: open transactions spill, and connections that publish wait."""

    def __init__(self, server: AmqpServer, alarm: Alarm) -> None:
        self._server, self._alarm = server, alarm
        self.reason = ""  # of the alarm that is on
        self._spills = False  # goes on spilling before the next sweep

    def spill(self) -> None:
        """If open transactions are large together, they spill earlier, and the largest ones at once."""
        large = self._alarm.transactions_large()
        self._server.broker.channel_commits.spill_early(large)
        if not large or self._spills:
            return
        deadline = time.monotonic() + SPILL_S
        sessions = [
            session
            for connection in self._server.connections
            for session in connection.sessions.by_number.values()
            if session.spillable
        ]
        for session in sorted(sessions, key=lambda session: -session.channel.transaction.memory_bytes):
            if not self._alarm.transactions_large():
                return
            if time.monotonic() > deadline:
                self._spills = True
                self._server.loop.call_later(SPILL_S, self._go_on_spilling)  # others are served in between
                return
            self._server.broker.channel_commits.spill(session.channel.transaction)

    def _go_on_spilling(self) -> None:
        self._spills = False
        if not self._server.stopping:
            self.spill()

    def look(self) -> None:
        shortage = self._alarm.now()
        reason = shortage.reason if shortage is not None else ""
        if bool(reason) == bool(self.reason):
            return
        self.reason = reason
        for connection in list(self._server.connections):
            if reason:
                connection.points.guard(reason)
            else:
                connection.points.unguard()


def _allow_many_sockets() -> None:
    """Raise the soft limit of open files, often 1,024, for thousands of idle clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
