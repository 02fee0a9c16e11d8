"""That a change is made to the table that it was decided for, and not to another one with its name or place.

1. The snapshot that Delta has analysed a MERGE on, or the newest one before an overwrite, is of that table.
2. A table that is replaced while the change runs is a conflict for Delta, because its metadata changes.
3. Between 1 and 2 are milliseconds in which Delta notices nothing. So the table of the commit is looked at
   afterwards, and an error says how to undo the change.

Not here: a table that was replaced before (``batch/apply.py``). Not on Spark Connect, where a client does not
learn which table a statement was analysed on.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import OptionError
from connector.delta import jvm, log
from connector.delta.resolve import log_at, look_at, snapshot_at
from connector.delta.transient import TableAltered
from connector.tables.commit_id import CommitId
from connector.tables.table import Table
from connector.tables.target import UNAPPLIED, replaced


def merge(session: SparkSession, text: str, table: Table, once: CommitId) -> None:
    """Executes a MERGE into ``table`` in the active session. Raises OptionError if that was replaced."""
    if jvm.only_sql(session):
        session.sql(text).collect()
        return
    execution = jvm.execution(session, text)
    analysed = execution.analyzed().targetFileIndex().metadata()
    _require(table, str(analysed.id()), once)
    failpoint.here("changing.checked")
    try:
        execution.commandExecuted()
    except Exception as error:
        # With row tracking switched on since then, Delta looks for columns that its analysis does not have.
        if not analysed.equals(snapshot_at(session, table.location).metadata()):
            raise TableAltered(str(error)) from error
        raise


def require(session: SparkSession, table: Table, once: CommitId) -> None:
    """Raises OptionError if ``table`` is another one now."""
    if jvm.only_sql(session):
        return
    found, _, _ = look_at(snapshot_at(session, table.location))
    _require(table, found, once)
    failpoint.here("changing.checked")


def require_done_on(spark: SparkSession, table: Table, once: CommitId) -> None:
    """Raises OptionError if the commit of ``once`` is one of another table than ``table``."""
    if jvm.only_sql(spark):
        return
    delta_log = log_at(spark, table.location)
    if str(delta_log.unsafeVolatileSnapshot().metadata().id()) == table.table_id:
        return
    newest_first = log.commits(spark, table, fresh=False)
    commit = next((each for each in newest_first if log.is_of(each.metadata, once.batch)), None)
    if commit is None:
        return  # too old to be in the log
    nothing = jvm.nothing(spark)
    found = delta_log.getSnapshotAt(commit.version, nothing, nothing, False).metadata().id()
    if str(found) == table.table_id:
        return  # it was replaced afterwards
    raise OptionError(
        f"table {table.name!r} was replaced by another one (its id was {table.table_id}) while batch "
        f"{once.sequence} of app {once.app_id!r} changed it, and the new one has the change as version "
        f"{commit.version}",
        f"while it is newest, undo it: RESTORE TABLE .. TO VERSION AS OF {commit.version - 1}; {UNAPPLIED}",
    )


def _require(table: Table, found: str, once: CommitId) -> None:
    if found != table.table_id:
        what = f"change of batch {once.sequence}, app {once.app_id!r}"
        raise replaced(table.name, what, table.table_id, exists=bool(found))
