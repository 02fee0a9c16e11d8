"""``tx``: the operations that a foreachBatch function may do in its transaction.

The function may call them in threads. One thread at a time asks what a table is like and takes the next step
on it; the jobs that stage rows run side by side.

Not here: the decision (``foreach_batch.py``), the tasks (``stream/staging.py``), what follows (``apply.py``).
Invariant: an operation that has returned is staged: durable, and without effect unless the batch is decided.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import OptionError
from broker_core.engine import EMPTY, BranchHeader, BranchKind, BranchTarget, Engine, Opened, StagedBranch
from connector.batch.apply import Apply
from connector.batch.batch_reads import BatchReads
from connector.batch.operations import Operations
from connector.batch.steps import Steps
from connector.batch.thread_context import ThreadContext
from connector.errors import error_summary
from connector.options import AddressOptions
from connector.reject.dead_letters import ATTEMPTS, Rejection, rejected_rows, with_reason
from connector.reject.rejected_metrics import Executions, to_write
from connector.sql import nullable
from connector.stream import staging
from connector.stream.schema import check_publish_columns
from connector.tables import target
from connector.tables.change import Change, Merge, Overwrite
from connector.tables.checks import Checks
from connector.tables.commit_id import txn_app_id
from connector.tables.table import Table
from connector.tables.table_format import Attempt, TableFormat
from connector.tables.when import Clause
from connector.typed.decode import Decoded

log = logging.getLogger("txmq")


class Pipeline(Protocol):
    """What is the same for every batch of an app."""

    tables: TableFormat
    checks: Checks
    apply: Apply
    address: AddressOptions

    @property
    def engine(self) -> Engine: ...


@dataclass
class BatchTransaction:
    """``tx``: the operations of ``fn``. ``sequence`` counts the app's batches over all checkpoints."""

    app_id: str
    query_id: str
    batch_id: int
    sequence: int
    _batch: DataFrame = field(repr=False)
    _opened: Opened = field(repr=False)
    _owner: Pipeline = field(repr=False)
    branches: list[StagedBranch] = field(default_factory=list, repr=False)
    _steps: Steps = field(default_factory=Steps, repr=False)
    _hidden: list[tuple[str, Attempt]] = field(default_factory=list, repr=False)  # one for each append
    _seen: Executions = field(default_factory=Executions, repr=False)
    _operations: Operations = field(default_factory=Operations, repr=False)
    executions: int = field(default=0, repr=False)  # operations that have read the batch
    in_threads: bool = field(default=False, repr=False)  # the function has called it in threads of its own
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # of what is not a job of Spark

    def __post_init__(self) -> None:
        self._reads = BatchReads(self._batch)
        self._thread = ThreadContext(self._batch.sparkSession, (self.app_id, self.query_id, self.batch_id))

    def __reduce__(self) -> Any:
        raise OptionError(
            "tx cannot leave the driver: a task, a UDF or another process has it",
            "call tx in the function, and take values such as tx.sequence into variables before",
        )

    def publish(
        self, rows: DataFrame, exchange: str = "", routing_key: str = "", queue: str | None = None
    ) -> None:
        """Publish ``rows``: column ``body`` (string or binary), and optionally ``exchange``, ``routing_key``
        and ``properties``. A column overrides the argument of its name. ``queue`` means exchange "" and this
        routing key. Raises OptionError.
        """
        with self._operation("publish", rows):
            if queue is not None:
                if exchange or routing_key:
                    raise OptionError(
                        f"publish has queue={queue!r} and also exchange or routing_key",
                        f"queue means exchange='' and routing_key={queue!r}, so give one of them",
                    )
                routing_key = queue
            check_publish_columns(rows.schema)
            self._stage(rows, "publish", {"exchange": exchange, "routing_key": routing_key})

    def reject(
        self, rows: DataFrame | Decoded, reason: str | None = None, *, exchange: str | None = None,
        routing_key: str | None = None, queue: str | None = None, delay: float | None = None,
        attempts: int = ATTEMPTS,
    ) -> None:  # fmt: skip
        """Publish messages of the batch as dead letters: body and properties unchanged, plus ``x-death``.

        ``rows`` need queue, partition, offset, and ``reason`` if the argument is None. ``exchange``: default
        that of their queue; ``routing_key``: default their own; ``queue``: exchange "" and this routing key.
        ``delay``: try again after these seconds, ``attempts`` times, first. Raises OptionError, DataLoss.
        """
        with self._operation("reject", rows):
            rejection = Rejection.to(self.app_id, exchange, routing_key, queue, delay, attempts)
            broken = self._seen.broken(rows.metric if isinstance(rows, Decoded) else rows)
            if broken is None:
                messages = rows.rejected if isinstance(rows, Decoded) else rows
                self._stage(rejected_rows(messages, reason), "publish", rejection.target, rejection)
            elif broken.num_rows:
                dead = rejection.messages(self._owner.engine, [with_reason(broken, reason)])
                self._stage_here("publish", rejection.target, dead)

    def append(self, rows: DataFrame, table: str, **options: Any) -> None:
        """Append ``rows`` to a Delta table (path or name), exactly once, after the decision.

        ``options`` are writer options (``mergeSchema=True``) and ``partitionBy`` (a column or a list).
        Appends to one table are one Delta commit and need the same options and columns. Raises OptionError.
        """
        with self._operation("append", rows):
            with self._lock:
                spark, found = rows.sparkSession, self._table("append", rows, table)
                writing = self._owner.tables.writing(table, options)
                checked = self._owner.checks.append(spark, found, nullable(rows.schema), writing)
                rows = checked.ready(rows)
                schema = nullable(rows.schema)
                step = self._steps.append(found.location)
                about = {
                    "options": writing.options,
                    "partition_by": [] if found.exists else writing.partition_by,  # that table has its own
                    "schema": schema.json(),
                    **self._step_target(spark, found, step),
                }
                self._steps.same_target("append", found.location, step, about)
                context = {target.CONTEXT: self._owner.tables.context(spark)} if checked.by_context else {}
                about = {**about, "table": found.name, "table_id": found.table_id, **context}
            with self._steps.left_by_failures(self._lock, "append", found.location, step):
                if checked.by_rows or not self._stage_files(rows, found, about):
                    self._stage(rows, "append", about)

    def merge(
        self, rows: DataFrame, table: str, on: str, *, update: bool | Mapping[str, str] | None = None,
        insert: bool | Mapping[str, str] | None = None, delete: bool | str | None = None,
        clauses: Sequence[Clause] = (), keys: Sequence[str] = (), merge_schema: bool = False,
    ) -> None:  # fmt: skip
        """Merge ``rows`` (``s``) into a Delta table (``t``), exactly once, after the decision.

        ``on``: SQL over t and s. ``update``, ``insert``: True for all columns, or {column: SQL}; ``delete``:
        True, or SQL; or ``clauses`` in order (:class:`When`). ``keys``: columns that identify a row: two
        rows of the batch with equal keys are an error. ``merge_schema``: the merge may add columns. Raises
        OptionError.
        """
        merge = Merge.parse(on, update, insert, delete, clauses, evolves=merge_schema)
        self._change("merge", rows, table, merge, keys)

    def delete(self, rows: DataFrame, table: str, on: str) -> None:
        """Delete the rows of a Delta table (``t``) that match a row of ``rows`` (``s``) by ``on`` (SQL),
        exactly once, after the decision. Raises OptionError."""
        self._change("delete", rows, table, Merge.parse(on, delete=True))

    def overwrite(self, rows: DataFrame, table: str, where: str, **options: object) -> None:
        """Replace the rows of a Delta table that satisfy ``where`` (SQL) by ``rows``, which must satisfy it
        too, exactly once, after the decision. ``options``: writer options. Raises OptionError.
        """
        chosen = self._owner.tables.writing(table, options).options
        self._change("overwrite", rows, table, Overwrite.parse(where, chosen))

    def after_commit(self, rows: DataFrame, name: str) -> None:
        """Call function ``name`` with ``rows`` after the decision, in order, at least once.

        A parameter ``token`` of the function gets a UUID as text: the same each time the call is repeated,
        and a different one for every other batch, function, app and data directory. Raises OptionError.
        """
        with self._operation("after_commit", rows):
            self._owner.apply.function(name)
            about = {"name": name, "schema": nullable(rows.schema).json()}
            with self._lock:
                self._steps.same_target("after_commit", name, 0, about)
            with self._steps.left_by_failures(self._lock, "after_commit", name, 0):
                self._stage(rows, "after_commit", about)

    @contextlib.contextmanager
    def _operation(self, name: str, rows: object) -> Iterator[None]:
        """An operation, in any thread. Raises OptionError after the function returned."""
        with self._operations.one(name):
            _require_frame(name, rows)
            if self._operations.elsewhere:
                self.in_threads = True
                self._thread.require_query(self.query_id, name)
            with self._thread.of_batch(elsewhere=self._operations.elsewhere):
                yield

    def _table(self, operation: str, rows: DataFrame, table: str) -> Table:
        if not isinstance(table, str) or not table:
            raise OptionError(
                f"{operation} got the table {table!r}", "give the path or the name of a Delta table"
            )
        return self._owner.tables.resolve(rows.sparkSession, table)

    def _step_target(self, spark: SparkSession, table: Table, step: int) -> dict[str, Any]:
        """What is stored with the decision, so that a repeated step has the same id."""
        app = self.app_id, self._opened.identity, table.location
        restored = self._owner.checks.guard(spark, table, txn_app_id(*app))
        return {"txn_app_id": txn_app_id(*app, step, restored), "location": table.location, "step": step}

    def _change(
        self, kind: BranchKind, rows: DataFrame, table: str, change: Change, keys: Sequence[str] = ()
    ) -> None:
        with self._operation(kind, rows):
            with self._lock:
                found = self._table(kind, rows, table)
                rows, about = self._owner.checks.change(rows, found, change, keys)
                step = self._step_target(rows.sparkSession, found, self._steps.change(found.location))
                about = {**step, **about}
            if not self._stage(rows, kind, about) and change.acts_without_rows:
                self._stage_here(kind, {**about, EMPTY: True}, [target.nothing()])

    def _stage(
        self, rows: DataFrame, kind: BranchKind, target: BranchTarget, rejection: Rejection | None = None
    ) -> int:
        """Stage ``rows`` in their tasks, and return how many there are."""
        frame = staging.staging_frame(rows, self._header(kind, target), self._owner.address, rejection)
        with self._executing(frame, stages=True):
            staged = staging.staged(frame)
        self.branches += staged
        return sum(branch.rows for branch in staged)

    def _stage_here(
        self, kind: BranchKind, target: BranchTarget, batches: Iterable[pa.RecordBatch], number: int = 0
    ) -> None:
        """Stage a branch in the driver."""
        self.branches.append(self._owner.engine.stage(self._header(kind, target, number), iter(batches)))

    def _header(self, kind: BranchKind, target: BranchTarget, partition: int = 0) -> BranchHeader:
        batch = self.app_id, self.query_id, self.batch_id
        return BranchHeader(self._opened.token, uuid.uuid4().hex, kind, target, *batch, partition)

    def _stage_files(self, rows: DataFrame, table: Table, about: BranchTarget) -> bool:
        """Stage files that the table takes; False if it has changed since it was resolved."""
        attempt = Attempt(self.app_id, about["txn_app_id"], self.sequence, self._opened.token)
        with self._lock:
            number = len(self._hidden)
            self._hidden.append((table.location, attempt))
        rows, written = to_write(rows)
        with self._executing(rows, stages=False):
            staged = self._owner.tables.stage(written, table, about["options"], attempt, number)
            if staged is None:
                return False
        if staged.rows:
            self._stage_here("append", {**about, **staged.target()}, [staged.batch()], number)
        failpoint.here("foreach.files_staged")
        return True

    @contextlib.contextmanager
    def _executing(self, frame: DataFrame, *, stages: bool) -> Iterator[None]:
        """An execution of ``frame``: afterwards it is known whether it was one of the whole batch."""
        direct = self._reads.direct()
        self.executions += 1
        yield
        whole = self._seen.note(frame, self._batch, stages=stages, rdd_id=self._reads.rdd_id)
        self._reads.by_tasks |= direct and whole and self._reads.direct()

    def persist(self) -> None:
        """Caches the batch until the function has returned, for operations that read it several times."""
        self._reads.persist()

    def finish(self) -> None:
        """C3, when the function has returned. Raises what an operation in one of its threads has raised."""
        self._operations.finish()
        failpoint.here("foreach.staged")
        with self._thread.of_batch(elsewhere=False):
            if not self._seen.whole:
                direct = self._reads.direct()
                staging.execute(self._batch)
                self._reads.by_tasks |= direct and self._reads.direct()
            self._reads.note(self._owner.engine, self.app_id, self.query_id, self.batch_id)

    def seal(self) -> None:
        """Closes ``tx`` for the decision. Raises the error of a call that it refused since ``finish``."""
        self._operations.seal()
        _require_files(self._owner.tables, self._hidden)

    def close(self) -> None:
        """Waits for the operations under way, and refuses new ones."""
        self._operations.close()

    def drop_files(self) -> None:
        """Delete the files of an attempt that can not be decided; what is left, a later batch deletes."""
        for location, attempt in self._hidden:
            try:
                self._owner.tables.drop(location, attempt)
            except Exception as error:
                log.warning("files of a batch that was not decided are not deleted: %s", error_summary(error))


def _require_frame(operation: str, rows: object) -> None:
    if not hasattr(rows, "sparkSession") and not (operation == "reject" and isinstance(rows, Decoded)):
        raise OptionError(
            f"tx.{operation} got rows of the type {type(rows).__name__}",
            "give a DataFrame of Spark: .good of what decode returned, or one of spark.createDataFrame",
        )


def _require_files(tables: TableFormat, hidden: Iterable[tuple[str, Attempt]]) -> None:
    for location, attempt in dict.fromkeys(hidden):
        if lost := tables.lost(location, attempt):
            raise OptionError(
                f"the table at {location} was dropped or replaced since tx.append staged data files in its "
                f"directory, and {len(lost)} are gone ({lost[0]})",
                "nothing is decided: make the table again if need be, and start the query again",
            )
