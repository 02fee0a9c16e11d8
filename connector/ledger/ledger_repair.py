"""A Delta ledger that others have damaged: noticed from the log of the table, and completed from the engine.

Not here: what is written with each batch (``delta_ledger.py``).
Invariant: what is completed are rows of mirrored entries that the engine still has; each is written once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from broker_core.core import failpoint
from broker_core.engine import Engine, LedgerEntry
from connector.tables.table import Table
from connector.tables.table_format import TableFormat, TableMark

log = logging.getLogger("txmq")

Insert = Callable[[SparkSession, Table, Sequence[LedgerEntry]], None]


class Repair:
    """Of the ledger of one app. ``insert``: adds the rows of entries that a table does not have."""

    def __init__(self, tables: TableFormat, name: str, engine: Engine, app_id: str, insert: Insert) -> None:
        self._tables = tables
        self._name = name
        self._engine = engine
        self._app_id = app_id
        self._insert = insert
        self._seen: TableMark | None = None

    def start(self, spark: SparkSession) -> None:
        """Looks at the whole table, whatever happened before this process."""
        table = self._tables.resolve(spark, self._name)
        seen = self._tables.disturbed(spark, table, None)[0] if table.exists else None
        self._complete(spark, table, [])
        self._seen = seen

    def sound(self, spark: SparkSession) -> Table:
        """The table, complete as far as it can be. Costs nothing where nobody else has made a commit."""
        table = self._tables.resolve(spark, self._name)
        if not table.exists:
            seen, found = None, ["it was removed"] if self._seen is not None else []
        else:
            seen, found = self._tables.disturbed(spark, table, self._seen)
        if found:
            self._complete(spark, table, found)
            table = self._tables.resolve(spark, self._name)
        self._seen = seen if seen is not None else self._seen if not found else None
        return table

    def _complete(self, spark: SparkSession, table: Table, found: Sequence[str]) -> None:
        known = [entry for entry in self._engine.entries(self._app_id) if entry.mirrored]
        if not known:
            return
        held, others = self._held(spark, table, known)
        # an entry has a row for each log, or one without a log
        missing = [
            entry for entry in known if not {(entry.token, log) for log in entry.ranges or (None,)} <= held
        ]
        before = known[0].sequence - 1
        lost = bool(found) and others < before
        if not missing and not lost:
            return
        sentences = [f"{'; '.join(found) or 'found at the start'}"]
        if missing:
            first, last = missing[0].sequence, missing[-1].sequence
            batches = f"{len(missing)} of the batches {first} to {last} are"
            batches = batches if first < last else f"batch {first} is"
            sentences.append(f"{batches} written again from the entries of the engine")
        if lost:
            sentences.append(
                f"of the batches 1 to {before}, which the engine does not keep any more, the table has "
                f"{others}, and the others cannot be completed"
            )
        log.warning(
            "Delta ledger %r of app %r has lost rows: %s", self._name, self._app_id, ". ".join(sentences)
        )
        if missing:
            self._insert(spark, table, missing)
            failpoint.here("ledger.repaired")

    def _held(
        self, spark: SparkSession, table: Table, known: Sequence[LedgerEntry]
    ) -> tuple[set[tuple[str, str | None]], int]:
        """(token, log) of the rows of these entries, and how many other batches of the app there are."""
        if not table.exists:
            return set(), 0
        rows = self._tables.read(spark, table).where(F.col("app_id") == self._app_id)
        wanted = spark.createDataFrame([(entry.token,) for entry in known], "token string")
        found: list[Any] = rows.join(wanted, "token", "left_semi").select("token", "log").collect()
        others = rows.join(wanted, "token", "left_anti").select("token").distinct().count()
        return {(str(row["token"]), row["log"]) for row in found}, others
