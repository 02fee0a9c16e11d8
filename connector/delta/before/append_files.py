"""Which appends take the form of files: Delta writes their data files before the decision, invisible.

The other form is rows: they are staged in the engine, and written after the decision. Any table takes rows.

Not here: the files (``staged_files.py``), adding them (``after/add_files.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from connector.delta import jvm
from connector.delta.before.append_rows import merges_schema
from connector.delta.before.fit import Known, fit
from connector.delta.before.rehearsal import evolved
from connector.delta.table_files import DISK
from connector.tables.table import Table
from connector.tables.table_format import Writing

# Options and table features that mean the same to a commit of files.
_OPTIONS = {"mergeschema", "maxrecordsperfile", "compression", "optimizewrite"}
_FEATURES = {
    "allowColumnDefaults", "appendOnly", "changeDataFeed", "checkConstraints", "checkpointProtection",
    "clustering", "columnMapping", "deletionVectors", "domainMetadata", "generatedColumns",
    "identityColumns", "inCommitTimestamp", "invariants", "rowTracking", "timestampNtz", "typeWidening",
    "v2Checkpoint", "vacuumProtocolCheck",
}  # fmt: skip
# Columns whose values the commit, or Spark's analysis of a write by name, completes.
_IDENTITY = "delta.identity.start"
_DEFAULT = "CURRENT_DEFAULT"
_CHAR = "__CHAR_VARCHAR_TYPE_STRING"
_EVALUATED = ("delta.generationExpression", "delta.constraints.", "delta.invariants")
_STATISTICS = "spark.databricks.delta.stats.collect"


def evaluates(table: Table) -> bool:
    """Whether a write to an existing table evaluates SQL of that."""
    return any(name in table.metadata for name in _EVALUATED)


def why_rows(spark: SparkSession, table: Table, schema: StructType, options: Mapping[str, str]) -> str:
    """Why the data files of an append cannot be written before the decision; "" if they can."""
    if jvm.only_sql(spark):
        return "this session has no access to Delta's writer"
    if not table.exists:
        return "the table does not exist yet"
    if not table.location.startswith(DISK):
        return "the table is not on a disk that this process sees"
    if not table.protocol:
        return "the table belongs to a catalog that is not Spark's own"
    protocol = json.loads(table.protocol)["protocol"]
    unknown = sorted({*protocol.get("writerFeatures", ()), *protocol.get("readerFeatures", ())} - _FEATURES)
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
    if merges_schema(spark, options):
        try:
            fit(table.name, schema, known, (), merges=False)
        except OptionError:
            return "the append adds columns to the table"
        wide = evolved(spark, table, schema, Writing(options)) if known.widens else None
        if known.widened(wide) != known:
            return "the append widens columns of the table"
    return ""
