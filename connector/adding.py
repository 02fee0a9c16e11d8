"""The Delta commit that adds staged files to their table, once (C5).

1. The table has the shape that it had when the files were written; else the caller appends their rows.
2. The files get a second name, or a copy, in the layout of the table. The hidden ones stay: VACUUM may delete
   what no commit names yet.
3. One Delta commit adds them. It carries (txnAppId, txnVersion), and conflicts with another one that does.
4. What VACUUM has deleted between 2 and 3 is copied again.

Not here: when this is done, and the end of the hidden files, which is behind step 4 (``apply.py``).
Invariant: every step may be repeated, by any number of drivers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession

from broker_core import failpoint
from connector import delta
from connector.delta_log import version_in_checksum
from connector.staged_files import StagedFiles
from connector.table import Table, digest, log_at
from connector.table_files import TableFiles


def add(
    spark: SparkSession,
    table: Table,
    files: TableFiles,
    staged: Sequence[StagedFiles],
    *,
    txn_app_id: str,
    txn_version: int,
    batch: Mapping[str, Any],
    decided_at_us: int,
    options: Mapping[str, str],
    known: bool,
) -> bool:
    """One Delta commit of ``staged``, or none if the table has that of ``batch``. False, with nothing done,
    if the table has another shape now. ``known``: this process has added to the table before.

    Raises LineageConflict as ``delta.append`` does, NotApplied if a file is gone.
    """
    batch = {**batch, "txn_app_id": txn_app_id}
    places = {have: want for each in staged for have, want in each.places.items()}
    metadata = delta.user_metadata(batch, txn_app_id)
    remembered = delta.remembered(spark, table, batch, txn_version, decided_at_us)
    attempts = 0

    failpoint.here("adding.started")

    def commit() -> bool:
        nonlocal attempts
        attempts += 1
        transaction = started(spark, table)
        if remembered or _last(transaction, txn_app_id, quick=known and attempts == 1) >= txn_version:
            return True
        # 1
        shape = digest(str(transaction.metadata().json()), str(transaction.protocol().json()))
        if any(each.shape != shape for each in staged):
            return False
        failpoint.here("adding.checked")
        # 2
        files.copy(places)
        failpoint.here("adding.copied")
        # 3
        _commit(spark, transaction, staged, (txn_app_id, txn_version), metadata, options)
        failpoint.here("adding.committed")
        return True

    try:
        if not delta.retried(commit):
            return False
    except FileNotFoundError:
        # another driver has committed and deleted them?
        if _last(started(spark, table), txn_app_id, quick=False) < txn_version:
            for each in staged:
                each.require_there(
                    files, f"table {table.name!r}, batch {txn_version} of app {batch['app_id']!r}"
                )
            raise
    delta.require_held(spark, table, txn_app_id, batch, decided_at_us)
    # 4. If the rows were written in another way, or OPTIMIZE and VACUUM have been here, these copies are of
    # no use, and the next VACUUM deletes them
    lost = set(files.missing(places.values()))
    again = {have: want for have, want in places.items() if want in lost}
    gone = set(files.missing(again)) if again else set()
    files.copy({have: want for have, want in again.items() if have not in gone})
    failpoint.here("adding.complete")
    return True


def started(spark: SparkSession, table: Table) -> JavaObject:
    """A transaction of Delta on the table as it is now."""
    jvm: Any = spark._jvm
    nothing = jvm.scala.Option.empty()
    return log_at(spark, table.location).startTransaction(nothing, nothing)


def _last(transaction: JavaObject, txn_app_id: str, *, quick: bool) -> int:
    """The last txnVersion of an app. Delta notes it as read: a commit with another one conflicts.

    ``quick``: from the checksum of the version, if it is there. The state is asked where this process does
    not know what was before.
    """
    found = version_in_checksum(transaction.snapshot(), txn_app_id) if quick else None
    if found is not None:
        transaction.readTxn().append(txn_app_id)
        return found
    return int(transaction.txnVersion(txn_app_id))


def _commit(
    spark: SparkSession,
    transaction: JavaObject,
    staged: Sequence[StagedFiles],
    version: tuple[str, int],
    metadata: str,
    options: Mapping[str, str],
) -> None:
    """Commits what ``DataFrameWriter`` would: the same operation, metrics and hooks."""
    jvm: Any = spark._jvm
    classes, option = jvm.org.apache.spark.sql.delta, jvm.scala.Option
    python, nothing = jvm.org.apache.spark.api.python.PythonUtils, jvm.scala.Option.empty()
    app_id, number = version
    now = int(transaction.deltaLog().clock().getTimeMillis())
    lines = [json.dumps({"txn": {"appId": app_id, "version": number, "lastUpdated": now}})]
    lines += [line for each in staged for line in each.adds]
    merges = any(name.lower() == "mergeschema" and value.lower() == "true" for name, value in options.items())
    operation = getattr(classes, "DeltaOperations$Write")(
        jvm.org.apache.spark.sql.SaveMode.Append,
        option.apply(python.toSeq([])),  # partitionBy
        nothing,  # predicate
        option.apply(metadata),
        nothing,  # isDynamicPartitionOverwrite
        nothing,  # canOverwriteSchema
        option.apply(True) if merges else nothing,
        nothing,  # replaceOn
        nothing,  # replaceUsing
    )
    figures = {
        "numFiles": sum(len(each.adds) for each in staged),
        "numOutputRows": sum(each.rows for each in staged),
        "numOutputBytes": sum(each.size_bytes for each in staged),
    }
    metrics = {}
    for name, figure in figures.items():
        metrics[name] = jvm.org.apache.spark.sql.execution.metric.SQLMetrics.createMetric(
            spark._jsc.sc(), name
        )
        metrics[name].set(figure)
    transaction.registerSQLMetrics(spark._jsparkSession, python.toScalaMap(metrics))
    transaction.registerPostCommitHook(getattr(getattr(classes.hooks, "AutoCompact$"), "MODULE$"))
    transaction.commit(python.toSeq([classes.actions.Action.fromJson(line) for line in lines]), operation)
