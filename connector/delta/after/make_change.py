"""Merges, deletes and overwrites of decided batches, each once (C5).

Each is one Delta commit with (txnAppId, txnVersion). Delta skips a change that the table has, and lets only
one of two drivers commit it. A merge that changes nothing is a commit too, so it is known as done.

Not here: their order (``batch/apply.py``), the checks before the decision (``before/check_change.py``), and
whether the table is that one (``same_table.py``).
Invariant: the transaction is in settings of a session that nobody else has, or in options of the write.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping

from pyspark.sql import SparkSession

from broker_core.core import failpoint
from connector.delta.after import same_table
from connector.delta.before.append_rows import widened
from connector.delta.commits import require_commit, retry, save, settings, was_committed
from connector.delta.isolated_session import isolated_session
from connector.sql import plain
from connector.tables.change import Change, Overwrite
from connector.tables.commit_id import CommitId
from connector.tables.table import Table, in_sql
from connector.tables.table_format import CONFLICT_TIMEOUT_S, Rows

_REPARTITION = "spark.databricks.delta.merge.repartitionBeforeWrite.enabled"


def change(
    spark: SparkSession,
    table: Table,
    change: Change,
    rows: Rows,
    once: CommitId,
    context: Mapping[str, object] | None = None,
    limit_s: float = CONFLICT_TIMEOUT_S,
) -> int | None:
    """One Delta commit of the change, or none if the table has that of ``once``. Returns its version, if that
    is known.

    ``rows`` makes the given rows in a session; ``context``: of the text, as it was decided. Raises
    CheckpointMismatch as ``append`` does, OptionError if the table is replaced meanwhile.
    """

    def write() -> None:
        if isinstance(change, Overwrite):
            with isolated_session(spark, None, context) as session:
                source = widened(rows(session), table)
                writer = source.write.format("delta").mode("overwrite").options(**change.options)
                same_table.require(session, table, once)
                save(writer.option("replaceWhere", change.where), table, once)
            return
        view = f"txmq_{uuid.uuid4().hex}"
        # where Delta repartitions the rows of a merge, it reads a name as a path of fields (``a.b``)
        columns = json.loads(table.metadata)["metaData"].get("partitionColumns", ()) if table.metadata else ()
        partitions = {} if plain(columns) else {_REPARTITION: "false"}
        with isolated_session(spark, {**settings(once), **partitions}, context) as session:
            rows(session).createOrReplaceTempView(view)
            same_table.merge(session, change.sql(in_sql(table.name), view), table, once)

    if (version := was_committed(spark, table, once)) is not None:
        return version
    failpoint.here("changing.started")
    retry(write, limit_s)
    failpoint.here("changing.committed")
    version = require_commit(spark, table, once)
    same_table.require_done_on(spark, table, once)
    return version
