"""Applies decided batches (C5): the steps on Delta tables, and the functions of ``after_commit``.

Not here: the decision (``foreach_batch.py``), one commit of a table (``tables/table_format.py``).
Invariant: batches are applied in the order of their decisions, each until it is marked, and the steps of a
table in the order of the calls. Tables do not depend on each other: those of a function that called ``tx`` in
threads are applied side by side, as plain writes of its threads would be. Every step may be repeated.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core.core import failpoint
from broker_core.core.errors import MissingBranch, NotApplied, NotAppliedYet, OptionError, TxmqError, cause
from broker_core.engine import EMPTY, REFUSED, TO_QUEUE, Engine, LedgerEntry, ToApply
from broker_core.message import spans
from connector.batch.after_commit import AfterCommit, call
from connector.batch.refused_file import RefusedFile
from connector.batch.refused_letters import RefusedLetters
from connector.batch.row_by_row import RefusedRows, RowByRow
from connector.batch.thread_context import ThreadContext
from connector.errors import error_summary, is_interruption
from connector.options import AddressOptions
from connector.stream import staging
from connector.tables import target
from connector.tables.commit_id import CommitId
from connector.tables.table import Table, is_path
from connector.tables.table_format import Attempt, Rows, TableFormat, Writing

log = logging.getLogger("txmq")
NOTED_CHARACTERS = 500  # of an error, for an operator
_TABLES_AT_ONCE = 8

TableSteps = list[tuple[int, list[ToApply]]]  # the steps of one table, with their numbers in the batch


class Apply:
    """The operations on tables and the functions of one app."""

    def __init__(
        self, tables: TableFormat, app_id: str, address: AddressOptions, functions: Mapping[str, AfterCommit]
    ) -> None:
        self._tables = tables
        self._app_id = app_id
        self._address = address
        self._functions = functions
        self._applied = -1  # this batch and all before it are applied

    def function(self, name: str) -> AfterCommit:
        try:
            return self._functions[name]
        except KeyError:
            names = ", ".join(sorted(self._functions)) or "none"
            raise OptionError(f"no function {name!r} in after_commit (there: {names})", "add it") from None

    @spans.span("txmq.apply", {})
    def decided(
        self,
        spark: SparkSession,
        engine: Engine,
        newest: LedgerEntry | None = None,
        *,
        side_by_side: bool = False,
    ) -> None:
        """Applies every decided batch that is not applied. ``newest``: one that this process has decided;
        ``side_by_side``: its tables at the same time.
        """
        # files tell themselves whether another driver has added them, so the engine need not be asked
        alone = newest is not None and newest.sequence == self._applied + 1
        if newest is not None and alone and all(map(target.is_files, newest.to_apply)):
            entries = [newest]
        else:
            entries = engine.unapplied(self._app_id)
        for entry in entries:
            tables, functions = _grouped(entry)
            for name in functions:  # fails before the first effect of this batch
                self.function(name)
            batch = DecidedBatch(self._tables, self._address, spark, engine, entry)
            ours = newest is not None and entry.sequence == newest.sequence
            if side_by_side and ours and len(tables) > 1:
                batch.apply_side_by_side(tables)
            else:
                for steps in tables:
                    batch.apply(steps)
            for name, parts in functions.items():
                with batch.note_refusal(parts):
                    call(name, self.function(name), batch.rows(spark, parts), entry)
                failpoint.here("foreach.called")
            engine.mark_applied(self._app_id, entry.sequence, batch.versions)
            self._applied = entry.sequence
            failpoint.here("foreach.marked")


@dataclass
class DecidedBatch:
    """What one ledger entry does to tables. ``versions``: those of the tables, by a branch of each part."""

    tables: TableFormat
    address: AddressOptions
    spark: SparkSession
    engine: Engine
    entry: LedgerEntry
    versions: dict[str, int] = field(default_factory=dict)

    def apply_side_by_side(self, tables: list[TableSteps]) -> None:
        """Raises the error of the first table that has one, when all have ended, and logs those of others."""
        context = ThreadContext(self.spark)

        def table(steps: TableSteps) -> None:
            with context.entered():
                self.apply(steps)

        with ThreadPoolExecutor(min(len(tables), _TABLES_AT_ONCE), "txmq-apply") as pool:
            ended = [pool.submit(table, steps) for steps in tables]
        found = zip(tables, (each.exception() for each in ended), strict=True)
        failed = [(steps, error) for steps, error in found if error is not None]
        for steps, error in failed[1:]:
            if not is_interruption(error):
                about = steps[0][1][0].target["table"], self.entry.sequence, self.entry.app_id
                log.error("table %r has not taken batch %d of app %r: %s", *about, error_summary(error))
        for _, error in failed[:1]:
            raise error

    def apply(self, steps: TableSteps) -> None:
        """The steps of one table."""
        for number, parts in steps:
            failpoint.here(f"foreach.applying.{number}")
            with self.note_refusal(parts):
                version = self._step(parts)
            if version is not None:
                self.versions.update((part.branches[0], version) for part in parts if part.branches)
            failpoint.here(f"foreach.applied.{number}")

    @contextlib.contextmanager
    def note_refusal(self, parts: Sequence[ToApply]) -> Iterator[None]:
        """Lets an operator know why the parts are not applied, and since when."""
        try:
            yield
        except Exception as error:
            found, entry = cause(error), self.entry
            text = (error_summary(error) if found is None else found.summary)[:NOTED_CHARACTERS]
            if not getattr(found, "retriable", False) and not is_interruption(error):
                with contextlib.suppress(TxmqError):  # the error itself says what is to be known
                    self.engine.note(entry.app_id, entry.sequence, _branches(parts), REFUSED, text)
            raise

    def rows(self, spark: SparkSession, parts: Sequence[ToApply]) -> DataFrame:
        """The rows of the user that the parts hold."""
        nonempty = [part for part in parts if EMPTY not in part.target]
        if not nonempty:
            return staging.no_rows(spark, _schema(parts))
        count = sum(part.rows for part in nonempty)
        return staging.rows_of(spark, _branches(nonempty), count, _schema(nonempty), self.address)

    def _step(self, parts: list[ToApply]) -> int | None:
        """Returns the version of the table, if it is known."""
        rows = sum(map(target.rows_in, parts))
        changes = target.is_change(parts[0])
        if not rows and not changes:
            return None  # an empty Delta commit costs as much as a full one
        spark, batch = self.spark, f"batch {self.entry.sequence}, app {self.entry.app_id!r}"
        # a new table that is given as name and as path: the name creates it in the catalog
        table = self.tables.resolve(spark, min((part.target["table"] for part in parts), key=is_path))
        if changes:
            if table.table_id != (decided := parts[0].target["table_id"]):
                change = f"{parts[0].kind} of {batch}"
                raise target.replaced(table.name, change, decided, exists=table.exists)
        elif any(part.target.get("table_id") for part in parts) and not table.exists:
            raise target.missing(table.name, parts, batch)
        try:
            once = CommitId.of(self.entry, parts[0].target["txn_app_id"])
            to = target.rows_to(parts) if rows else ""
            by_row = bool(to) and not self.tables.has(spark, table, once)
            if changes and not by_row:
                return self._change(spark, table, parts, once, lambda session: self.rows(session, parts))
            with self.tables.decided(spark, parts[0].target.get(target.CONTEXT)) as session:
                if by_row:
                    return self._row_by_row(session, table, parts, once, to)
                return self._append(session, table, parts, once)
        except Exception as error:
            found = cause(error)
            if isinstance(found, MissingBranch):
                waiting = self.engine.unapplied(self.entry.app_id)
                if all(self.entry.sequence != each.sequence for each in waiting):
                    return None  # another driver has applied it meanwhile, and its rows are freed
            if found is not None or is_interruption(error):
                raise
            what = f"the {parts[0].kind}" if changes else "its rows"
            what += f" of {batch} ({error_summary(error)}); the batch is decided, and its rows are kept"
            if passes := self.tables.transient(error):
                raise NotAppliedYet(
                    f"{passes[:1].upper()}{passes[1:]}: table {table.name!r} has not taken {what}",
                    target.AGAIN,
                ) from error
            what += "; --refused can leave out no other row" if by_row else ""  # the table's own rows decide
            raise NotApplied(
                f"table {table.name!r} does not take {what}",
                "repair the table and start the query again, or "
                f"{target.ALL_ROWS if by_row else target.UNAPPLIED}",
            ) from error

    def _row_by_row(
        self, spark: SparkSession, table: Table, parts: list[ToApply], once: CommitId, to: str
    ) -> int | None:
        """The operation with the rows that the table takes."""
        schema, tables, changes = _schema(parts), self.tables, target.is_change(parts[0])
        if changes and target.change_of(parts[0]).acts_without_rows:
            raise OptionError(
                f"the {parts[0].kind} of table {table.name!r} deletes rows that its source lacks, so no row "
                f"of batch {self.entry.sequence} can be left out",
                target.ALL_ROWS,
            )
        try:
            if changes:
                ready = tables.check_change(spark, table, schema, target.change_of(parts[0])).ready
            else:
                ready = tables.check_append(spark, table, schema, _writing(parts)).ready
        except OptionError as error:  # its advice is for a function that has not been decided
            raise NotApplied(
                f"{error.summary}, of batch {self.entry.sequence}, which is decided; its rows are kept",
                f"repair the table and start the query again, or {target.UNAPPLIED}",
            ) from None
        # rows that were published stay published, even if an operator names another place now
        refused: RefusedRows = RefusedFile(to, self.entry, parts[0], once)
        if to.startswith(TO_QUEUE) or target.refused_rows(parts) is not None:
            refused = RefusedLetters(self.engine, to.removeprefix(TO_QUEUE), self.entry, parts)
        rows = RowByRow(self._batches(parts), schema, ready)
        taken = rows.accepted_rows(spark, refused)
        version = None
        if changes:
            version = self._change(spark, table, parts, once, lambda session: rows.frame(session, taken))
        elif taken is not None:
            version = tables.append(
                spark, table, lambda session: ready(rows.frame(session, taken)), once, _writing(parts)
            )
        failpoint.here("rows.applied")
        if any(map(target.is_files, parts)):
            self._clear(parts[0].target["location"], once)
        return version

    def _change(
        self, spark: SparkSession, table: Table, parts: list[ToApply], once: CommitId, rows: Rows
    ) -> int | None:
        change, context = target.change_of(parts[0]), parts[0].target.get(target.CONTEXT)
        return self.tables.change(spark, table, change, rows, once, context)

    def _append(self, spark: SparkSession, table: Table, parts: list[ToApply], once: CommitId) -> int | None:
        of_files = [part for part in parts if target.is_files(part)]
        of_rows = [part for part in parts if not target.is_files(part)]
        rows = (lambda session: self.rows(session, of_rows)) if of_rows else None
        if rows is not None and not of_files:
            return self.tables.append(spark, table, rows, once, _writing(parts))
        branches = [(part, self.engine.read_branches(part.branches)) for part in of_files]
        version = self.tables.add(spark, table, branches, rows, once, _writing(parts).options)
        self._clear(parts[0].target["location"], once)
        return version

    def _clear(self, location: str, once: CommitId) -> None:
        """Deletes the files that the table does not need any more."""
        entry = self.entry
        attempt = Attempt(entry.app_id, once.txn_app_id, entry.sequence, entry.token)
        self.tables.drop(location, attempt)
        failpoint.here("adding.cleared")
        self.tables.sweep(location, attempt, lambda: self.engine.unapplied(entry.app_id))

    def _batches(self, parts: Sequence[ToApply]) -> Iterator[pa.RecordBatch]:
        """The rows of the parts, always in the same order. Raises NotApplied if data files are gone."""
        for part in parts:
            if not target.rows_in(part):
                continue
            batches = self.engine.read_branches(part.branches)
            if target.is_files(part):
                files = self.tables.exported_files(part, batches)
                if gone := files.missing():
                    number = f"{len(gone)} of {len(files)}"
                    raise NotApplied(f"{number} data files are gone ({gone[0]})", target.LOST)
                batches = files.rows()
            yield from batches


def _writing(parts: Sequence[ToApply]) -> Writing:
    about = parts[0].target
    return Writing(about.get("options", {}), about.get("partition_by", []))


def _branches(parts: Sequence[ToApply]) -> list[str]:
    return [branch for part in parts for branch in part.branches]


def _schema(parts: Sequence[ToApply]) -> StructType:
    return StructType.fromJson(json.loads(parts[0].target["schema"]))


def _grouped(entry: LedgerEntry) -> tuple[list[TableSteps], dict[str, list[ToApply]]]:
    """The parts to apply: by table and step, the tables in the order of their first part; and by function, in
    the order of staging. The steps are numbered through.
    """
    tables: dict[str, dict[int, list[ToApply]]] = {}
    functions: dict[str, list[ToApply]] = {}
    for part in entry.to_apply:
        if part.kind == "after_commit":
            functions.setdefault(part.target["name"], []).append(part)
        elif "table" in part.target:
            steps = tables.setdefault(part.target.get("location", part.target["table"]), {})
            steps.setdefault(part.target.get("step", 0), []).append(part)
    number = itertools.count()
    return [[(next(number), steps[step]) for step in sorted(steps)] for steps in tables.values()], functions
