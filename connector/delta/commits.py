"""A commit that a Delta table takes once: it carries (txnAppId, txnVersion), and its batch as userMetadata.

Not here: what is written (``before/append_rows.py``, ``after/add_files.py``, ``after/make_change.py``).
Invariant: Delta skips a write whose version is not above the stored one of that app, so a repeated one
changes nothing. The same rule could silently drop the rows of another batch. So the txnAppId contains the id
of the data directory, the commit carries the token of the batch, and after each write the log must contain
the commit of this batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.readwriter import DataFrameWriter

from broker_core.errors import LineageConflict
from connector.delta import log
from connector.tables.commit_id import CommitId
from connector.tables.table import Table, is_path
from connector.tables.target import UNAPPLIED

T = TypeVar("T")

# After a conflict with a transaction of the same (txnAppId, txnVersion), the repeated write is skipped.
CONFLICT_ATTEMPTS = 5
_CONFLICT = re.compile(
    r"DELTA_CONCURRENT|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED|DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS"
    r"|Concurrent\w*Exception|(Metadata|Protocol)ChangedException"
)
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_WRITE = "spark.databricks.delta.write"
_RETENTION = "delta.setTransactionRetentionDuration"


class Altered(Exception):
    """A write failed, and its table was altered since it was analysed."""


def retried(write: Callable[[], T]) -> T:
    """Call ``write``, and repeat it after a conflict with the commit of another writer."""
    for attempt in range(1, CONFLICT_ATTEMPTS + 1):
        try:
            return write()
        except Exception as error:
            conflict = isinstance(error, Altered) or _CONFLICT.search(f"{type(error).__name__} {error}")
            if attempt == CONFLICT_ATTEMPTS or not conflict:
                raise
    raise AssertionError("unreachable")


def settings(once: CommitId) -> dict[str, str]:
    """The settings of a session in which every write is the commit of ``once``."""
    return {
        f"{_WRITE}.txnAppId": once.txn_app_id,
        f"{_WRITE}.txnVersion": str(once.sequence),
        f"{_WRITE}.txnVersion.autoReset.enabled": "false",
        _USER_METADATA: once.metadata,
    }


def save(spark: SparkSession, writer: DataFrameWriter, table: Table, once: CommitId) -> None:
    """Write the commit of ``once`` with Spark's writer."""
    writer = writer.option("txnAppId", once.txn_app_id).option("txnVersion", str(once.sequence))
    writer = writer.option("userMetadata", once.metadata)
    if is_path(table.name):
        writer.save(table.name)
        return
    spark.conf.set(_USER_METADATA, once.metadata)  # Delta ignores the option if saveAsTable creates the table
    try:
        writer.saveAsTable(table.name)
    finally:
        spark.conf.unset(_USER_METADATA)


def was_committed(spark: SparkSession, table: Table, once: CommitId) -> int | None:
    """The version in which an existing table that expires txnVersions has the commit of this batch; None if
    it has not, and for other tables. Raises LineageConflict if that is unknown.
    """
    if _RETENTION not in table.properties:
        return None
    found = log.held(log.commits(spark, table), once.batch, once.decided_at_us)
    if found.known is None:
        raise LineageConflict(
            f"table {table.name!r} forgets the batches that it has (delta.setTransactionRetentionDuration), "
            f"and its log was cleaned after batch {once.sequence} of app {once.app_id!r} was decided, "
            "so it is unknown whether the table has the rows of this batch",
            UNAPPLIED,
        )
    return found.version


def has(spark: SparkSession, table: Table, once: CommitId) -> bool:
    """Whether an existing table has the commit of this batch, also one of another process."""
    return bool(_held(spark, table, once, fresh=True).known)


def _held(spark: SparkSession, table: Table, once: CommitId, *, fresh: bool) -> log.Held:
    found = log.held(log.commits(spark, table, fresh=fresh), once.batch, once.decided_at_us)
    if found.known is None:
        return log.Held(log.stored_at_ms(spark, table, once.txn_app_id) >= once.decided_at_us // 1000)
    return found


def require_held(spark: SparkSession, table: Table, once: CommitId) -> int | None:
    """The version that has the commit of this batch, None if its log is gone. Raises LineageConflict unless
    the table has it.
    """
    found = _held(spark, table, once, fresh=False)
    if found.known:
        return found.version
    raise LineageConflict(
        f"Delta has skipped batch {once.sequence} of app {once.app_id!r}, because table {table.name!r} holds "
        "another batch with this number: an older copy of the broker's data was restored, or two copies are "
        "in use (the broker keeps the rows)",
        UNAPPLIED,
    )
