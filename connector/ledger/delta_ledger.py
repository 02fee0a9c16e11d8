"""The Delta ledger: a copy of the engine's ledger in a Delta table.

What others have damaged is noticed from the log of the table, and completed from the mirrored entries that
the engine still has.
Not here: the ledger itself (the engine). This table decides nothing.

Invariant: the table has exactly the rows of the first entries of an app, in the order of their sequence.
Every commit carries txnAppId ``txmq-ledger:<app>@<data directory>`` and its last sequence as txnVersion, so
the second of two writers is skipped. Entries are identified by their tokens in the table.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from broker_core.core import failpoint
from broker_core.core.errors import CheckpointMismatch, TxmqError
from broker_core.engine import Engine, LedgerEntry
from connector.errors import first_line
from connector.table_formats import table_format
from connector.tables.change import Merge
from connector.tables.checks import require_numbers
from connector.tables.commit_id import STEP, CommitId, numbered_anew
from connector.tables.table import Table, is_connect
from connector.tables.table_format import TableFormat, TableMark

log = logging.getLogger("txmq")

LEDGER_COLUMNS = (
    "app_id string, query_id string, batch_id bigint, token string, log string, start_offset bigint, "
    "end_offset bigint, messages bigint, published bigint, committed_at timestamp, sequence bigint, engine "
    "string, log_id string"
)
LEDGER_NAMES = tuple(column.split()[0] for column in LEDGER_COLUMNS.split(", "))
_KEY = ("app_id", "query_id", "batch_id", "token", "log")
# A Delta commit costs the same for one row and for a thousand: for more entries, one MERGE is cheaper.
APPENDED_ONE_BY_ONE = 2
RETRY_PAUSE_S = 1.0


def ledger_rows(
    entry: LedgerEntry, engine: str = "", log_ids: Mapping[str, str] | None = None
) -> list[tuple[Any, ...]]:
    """One row per log, or one with a null log. ``published`` counts the whole batch. ``engine``: whose
    decision it is; ``log_ids``: of its logs.

    ``messages`` is null if a batch over several logs skipped settled messages, because only the sum is known.
    """
    committed_at = datetime.datetime.fromtimestamp(entry.committed_at_us / 1e6, datetime.timezone.utc)
    identity = (entry.app_id, entry.query_id, entry.batch_id, entry.token)
    dense = sum(end - start for start, end in entry.ranges.values()) == entry.messages
    whole, ids = entry.messages if len(entry.ranges) <= 1 else None, log_ids or {}
    of_logs: list[tuple[Any, ...]] = [
        (name, start, end, end - start if dense else whole, ids.get(name))
        for name, (start, end) in sorted(entry.ranges.items())
    ]
    return [
        (*identity, *row, entry.published, committed_at, entry.sequence, engine, log_id)
        for *row, log_id in of_logs or [(None, None, None, whole, None)]
    ]


def ledger_id(app_id: str, engine: str) -> str:
    """The id under which the batches of an app on an engine are commits of a ledger."""
    return f"txmq-ledger:{app_id}@{engine}"


def held_tokens(
    tables: TableFormat, spark: SparkSession, table: str, entries: Sequence[LedgerEntry]
) -> set[str]:
    """The tokens of those of these batches that the ledger table has."""
    found = tables.resolve(spark, table)
    if not found.exists:
        return set()
    tokens = spark.createDataFrame([(entry.token,) for entry in entries], "token string")
    rows = tables.read(spark, found).select("token").join(tokens, "token", "left_semi").distinct().collect()
    return {str(row["token"]) for row in rows}


def _held_rows(
    tables: TableFormat, spark: SparkSession, table: Table, app_id: str, entries: Sequence[LedgerEntry]
) -> tuple[set[tuple[str, str | None]], int]:
    """(token, log) of the rows of these entries, and how many other batches of the app a table has."""
    if not table.exists:
        return set(), 0
    rows = tables.read(spark, table).where(F.col("app_id") == app_id)
    tokens = spark.createDataFrame([(entry.token,) for entry in entries], "token string")
    found = rows.join(tokens, "token", "left_semi").select("token", "log").collect()
    others = rows.join(tokens, "token", "left_anti").select("token").distinct().count()
    return {(str(row["token"]), row["log"]) for row in found}, others


def _loss(missing: Sequence[LedgerEntry], before: int, others: int) -> list[str]:
    """What a table lacks, in sentences: of the ``before`` first batches it has ``others``."""
    sentences = []
    if missing:
        first, last = missing[0].sequence, missing[-1].sequence
        batches = f"{len(missing)} of the batches {first} to {last} are"
        batches = batches if first < last else f"batch {first} is"
        sentences.append(f"{batches} written again from the entries of the engine")
    if others < before:
        sentences.append(
            f"of the batches 1 to {before}, which the engine does not keep any more, the table has "
            f"{others}, and the others cannot be completed"
        )
    return sentences


class DeltaLedger:
    """Copies the engine's ledger of one app to the Delta table.

    ``spark``: a session of its own. ``start`` creates a thread that writes after ``notify``;
    ``write_missing`` writes in the caller's thread.
    """

    def __init__(self, spark: SparkSession, table: str, engine: Engine, app_id: str) -> None:
        self._spark = spark
        self._table = table
        self._engine = engine
        self._app_id = app_id
        self._tables = table_format()
        # the engine, and the id under which its batches are commits of the table: set in the first round
        self._writer = ("", "")
        self._log_ids: dict[str, str] = {}
        self._seen: TableMark | None = None  # the table as it was last complete
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._rounds = 1  # the first round writes what an earlier process did not write
        self._done = 0
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- writing ---------------------------------------------------------------------------------------------
    def write_missing(self, spark: SparkSession | None = None) -> None:
        """Write all missing entries in order, and mark them in the engine."""
        with self._writing:
            session = spark or self._spark
            while entries := self._due():
                if not self._writer[0]:
                    entries = self._started(session, entries)
                if len(entries) <= APPENDED_ONE_BY_ONE:
                    for entry in entries:
                        self._append(session, entry)
                else:
                    self._merge(session, entries)

    def _due(self) -> list[LedgerEntry]:
        """What is written next: a row says that its batch has reached its tables too."""
        return list(takewhile(lambda entry: entry.applied, self._engine.unmirrored(self._app_id)))

    def _started(self, spark: SparkSession, entries: list[LedgerEntry]) -> list[LedgerEntry]:
        """The rest of ``entries``, without those that an earlier process wrote and did not mark."""
        identity = self._engine.identity(self._app_id)
        txn_app_id = ledger_id(self._app_id, identity)

        def written() -> int:
            tokens = held_tokens(self._tables, spark, self._table, entries)
            last = entries[0].sequence - 1
            while entries and entries[0].token in tokens:
                last = entries.pop(0).sequence
                self._engine.mark_mirrored(self._app_id, last)
            return last

        table = self._tables.resolve(spark, self._table)
        restored = require_numbers(self._tables, spark, table, txn_app_id, self._app_id, written, ledger=True)
        self._writer = identity, numbered_anew(txn_app_id, restored)
        self._sound(spark, starts=True)
        return entries

    def _frame(self, spark: SparkSession, entries: Sequence[LedgerEntry]) -> DataFrame:
        unknown = {log for entry in entries for log in entry.ranges} - self._log_ids.keys()
        if unknown:
            self._log_ids |= self._engine.log_ids(sorted(unknown))
        rows = [row for entry in entries for row in ledger_rows(entry, self._writer[0], self._log_ids)]
        return spark.createDataFrame(rows, LEDGER_COLUMNS).coalesce(1)

    def _append(self, spark: SparkSession, entry: LedgerEntry) -> None:
        table = self._sound(spark)
        rows = partial(self._frame, entries=[entry])
        self._written(spark, [entry], lambda once: self._tables.append(spark, table, rows, once))

    def _merge(self, spark: SparkSession, entries: Sequence[LedgerEntry]) -> None:
        """Write many entries in one commit.

        By key, because another writer may have appended some of them. Under the same txnAppId, because Delta
        allows a blind append concurrent with a MERGE, but not two commits of one app.
        """
        table = self._sound(spark)
        if not table.exists:
            self._append(spark, entries[0])
            entries = entries[1:]
            table = self._tables.resolve(spark, self._table)
        self._written(spark, entries, lambda once: self._add(spark, table, entries, once))

    def _add(self, spark: SparkSession, table: Table, entries: Sequence[LedgerEntry], once: CommitId) -> None:
        """Adds the rows that an existing table does not have, in one commit."""
        on = " AND ".join(f"t.{name} <=> s.{name}" for name in _KEY)
        self._tables.change(
            spark,
            table,
            # not all columns: somebody may have added one
            Merge.parse(on, insert={name: f"s.{name}" for name in LEDGER_NAMES}),
            lambda session: self._frame(session, entries),
            once,
        )

    def _sound(self, spark: SparkSession, *, starts: bool = False) -> Table:
        """The table, complete as far as it can be. Costs nothing where nobody else has made a commit.
        ``starts``: it is looked at as a whole, whatever happened before this process.
        """
        table = self._tables.resolve(spark, self._table)
        if table.exists:
            seen, found = self._tables.disturbances(spark, table, self._seen)
        else:
            seen, found = None, ["it was removed"] if self._seen is not None else []
        if found or starts:
            self._complete(spark, table, found)
            table = self._tables.resolve(spark, self._table)
        self._seen = seen if seen is not None else self._seen if not found else None
        return table

    def _complete(self, spark: SparkSession, table: Table, found: Sequence[str]) -> None:
        """Writes the rows of mirrored entries again that others have taken away (``found``: by what)."""
        mirrored = [entry for entry in self._engine.entries(self._app_id) if entry.mirrored]
        if not mirrored:
            return
        rows, others = _held_rows(self._tables, spark, table, self._app_id, mirrored)
        # an entry has a row for each log, or one without a log
        missing = [
            entry for entry in mirrored if not {(entry.token, log) for log in entry.ranges or (None,)} <= rows
        ]
        before = mirrored[0].sequence - 1  # which the engine does not keep any more
        lost = _loss(missing, before, others if found else before)
        if not lost:
            return
        sentences = ". ".join(["; ".join(found) or "found at the start", *lost])
        log.warning("Delta ledger %r of app %r has lost rows: %s", self._table, self._app_id, sentences)
        if missing and table.exists:  # it has their numbers: they get another id
            repaired = f"{self._writer[1]}{STEP}repaired-{uuid.uuid4().hex}"
            self._add(spark, table, missing, CommitId.of_all(missing, repaired))
        elif missing:
            once = CommitId.of_all(missing, self._writer[1])
            self._tables.append(spark, table, partial(self._frame, entries=missing), once)
        if missing:
            failpoint.here("ledger.repaired")

    def _written(
        self, spark: SparkSession, entries: Sequence[LedgerEntry], write: Callable[[CommitId], object]
    ) -> None:
        last = entries[-1]
        try:
            write(CommitId.of_all(entries, self._writer[1]))
        except CheckpointMismatch:
            # a commit of another writer with a later batch may have written them
            if {entry.token for entry in entries} - held_tokens(self._tables, spark, self._table, entries):
                raise
        failpoint.here("ledger.appended")
        self._engine.mark_mirrored(self._app_id, last.sequence)
        failpoint.here("ledger.marked")

    # -- in the background -----------------------------------------------------------------------------------
    def start(self) -> None:
        """Write in a background thread, which ends with the process or with ``close``."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._loop, name=f"txmq-ledger-{self._app_id}", daemon=True
            )
            self._thread.start()

    def notify(self) -> None:
        """A batch was decided."""
        with self._changed:
            self._rounds += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until all decided batches are in the table. Raises TimeoutError, or the last error."""
        if self._thread is None:
            self.write_missing()
            return
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._rounds += 1
            self._error = None
            self._changed.notify_all()
            goal = self._rounds
            while self._done < goal:
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    raise TimeoutError(
                        f"the Delta ledger {self._table!r} of app {self._app_id!r} is not complete after "
                        f"{timeout_s} s; "
                        "call flush again; the next start also repairs it"
                    )
                self._changed.wait(left)

    def close(self) -> None:
        """End the thread after its current write. The next start writes the missing rows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._done < self._rounds)
                if self._closed:
                    return
                round_number = self._rounds
            error: BaseException | None = None
            try:
                self.write_missing()
            except Exception as failed:
                error = failed
            with self._changed:
                self._error = error
                if error is None:
                    self._done = round_number
                self._changed.notify_all()
                if error is not None:
                    if self.stopped():
                        return
                    log.warning(
                        "Delta ledger %r of app %r lags, next try in %s s: %s",
                        self._table,
                        self._app_id,
                        RETRY_PAUSE_S,
                        str(error) if isinstance(error, TxmqError) else first_line(error),
                    )
                    self._changed.wait_for(lambda: self._closed, RETRY_PAUSE_S)

    def stopped(self) -> bool:
        """Whether ``spark.stop()`` was called; the next start then repairs the table."""
        if is_connect(self._spark):
            client: Any = self._spark
            return bool(client.is_stopped)
        context: Any = self._spark.sparkContext
        return bool(context._jsc is None or context._jsc.sc().isStopped())
