"""The port that the connector uses: what a micro-batch needs of a broker, and nothing else.

The embedded engine implements it in process (``EmbeddedEngine``) and over Flight (``BrokerClient``); a Kafka
engine implements it with topics. It exposes no SQLite, Arrow file or socket. ``docs/transactions.md``
describes the protocol; the rule numbers (S1, C4) are those of its headings.

Not guaranteed: ``read`` and ``stage`` may block until a broker is available again; every other call fails
with ConnectionFailed after the client's reconnection time. Every call is idempotent.

Words: a *log* is what offsets count in. A queue of the embedded engine is its own only log. On Kafka it is a
topic, and ``orders/3`` is partition 3 of it. Logs may be added to a queue, and are never taken away. A
*vector* names the next offset to read of each log; a queue whose start is symbolic has the entry ``START``
instead, under the queue's name. Offsets are end-exclusive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import pyarrow as pa

from broker_core.core.checks import Json, Name
from broker_core.core.errors import OptionError

START: Literal["start"] = "start"
EARLIEST, LATEST = -2, -1  # in place of an offset
UNKNOWN_OFFSETS = "?"  # of a batch, in place of a digest

# what the target of a branch says about its way to a table, as [microseconds, text]
Note = Literal["refused", "rows_to"]
REFUSED: Note = "refused"  # since when it is not applied, and the last error
ROWS_TO: Note = "rows_to"  # an operator wants the rows that the table refuses there, see TO_QUEUE
TO_QUEUE = "queue:"  # before the name of a queue in such a note; else it is a directory
FILES = "files"  # data files that hold the rows, and how many rows: the branch has their names
EMPTY = "empty"  # a change without rows, whose branch has one all the same
VERSION = "version"  # of the table that has the rows of the branch
REFUSED_ROWS = "refused_rows"  # the numbers of rows that were published, because the table refuses them

Vector = dict[Name, int | Literal["start"]]  # log -> offset, or queue -> START
Ranges = dict[Name, tuple[int, int]]  # log -> (start, end), concrete
Slice = tuple[Name, int, int]  # log, start, end
OnNewCheckpoint = Literal["fail", "resume"]
BranchTarget = Mapping[str, Any]  # JSON: where the rows of a branch go, see BranchHeader
BranchKind = Literal["publish", "append", "merge", "delete", "overwrite", "after_commit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """How much ``claim`` may take. None: no limit. ``end`` limits the result (Trigger.AvailableNow): nothing
    is taken from a log that it does not name.

    Below ``min_rows`` it takes nothing, until the oldest waiting message was committed ``max_delay_s`` ago;
    over all logs.
    """

    max_rows: int | None = None
    max_bytes: int | None = None
    end: Mapping[Name, int] | None = None
    min_rows: int | None = None
    max_delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """The meaning of a symbolic start; resolved once, durably, per app and lineage.

    ``offsets`` names every queue or logs of it: a log with an offset, EARLIEST or LATEST (the numbers of
    Spark's Kafka source), a queue of several logs with EARLIEST or LATEST. The engine knows the logs, and
    checks that.
    """

    at: Literal["earliest", "latest"] = "earliest"
    offsets: Mapping[Name, int] | None = None
    timestamp_us: int | None = None  # first message committed at or after

    def offset(self, queue: str, log: str) -> int:
        """Returns where a log of ``queue`` starts: an offset, EARLIEST or LATEST. Leaves out
        ``timestamp_us``.
        """
        offsets = self.offsets or {}
        return offsets.get(log, offsets.get(queue, LATEST if self.at == "latest" else EARLIEST))

    def check(self, logs: Mapping[str, Sequence[str]], option: str = "startingOffsets") -> None:
        """Raises OptionError if ``offsets`` does not fit the queues of a reader, whose logs these are."""
        if self.offsets is None:
            return
        names, sources = set(self.offsets), {*logs, *(log for found in logs.values() for log in found)}
        if names - sources or not all(names & {queue, *found} for queue, found in logs.items()):
            raise OptionError(
                f"option {option!r} names {', '.join(sorted(names))}, option 'queue' names "
                f"{', '.join(sorted(logs))}; give an offset for every queue and for no other"
            )
        for queue, found in logs.items():
            if queue not in found and self.offsets.get(queue, EARLIEST) >= 0:
                raise OptionError(
                    f"option {option!r} names offset {self.offsets[queue]} of queue {queue!r}, which has the "
                    f"logs {', '.join(found)}; give an offset for every log, or {queue!r} -2 or -1"
                )


@dataclass(frozen=True, slots=True)
class Available:
    """Messages of a log between two offsets. A read has at most ``rows`` rows (the difference of the offsets,
    where the engine does not know what is between them); ``size_bytes`` is about the size of their bodies.
    """

    start: int
    end: int
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DeadLetterRoute:
    """Where a queue sends its dead letters. ``routing_key`` None: each keeps its own."""

    exchange: str
    routing_key: str | None
    later: str = ""  # an exchange that delays, and leads to this queue alone by its name


@dataclass(frozen=True, slots=True)
class ReadTicket:
    """One task's slice of a claimed range.

    ``ranges`` is the whole range of the micro-batch, over all logs; ``query_id``/``batch_id`` come from the
    TaskContext (empty and -1 where it does not know them: then nothing is recorded).
    """

    app_id: str
    query_id: str
    batch_id: int
    ranges: Ranges
    slices: tuple[Slice, ...]  # in reading order
    fail_on_data_loss: bool = True
    transaction: bool = False  # rows as READ_WITH_TRANSACTION, where commits have numbers
    record: bool = False  # rows as READ_WITH_RECORD, where messages are records of Kafka


@dataclass(frozen=True, slots=True)
class Opened:
    """The result of ``open_batch``: a token for staging, or the ledger entry of a batch that is decided."""

    sequence: int
    token: str  # "" when already decided
    entry: LedgerEntry | None = None
    identity: str = ""  # of the engine, as its method says it

    @property
    def already(self) -> bool:
        return self.entry is not None


@dataclass(frozen=True, slots=True)
class BranchHeader:
    """What one task stages: rows for the broker (publish), for a table (append, merge, delete, overwrite) or
    for a function (after_commit).

    ``target``: for publish ``{"exchange": str, "routing_key": str}`` (defaults if the rows have no such
    column); for a table ``{"table": str, ...}`` and what the connector needs to write it; for after_commit
    ``{"name": str}``.
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
    """A durable branch, for ``commit_batch`` by the driver. ``receipt`` is what the engine needs to find its
    rows again; nobody else reads it.
    """

    branch: str
    partition: int
    attempt: int
    rows: int
    checksum: int  # over the checksums of its parts
    receipt: str = ""


@dataclass(frozen=True, slots=True)
class ToApply:
    """Rows of a decided batch that must reach a table or a function."""

    kind: BranchKind
    target: BranchTarget
    branches: tuple[str, ...]  # names for ``read_branches``, by which only the engine finds anything
    rows: int


@dataclass(frozen=True, slots=True)
class InTable:
    """Which version of a table has a step of an applied batch. ``table_id``: "" if the step created it."""

    table_id: str
    version: int


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One decided micro-batch. ``ranges`` is empty if it consumed nothing. ``messages`` counts what it
    consumed: messages, or offsets where the engine cannot count messages. ``in_tables``: where it is known.
    """

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
    in_tables: tuple[InTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of ``commit_batch``; ``already`` if an earlier call decided the same batch."""

    entry: LedgerEntry
    already: bool


@dataclass(frozen=True, slots=True)
class AppInfo:
    app_id: str
    queues: tuple[str, ...]  # claimed
    sequence: int  # last decided batch
    query_id: str
    batch_id: int
    lag: int  # messages not consumed in its queues, at most
    unapplied: int
    unmirrored: int
    lag_s: float | None = field(default=None, compare=False)  # age of the oldest; None: none, or not known


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """One row of ``txmq app staged``: what was staged for a micro-batch or a batch write, not yet decided."""

    token: str
    app_id: str  # "" for a batch write
    query_id: str
    batch_id: int
    idle_s: float  # since it was opened, or about since its last part arrived
    branches: int
    rows: int
    size_bytes: int
    user: str = ""  # who opened it; "": the owner of the data directory
    client: str = ""  # its program, host and process, since the broker runs


class Source(Protocol):
    """The logs, and what one app reads of them."""

    def logs(self, queues: Sequence[str]) -> list[str]:
        """Returns the logs of these queues, in order. Raises QueueNotFound."""

    def log_ids(self, logs: Sequence[str]) -> dict[str, str]:
        """Returns what tells each log from another one of its name, here or on another engine; a log that is
        gone is missing.
        """

    def available(
        self, logs: Sequence[str], starts: Mapping[Name, int] | None = None
    ) -> dict[str, Available]:
        """Returns per log what is unsettled from ``starts`` (default: the first such message) to its end."""

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        """Returns ``origin`` as an offset of every log, as of now; records nothing (batch reads). Raises
        QueueNotFound, OptionError.
        """

    def wait(self, queues: Sequence[str], ends: Mapping[Name, int], timeout_s: float) -> bool:
        """Waits until a log has grown past ``ends``, at most ``timeout_s``. A log that ``ends`` lacks counts
        from 0. Returns whether one has grown; may be True too early, never False too early.
        """

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
        ran: bool = False,
    ) -> Vector:
        """Acks everything below ``start``, which Spark has committed (else ``acks`` is False), then returns
        its end vector: the recorded one, or a new claim; ``start`` if nothing is new (S2). The end has no
        symbolic entry unless it is ``start``. ``ran``: this reader has planned the batch that ends at
        ``start``. Without it nothing is acked that may still have to be decided here.

        ``start`` names every queue or logs of it. The end may name logs that ``start`` lacks: they were added
        to a queue, and are read from their beginning, whatever the origin. Raises QueueNotFound, OptionError,
        ResourceLocked (another app or a channel holds a queue), CheckpointMismatch: even where the ledger of
        the app has not decided what Spark has committed.
        """

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        """Returns the concrete ranges of a claim, even if they are settled (S3). Raises CheckpointMismatch if
        there is no such claim.
        """

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        """Returns rows and bytes of reading the claimed ranges, to split them evenly."""

    def read(self, ticket: ReadTicket) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the slices, as READ_SCHEMA, the same on every replay until acked (S4). Continues
        after a reconnect.

        Records durably, before the first row, that (query, batch) reads ``ranges``. Raises DataLoss
        (``fail_on_data_loss``) if rows are lost. Ranges that are no claim, and other ranges of these logs
        than the batch has read, raise CheckpointMismatch: here, or in ``commit_batch``.
        """

    def browse(
        self, slices: Sequence[Slice], *, transaction: bool = False, record: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yields unsettled rows of the slices, as READ_SCHEMA; claims and changes nothing (batch reads).
        ``transaction``, ``record``: as in a ticket.
        """

    def dead_letter_route(self, queue: str) -> DeadLetterRoute | None:
        """Returns where a queue sends its dead letters; None: nowhere. Raises QueueNotFound, OptionError."""

    def ack(self, app_id: str, end: Vector, ran: bool = False) -> None:
        """Allows the deletion of everything below ``end`` (S5), as ``claim`` does. Raises CheckpointMismatch
        if ``end`` is not the end of a claim, or not decided.
        """


class Sink(Protocol):
    """What a micro-batch publishes and decides, and what is done with its entry afterwards."""

    def open_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        on_new_checkpoint: OnNewCheckpoint,
        *,
        token: str = "",
        offset_log: str = "",
    ) -> Opened:
        """Returns a token for a new attempt (``token``, if the caller made one), or the entry of a decided
        batch (C1). ``offset_log``: its offsets of sources that are not txmq, as one text; "" without one,
        UNKNOWN_OFFSETS. Raises CheckpointMismatch, BatchGap.
        """

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        """Makes rows durable and invisible under the header's token (C2); continues after a reconnect.

        publish takes rows with the columns of MESSAGE_SCHEMA, of which only ``body`` is required. The other
        kinds take any schema. Raises TransactionTooLarge, ExchangeNotFound, OptionError for what the
        engine cannot carry. May raise BatchDecided for a late task; otherwise its branch is never named.
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
        opens: OnNewCheckpoint | None = None,
        offset_log: str = "",
    ) -> Committed:
        """Decides a batch (C4), or returns its entry if it is decided; ``token`` may then be "" and
        ``branches`` empty. ``opens``: opens it first, with this word. ``offset_log``: as ``open_batch``.

        Raises MissingBranch, CheckpointMismatch (even if the batch is decided and has read other ranges
        since, or has other offsets now), BatchGap, Unroutable, OptionError.
        """

    def commit_branches(
        self, token: str, branches: Sequence[StagedBranch], *, on_unroutable: Literal["fail", "drop"] = "fail"
    ) -> int:
        """Commits a batch write: publishes what is staged under ``token`` in one transaction. Returns the
        number of messages. Idempotent by token.
        """

    def rollback_batch(self, token: str, *, of: str | None = None) -> None:
        """Drops the staged batch and its branches; a later commit of the token is refused, or decides once.
        Raises BatchDecided if the token was committed; an unknown token is allowed. ``of``: for an operator,
        whose it is; None if one user only has this token.
        """

    # -- apply, mirror ---------------------------------------------------------------------------------------
    def unapplied(self, app_id: str) -> list[LedgerEntry]:
        """Returns decided batches with rows that are not applied, in sequence order (C5)."""

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of decided branches of tables and functions. Raises MissingBranch if they are
        applied and freed.
        """

    def mark_applied(self, app_id: str, sequence: int, versions: Mapping[str, int] | None = None) -> None:
        """Frees the rows of this batch, which have reached their tables. Idempotent: the first call counts.
        ``versions``: of the tables, by a branch of each target, as far as they are known.
        """

    def publish_refused(
        self,
        app_id: str,
        sequence: int,
        branches: Sequence[str],
        rows: str,
        token: str,
        staged: Sequence[StagedBranch],
    ) -> str:
        """Publishes what is staged under ``token``, as a batch write, in the place of rows of these decided
        branches, and records in their target (``REFUSED_ROWS``) which rows these are: one transaction.
        Returns what is recorded: the first call decides, and a later one publishes nothing.

        Raises UnknownTransaction if they are applied or skipped, MissingBranch, Unroutable.
        """

    def entries(self, app_id: str) -> list[LedgerEntry]:
        """Returns the decided batches that are kept, in sequence order: the last ones, at least 1000."""

    def unmirrored(self, app_id: str, limit: int = 1000) -> list[LedgerEntry]:
        """Returns entries that the Delta ledger does not have yet, in sequence order (C6)."""

    def mark_mirrored(self, app_id: str, sequence: int) -> None:
        """Records that the Delta ledger has every entry up to ``sequence``."""

    def last_entry(self, app_id: str) -> LedgerEntry | None:
        """Returns the newest decided batch of the app; None: there is none."""

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> bool:
        """Continues the app after ``entries`` of a ledger that this engine does not have, the last one of
        each log, in sequence order (C7): their ends are consumed, the next batch has the next sequence, and a
        source that resumes begins there. Idempotent.

        Returns whether the app has decided just these; False: other batches, and nothing has changed. Raises
        QueueNotFound, ResourceLocked, CheckpointMismatch for an end that a log has not reached.
        """


class AppOperator(Protocol):
    """What is seen of apps, and done for one that cannot go on by itself."""

    def apps(self) -> list[AppInfo]:
        """Returns the apps that have claimed or decided, by name."""

    def app(self, app_id: str) -> AppInfo | None:
        """Returns what ``apps`` says of one app; None if it has neither claimed nor decided."""

    def staged_batches(self) -> list[StagedBatch]:
        """Returns the batches that are staged and not decided, oldest first. ``rollback_batch`` drops one."""

    def release(self, app_id: str, queue: str, *, force: bool = False, by: str = "") -> None:
        """Releases the claim on a queue of an app that will not return, and records when and ``by`` whom;
        an engine that knows the user of the call takes that.

        Raises QueueNotFound, PreconditionFailed: the app does not have it, or, without ``force``, something
        of it is claimed and not decided, or a decided batch of the app is not applied.
        """

    def skip(self, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        """Records that an operator has written the rows of these branches of a decided batch to ``to``, so
        that nothing applies them. Idempotent.

        The ledger keeps ``to``. Raises UnknownTransaction if there is no such batch or branch to apply.
        """

    def note(self, app_id: str, sequence: int, branches: Sequence[str], name: Note, text: str) -> None:
        """Records something about these branches in their target, with the time when it was said first:
        ``REFUSED``, why they could not be applied, or ``ROWS_TO``. Raises UnknownTransaction if they are
        applied or skipped.
        """


class Engine(Source, Sink, AppOperator, Protocol):
    def identity(self, app_id: str = "") -> str:
        """Returns whose data answers: of which data directory or cluster; with ``app_id``, whose ledger of
        that app. What is made again at the same place has a new identity; a copy has the same.
        """

    def close(self) -> None: ...
