"""Appends of one app before the decision: checked, and in one of two forms.

*Files*: Delta writes the data files at once, invisible, and adds them after the decision. *Rows*: the rows
are staged in the engine, and written to the table after the decision. Any table takes rows.

Not here: what happens after the decision (``apply.py``).
Invariant: an append that passes the check does not fail after the decision because of its rows.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.errors import OptionError
from connector import delta
from connector.fit import Fit, Known, fit
from connector.table import Table, is_connect
from connector.table_files import DISK

log = logging.getLogger("txmq")

# Options and table features that mean the same to a commit of files.
_OPTIONS = {"mergeschema", "maxrecordsperfile", "compression", "optimizewrite"}
_FEATURES = {
    "allowColumnDefaults",
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "checkpointProtection",
    "clustering",
    "columnMapping",
    "deletionVectors",
    "domainMetadata",
    "generatedColumns",
    "identityColumns",
    "inCommitTimestamp",
    "invariants",
    "rowTracking",
    "timestampNtz",
    "typeWidening",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
# Columns whose values the commit, or Spark's analysis of a write by name, completes.
_IDENTITY = "delta.identity.start"
_DEFAULT = "CURRENT_DEFAULT"
_CHAR = "__CHAR_VARCHAR_TYPE_STRING"
_STATISTICS = "spark.databricks.delta.stats.collect"


@dataclass(frozen=True)
class Checked:
    """An append that its table takes. ``fit``: how its rows are converted; ``by_rows``: why its form is rows,
    "" for files.
    """

    fit: Fit | None
    by_rows: str


class Appends:
    """What a process has checked for its app. Each check is made once for each shape of rows and table."""

    def __init__(self, app_id: str, decided: Callable[[], int]) -> None:
        """``decided``: the last decided sequence of the app."""
        self._app_id = app_id
        self._decided = decided
        self._checked: dict[tuple[str, ...], Checked] = {}
        self._guarded: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def check(
        self,
        spark: SparkSession,
        table: Table,
        schema: StructType,
        options: Mapping[str, str],
        columns: list[str],
    ) -> Checked:
        """Raises OptionError if the append would fail after the decision."""
        shape = (*table.shape, schema.json(), repr(sorted(options.items())), *columns)
        if shape not in self._checked:
            found = delta.check_append(spark, table, schema, options, columns)
            self._checked[shape] = Checked(found, why_rows(spark, table, schema, options))
        self._tell(table, self._checked[shape].by_rows)
        return self._checked[shape]

    def guard(self, spark: SparkSession, table: Table, txn: str) -> None:
        """Raises LineageConflict if Delta would skip the append; asked once for each table."""
        if (table.table_id, txn) not in self._guarded:
            delta.refuse_a_restarted_sequence(spark, table, txn, self._app_id, self._decided)
            self._guarded.add((table.table_id, txn))

    def _tell(self, table: Table, by_rows: str) -> None:
        if (table.location, by_rows) in self._told:
            return
        self._told.add((table.location, by_rows))
        how = f"as rows, which are written twice: {by_rows}" if by_rows else "as files"
        log.info("app %r appends to table %r %s", self._app_id, table.name, how)


def why_rows(spark: SparkSession, table: Table, schema: StructType, options: Mapping[str, str]) -> str:
    """Why the data files of an append cannot be written before the decision; "" if they can."""
    if is_connect(spark):
        return "Spark Connect has no access to Delta's writer"
    if not table.exists:
        return "the table does not exist yet"
    if not table.location.startswith(DISK):
        return "the table is not on a disk that this process sees"
    if not table.protocol:
        return "the table belongs to a catalog that is not Spark's own"
    told = json.loads(table.protocol)["protocol"]
    unknown = sorted({*told.get("writerFeatures", ()), *told.get("readerFeatures", ())} - _FEATURES)
    if unknown:
        return f"the table has the feature {', '.join(unknown)}"
    others = sorted(name for name in options if name.lower() not in _OPTIONS)
    if others:
        return f"the option {', '.join(others)}"
    if str(spark.conf.get(_STATISTICS, "true")).lower() != "true":
        return f"{_STATISTICS} is off"
    known = Known.of(table.metadata)
    for column in known.schema:
        completed = _IDENTITY in column.metadata or _DEFAULT in column.metadata
        if completed or re.search(r"(?i)(?<!var)char\(", str(column.metadata.get(_CHAR, ""))):
            return f"column {column.name!r} is an identity, has a default or is of type CHAR"
    if delta.merges_schema(spark, options):
        try:
            fit(table.name, schema, known, (), merges=False)
        except OptionError:
            return "the append adds columns to the table"
    return ""
