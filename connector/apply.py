"""Applies decided batches (C5): the steps on Delta tables, and the functions of ``after_commit``.

Not here: the decision (``foreach_batch.py``), one append of rows (``delta.py``) or of files (``adding.py``),
one merge, delete or overwrite (``changing.py``).
Invariant: batches are applied in the order of their decisions, each until it is marked, and the steps of a
table in the order of the calls. Every step may be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core import failpoint
from broker_core.engine import Engine, LedgerEntry, ToApply
from broker_core.errors import MissingBranch, NotApplied, OptionError, cause
from connector import adding, changing, delta, staging
from connector.after_commit import AfterCommit, call
from connector.hidden import Attempt, sweep
from connector.ledger import offsets_of
from connector.options import Address
from connector.rehearsal import no_rows
from connector.staged_files import EMPTY, LOST, StagedFiles, is_files, rows_in
from connector.table import Table, is_path, resolve
from connector.table_files import TableFiles
from connector.trace import INTERRUPTIONS, told


class Apply:
    """The operations on tables and the functions of one app."""

    def __init__(self, app_id: str, address: Address, functions: Mapping[str, AfterCommit]) -> None:
        self._app_id = app_id
        self._address = address
        self._functions = functions
        self._added: set[str] = set()  # txnAppIds, which are of one table

    def function(self, name: str) -> AfterCommit:
        try:
            return self._functions[name]
        except KeyError:
            known = ", ".join(sorted(self._functions)) or "none"
            raise OptionError(f"no function {name!r} in after_commit (there: {known})", "add it") from None

    def decided(self, spark: SparkSession, engine: Engine) -> None:
        """Applies every decided batch that is not applied."""
        for entry in engine.unapplied(self._app_id):
            steps, functions = _grouped(entry)
            for name in functions:  # fails before the first effect of this batch
                self.function(name)
            for number, parts in enumerate(steps):
                failpoint.here(f"foreach.applying.{number}")
                self._step(spark, engine, entry, parts)
                failpoint.here(f"foreach.applied.{number}")
            for name, parts in functions.items():
                call(name, self.function(name), self._rows(spark, parts), entry)
                failpoint.here("foreach.called")
            engine.mark_applied(self._app_id, entry.sequence)
            failpoint.here("foreach.marked")

    def _step(self, spark: SparkSession, engine: Engine, entry: LedgerEntry, parts: list[ToApply]) -> None:
        rows = sum(map(rows_in, parts))
        changes = changing.is_change(parts[0])
        if not rows and not changes:
            return  # an empty Delta commit costs as much as a full one
        batch = f"batch {entry.sequence}, app {self._app_id!r}"
        # a new table that is given as name and as path: the name creates it in the catalog
        table = resolve(spark, min((part.target["table"] for part in parts), key=is_path))
        if changes:
            changing.require_same_table(table, parts[0], batch)
        elif any(part.target.get("table_id") for part in parts) and not table.exists:
            held = any(map(is_files, parts))
            raise OptionError(
                f"table {table.name!r} was dropped before app {self._app_id!r} wrote batch {entry.sequence}"
                + (f", whose {rows} rows wait in data files in its directory" if held else ""),
                f"if the directory is gone, so are they: {LOST}"
                if held
                else f"create it again and start the query, or {delta.UNAPPLIED}",
            )
        try:
            if changes:
                self._change(spark, table, entry, parts)
            else:
                self._append(spark, engine, table, entry, parts)
        except Exception as error:
            found = cause(error)
            if isinstance(found, MissingBranch) and not _waits(engine, entry):
                return  # another driver has applied it meanwhile, and its rows are freed
            if found is not None or any(name in str(error) for name in INTERRUPTIONS):
                raise
            raise NotApplied(
                f"table {table.name!r} does not take "
                + (f"the {parts[0].kind}" if changes else "its rows")
                + f" of {batch} ({told(error)}); the batch is decided, and its rows are kept",
                f"repair the table and start the query again, or {delta.UNAPPLIED}",
            ) from error

    def _change(self, spark: SparkSession, table: Table, entry: LedgerEntry, parts: list[ToApply]) -> None:
        with_rows = [part for part in parts if EMPTY not in part.target]

        def rows(session: SparkSession) -> DataFrame:
            return self._rows(session, with_rows) if with_rows else no_rows(session, _schema(parts))

        changing.change(
            spark,
            table,
            parts[0],
            rows,
            txn_app_id=parts[0].target["txn_app_id"],
            txn_version=entry.sequence,
            batch=offsets_of(entry),
            decided_at_us=entry.committed_at_us,
        )

    def _append(
        self, spark: SparkSession, engine: Engine, table: Table, entry: LedgerEntry, parts: list[ToApply]
    ) -> None:
        target = parts[0].target
        once: dict[str, Any] = {
            "txn_app_id": target.get("txn_app_id", self._app_id),  # not in entries of old versions
            "txn_version": entry.sequence,
            "batch": offsets_of(entry),
            "decided_at_us": entry.committed_at_us,
            "options": target.get("options", {}),
        }
        of_files = [part for part in parts if is_files(part)]
        if not of_files:
            delta.append(self._rows(spark, parts), table, partition_by=target.get("partition_by", []), **once)
            return
        staged = [StagedFiles.of(part, engine.read_branches(part.branches)) for part in of_files]
        place = target["location"]
        files = TableFiles.at(place)
        here = table.location == place and len(of_files) == len(parts)
        known = once["txn_app_id"] in self._added
        if here and adding.add(spark, table, files, staged, known=known, **once):
            self._added.add(once["txn_app_id"])
        else:
            # the table has changed or moved since: Delta writes the rows again
            frames = [
                each.frame(spark, files, place, _schema(parts), f"batch {entry.sequence}") for each in staged
            ]
            others = [part for part in parts if not is_files(part)]
            frames += [self._rows(spark, others)] if others else []
            delta.append(reduce(DataFrame.unionByName, frames), table, **once)
        attempt = Attempt(self._app_id, once["txn_app_id"], entry.sequence, entry.token)
        files.delete(attempt.directory)
        failpoint.here("adding.cleared")
        sweep(
            files,
            self._app_id,
            once["txn_app_id"],
            entry.sequence,
            lambda: engine.unapplied(self._app_id),
        )

    def _rows(self, spark: SparkSession, parts: Sequence[ToApply]) -> DataFrame:
        branches = [branch for part in parts for branch in part.branches]
        return staging.rows_of(
            spark, branches, sum(part.rows for part in parts), _schema(parts), self._address
        )


def _schema(parts: Sequence[ToApply]) -> StructType:
    return StructType.fromJson(json.loads(parts[0].target["schema"]))


def _waits(engine: Engine, entry: LedgerEntry) -> bool:
    """Whether a batch is still to be applied."""
    return any(entry.sequence == waiting.sequence for waiting in engine.unapplied(entry.app_id))


def _grouped(entry: LedgerEntry) -> tuple[list[list[ToApply]], dict[str, list[ToApply]]]:
    """The parts to apply: by table and step, the tables in the order of their first part; and by function, in
    the order of staging.
    """
    tables: dict[str, dict[int, list[ToApply]]] = {}
    functions: dict[str, list[ToApply]] = {}
    for part in entry.to_apply:
        if part.kind == "after_commit":
            functions.setdefault(part.target["name"], []).append(part)
        elif "table" in part.target:
            steps = tables.setdefault(part.target.get("location", part.target["table"]), {})
            steps.setdefault(part.target.get("step", 0), []).append(part)
    return [steps[step] for steps in tables.values() for step in sorted(steps)], functions
