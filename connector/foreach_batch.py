"""``transactional(fn)``: a foreachBatch function whose effects are one transaction.

Not here: the tasks (staging.py), tables (checks.py, table_format.py), what follows a decision (apply.py),
the copy of the ledger in Delta (ledger.py).

Invariant: decide, then apply. Before ``commit_batch`` answers, no effect is visible. Afterwards, all
effects follow from the ledger entry and are repeated until they are done (docs/transactions.md).

1. C1 open: a token, or the entry of a decided batch.
2. C2 stage: ``fn`` stages rows from the executors under the token, and files that Delta has written.
3. C3 execute: the batch is executed to its end at least once.
4. C4 decide: one call, idempotent.
5. C5 apply: operations on tables and functions of all decided batches that are not applied, in order.
6. C6 mirror: the ledger in Delta, behind the commit (or within it: ``ledger_sync``).
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from broker_core import failpoint
from broker_core.engine import BranchHeader, BranchKind, Engine, LedgerEntry, OnNewCheckpoint, StagedBranch
from broker_core.errors import ConnectionFailed, OptionError, TxmqError
from connector import staging, target
from connector.after_commit import AfterCommit, check_functions
from connector.apply import Apply
from connector.checks import Checks
from connector.dead_letters import Rejection, rejected_rows, with_reason
from connector.decoded import Decoded
from connector.fit import nullable
from connector.ledger import DeltaLedger
from connector.merge import Merge
from connector.observed import Seen, to_write
from connector.once import txn_app_id
from connector.options import Address, WriteOptions, write_options
from connector.overwrite import Overwrite
from connector.schema import check_publish_columns
from connector.steps import Steps
from connector.table import Table, is_connect
from connector.table_format import Attempt
from connector.tables import table_format
from connector.trace import holds_java_trace, shortened, told
from connector.when import Clause

log = logging.getLogger("txmq")

OnUnroutable = Literal["fail", "drop"]


def transactional(
    fn: Callable[[DataFrame, BatchTransaction], None],
    *,
    url: str | None = None,
    data: str | None = None,
    vhost: str | None = None,
    app_id: str,
    ledger: str | None = None,
    ledger_sync: bool = False,
    after_commit: Mapping[str, AfterCommit] | None = None,
    on_new_checkpoint: OnNewCheckpoint = "fail",
    on_unroutable: OnUnroutable = "fail",
    persist: bool = False,
    lineage: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> Transactional:
    """A function for ``foreachBatch`` that runs ``fn(batch, tx)`` as one transaction per micro-batch.

    ``url`` or ``data``: the broker; ``vhost``: the virtual host at ``data``. ``app_id``: the stable name of
    the pipeline, equal to the ``appId`` of a txmq source. ``ledger``: a Delta table (path or name) for the
    offsets of every batch; ``ledger_sync``: write it before the batch ends. ``after_commit``: the functions
    ``f(rows, sequence)`` or ``f(rows, sequence, token)`` for ``tx.after_commit``, by name. ``persist``: cache
    the batch while ``fn`` runs. ``lineage``: on Spark Connect with a source that is not txmq, a string that
    you change together with the checkpoint. ``settings``: of the connections to Kafka, with the names of the
    options (``kafka.sasl.username``).

    Raises OptionError. A batch raises the :class:`TxmqError` of its step, or the exception of ``fn``.
    """
    if not callable(fn):
        raise OptionError(f"transactional takes a function fn(batch, tx), not {fn!r}", "pass a function")
    given = {**(settings or {}), "url": url, "data": None if data is None else os.fspath(data)}
    given["vhost"] = vhost
    given |= {"appId": app_id, "onNewCheckpoint": on_new_checkpoint, "onUnroutable": on_unroutable}
    options = write_options(
        {name: value for name, value in given.items() if value is not None}, "stream write"
    )
    functions = dict(after_commit or {})
    check_functions(functions)
    if ledger_sync and not ledger:
        raise OptionError("ledger_sync=True without ledger", "name the Delta table with ledger=")
    return Transactional(
        fn, options, functions, ledger=ledger, ledger_sync=ledger_sync, persist=persist, lineage=lineage
    )


@dataclass
class BatchTransaction:
    """``tx``: the operations of ``fn``. ``sequence`` counts the app's batches over all checkpoints."""

    app_id: str
    query_id: str
    batch_id: int
    sequence: int
    _batch: DataFrame = field(repr=False)
    _token: str = field(repr=False)
    _owner: Transactional = field(repr=False)
    _branches: list[StagedBranch] = field(default_factory=list, repr=False)
    _steps: Steps = field(default_factory=Steps, repr=False)
    _hidden: list[tuple[str, Attempt]] = field(default_factory=list, repr=False)  # one for each append
    _seen: Seen = field(default_factory=Seen, repr=False)
    _closed: bool = field(default=False, repr=False)

    def publish(
        self, rows: DataFrame, exchange: str = "", routing_key: str = "", queue: str | None = None
    ) -> None:
        """Publish ``rows``: ``body`` (string or binary), maybe ``exchange``, ``routing_key``, ``properties``.

        A column overrides the argument. ``queue`` means exchange "" and this routing key. Raises OptionError.
        """
        self._refuse_late_use("publish")
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
        routing_key: str | None = None, queue: str | None = None,
    ) -> None:  # fmt: skip
        """Publish messages of the batch as dead letters: body and properties as they are, and ``x-death``.

        ``rows`` have the columns queue, partition and offset of the source, and ``reason`` (string), which
        the argument replaces. They go to the dead-letter exchange of their queue, or to ``exchange``, with
        their own routing key, or ``routing_key``; ``queue`` means exchange "" and this routing key. Raises
        OptionError, DataLoss.
        """
        self._refuse_late_use("reject")
        rejection = Rejection.to(self.app_id, exchange, routing_key, queue)
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
        spark, found = rows.sparkSession, self._table("append", rows, table)
        chosen, columns = self._owner.tables.writer_options(table, options)
        checked = self._owner.checks.append(spark, found, nullable(rows.schema), chosen, columns)
        rows = checked.ready(rows)
        schema = nullable(rows.schema)
        columns = [] if found.exists else columns  # an existing table has its own
        step = self._steps.append(found.location)
        about = {
            "options": chosen,
            "partition_by": columns,
            "schema": schema.json(),
            **self._step_target(spark, found, step),
        }
        self._steps.same_target("append", found.location, step, about)
        about = {**about, "table": found.name, "table_id": found.table_id}
        if checked.by_rows or not self._stage_files(rows, found, about):
            self._stage(rows, "append", about)

    def merge(
        self, rows: DataFrame, table: str, on: str, *, update: bool | Mapping[str, str] | None = None,
        insert: bool | Mapping[str, str] | None = None, delete: bool | str | None = None,
        clauses: Sequence[Clause] = (), keys: Sequence[str] = (), merge_schema: bool = False,
    ) -> None:  # fmt: skip
        """Merge ``rows`` (``s``) into a Delta table (``t``), exactly once, after the decision.

        ``on``: SQL over t and s. ``update``, ``insert``: True for all columns, or {column: SQL}; ``delete``:
        True, or SQL; or ``clauses`` in order (:class:`When`). ``keys``: columns in which the rows of the
        batch must differ. ``merge_schema``: the merge may add columns. Raises OptionError.
        """
        merge = Merge.made(on, update, insert, delete, clauses, evolves=merge_schema)
        self._change("merge", rows, table, merge, keys)

    def delete(self, rows: DataFrame, table: str, on: str) -> None:
        """Delete the rows of a Delta table (``t``) for which ``on`` is true with one of ``rows`` (``s``),
        exactly once, after the decision. Raises OptionError.
        """
        self._change("delete", rows, table, Merge.made(on, delete=True))

    def overwrite(self, rows: DataFrame, table: str, where: str, **options: Any) -> None:
        """Replace the rows of a Delta table for which ``where`` (SQL) is true by ``rows``, for which it must
        be true too, exactly once, after the decision. ``options``: of the writer. Raises OptionError.
        """
        chosen, _ = self._owner.tables.writer_options(table, options)
        self._change("overwrite", rows, table, Overwrite.made(where, chosen))

    def after_commit(self, rows: DataFrame, name: str) -> None:
        """Call function ``name`` with ``rows`` after the decision, in order, at least once.

        A parameter ``token`` of the function gets the text of a UUID: the same in each repetition of the
        call, another one for every other batch, function, app and data directory. Raises OptionError.
        """
        self._refuse_late_use("after_commit")
        self._owner.apply.function(name)
        schema = nullable(rows.schema)
        about = {"name": name, "schema": schema.json()}
        self._steps.same_target("after_commit", name, 0, about)
        self._stage(rows, "after_commit", about)

    def _table(self, operation: str, rows: DataFrame, table: str) -> Table:
        self._refuse_late_use(operation)
        if not isinstance(table, str) or not table:
            raise OptionError(f"{operation} of {table!r}", "give the path or the name of a Delta table")
        return self._owner.tables.resolve(rows.sparkSession, table)

    def _step_target(self, spark: SparkSession, table: Table, step: int) -> dict[str, Any]:
        """What is stored with the decision, so that a repeated step has the same id."""
        app = self.app_id, self._owner.engine.identity(self.app_id), table.location
        self._owner.checks.guard(spark, table, txn_app_id(*app))
        return {"txn_app_id": txn_app_id(*app, step), "location": table.location, "step": step}

    def _change(
        self,
        kind: BranchKind,
        rows: DataFrame,
        table: str,
        change: Merge | Overwrite,
        keys: Sequence[str] = (),
    ) -> None:
        found = self._table(kind, rows, table)
        rows = self._owner.checks.change(rows, found, change, keys)
        step = self._step_target(rows.sparkSession, found, self._steps.change(found.location))
        about = {**step, **target.of_change(found, change, nullable(rows.schema))}
        if not self._stage(rows, kind, about) and change.acts_without_rows:
            self._stage_here(kind, {**about, target.EMPTY: True}, [target.nothing()])

    def _stage(
        self, rows: DataFrame, kind: BranchKind, target: Mapping[str, Any], rejection: Rejection | None = None
    ) -> int:
        """Stage ``rows`` in their tasks, and return how many there are."""
        identity = (self.app_id, self.query_id, self.batch_id)
        place: dict[str, Any] = {"token": self._token, "identity": identity, "address": self._owner.address}
        frame = staging.staging_frame(rows, kind, target, rejection=rejection, **place)
        staged = staging.staged(frame)
        self._branches += staged
        self._seen.note(frame, self._batch, stages=True)
        return sum(branch.rows for branch in staged)

    def _stage_here(
        self, kind: BranchKind, target: Mapping[str, Any], batches: Iterable[pa.RecordBatch], number: int = 0
    ) -> None:
        """Stage a branch in the driver."""
        batch = {"app_id": self.app_id, "query_id": self.query_id, "batch_id": self.batch_id}
        header = BranchHeader(self._token, uuid.uuid4().hex, kind, target, **batch, partition=number)  # type: ignore[arg-type]
        self._branches.append(self._owner.engine.stage(header, iter(batches)))

    def _stage_files(self, rows: DataFrame, table: Table, about: Mapping[str, Any]) -> bool:
        """Stage files that the table takes; False if it has changed since it was resolved."""
        attempt = Attempt(self.app_id, about["txn_app_id"], self.sequence, self._token)
        number = len(self._hidden)
        self._hidden.append((table.location, attempt))
        rows, written = to_write(rows)
        staged = self._owner.tables.stage(written, table, about["options"], attempt, number)
        if staged is None:
            return False
        if staged.rows:
            self._stage_here("append", {**about, **staged.target()}, [staged.batch()], number)
        self._seen.note(rows, self._batch, stages=False)
        failpoint.here("foreach.files_staged")
        return True

    def drop_files(self) -> None:
        """Delete the files of an attempt that can not be decided; what is left, a later batch deletes."""
        for location, attempt in self._hidden:
            try:
                self._owner.tables.drop(location, attempt)
            except Exception as error:
                log.warning("files of a lost attempt are not deleted: %s", told(error))

    def _refuse_late_use(self, operation: str) -> None:
        if self._closed:
            raise OptionError(f"tx.{operation} after the function returned", "call it within the function")


class Transactional:
    """The callable object for ``foreachBatch``; see :func:`transactional`. It can be pickled, for Spark
    Connect.
    """

    def __init__(
        self,
        fn: Callable[[DataFrame, BatchTransaction], None],
        options: WriteOptions,
        functions: dict[str, AfterCommit],
        *,
        ledger: str | None,
        ledger_sync: bool,
        persist: bool,
        lineage: str | None,
    ) -> None:
        self.app_id = options.app_id
        self._options = options
        self._fn = fn
        self._functions = functions
        self._ledger_table = ledger
        self._ledger_sync = ledger_sync
        self._persist = persist
        self._lineage = lineage
        self._forget_process()

    def _forget_process(self) -> None:
        """Reset the attributes that are not pickled."""
        self._lock = threading.Lock()
        self._started = False
        self.tables = table_format()
        self.checks = Checks(self.tables, self.app_id, self._decided)
        self.apply = Apply(self.tables, self.app_id, self.address, self._functions)
        self._ledger: DeltaLedger | None = None
        self._session = SparkSession.getActiveSession()  # the user's session; a batch has a clone of it

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(self.__dict__)
        for name in ("_lock", "_started", "tables", "checks", "apply", "_ledger", "_session"):
            del kept[name]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_process()

    # -- one micro-batch -------------------------------------------------------------------------------------
    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        with self._lock:  # the engine refuses two queries with one app_id
            try:
                self._run(batch, int(batch_id))
            except Exception as error:
                if not holds_java_trace(error):
                    raise
                raise shortened(error) from None

    def _run(self, batch: DataFrame, batch_id: int) -> None:
        spark = batch.sparkSession
        engine = self.address.engine()
        query_id, consumes = self._identity(spark, engine)
        if not self._started:  # C5 of an earlier process, before this batch, to keep the order
            self._apply_decided(spark, engine)
            self._start_ledger(spark, engine, query_id)
            self._started = True
        # C1
        opened = engine.open_batch(
            self.app_id, query_id, batch_id, self._options.on_new_checkpoint, consumes=consumes
        )
        failpoint.here("foreach.opened")
        if opened.entry is not None:
            staging.execute(batch)  # to write the state of the query and to record what it reads
            failpoint.here("foreach.replayed")
            decided = engine.commit_batch(  # compares that with what the batch has consumed
                self.app_id, query_id, batch_id, "", [], consumes=consumes
            ).entry
        else:
            decided = self._decide(
                batch, engine, (query_id, batch_id, opened.sequence, opened.token), consumes
            )
        # C5
        if not decided.applied:
            self._apply_decided(spark, engine, decided if decided.token == opened.token else None)
        # C6
        if self._ledger is not None:
            self._ledger.notify()
            if self._ledger_sync or not consumes:
                self._ledger.write_missing(spark)
        failpoint.here("foreach.mirrored")

    def _decide(
        self, batch: DataFrame, engine: Engine, opened: tuple[str, int, int, str], consumes: bool
    ) -> LedgerEntry:
        query_id, batch_id, sequence, token = opened
        tx = BatchTransaction(self.app_id, query_id, batch_id, sequence, batch, token, self)
        asked = False
        if self._persist:
            batch.persist()
        try:
            # C2
            self._fn(batch, tx)
            tx._closed = True
            failpoint.here("foreach.staged")
            # C3
            if not tx._seen.whole:
                staging.execute(batch)
            failpoint.here("foreach.executed")
            # C4
            asked = True
            committed = engine.commit_batch(
                self.app_id,
                query_id,
                batch_id,
                token,
                tx._branches,
                on_unroutable=self._options.on_unroutable,
                consumes=consumes,
            )
            failpoint.here("foreach.decided")
            if committed.entry.token != token:  # another driver was first
                tx.drop_files()
            return committed.entry
        except BaseException as error:
            self._roll_back(engine, token, error)
            if not asked:
                tx.drop_files()
            raise
        finally:
            if self._persist:
                batch.unpersist()

    def _roll_back(self, engine: Engine, token: str, error: BaseException) -> None:
        """Drop the attempt, unless it is decided: then its replay is answered ALREADY."""
        if isinstance(error, ConnectionFailed):
            return  # the broker does not answer; it drops the branches with a later decision
        try:
            engine.rollback_batch(token)
        except TxmqError as refused:
            log.warning("the micro-batch was not rolled back after %s: %s", type(error).__name__, refused)

    def _identity(self, spark: SparkSession, engine: Engine) -> tuple[str, bool]:
        """(query_id, whether the commit consumes the rows that the batch has read)."""
        if not is_connect(spark):
            query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
            if not query_id:
                raise OptionError("transactional was called outside a query", "use it in foreachBatch")
            return query_id, True
        if self._lineage:
            return self._lineage, False
        known = engine.app(self.app_id)
        if known is not None and known.queues:
            return "", False  # the claims of the txmq source distinguish checkpoints
        raise OptionError(
            f"app {self.app_id!r} on Spark Connect has no txmq source, so its checkpoints look the same",
            "pass lineage= with a string that you change together with the checkpoint",
        )

    # -- C5 --------------------------------------------------------------------------------------------------
    def _apply_decided(self, spark: SparkSession, engine: Engine, newest: LedgerEntry | None = None) -> None:
        """Apply every decided batch that is not applied, in the order of the decisions."""
        self.apply.decided(spark, engine, newest)

    @property
    def address(self) -> Address:
        return self._options.address

    @property
    def engine(self) -> Engine:
        return self.address.engine()

    def _decided(self) -> int:
        return last.sequence if (last := self.engine.last_entry(self.app_id)) else 0

    # -- C6 --------------------------------------------------------------------------------------------------
    def _start_ledger(self, spark: SparkSession, engine: Engine, query_id: str) -> None:
        if self._ledger_table is None:
            return
        if is_connect(spark):
            self._ledger = DeltaLedger(spark, self._ledger_table, engine, self.app_id)
            return
        # the user's session: listeners of its clone for the batch are not called
        owner = self._session or SparkSession._instantiatedSession or spark
        self._ledger = DeltaLedger(owner.newSession(), self._ledger_table, engine, self.app_id)
        if not self._ledger_sync:
            self._ledger.start()
            from connector.listener import FlushAtEnd

            owner.streams.addListener(FlushAtEnd(self._ledger, query_id))

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the Delta ledger has every decided batch. Raises TimeoutError, or the last error."""
        if self._ledger_table is None:
            return
        ledger = self._ledger
        if ledger is None:  # no batch yet, or Spark Connect, where batches run in another process
            session = SparkSession.getActiveSession()
            if session is None:
                raise OptionError("flush needs a Spark session in this thread", "call it before spark.stop()")
            ledger = DeltaLedger(session, self._ledger_table, self.address.engine(), self.app_id)
            ledger.write_missing(session)
            return
        ledger.flush(timeout_s)
