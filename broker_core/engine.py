"""The port that the connector is written against: what a micro-batch needs of a broker, and nothing else.

The embedded engine fills it in process (``EmbeddedEngine``) and over Flight (``BrokerClient``); a Kafka
engine fills it with topics. No SQLite, Arrow file or socket shows through. ``docs/transactions.md`` tells the
protocol; the rule numbers (S1, C4) are those of its headings.

What the port does not promise: ``read`` and ``stage`` may block for as long as a broker needs to come back;
every other call fails with ConnectionFailed once the client's time for reconnecting is over. Every call is
idempotent.

Words: a *log* is what offsets count in (here a queue; on Kafka a topic partition). A *vector* is a dict from
log to the next offset to read, where ``START`` stands for the symbolic start. Offsets are end-exclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa

from broker_core.checks import Json

START: Literal["start"] = "start"

Vector = dict[str, int | Literal["start"]]
Ranges = dict[str, tuple[int, int]]  # log -> (start, end), concrete
OnNewCheckpoint = Literal["fail", "resume"]
BranchKind = Literal["publish", "append", "after_commit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """How much ``claim`` may take. None: no limit. ``end`` caps the answer (Trigger.AvailableNow).

    Below ``min_rows`` it takes nothing, until the oldest message that waits was committed ``max_delay_s``
    ago; over all logs.
    """

    max_rows: int | None = None
    max_bytes: int | None = None
    end: Mapping[str, int] | None = None
    min_rows: int | None = None
    max_delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """What a symbolic start means; resolved once, durably, per app and lineage."""

    at: Literal["earliest", "latest"] = "earliest"
    offsets: Mapping[str, int] | None = None  # per log; -2 earliest, -1 latest, as Kafka's source has it
    timestamp_us: int | None = None  # first message committed at or after


@dataclass(frozen=True, slots=True)
class Available:
    """Messages of a log between two offsets: ``rows`` counts what a read would give, ``size_bytes`` their
    bodies (about).
    """

    start: int
    end: int
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """One task's slice of a claimed range.

    ``ranges`` is the whole range of the micro-batch, over all logs; ``query_id``/``batch_id`` come from the
    TaskContext (empty and -1 on Spark Connect: then nothing is recorded, and the commit consumes nothing).
    """

    app_id: str
    query_id: str
    batch_id: int
    ranges: Ranges
    slices: tuple[tuple[str, int, int], ...]  # (log, start, end) in reading order
    fail_on_data_loss: bool = True


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to ``open_batch``: a token to stage under, or the ledger entry of a batch that is decided
    already.
    """

    sequence: int
    token: str  # "" when already decided
    entry: LedgerEntry | None = None

    @property
    def already(self) -> bool:
        return self.entry is not None


@dataclass(frozen=True, slots=True)
class BranchHeader:
    """What one task stages: rows for the broker (publish), for a table (append) or for a function
    (after_commit).

    ``target``: for publish ``{"exchange": str, "routing_key": str}`` (defaults where the rows have no such
    column); for append ``{"table": str, "options": {...}}``; for after_commit ``{"name": str}``.
    """

    token: str
    branch: str  # uuid made by the task: a retried or speculative attempt has another
    kind: BranchKind
    target: Mapping[str, Json]
    app_id: str = ""  # for attempts that the tasks open by staging (native sink, batch write)
    query_id: str = ""
    batch_id: int = -1
    partition: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class StagedBranch:
    """A durable branch, as the driver names it in ``commit_batch``."""

    branch: str
    partition: int
    attempt: int
    rows: int
    checksum: int  # over the checksums of its parts


@dataclass(frozen=True, slots=True)
class ToApply:
    """Rows of a decided batch that must reach a table or a function."""

    kind: BranchKind
    target: Mapping[str, Any]
    branches: tuple[str, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One decided micro-batch. ``ranges`` is empty where it consumed nothing."""

    app_id: str
    sequence: int
    query_id: str
    batch_id: int
    token: str
    ranges: Ranges
    messages: int
    published: int
    committed_at_us: int
    to_apply: tuple[ToApply, ...] = ()
    applied: bool = True
    mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer to ``commit_batch``; ``already`` when an earlier call decided the same batch."""

    entry: LedgerEntry
    already: bool


@dataclass(frozen=True, slots=True)
class AppInfo:
    app_id: str
    queues: tuple[str, ...]  # owned
    sequence: int  # last decided batch
    query_id: str
    batch_id: int
    lag: int  # messages not consumed in its queues
    unapplied: int
    unmirrored: int


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One row of ``txmq attempts``: what was staged for a micro-batch or a batch write that is not
    decided.
    """

    token: str
    app_id: str  # "" for a batch write
    query_id: str
    batch_id: int
    idle_s: float  # since it was opened, or about since its last part came
    branches: int
    rows: int
    size_bytes: int


class Engine(Protocol):
    def identity(self) -> str:
        """Which data directory answers: another one, also one made anew at the same place, has another
        identity; a copy has the same.
        """

    # -- logs ------------------------------------------------------------------------------------------------
    def logs(self, queues: Sequence[str]) -> list[str]:
        """The logs of these queues, in order. Raises QueueNotFound."""

    def available(self, logs: Sequence[str], starts: Mapping[str, int] | None = None) -> dict[str, Available]:
        """Per log what is unsettled from ``starts`` (default: its earliest unsettled message) to its end."""

    def offsets(self, logs: Sequence[str], origin: Origin) -> dict[str, int]:
        """``origin`` as a concrete vector, as of now; records nothing (batch reads)."""

    def wait(self, logs: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        """Wait until a log has grown past ``ends``, at most ``timeout_s``; True if one has."""

    # -- source ----------------------------------------------------------------------------------------------
    def claim(
        self, app_id: str, start: Vector, limit: Limit, origin: Origin, on_new_checkpoint: OnNewCheckpoint
    ) -> Vector:
        """S2: ack everything below ``start``, then the end vector for it: the recorded one, or a new claim;
        ``start`` if nothing is new.

        The logs are the keys of ``start``. Raises QueueNotFound, ResourceLocked (another app or a channel
        holds a queue), LineageConflict.
        """

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        """S3: the concrete ranges of a claim. A settled range does not make it fail. Raises LineageConflict
        if there is no such claim.
        """

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        """Rows and bytes that reading the claimed ranges would give, for splitting them evenly."""

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        """S4: the rows of the slices, as READ_SCHEMA, the same on every replay until acked. Goes on after a
        reconnect.

        Records durably, before the first row, that (query, batch) reads ``ranges``. Raises LineageConflict
        when that batch has read other ranges of these logs; DataLoss (``fail_on_data_loss``) when rows are
        gone.
        """

    def browse(self, slices: Sequence[tuple[str, int, int]]) -> Iterator[pa.RecordBatch]:
        """Unsettled rows of the slices, as READ_SCHEMA; claims nothing, changes nothing (batch reads)."""

    def ack(self, app_id: str, end: Vector) -> None:
        """S5: everything below ``end`` may be deleted. Raises LineageConflict where ``end`` is not the end of
        a claim.
        """

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
        """C1: a token for a new attempt (``token``, where the caller made one), or the entry of a decided
        batch.

        ``consumes`` False: Spark Connect, where no range is known. Raises LineageConflict, BatchGap.
        """

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        """C2: make rows durable and invisible under the header's token; goes on after a reconnect.

        publish takes rows with the columns of MESSAGE_SCHEMA; ``exchange`` and ``routing_key`` may be
        missing, ``properties`` too. append and after_commit take any schema. Raises TransactionTooLarge,
        ExchangeNotFound.
        """

    def commit_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        token: str,
        branches: Sequence[StagedBranch],
        *,
        on_unroutable: Literal["fail", "drop"] = "fail",
        consumes: bool = True,
    ) -> Committed:
        """C4: decide. Raises MissingBranch, LineageConflict, BatchGap, Unroutable."""

    def commit_branches(
        self, token: str, branches: Sequence[StagedBranch], *, on_unroutable: Literal["fail", "drop"] = "fail"
    ) -> int:
        """A batch write: publish what is staged under ``token`` in one transaction; the number of messages.
        Idempotent by token.
        """

    def rollback_batch(self, token: str) -> None:
        """Drop the attempt and its branches. Raises BatchDecided when the token was committed; an unknown
        token is fine.
        """

    # -- apply, mirror ---------------------------------------------------------------------------------------
    def unapplied(self, app_id: str) -> list[LedgerEntry]:
        """C5: decided batches with rows that are not applied, in sequence order."""

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of decided append or after_commit branches. Raises MissingBranch where they are applied
        and freed.
        """

    def mark_applied(self, app_id: str, sequence: int) -> None:
        """The rows of this batch reached their tables; they are freed. Idempotent."""

    def skip(self, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        """An operator has written the rows of these branches of a decided batch to ``to``: nothing applies
        them any more. Idempotent.

        The ledger keeps ``to``. Raises UnknownTransaction where there is no such batch or branch to apply.
        """

    def unmirrored(self, app_id: str, limit: int = 1000) -> list[LedgerEntry]:
        """C6: entries that the Delta ledger does not have yet, in sequence order."""

    def mark_mirrored(self, app_id: str, sequence: int) -> None:
        """The Delta ledger has every entry up to ``sequence``."""

    def last_entry(self, app_id: str) -> LedgerEntry | None: ...

    def apps(self) -> list[AppInfo]: ...

    def attempts(self) -> list[AttemptInfo]:
        """Open attempts, oldest first. ``rollback_batch`` drops one whose driver will not come back."""

    def release(self, app_id: str, queue: str) -> None:
        """Take the claim on a queue from a pipeline that will not come back. Raises QueueNotFound,
        PreconditionFailed.
        """

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One row of ``txmq queues``."""

    name: str
    messages: int  # committed and not settled
    unacknowledged: int  # of these, held by channels
    next_offset: int
    consumers: int
    owner: str  # app_id, "" for none
    durable: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparedInfo:
    """One row of ``txmq transactions``."""

    xid: str
    age_s: float
    publishes: int
    settles: int
    size_bytes: int
    dropped: int = 0  # messages and acks of it that will come to nothing, because their queue is gone
