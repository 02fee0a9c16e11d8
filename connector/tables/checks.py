"""What an app may do to a table, asked before the decision, once for each shape of rows, table and operation.

Not here: the answers (``table_format.py``), what happens after the decision (``batch/apply.py``).
Invariant: an operation that passes does not fail after the decision because of its rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core.errors import LineageConflict, OptionError
from connector.sql import nullable
from connector.tables.commit_id import txn_app_id
from connector.tables.merge import Merge
from connector.tables.overwrite import Overwrite
from connector.tables.table import Table
from connector.tables.table_format import Checked, TableFormat, Writing
from connector.tables.target import of_change
from connector.tables.unique import unique

log = logging.getLogger("txmq")

KEPT = 256  # answers: one for each operation of a function is enough


class Checks:
    """What a process has asked for its app."""

    def __init__(self, tables: TableFormat, app_id: str, decided: Callable[[], int]) -> None:
        """``decided``: the last decided sequence of the app."""
        self._tables = tables
        self._app_id = app_id
        self._decided = decided
        self._answers: dict[tuple[str, ...], Checked] = {}  # the one used last is the last one
        self.taken: Mapping[str, int] = {}  # engine -> behind which batch this one has taken the app over
        self._guarded: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def append(self, spark: SparkSession, table: Table, schema: StructType, writing: Writing) -> Checked:
        """Raises OptionError if the append would fail after the decision."""
        options, columns = writing
        found = self._answer(
            ("append", *table.shape, schema.json(), repr(sorted(options.items())), *columns),
            lambda: self._tables.check_append(spark, table, schema, writing),
        )
        self._warn(table, found.by_rows)
        return found

    def change(
        self, rows: DataFrame, table: Table, change: Merge | Overwrite, keys: Sequence[str] = ()
    ) -> tuple[DataFrame, dict[str, object]]:
        """The rows as they are staged, and what is stored with them. Their execution fails if the table would
        refuse one, or if two have the same ``keys``. Raises OptionError if the change would fail after the
        decision, whatever its rows.
        """
        if not table.exists:
            raise OptionError(f"table {table.name!r} does not exist", "create it before the query starts")
        spark, schema = rows.sparkSession, nullable(rows.schema)
        context = self._tables.context(spark)
        settled = self._tables.settled(table, schema.names, change, context)
        found = self._answer(
            ("change", *table.shape, schema.json(), json.dumps([settled.to_json(), context], sort_keys=True)),
            lambda: self._tables.check_change(spark, table, schema, settled, context),
        )
        rows = unique(found.ready(rows), keys, table.name, found.compared)
        return rows, of_change(table, settled, nullable(rows.schema), context)

    def guard(self, spark: SparkSession, table: Table, txn_app_id: str) -> None:
        """Raises LineageConflict if the table would skip what this app writes; asked once for each table."""
        if (table.table_id, txn_app_id) not in self._guarded:
            refuse_a_restarted_sequence(self._tables, spark, table, txn_app_id, self._app_id, self._decided)
            for engine, behind in self.taken.items() if table.exists else ():
                refuse_what_was_done_elsewhere(self._tables, spark, table, self._app_id, engine, behind)
            self._guarded.add((table.table_id, txn_app_id))

    def _answer(self, shape: tuple[str, ...], ask: Callable[[], Checked]) -> Checked:
        found = self._answers.pop(shape, None) or ask()
        self._answers[shape] = found
        if len(self._answers) > KEPT:
            del self._answers[next(iter(self._answers))]
        return found

    def _warn(self, table: Table, by_rows: str) -> None:
        if (table.location, by_rows) in self._told:
            return
        self._told.add((table.location, by_rows))
        how = f"as rows, which are written twice: {by_rows}" if by_rows else "as files"
        log.info("app %r appends to table %r %s", self._app_id, table.name, how)


def refuse_a_restarted_sequence(
    tables: TableFormat,
    spark: SparkSession,
    table: Table,
    txn_app_id: str,
    app_id: str,
    decided: Callable[[], int],
) -> None:
    """Raises LineageConflict if the table holds later batches of this broker than ``decided()``, in any of
    the steps of ``txn_app_id``.
    """
    stored = tables.last_sequence(spark, table, txn_app_id) if table.exists else 0
    # ``decided`` is called after the table was read: another driver may decide meanwhile
    if stored and stored > (known := decided()):
        raise LineageConflict(
            f"table {table.name!r} holds batch {stored} of app {app_id!r}, and the broker has decided only "
            f"{known}: an older copy of the broker's data was restored (nothing was consumed)",
            "restore the newest data, or use a new app_id, which appends later batches again",
        )


def refuse_what_was_done_elsewhere(
    tables: TableFormat, spark: SparkSession, table: Table, app_id: str, engine: str, behind: int
) -> None:
    """Raises LineageConflict if the table has batches of an engine behind the one up to which this engine has
    taken the app over (C7): their messages are read again here.
    """
    stored = tables.last_sequence(spark, table, txn_app_id(app_id, engine, table.location))
    if stored > behind:
        raise LineageConflict(
            f"table {table.name!r} has batch {stored} of app {app_id!r} from engine {engine}, and the ledger "
            f"ends with batch {behind}: its rows would come twice (nothing was consumed)",
            f"see in the history of the table which messages batch {stored} had (userMetadata); begin behind "
            "them with another app_id, and startingOffsets",
        )
