"""A commit that a Delta table takes once: it carries (txnAppId, txnVersion), and its batch as userMetadata.

Not here: what is written (``before/append_rows.py``, ``after/add_files.py``, ``after/make_change.py``).
Invariant: Delta skips a write whose version is not above the stored one of that app, so a repeated one
changes nothing. The same rule could silently drop the rows of another batch. So the txnAppId contains the id
of the data directory, the commit carries the token of the batch, and after each write the log must contain
the commit of this batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.readwriter import DataFrameWriter

from broker_core.core.backoff import Backoff, Time
from broker_core.core.errors import CheckpointMismatch
from connector.delta import log, transient
from connector.tables.commit_id import CommitId
from connector.tables.table import Table, in_sql, is_path
from connector.tables.target import UNAPPLIED

T = TypeVar("T")

_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_WRITE = "spark.databricks.delta.write"
_RETENTION = "delta.setTransactionRetentionDuration"


def retry(write: Callable[[], T], limit_s: float, time: Time | None = None) -> T:
    """Call ``write``, and repeat it after a conflict with the commit of another writer, until ``limit_s``
    after the first one. After a conflict with the same (txnAppId, txnVersion), Delta skips it.
    """
    backoff = Backoff(limit_s, time or Time(), _PAUSES_S, spread=0.5)
    while True:
        try:
            return write()
        except Exception as error:
            if transient.why(error) != transient.CONFLICT or not backoff.failed():
                raise


def settings(once: CommitId) -> dict[str, str]:
    """The settings of a session in which every write is the commit of ``once``."""
    return {
        f"{_WRITE}.txnAppId": once.txn_app_id,
        f"{_WRITE}.txnVersion": str(once.sequence),
        f"{_WRITE}.txnVersion.autoReset.enabled": "false",
        _USER_METADATA: once.metadata,
    }


def creation(table: Table, once: CommitId) -> dict[str, str]:
    """The settings of a session that makes the table: where that has a name, Delta ignores the option."""
    return {} if table.exists or is_path(table.name) else {_USER_METADATA: once.metadata}


def save(writer: DataFrameWriter, table: Table, once: CommitId) -> None:
    """Write the commit of ``once`` with Spark's writer."""
    writer = writer.option("txnAppId", once.txn_app_id).option("txnVersion", str(once.sequence))
    writer = writer.option("userMetadata", once.metadata)
    (writer.save if is_path(table.name) else writer.saveAsTable)(table.name)


def was_committed(spark: SparkSession, table: Table, once: CommitId) -> int | None:
    """The version in which an existing table that expires txnVersions has the commit of this batch; None if
    it has not, and for other tables. Raises CheckpointMismatch if that is unknown.
    """
    if _RETENTION not in table.properties:
        return None
    found = log.find_commit(log.commits(spark, table), once.batch, once.decided_at_us)
    if found.exists is None:
        raise CheckpointMismatch(
            f"table {table.name!r} forgets the batches that it has (delta.setTransactionRetentionDuration), "
            f"and its log was cleaned after batch {once.sequence} of app {once.app_id!r} was decided, "
            "so it is unknown whether the table has the rows of this batch",
            UNAPPLIED,
        )
    return found.version if found.exists else None


def has(spark: SparkSession, table: Table, once: CommitId) -> bool:
    """Whether a table has the commit of this batch, even from another process."""
    return table.exists and bool(_status(spark, table, once, fresh=True).exists)


class Undone(CheckpointMismatch):
    """A RESTORE has taken a commit out of its table, which keeps its number. ``next``: the id of another."""

    def __init__(self, table: Table, once: CommitId, restored: int) -> None:
        super().__init__(f"RESTORE has taken batch {once.sequence} out of table {table.name!r}", UNAPPLIED)
        self.next = once.behind(restored)


def once_more(once: CommitId, commit: Callable[[CommitId], T]) -> T:
    """Returns what ``commit`` does; again behind a RESTORE that has taken it out."""
    try:
        return commit(once)
    except Undone as error:
        undone = error
    return commit(undone.next)  # not within "except": Spark's text of an error begins with that


def put_back(spark: SparkSession, table: Table, once: CommitId) -> str:
    """What to do if a RESTORE has taken the commit of this batch out of its table; "" if none has."""
    found = log.find_commit(log.commits(spark, table), once.behind(0).batch, once.decided_at_us)
    if not found.restored or found.version is None:
        return ""
    return (
        f"version {found.version} of table {table.name!r} has the rows, and RESTORE has taken it out: before "
        f"others write to it, RESTORE TABLE {in_sql(table.name)} TO VERSION AS OF {found.version}, and start "
        "the query again; otherwise "
    )


def _status(spark: SparkSession, table: Table, once: CommitId, *, fresh: bool) -> log.CommitStatus:
    found = log.find_commit(log.commits(spark, table, fresh=fresh), once.batch, once.decided_at_us)
    if found.exists is None and not found.restored:
        return log.CommitStatus(log.stored_at_ms(spark, table, once.txn_app_id) >= once.decided_at_us // 1000)
    return found


def require_commit(spark: SparkSession, table: Table, once: CommitId) -> int | None:
    """The version that has the commit of this batch, None if its log is gone. Raises CheckpointMismatch
    unless the table has it.
    """
    if (version := log.made_last(spark, table, once.batch)) is not None:
        return version
    found = _status(spark, table, once, fresh=False)
    if found.exists:
        return found.version
    if found.exists is False and found.restored:
        raise Undone(table, once, found.restored)
    raise CheckpointMismatch(
        f"Delta has skipped batch {once.sequence} of app {once.app_id!r}, because table {table.name!r} holds "
        "another batch with this number: an older copy of the broker's data was restored, two copies are in "
        "use, or RESTORE has put the table back to a time (the broker keeps the rows)",
        UNAPPLIED,
    )
