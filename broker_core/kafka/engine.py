"""The engine of the connector on Apache Kafka: source and sink over one client.

Not here: what its methods do (``source/source.py``, ``sink/sink.py``), and the operator's port.
Invariant: nothing connects before the first call. A process has its own memory of journals and decisions,
also after a fork; the engine pickles by its arguments.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from broker_core.core.checks import checked_calls
from broker_core.core.errors import ConnectionFailed, OptionError
from broker_core.engine import AppOperator, DeadLetterRoute, Sink, Source
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.cluster.wire import SocketWire
from broker_core.kafka.journal.journal import AppProgress
from broker_core.kafka.protocol.port import Wire
from broker_core.kafka.settings import KafkaSettings, parse_settings, without_secrets
from broker_core.kafka.sink.sink import KafkaSink
from broker_core.kafka.source.source import KafkaSource
from broker_core.kafka.topics.routing import ClusterTopology

P = ParamSpec("P")
T = TypeVar("T")

_engines: dict[tuple[int, str, tuple[tuple[str, object], ...]], KafkaEngine] = {}
_engines_lock = threading.Lock()


def connect(url: str, settings: Mapping[str, object] | None = None) -> KafkaEngine:
    """Returns the engine of this process for an address and settings: one, made once. Raises OptionError."""
    key = os.getpid(), url, tuple(sorted((settings or {}).items()))
    with _engines_lock:
        engine = _engines.get(key)
        if engine is None or engine.closed:
            engine = _engines[key] = KafkaEngine(url, settings)
        return engine


def _after_fork() -> None:
    global _engines_lock
    _engines_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def over_sockets(settings: KafkaSettings) -> Wire:
    return SocketWire(settings.connection)


class _Parts(NamedTuple):
    """What one process has."""

    pid: int
    client: Client
    source: KafkaSource
    sink: KafkaSink


def _word(
    part: Literal["source", "sink"], method: Callable[Concatenate[Any, P], T]
) -> Callable[Concatenate[Any, P], T]:
    """A word of the port that a part of this process carries out."""
    name = method.__name__

    @functools.wraps(method)
    def call(engine: KafkaEngine, /, *positional: P.args, **keywords: P.kwargs) -> T:
        answer: T = getattr(getattr(engine, part), name)(*positional, **keywords)
        return answer

    return call


@checked_calls()
class KafkaEngine:
    """Implements :class:`broker_core.engine.Engine`; thread-safe.

    ``url`` is ``kafka://host:port,host:port``, ``settings`` have Kafka's names behind ``kafka.``. ``wire``
    carries the requests. Raises OptionError.
    """

    def __init__(
        self,
        url: str,
        settings: Mapping[str, object] | None = None,
        wire: Callable[[KafkaSettings], Wire] = over_sockets,
    ) -> None:
        self._arguments = url, dict(settings or {}), wire
        self._settings = parse_settings(url, settings)
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._parts: _Parts | None = None
        self.closed = False

    def __reduce__(self) -> tuple[object, ...]:
        return KafkaEngine, self._arguments

    def __enter__(self) -> KafkaEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        url, settings, _ = self._arguments
        return f"KafkaEngine({url!r}, {without_secrets(settings)!r})"

    def close(self) -> None:
        self.closed = True
        if self._wire is not None:
            self._wire.close()

    def _here(self) -> _Parts:
        """What this process has; the memory of a parent may be half changed by a thread that is not here."""
        parts = self._parts
        if parts is not None and parts.pid == os.getpid():
            return parts
        if parts is not None:
            self._lock = threading.Lock()
        with self._lock:
            if self._parts is None or self._parts.pid != os.getpid():
                self._parts = self._open()
            return self._parts

    def _open(self) -> _Parts:
        if self.closed:
            raise ConnectionFailed("this engine is closed")
        if self._wire is None:
            self._wire = self._arguments[2](self._settings)
        client = Client(self._wire, self._settings.bootstrap, reconnect_s=self._settings.reconnect_s)
        source = KafkaSource(client, lambda app_id: sink.decided(app_id))

        def progress(app_id: str) -> AppProgress:
            return AppProgress(client, app_id, source.journal(app_id), source)

        sink = KafkaSink(client, progress, codec=self._settings.codec)
        return _Parts(os.getpid(), client, source, sink)

    @property
    def client(self) -> Client:
        """The client of this process, for the operator's port (``admin.py``)."""
        return self._here().client

    @property
    def bootstrap(self) -> str:
        """The nodes of the url, as Kafka's tools take them."""
        return ",".join(map(str, self._settings.bootstrap))

    @property
    def topology(self) -> ClusterTopology:
        """Exchanges and bindings, for the operator's port."""
        return self.sink.topology

    @property
    def source(self) -> KafkaSource:
        return self._here().source

    @property
    def sink(self) -> KafkaSink:
        return self._here().sink

    def identity(self, app_id: str = "") -> str:
        """Returns which cluster answers; with ``app_id``, also which topic holds the app's ledger."""
        here = self._here()
        return here.sink.identity(app_id) if app_id else here.client.cluster_id()

    # -- logs ------------------------------------------------------------------------------------------------

    logs = _word("source", Source.logs)
    log_ids = _word("source", Source.log_ids)
    available = _word("source", Source.available)
    offsets = _word("source", Source.offsets)
    wait = _word("source", Source.wait)

    # -- source ----------------------------------------------------------------------------------------------

    claim = _word("source", Source.claim)
    resolve = _word("source", Source.resolve)
    count = _word("source", Source.count)
    read = _word("source", Source.read)
    browse = _word("source", Source.browse)

    def dead_letter_route(self, queue: str) -> DeadLetterRoute | None:
        raise OptionError(
            f"topic {queue!r} has no dead-letter exchange, because a topic of Kafka cannot have one",
            "name where its rejected messages go: an exchange, or another queue",
        )

    ack = _word("source", Source.ack)

    # -- sink ------------------------------------------------------------------------------------------------

    open_batch = _word("sink", Sink.open_batch)
    stage = _word("sink", Sink.stage)
    commit_batch = _word("sink", Sink.commit_batch)
    commit_branches = _word("sink", Sink.commit_branches)
    rollback_batch = _word("sink", Sink.rollback_batch)

    # -- apply, mirror ---------------------------------------------------------------------------------------

    unapplied = _word("sink", Sink.unapplied)
    read_branches = _word("sink", Sink.read_branches)
    mark_applied = _word("sink", Sink.mark_applied)
    skip = _word("sink", AppOperator.skip)
    note = _word("sink", AppOperator.note)
    publish_refused = _word("sink", Sink.publish_refused)
    entries = _word("sink", Sink.entries)
    unmirrored = _word("sink", Sink.unmirrored)
    mark_mirrored = _word("sink", Sink.mark_mirrored)
    last_entry = _word("sink", Sink.last_entry)
    resume = _word("sink", Sink.resume)
    app = _word("sink", AppOperator.app)
    apps = _word("sink", AppOperator.apps)
    staged_batches = _word("sink", AppOperator.staged_batches)

    def release(self, app_id: str, queue: str, *, force: bool = False, by: str = "") -> None:
        login = self._settings.connection.login
        self.sink.release(app_id, queue, force=force, by=(login.user if login else "") or by)
