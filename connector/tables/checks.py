"""What an app may do to a table, asked before the decision, once for each shape of rows, table and operation.

Not here: the answers (``table_format.py``), what happens after the decision (``batch/apply.py``).
Invariants: an operation that passes does not fail after the decision because of its rows. The rows that are
staged are those that were compared: both happen in one execution.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql.functions import col, count, expr, lit
from pyspark.sql.types import StructType

from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.engine import Engine, InTable, LedgerEntry
from connector.errors import first_line, without_logs
from connector.sql import literal, nullable, quoted
from connector.tables.change import SOURCE, Change
from connector.tables.commit_id import ids_at, restored_in, txn_app_id
from connector.tables.table import Table, in_sql, is_connect
from connector.tables.table_format import CheckResult, TableFormat, Writing
from connector.tables.target import of_change

log = logging.getLogger("txmq")

_COUNT = "__txmq_rows"
KEPT = 256  # answers: one for each operation of a function is enough


class Checks:
    """The checks of a process for its app, with their answers."""

    def __init__(self, tables: TableFormat, app_id: str, engine: Callable[[], Engine]) -> None:
        self._tables = tables
        self._app_id = app_id
        self._engine = engine
        self._applied: Sequence[tuple[LedgerEntry, InTable]] | None = None  # asked for once
        self._answers: dict[tuple[str, ...], CheckResult] = {}  # the one used last is the last one
        self.take_overs: Mapping[str, int] = {}  # engine -> behind which of its batches this one goes on
        self._guarded: dict[tuple[str, str], int] = {}
        self._log_keys: set[tuple[str, str]] = set()

    def append(self, spark: SparkSession, table: Table, schema: StructType, writing: Writing) -> CheckResult:
        """Raises OptionError if the append would fail after the decision."""
        options, columns = writing
        found = self._answer(
            ("append", *table.shape, schema.json(), repr(sorted(options.items())), *columns),
            lambda: self._tables.check_append(spark, table, schema, writing),
        )
        if (table.location, found.by_rows) not in self._log_keys:
            self._log_keys.add((table.location, found.by_rows))
            how = f"as rows, which are written twice: {found.by_rows}" if found.by_rows else "as files"
            log.info("app %r appends to table %r %s", self._app_id, table.name, how)
        return found

    def change(
        self, rows: DataFrame, table: Table, change: Change, keys: Sequence[str] = ()
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
            ("change", *table.shape, schema.json(), json.dumps([asdict(settled), context], sort_keys=True)),
            lambda: self._tables.check_change(spark, table, schema, settled, context),
        )
        rows = unique(found.ready(rows), keys, table.name, found.compared)
        return rows, of_change(table, settled, nullable(rows.schema), context)

    def guard(self, spark: SparkSession, table: Table, txn_app_id: str) -> int:
        """The RESTORE behind which the batches of this app on the table are numbered (``numbered_anew``),
        found once for each table. Raises CheckpointMismatch if the table would skip what this app writes.
        """
        key = table.table_id, txn_app_id
        if key not in self._guarded:
            restored = require_numbers(self._tables, spark, table, txn_app_id, self._app_id, self._decided)
            for engine, behind in self.take_overs.items() if table.exists else ():
                refuse_what_was_done_elsewhere(self._tables, spark, table, self._app_id, engine, behind)
            if table.exists:
                self._warn_of_an_older_copy(spark, table)
            self._guarded[key] = restored
        return self._guarded[key]

    def _decided(self) -> int:
        return last.sequence if (last := self._engine().last_entry(self._app_id)) else 0

    def _warn_of_an_older_copy(self, spark: SparkSession, table: Table) -> None:
        """Its directory was put back while no driver looked: the engine has no rows of applied batches."""
        if self._applied is None:
            entries = self._engine().entries(self._app_id)
            self._applied = [(entry, each) for entry in entries for each in entry.in_tables]
        missing: list[LedgerEntry] = []
        for entry, each in reversed(self._applied):
            if each.table_id == table.table_id:
                if not self._tables.lacks(spark, table, each.version, entry.token):
                    break
                missing[:0] = [entry] if entry not in missing else []
        if missing:
            first, last = missing[0].sequence, missing[-1].sequence
            log.warning(
                "table %r is an older copy: it lost %s of app %r. They are not applied "
                "again: add their rows from the newer copy; `txmq app ledger %s` says what they consumed",
                table.name,
                f"batch {first}" if first == last else f"the batches {first} to {last}",
                self._app_id,
                self._app_id,
            )

    def _answer(self, shape: tuple[str, ...], ask: Callable[[], CheckResult]) -> CheckResult:
        found = self._answers.pop(shape, None) or ask()
        self._answers[shape] = found
        if len(self._answers) > KEPT:
            del self._answers[next(iter(self._answers))]
        return found


def last_stored(tables: TableFormat, spark: SparkSession, table: Table, txn_app_id: str) -> tuple[int, int]:
    """The RESTORE behind which an app was numbered last on a table, and its last batch there, in any step."""
    last: dict[int, int] = {0: 0}
    names = ids_at(txn_app_id, table.locations)
    alike = txn_app_id if len(names) == 1 else txn_app_id.rpartition("/")[0]
    for name, sequence in tables.sequences(spark, table, alike).items():
        for restored in (restored_in(name, own) for own in names):
            if restored is not None:
                last[restored] = max(sequence, last.get(restored, 0))
    return max(last.items())


def require_numbers(
    tables: TableFormat,
    spark: SparkSession,
    table: Table,
    txn_app_id: str,
    app_id: str,
    decided: Callable[[], int],
    ledger: bool = False,
) -> int:
    """The RESTORE behind which the next batch is numbered: the table takes each number once, and also keeps
    those of batches that are undone. Raises CheckpointMismatch if it has later ones of this broker.
    ``ledger``: the table is one, which is written after the decision.
    """
    if not table.exists:
        return 0
    restored, stored = last_stored(tables, spark, table, txn_app_id)
    # ``decided`` is called after the table was read: another driver may decide meanwhile
    if stored <= (last_decided := decided()):
        return restored
    version, undone, of_others = tables.later(spark, table, txn_app_id, last_decided)
    if undone:
        return undone
    to, lost = (version or 0) - 1, ""
    restore = f"RESTORE TABLE {in_sql(table.name)} TO VERSION AS OF {to}"
    put_back = f"or, before others write to it, put the table back ({restore}), " if version else ""
    if version and of_others:
        put_back, lost = "", f"; a RESTORE to version {to} would also undo commits of others ({of_others})"
    text = f"table {table.name!r} holds batch {stored} of app {app_id!r}, and the broker has"
    why = f"only {last_decided}: an older copy of the broker's data was restored"
    if ledger:
        raise CheckpointMismatch(
            f"{text} mirrored {why} (what it has decided since stays decided)",
            f"restore the newest data, {put_back}or name another ledger{lost}",
        )
    raise CheckpointMismatch(
        f"{text} decided {why} (nothing was consumed)",
        f"restore the newest data, {put_back}or use a new app_id, which appends later batches again (a "
        f"broker needs `txmq app release {app_id} QUEUE --force` first){lost}",
    )


def refuse_what_was_done_elsewhere(
    tables: TableFormat, spark: SparkSession, table: Table, app_id: str, engine: str, behind: int
) -> None:
    """Raises CheckpointMismatch if the table has batches of an engine behind the one up to which this one has
    taken the app over (C7): they are read again here."""
    theirs = txn_app_id(app_id, engine, table.location)
    _, stored = last_stored(tables, spark, table, theirs)
    if stored > behind and not tables.later(spark, table, theirs, behind).restored:
        raise CheckpointMismatch(
            f"table {table.name!r} has batch {stored} of app {app_id!r} from engine {engine}, and the ledger "
            f"ends with batch {behind}: its rows would come twice (nothing was consumed)",
            f"see in the history of the table which messages batch {stored} had (userMetadata); begin after "
            "them with another app_id, and startingOffsets",
        )


# -- rows that must differ: two for one row of the table make a merge ambiguous ------------------------------


def unique(
    rows: DataFrame, keys: Sequence[str], table: str, compared: Mapping[str, str] | None = None
) -> DataFrame:
    """The rows. Their execution fails if two of them have the same values in ``keys``; nulls are equal.
    ``compared``: SQL over ``s`` that is compared in the place of a key, by its name in lower case.
    Raises OptionError unless ``keys`` are columns that can be compared.

    The rows are shuffled by ``keys``, unless they are already.
    """
    if not keys and not isinstance(keys, str):
        return rows
    _check_keys(keys, rows.columns, table)
    try:
        with without_logs():
            return _asserted(rows.alias(SOURCE), keys, table, compared or {})
    except PySparkException as error:
        raise OptionError(
            f"table {table!r}: keys={list(keys)!r} cannot be compared: {first_line(error)[:500]}"
        ) from error


def _asserted(rows: DataFrame, keys: Sequence[str], table: str, compared: Mapping[str, str]) -> DataFrame:
    columns = [expr(compared.get(key.lower(), quoted(key))) for key in keys]
    spark = rows.sparkSession
    if not is_connect(spark) and str(spark.conf.get("spark.sql.adaptive.enabled")).lower() != "true":
        # otherwise Spark makes a task for each of the shuffle partitions, by default 200
        rows = rows.repartition(spark.sparkContext.defaultParallelism, *columns)
    counted = rows.withColumn(_COUNT, count(lit(1)).over(Window.partitionBy(*columns)))
    error = OptionError(f"table {table!r}: several rows of the batch have the same {', '.join(keys)}")
    advice = "; keep one row for each, for example the last one"
    struct = f"struct({', '.join(map(quoted, keys))})"
    text = f"concat({literal(str(error) + ': ')}, to_json({struct}), {literal(advice)})"
    first, *others = (name for name in counted.columns if name != _COUNT)
    asserted = f"CASE WHEN {_COUNT} > 1 THEN raise_error({text}) ELSE {quoted(first)} END"
    return counted.select(expr(asserted).alias(first), *(col(quoted(name)) for name in others))


def _check_keys(keys: Sequence[str], columns: Sequence[str], table: str) -> None:
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise OptionError(f"table {table!r}: keys={keys!r}", "give a list of columns of the rows")
    lower = [column.lower() for column in columns]
    missing = [key for key in keys if key.lower() not in lower]
    if missing:
        raise OptionError(
            f"table {table!r}: keys names {', '.join(missing)}, which the rows do not have",
            f"use columns of {', '.join(columns)}",
        )
