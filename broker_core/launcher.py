"""The composition root: a broker opened in this process, its servers (Flight, AMQP), and ``txmq serve``.

Not here: finding or starting the broker of a data directory from outside (``client/starter.py``).

Invariant: ``DIR/endpoint.json`` exists only while the broker that wrote it accepts connections; it is deleted
before the store is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import logging
import os
import secrets
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from broker_core import __version__
from broker_core.admin import PreparedInfo, QueueInfo
from broker_core.broker.access.shares import Shares
from broker_core.broker.history.history import HistoryLimits
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.broker.transaction.transaction import Limits
from broker_core.client.takeover import take_over
from broker_core.core import endpoint, failpoint
from broker_core.core.address import VHOST, bracketed
from broker_core.core.endpoint import Endpoint
from broker_core.core.errors import StoreFailed
from broker_core.core.files import sync
from broker_core.node.channel import LocalChannel
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server import log_file
from broker_core.server.access.accounts import Accounts
from broker_core.server.access.audit import Audit
from broker_core.server.access.logins import Logins
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.alarm import Alarm
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.server import AmqpServer
from broker_core.server.flight.connection_limit import FlightConnectionLimit
from broker_core.server.flight.server import FlightServer
from broker_core.server.http import opening
from broker_core.server.listener_options import LOOPBACK, ListenerOptions
from broker_core.server.options import ServeOptions
from broker_core.server.quotas import QuotaLimits, Quotas
from broker_core.server.threads import Signals
from broker_core.server.tls import Renewal, TlsFiles
from broker_core.store.durable import DurableStore
from broker_core.store.failure import full_disk_named
from broker_core.store.memory import MemoryStore
from broker_core.store.port import Store

log = logging.getLogger("txmq")

DEFAULTS = ServeOptions()

SWITCH_S = 0.0002  # after which a computing thread lets other threads run
LOOK_S = 0.25  # how often ``serve`` checks whether it must end


class Broker:
    """A broker in this process. It also listens on loopback, for other processes (Spark's workers).

    with Broker.open("data") as broker, broker.channel() as channel:
        channel.tx_select()
    """

    def __init__(self, store: Store, directory: str = "", options: ServeOptions = DEFAULTS) -> None:
        """Use :meth:`open` or :meth:`memory`."""
        self.directory = directory
        self._listeners = listeners = options.listeners
        with contextlib.ExitStack() as undo:  # closes in reverse order, now or in ``close``
            # 1. the state; once it is closed, committed data is on the disk and the lock is released
            self.local, id_ = _opened_state(store, directory, options)  # public for tests
            undo.callback(self.local.close)
            self.quotas = Quotas(options.quotas, self.local.state.names.shares)
            self.local.limit_history(options.history)
            adopt = store.adopt if isinstance(store, DurableStore) else None
            self.engines = VhostEngines(self.local, adopt, identity=id_, staged=self.quotas.staged)
            # 2. who is let in, and how far
            audit = Audit(directory)
            undo.callback(audit.close)
            token = secrets.token_urlsafe(32) if directory else ""
            self.logins = Logins(
                self.local.state.users,
                audit,
                file_users=options.users,
                token=token,
                open_to_anonymous=not listeners.token_only,
            )
            undo.callback(self.logins.close)
            record = audit.recorder("process")
            self.accounts = Accounts(self.local, record)
            files = TlsFiles(listeners.tls) if listeners.tls is not None else None
            self.vhosts = Vhosts(self.local, self.engines, self.accounts.changed, record)
            self.quotas.alarm = Alarm(self.local, directory, options.amqp_options.alarms)
            # 3. the file in which clients find the broker, before they may take all that it may open
            if directory:
                undo.callback(_forget_endpoint, directory)
                written = undo.enter_context(endpoint.new_endpoint(directory))
            # 4. Flight, which does not listen yet
            parts = self.engines, self.local, self.logins, self.accounts, self.vhosts, self.quotas
            entrance = _connection_limit(self.logins, options, self.quotas.shares)
            self.server = FlightServer(id_, directory, *parts, entrance, lambda: [self.url, *self.amqp_urls])
            undo.callback(self.server.stop)
            # 5. to 7.
            self._open_listeners(options, files, undo)
            # 8. Flight listens and serves at once
            self.host, self.port = options.host, self.server.listen(options.host, options.port, files)
            # what a certificate is for is a name of this host, and seldom loopback
            local_endpoint = (_reachable(self.host), self.port)
            if directory and files is not None:
                local_endpoint = (LOOPBACK, self.server.listen(LOOPBACK, 0))
            failpoint.here("launcher.open.listening")
            # 9. clients find the broker
            if directory:
                endpoint.write_endpoint(written, Endpoint(*local_endpoint, os.getpid(), id_, token))
                undo.callback(_forget_endpoint, directory)
            # 10. AMQP and HTTP serve
            for each in (self.amqp, self.http):
                if each is not None:
                    each.serve()
            self._open = undo.pop_all()

    def _open_listeners(
        self, options: ServeOptions, files: TlsFiles | None, undo: contextlib.ExitStack
    ) -> None:
        """Steps 5 to 7: the listeners beside Flight, at which clients wait."""
        # 5. AMQP
        parts = self.local, self.logins, self.directory, files, self.quotas
        self.amqp = _amqp_server(options, *parts)
        if self.amqp is not None:
            self.amqp.start(serves=False)
            self.accounts.changed.append(self.amqp.users_changed)
            self.vhosts.connections = self.amqp.connections_to
            undo.callback(self.amqp.stop)
        # 6. certificates that change while the broker runs
        self._renewal = Renewal(files) if files is not None else None
        if self._renewal is not None:
            undo.callback(self._renewal.stop)
        # 7. HTTP
        listeners = options.listeners
        self.http = opening.started(
            *(listeners.http, listeners.open_metrics, files),
            *(self.local, self.engines, self.accounts, self.vhosts, self.logins, self.quotas),
            self.directory,
            cluster=options.amqp_options.cluster_name,
            connections=self.amqp.connection_infos if self.amqp is not None else tuple,
            urls=lambda: (self.url, *self.amqp_urls, *self.http_urls),
            flight_calls=self.server.calls_in_progress,
            with_clients=self.server.with_clients,
        )
        if self.http is not None:
            undo.callback(self.http.stop)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        amqp: Sequence[str] = (),
        amqp_options: AmqpOptions | None = None,
        handlers: Sequence[Handler] = (),
        limits: Limits | None = None,
        outcomes: OutcomeLimits | None = None,
        history: HistoryLimits | None = None,
        users: Mapping[str, str] | None = None,
        listeners: ListenerOptions | None = None,
        quotas: QuotaLimits | None = None,
        strict: bool = False,
        started: bool = False,
    ) -> Broker:
        """Opens the broker of a data directory, which is created if missing.

        ``limits``: of one transaction. ``outcomes``: how many outcomes ``outcome`` knows, and for how long;
        ``history``: the same for commits. ``amqp``: HOST:PORT of each AMQP 0-9-1 listener. ``handlers``
        intercept commands of AMQP clients (docs/handlers.md). ``users``: name -> password or its hash, in
        addition to ``accounts``; they may do everything, unless the directory has a user of that name.
        ``listeners``: TLS, and who may connect. ``quotas``: limits per user. ``strict``: no useless argument.

        An idle broker that a client started (``data=DIR``) gives up the directory; ``txmq.connect`` uses the
        broker that holds it. ``started``: this is such a broker, and takes no directory from another one.

        Raises DataDirectoryLocked, DataDirectoryFormat, DataDirectoryInvalid, CorruptCatalog, DiskFull,
        ConnectionFailed (the port is in use), OptionError (a listener that others reach without TLS)."""
        options = ServeOptions(
            host,
            port,
            amqp,
            amqp_options or DEFAULTS.amqp_options,
            handlers,
            limits or DEFAULTS.limits,
            outcomes or DEFAULTS.outcomes,
            history or DEFAULTS.history,
            users,
            listeners or DEFAULTS.listeners,
            quotas or DEFAULTS.quotas,
            strict,
        )
        return cls._opened(directory, options, started=started)

    @classmethod
    def _opened(cls, directory: str | os.PathLike[str], options: ServeOptions, *, started: bool) -> Broker:
        options.listeners.check(options.host, options.amqp)
        path = os.path.abspath(os.fspath(directory))
        with full_disk_named(path):
            return cls(DurableStore(path) if started else take_over(path, DurableStore), path, options)

    @classmethod
    def memory(
        cls,
        *,
        amqp: Sequence[str] = (),
        amqp_options: AmqpOptions | None = None,
        handlers: Sequence[Handler] = (),
        users: Mapping[str, str] | None = None,
    ) -> Broker:
        """Opens a broker without files, for tests."""
        settings = amqp_options or DEFAULTS.amqp_options
        return cls(MemoryStore(), "", ServeOptions("127.0.0.1", 0, amqp, settings, handlers, users=users))

    @property
    def engine(self) -> EmbeddedEngine:
        """Returns the engine of the virtual host ``/``."""
        return self.engines.default

    @property
    def url(self) -> str:
        """Returns the address for Spark and :class:`BrokerClient`."""
        return f"{self._listeners.scheme}://{bracketed(_reachable(self.host))}:{self.port}"

    @property
    def amqp_urls(self) -> list[str]:
        """Returns the addresses for AMQP clients."""
        if self.amqp is None:
            return []
        plain, tls = self.amqp.listeners.addresses, self.amqp.listeners.tls_addresses
        return [*(f"amqp://{address}" for address in plain), *(f"amqps://{address}" for address in tls)]

    @property
    def http_urls(self) -> list[str]:
        """Returns the addresses for HTTP."""
        return self.http.urls if self.http is not None else []

    @property
    def idle_s(self) -> float:
        """Returns the seconds since the last Flight call and the last AMQP connection."""
        return min(self.server.idle_s(), self.amqp.idle_s() if self.amqp is not None else float("inf"))

    @property
    def failure(self) -> StoreFailed | None:
        """Returns why nothing can be committed until the broker is opened again."""
        return self.local.committer.failure

    def renew_certificates(self) -> None:
        """Read the files of TLS again, if they have changed; done too within a second after they have."""
        if self._renewal is not None:
            self._renewal.ask()

    def channel(self, *, vhost: str = VHOST) -> LocalChannel:
        """Opens a channel, as of AMQP, in this process. Raises NotAllowed: there is no such virtual host."""
        return self.local.channel(vhost=vhost)

    def queues(self, vhost: str = VHOST) -> list[QueueInfo]:
        """Returns every queue of the virtual host, by name."""
        return self.local.queues(vhost)

    def prepared(self) -> list[PreparedInfo]:
        """Returns the prepared transactions of all virtual hosts that are not decided."""
        return self.local.prepared()

    def commit(self, xid: str, *, of: str | None = None) -> int:
        """Commits a prepared transaction; returns how many of its messages and acks had a deleted queue.
        ``of``: the user who named it, if several have. Raises UnknownTransaction, TransactionState.
        """
        return self.local.commit(xid, of=of)

    def rollback(self, xid: str, *, of: str | None = None) -> None:
        """Rolls back a prepared transaction. Raises UnknownTransaction, TransactionState."""
        self.local.rollback(xid, of=of)

    def committed(self, token: str, since: float | None = None, *, of: str = "") -> bool:
        """Returns whether a commit with this token took place (decision 21). Raises UnknownOutcome: see
        ``outcome``.
        """
        return self.local.committed(token, since, of=of)

    def outcome(self, xid: str, since: float | None = None, *, of: str = "") -> str:
        """Returns how the transaction of this xid or token ended: prepared, committed or rolled_back.
        ``of``: the user who named it; "": this process, the holder of the directory's token, or ``guest``.

        Raises UnknownTransaction: there is none. UnknownOutcome: there may have been one, and its outcome is
        forgotten. ``since``: the earliest time at which it began (seconds since the epoch); then
        UnknownOutcome is raised only if a later outcome is forgotten.
        """
        return self.local.outcome(xid, since, of=of)

    def close(self) -> None:
        """Ends calls in progress, rolls back channels and closes the store. It may be repeated."""
        self._open.close()  # all steps run, even if Ctrl-C interrupts one

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _forget_endpoint(directory: str) -> None:
    """No new client finds the broker. A volume may refuse it: the file is a hint."""
    with contextlib.suppress(OSError):
        endpoint.remove_endpoint(directory, os.getpid())


def _opened_state(store: Store, directory: str, options: ServeOptions) -> tuple[LocalBroker, str]:
    """Returns the state, which closes its store from then on, and the id of the data directory."""
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(store.close, clean=False)
        id_ = _data_id(directory) if directory else ""
        local = LocalBroker(store, limits=options.limits, outcomes=options.outcomes, identity=id_)
        if options.strict:
            local.state.virtual_hosts.be_strict()
        on_failure.pop_all()
    return local, id_


def _amqp_server(
    options: ServeOptions,
    local: LocalBroker,
    logins: Logins,
    directory: str,
    files: TlsFiles | None,
    quotas: Quotas,
) -> AmqpServer | None:
    """Returns the server of the AMQP listeners, which is not started; None for none."""
    if not options.amqp and not options.listeners.amqps:
        return None
    return AmqpServer(
        local,
        options.amqp,
        handlers=options.handlers,
        options=options.amqp_options,
        logins=logins,
        directory=directory,
        tls_listeners=options.listeners.amqps,
        tls=files,
        quotas=quotas,
    )


def _connection_limit(logins: Logins, options: ServeOptions, shares: Shares | None) -> FlightConnectionLimit:
    most, handshake_s = options.quotas.flight_connections, options.amqp_options.handshake_timeout_s
    of_this_host = options.listeners.token_only
    return FlightConnectionLimit(logins.forget, most, handshake_s, of_this_host=of_this_host, shares=shares)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _data_id(directory: str) -> str:
    """Returns the id of a data directory, durable before it is used. Called by the owner of its lock."""
    data_id = endpoint.read_id(directory)
    if data_id:
        return data_id
    aside = Path(directory, f"{endpoint.ID}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    with aside.open("x") as file:  # makes it, and follows no link
        file.write(uuid.uuid4().hex + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(Path(directory, endpoint.ID))
    sync(Path(directory))
    return endpoint.read_id(directory)


def serve(
    directory: str,
    options: ServeOptions = DEFAULTS,
    *,
    idle_timeout_s: float | None = None,
    log_format: str = "text",
) -> int:
    """Runs the broker of ``directory`` until SIGTERM or SIGINT, or until it was idle for ``idle_timeout_s``.
    Returns the exit code.

    Prints ``ready txmq://HOST:PORT amqp://HOST:PORT`` when it accepts connections. SIGHUP: certificates are
    read again. If the store fails, it ends with code 1, and must be started again.
    """
    log_file.set_up(os.path.join(directory, endpoint.LOG), log_format)
    _leave_out_pandas()
    signals = Signals(signal.SIGTERM, signal.SIGINT)
    with Broker._opened(directory, options, started=True) as broker:
        if options.listeners.tls is not None:  # otherwise it ends the broker with its terminal
            signals.take(signal.SIGHUP)
        broker.server.gives_up = idle_timeout_s is not None
        # Messages in flight are thousands of short-lived objects, which are not in cycles: the collector
        # looks rarely, and at few at a time, because every client waits meanwhile.
        gc.freeze()
        gc.set_threshold(5_000, 1, 5_000)
        # The event loop releases the interpreter lock at each socket and each sync, and gets it back after
        # this time at the latest. With the default of 5 ms an answer took 100 ms while the upkeep expired or
        # sealed many messages.
        sys.setswitchinterval(SWITCH_S)
        scheme = options.listeners.scheme
        own = f"{scheme}://{bracketed(options.host)}:{broker.port}"
        addresses = [own, *broker.amqp_urls, *broker.http_urls]
        log.info(
            "txmq %s serves %s at %s, process %d", __version__, directory, " ".join(addresses), os.getpid()
        )
        print("ready", *addresses, flush=True)
        while (arrived := signals.wait(LOOK_S)) in (None, signal.SIGHUP):
            if arrived == signal.SIGHUP:
                broker.renew_certificates()
            if broker.server.failed.is_set() or broker.failure is not None:
                reason = "" if broker.failure is None else f": {broker.failure.message}"
                log.error("the store has failed; the broker ends and must be started again%s", reason)
                return 1
            if broker.server.given_up.is_set() or (
                idle_timeout_s is not None and broker.idle_s > idle_timeout_s
            ):
                log.info("the broker ends: it is idle")
                return 0
        log.info("the broker ends: it got a signal")
    return 0


class _NoPandas(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a broker has no use for pandas", name=fullname)


def _leave_out_pandas() -> None:
    """Keeps pyarrow from importing pandas at its first conversion: half a second of each start, and 40 MB.
    pyarrow tries once, so pandas stays importable for others.
    """
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)


__all__: Sequence[str] = ["Broker", "serve"]
