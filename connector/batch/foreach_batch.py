"""``transactional(fn)``: a foreachBatch function whose effects are one transaction.

Not here: the operations (batch_transaction.py), the tasks (stream/staging.py), tables (tables/checks.py,
tables/table_format.py), what follows a decision (apply.py), the copy of the ledger in Delta
(ledger/delta_ledger.py).

Invariant: decide, then apply. Before ``commit_batch`` answers, no effect is visible. Afterwards, all
effects follow from the ledger entry and are repeated until they are done (docs/transactions.md).

1. C1 open: a token, or the entry of a decided batch.
2. C2 stage: ``fn`` stages rows from the executors under the token, and files that Delta has written.
3. C3 execute: the batch is executed to its end at least once, and the ranges that it reads are noted.
4. C4 decide: one call, idempotent.
5. C5 apply: operations on tables and functions of all decided batches that are not applied, in order.
6. C6 mirror: the ledger in Delta, behind the commit (or within it: ``ledger_sync``).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import CheckpointMismatch, ConnectionFailed, OptionError, TxmqError
from broker_core.engine import Engine, LedgerEntry, OnNewCheckpoint, Opened
from broker_core.message import spans
from connector.batch.after_commit import AfterCommit, check_functions
from connector.batch.apply import Apply
from connector.batch.batch_reads import link_messages
from connector.batch.batch_transaction import BatchTransaction
from connector.batch.call import Call, execution, not_within_itself, require_ended, running_query
from connector.errors import holds_java_trace, shorten
from connector.ledger.delta_ledger import DeltaLedger
from connector.ledger.resume import Resume
from connector.options import WriteOptions, app_options
from connector.stream import query_plan, staging
from connector.stream.offset_log import OffsetLog, owner
from connector.stream.task_identity import marked
from connector.table_formats import table_format
from connector.tables.checks import Checks
from connector.tables.table import is_connect
from connector.tables.table_format import CONFLICT_TIMEOUT_S, TableFormat

log = logging.getLogger("txmq")

OnUnroutable = Literal["fail", "drop"]
AUTO = "auto"
_MAIN = threading.main_thread()


def transactional(
    fn: Callable[[DataFrame, BatchTransaction], object],
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
    persist: bool | Literal["auto"] = False,
    settings: Mapping[str, str] | None = None,
    resume_from: str | None = None,
    conflict_timeout_s: float = CONFLICT_TIMEOUT_S,
    checkpoint: str | None = None,
) -> Transactional:
    """Returns a function for ``foreachBatch`` that runs ``fn(batch, tx)`` as one transaction per micro-batch.

    ``url`` or ``data``: the broker; ``vhost``: the virtual host, with ``data``. ``app_id``: the stable name
    of the app; it must equal the ``appId`` of a txmq source. ``ledger``: a Delta table (path or name) that
    gets the offsets of every batch; "auto" puts it beside the checkpoint. ``ledger_sync``: write the ledger
    before the batch ends. ``after_commit``: the functions that ``tx.after_commit`` may call, by name:
    ``f(rows, sequence)`` or ``f(rows, sequence, token)``. ``persist``: cache the batch while ``fn`` runs;
    "auto" does so if several operations of ``tx`` read the batch before this one. ``settings``: options of
    the connection to Kafka (``kafka.sasl.username``). ``resume_from``: the engine that wrote ``ledger``, if
    this engine has the same messages at the same offsets. ``conflict_timeout_s``: seconds for which a table
    commit is retried that conflicts with other writers. ``checkpoint``: the ``checkpointLocation`` of the
    query. Spark Connect needs it for ``ledger="auto"``, and for a source that is not txmq, if the location
    is a setting of the session and no option of the query.

    With ``on_new_checkpoint="resume"``, a ledger and a session, an app whose engine has lost its ledger
    continues after the last batch of the table, before its source asks where to start. Raises OptionError,
    CheckpointMismatch. A batch raises the :class:`TxmqError` of its step, or the exception of ``fn``.
    """
    if not callable(fn):
        raise OptionError(f"transactional takes a function fn(batch, tx), not {fn!r}", "pass a function")
    place = {"url": url, "data": None if data is None else os.fspath(data), "vhost": vhost}
    app = {"appId": app_id, "onNewCheckpoint": on_new_checkpoint, "onUnroutable": on_unroutable}
    options = app_options(settings, **place, **app, checkpointLocation=checkpoint)
    functions = dict(after_commit or {})
    check_functions(functions)
    if persist not in (True, False, AUTO):
        raise OptionError(f"persist is {persist!r}", "give True, False or 'auto'")
    if ledger_sync and not ledger:
        raise OptionError("ledger_sync=True needs a ledger", "name the Delta table with ledger=")
    if not isinstance(conflict_timeout_s, int | float) or not conflict_timeout_s >= 0:
        raise OptionError(f"conflict_timeout_s is {conflict_timeout_s!r}", "give seconds, from 0 on")
    tables = table_format(conflict_timeout_s)
    function = Transactional(fn, options, functions, ledger, ledger_sync, persist, resume_from, tables)
    if on_new_checkpoint == "resume" and (spark := active_session()) is not None:
        function.resume(spark)  # before the source asks where it begins
    return function


def checkpoint_of(spark: SparkSession, query_id: str) -> str | None:
    """Where the checkpoint of a running query is; None if Spark does not report it."""
    if not is_connect(spark):
        query = execution(spark, query_id)
        return None if query is None else str(query.resolvedCheckpointRoot())
    found = map(query_plan.checkpoint_in, query_plan.plans(spark, query_id))
    return next((place for place in found if place is not None and owner(place, spark) == query_id), None)


def active_session() -> SparkSession | None:
    """The session of this thread, or of this process; None on Spark Connect."""
    session = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if session is None or is_connect(session) or session.sparkContext._jsc is None:
        return None
    return session


@dataclass(eq=False, repr=False)
class Transactional:
    """The callable object for ``foreachBatch``; see :func:`transactional`. It can be pickled, for Spark
    Connect.
    """

    _fn: Callable[[DataFrame, BatchTransaction], object]
    _options: WriteOptions
    _functions: dict[str, AfterCommit]
    _ledger_option: str | None
    _ledger_sync: bool
    _persist: bool | Literal["auto"]
    _resume_from: str | None
    tables: TableFormat
    _reads_again: bool = False  # the last batch was read by several operations

    def __post_init__(self) -> None:
        self.app_id, self.address = self._options.app_id, self._options.address
        self._ledger_table = self._ledger_option
        self._lock = threading.Lock()
        # context and query that it last ran for; the run, and its offsets: the next may have a copy
        self._started: tuple[object, str, OffsetLog] | None = None
        self.checks = Checks(self.tables, self.app_id, self.address.engine)
        self.apply = Apply(self.tables, self.app_id, self.address, self._functions)
        self._ledger: DeltaLedger | None = None
        self._session = SparkSession.getActiveSession()  # the user's session; a batch may have a clone of it

    def __reduce__(self) -> Any:
        """What is of this process is made anew in another one."""
        return _unpickled, tuple(getattr(self, field.name) for field in fields(self))

    # -- one micro-batch -------------------------------------------------------------------------------------
    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        query_id, run = running_query(batch)
        alone = not_within_itself(str(self.address), self.app_id, run)
        # the engine refuses two queries with one app_id
        with alone, self._lock, spans.micro_batch(self.app_id, int(batch_id)):
            try:
                with marked(batch.sparkSession, self.app_id, query_id, int(batch_id)):
                    self._run(batch, int(batch_id), query_id, run)
            except Exception as error:
                if not holds_java_trace(error):
                    raise
                raise shorten(error) from None
            except BaseException as stop:  # nobody would answer Spark, which waits for ever
                of_user = threading.current_thread() is _MAIN and not is_connect(batch)
                if isinstance(stop, KeyboardInterrupt) and of_user:
                    raise  # of a caller that is not Spark
                what = f"the function of app {self.app_id!r} raised {type(stop).__name__}: {stop}"
                raise OptionError(what, "raise an Exception to end the query") from stop

    def _run(self, batch: DataFrame, batch_id: int, query_id: str, run: str) -> None:
        spark = batch.sparkSession
        engine = self.address.engine()
        call = Call(str(self.address), self.app_id, (run, query_id, batch_id))
        call.require_first()
        running = (None if is_connect(spark) else spark.sparkContext, query_id)
        started = self._started
        if started is None or started[0] != running:
            # C5 of an earlier process or query, before this batch, to keep the order
            self._name_ledger(spark, query_id)
            self.resume(spark, query_id)
            self.apply.decided(spark, engine)
            self._start_ledger(spark, engine, query_id)
        if started is None or started[:2] != (running, run):
            started = running, run, OffsetLog(self.address, self.app_id, self._checkpoint(spark, query_id))
            self._started = started
        offsets = started[2].digest(batch_id, query_id, spark)
        in_threads = False  # the function called tx in threads
        # C1
        opened = engine.open_batch(
            self.app_id, query_id, batch_id, self._options.on_new_checkpoint, offset_log=offsets
        )
        failpoint.here("foreach.opened")
        if opened.entry is not None:
            staging.execute(batch)  # to write the state of the query and to record what it reads
            failpoint.here("foreach.replayed")
            # compares that with what the batch has consumed
            decided = engine.commit_batch(self.app_id, query_id, batch_id, "", [], offset_log=offsets).entry
        else:
            link_messages(batch, engine)
            attempt = query_id, batch_id, opened, offsets
            decided, in_threads = self._decide(batch, engine, attempt)
        # C5
        if not decided.applied:
            newest = decided if decided.token == opened.token else None
            self.apply.decided(spark, engine, newest, side_by_side=in_threads)
        # C6
        if self._ledger is not None:
            self._ledger.notify()
            if self._ledger_sync or is_connect(spark):  # Spark ends its worker with the query
                self._ledger.write_missing(spark)
        failpoint.here("foreach.mirrored")
        call.done()

    def _decide(
        self, batch: DataFrame, engine: Engine, attempt: tuple[str, int, Opened, str]
    ) -> tuple[LedgerEntry, bool]:
        """Returns also whether the function called ``tx`` in threads."""
        query_id, batch_id, opened, offsets = attempt
        tx = BatchTransaction(self.app_id, query_id, batch_id, opened.sequence, batch, opened, self)
        called = False
        persists = self._reads_again if self._persist == AUTO else self._persist
        try:
            if persists:
                tx.persist()
            # C2
            require_ended(self._fn(batch, tx), f"the function of app {self.app_id!r}")
            # C3
            tx.finish()
            failpoint.here("foreach.executed")
            # C4
            tx.seal()
            called = True
            with spans.span("txmq.commit", {"txmq.branches": len(tx.branches)}):
                committed = engine.commit_batch(
                    *(self.app_id, query_id, batch_id, opened.token, tx.branches),
                    on_unroutable=self._options.on_unroutable,
                    offset_log=offsets,
                )
            failpoint.here("foreach.decided")
            self._reads_again = tx.executions > 1
            if committed.entry.token != opened.token:  # another driver was first
                tx.drop_files()
            return committed.entry, tx.in_threads
        except BaseException as error:
            tx.close()
            # the attempt is dropped, unless it is decided: then its replay is answered ALREADY. A broker that
            # does not answer drops the branches with a later decision
            if not isinstance(error, ConnectionFailed):
                try:
                    engine.rollback_batch(opened.token)
                except TxmqError as refused:
                    what = type(error).__name__
                    log.warning("the micro-batch was not rolled back after %s: %s", what, refused)
            if not called:
                tx.drop_files()
            raise
        finally:
            if persists:
                batch.unpersist()

    @property
    def engine(self) -> Engine:
        return self.address.engine()

    # -- C7 --------------------------------------------------------------------------------------------------
    def resume(self, spark: SparkSession, query_id: str | None = None) -> None:
        """Continues after the Delta ledger if the engine has no ledger of the app. ``query_id``: the query of
        a batch whose source has already chosen its start. Raises CheckpointMismatch.
        """
        if self._ledger_table is not None and self._ledger_table != AUTO:
            before = self.engine.last_entry(self.app_id)
            on_new = self._options.on_new_checkpoint
            resume = Resume(
                self.tables, self._ledger_table, self.engine, self.app_id, on_new, self._resume_from
            )
            self.checks.take_overs = resume.ready(spark)
            last = self.engine.last_entry(self.app_id)
            if before is None and last is not None and query_id not in (None, last.query_id):
                raise CheckpointMismatch(
                    f"app {self.app_id!r} continues after batch {last.sequence} of its Delta ledger now, "
                    f"and query {query_id} had asked before where to begin. Nothing was consumed",
                    "start it once more, with a new checkpoint and onNewCheckpoint=resume",
                )

    def _checkpoint(self, spark: SparkSession, query_id: str) -> str | None:
        return checkpoint_of(spark, query_id) or self._options.checkpoint

    # -- C6 --------------------------------------------------------------------------------------------------
    def _name_ledger(self, spark: SparkSession, query_id: str) -> None:
        """``ledger="auto"``: beside the checkpoint. Raises OptionError where that is not known."""
        if self._ledger_option != AUTO:
            return
        location = self._checkpoint(spark, query_id)
        if location is None:
            raise OptionError(
                "ledger='auto' does not know the checkpoint of this query (Spark Connect)",
                "give the query the option checkpointLocation, or name the Delta table with ledger=",
            )
        table = f"{location.rstrip('/')}_ledger"
        if self._ledger is not None and self._ledger_table != table:  # the object serves another query
            self._ledger.close()
            self._ledger = None
        self._ledger_table = table

    def _start_ledger(self, spark: SparkSession, engine: Engine, query_id: str) -> None:
        if self._ledger_table is None:
            return
        if is_connect(spark):
            self._ledger = DeltaLedger(spark, self._ledger_table, engine, self.app_id)
            return
        # the user's session, unless it was stopped: listeners of its clone for the batch are not called
        sessions = (self._session, SparkSession._instantiatedSession)
        context = spark.sparkContext
        owner = next((each for each in sessions if each and each.sparkContext is context), spark)
        if self._ledger is None or self._ledger.stopped():
            if self._ledger is not None:
                self._ledger.close()
            self._ledger = DeltaLedger(owner.newSession(), self._ledger_table, engine, self.app_id)
        if not self._ledger_sync:
            self._ledger.start()
            from connector.ledger.listener import FlushAtEnd

            owner.streams.addListener(FlushAtEnd(self._ledger, query_id))

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the Delta ledger has every decided batch. Raises TimeoutError, or the last error."""
        if self._ledger_table is None or self._ledger_table == AUTO:
            return  # there is none, or no batch yet
        ledger = self._ledger
        # no batch yet in this session, or Spark Connect, where batches run in another process
        if ledger is None or ledger.stopped():
            if (session := SparkSession.getActiveSession()) is None:
                raise OptionError("flush needs a Spark session in this thread", "call it before spark.stop()")
            ledger = DeltaLedger(session, self._ledger_table, self.address.engine(), self.app_id)
            ledger.write_missing(session)
            return
        ledger.flush(timeout_s)


def _unpickled(*state: Any) -> Transactional:
    function = Transactional(*state)
    query_plan.root = function._session
    return function
