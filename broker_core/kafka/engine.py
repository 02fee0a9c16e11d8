"""The engine of the connector on Apache Kafka: source and sink over one client.

Not here: what its methods do (``source/source.py``, ``sink/sink.py``), and the operator's port.
Invariant: nothing connects before the first call. A process has its own memory of journals and decisions,
also after a fork; the engine pickles by its arguments.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa

from broker_core.checks import checked_calls
from broker_core.engine import (
    AppInfo,
    AttemptInfo,
    Available,
    BranchHeader,
    Committed,
    DeadLetterRoute,
    Features,
    LedgerEntry,
    Limit,
    Note,
    OnNewCheckpoint,
    Opened,
    Origin,
    Ranges,
    ReadTicket,
    StagedBranch,
    Vector,
)
from broker_core.errors import ConnectionFailed, OptionError
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.cluster.wire import SocketWire
from broker_core.kafka.journal.journal_progress import JournalProgress
from broker_core.kafka.protocol.port import Wire
from broker_core.kafka.settings import KafkaSettings, parse_settings, shown
from broker_core.kafka.sink.sink import KafkaSink
from broker_core.kafka.source.source import Source
from broker_core.kafka.topics.routing import ClusterTopology

OnUnroutable = Literal["fail", "drop"]

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
    source: Source
    sink: KafkaSink


@checked_calls()
class KafkaEngine:
    """Implements :class:`broker_core.engine.Engine`; thread-safe.

    ``url`` is ``kafka://host:port,host:port``, ``settings`` have Kafka's names behind ``kafka.``. ``wire``
    carries the requests. Raises OptionError.
    """

    features = Features(
        exclusive_claims=False,
        cuts_at_transactions=False,
        deletes_acked=False,
        counts_messages=False,
        refuses_late_tasks=False,
    )

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
        return f"KafkaEngine({url!r}, {shown(settings)!r})"

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
                self._parts = self._made()
            return self._parts

    def _made(self) -> _Parts:
        if self.closed:
            raise ConnectionFailed("this engine is closed")
        if self._wire is None:
            self._wire = self._arguments[2](self._settings)
        client = Client(self._wire, self._settings.bootstrap, reconnect_s=self._settings.reconnect_s)
        source = Source(client, lambda app_id: sink.consumed(app_id))

        def progress(app_id: str) -> JournalProgress:
            return JournalProgress(client, app_id, source.journal(app_id), source)

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
        return self._sink.topology

    @property
    def _source(self) -> Source:
        return self._here().source

    @property
    def _sink(self) -> KafkaSink:
        return self._here().sink

    def identity(self, app_id: str = "") -> str:
        """Returns which cluster answers; with ``app_id``, also which topic holds the app's ledger."""
        cluster = self._here().client.cluster_id()
        return f"{cluster}/{self._sink.ledger_id(app_id)}" if app_id else cluster

    # -- logs ------------------------------------------------------------------------------------------------

    def logs(self, queues: Sequence[str]) -> list[str]:
        return self._source.logs(queues)

    def log_ids(self, logs: Sequence[str]) -> dict[str, str]:
        return self._source.log_ids(logs)

    def available(self, logs: Sequence[str], starts: Mapping[str, int] | None = None) -> dict[str, Available]:
        return self._source.available(logs, starts)

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        return self._source.offsets(queues, origin)

    def wait(self, queues: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        return self._source.wait(queues, ends, timeout_s)

    # -- source ----------------------------------------------------------------------------------------------

    def claim(
        self,
        app_id: str,
        queues: Sequence[str],
        start: Vector,
        limit: Limit,
        origin: Origin,
        on_new_checkpoint: OnNewCheckpoint,
        acks: bool = True,
    ) -> Vector:
        return self._source.claim(app_id, queues, start, limit, origin, on_new_checkpoint, acks=acks)

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        return self._source.resolve(app_id, start, end)

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        return self._source.count(app_id, ranges)

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        return self._source.read(ticket)

    def browse(self, slices: Sequence[tuple[str, int, int]]) -> Iterator[pa.RecordBatch]:
        return self._source.browse(slices)

    def dead_letter_route(self, queue: str) -> DeadLetterRoute | None:
        raise OptionError(
            f"topic {queue!r} has no dead-letter exchange, because a topic of Kafka cannot have one",
            "name where its rejected messages go: an exchange, or another queue",
        )

    def ack(self, app_id: str, end: Vector) -> None:
        self._source.ack(app_id, end)

    # -- sink ------------------------------------------------------------------------------------------------

    def open_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        on_new_checkpoint: OnNewCheckpoint,
        *,
        token: str = "",
        consumes: bool = True,
    ) -> Opened:
        return self._sink.open_batch(
            app_id, query_id, batch_id, on_new_checkpoint, token=token, consumes=consumes
        )

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        return self._sink.stage(header, rows)

    def commit_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        token: str,
        branches: Sequence[StagedBranch],
        *,
        on_unroutable: OnUnroutable = "fail",
        consumes: bool = True,
    ) -> Committed:
        return self._sink.commit_batch(
            app_id, query_id, batch_id, token, branches, on_unroutable=on_unroutable, consumes=consumes
        )

    def commit_branches(
        self, token: str, branches: Sequence[StagedBranch], *, on_unroutable: OnUnroutable = "fail"
    ) -> int:
        return self._sink.commit_branches(token, branches, on_unroutable=on_unroutable)

    def rollback_batch(self, token: str, *, of: str | None = None) -> None:
        self._sink.rollback_batch(token)

    # -- apply, mirror ---------------------------------------------------------------------------------------

    def unapplied(self, app_id: str) -> list[LedgerEntry]:
        return self._sink.unapplied(app_id)

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return self._sink.read_branches(branches)

    def mark_applied(self, app_id: str, sequence: int) -> None:
        self._sink.mark_applied(app_id, sequence)

    def skip(self, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        self._sink.skip(app_id, sequence, branches, to)

    def note(self, app_id: str, sequence: int, branches: Sequence[str], name: Note, text: str) -> None:
        self._sink.note(app_id, sequence, branches, name, text)

    def publish_refused(
        self,
        app_id: str,
        sequence: int,
        branches: Sequence[str],
        rows: str,
        token: str,
        staged: Sequence[StagedBranch],
    ) -> str:
        return self._sink.publish_refused(app_id, sequence, branches, rows, token, staged)

    def entries(self, app_id: str) -> list[LedgerEntry]:
        return self._sink.entries(app_id)

    def unmirrored(self, app_id: str, limit: int = 1000) -> list[LedgerEntry]:
        return self._sink.unmirrored(app_id, limit)

    def mark_mirrored(self, app_id: str, sequence: int) -> None:
        self._sink.mark_mirrored(app_id, sequence)

    def last_entry(self, app_id: str) -> LedgerEntry | None:
        return self._sink.last_entry(app_id)

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> bool:
        return self._sink.resume(app_id, entries)

    def app(self, app_id: str) -> AppInfo | None:
        return self._sink.app(app_id)

    def apps(self) -> list[AppInfo]:
        return self._sink.apps()

    def attempts(self) -> list[AttemptInfo]:
        return self._sink.attempts()

    def release(self, app_id: str, queue: str, *, force: bool = False, by: str = "") -> None:
        login = self._settings.connection.login
        self._sink.release(app_id, queue, force=force, by=(login.user if login else "") or by)
