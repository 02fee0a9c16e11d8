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
from connector.delta import jvm
from connector.delta.commits import remembered, require_held, retried
from connector.delta.log import version_in_checksum
from connector.delta.resolve import digest, log_at
from connector.delta.staged_files import StagedFiles
from connector.delta.table_files import TableFiles
from connector.once import Once
from connector.table import Table

_METRICS = "org.apache.spark.sql.execution.metric.SQLMetrics"


def add(
    spark: SparkSession,
    table: Table,
    files: TableFiles,
    staged: Sequence[StagedFiles],
    once: Once,
    options: Mapping[str, str],
    *,
    known: bool,
) -> bool:
    """One Delta commit of ``staged``, or none if the table has that of ``once``. False, with nothing done,
    if the table has another shape now. ``known``: this process has added to the table before.

    Raises LineageConflict as ``append`` does, NotApplied if a file is gone.
    """
    places = {have: want for each in staged for have, want in each.places.items()}
    has_it = remembered(spark, table, once)
    attempts = 0

    failpoint.here("adding.started")

    def commit() -> bool:
        nonlocal attempts
        attempts += 1
        transaction = started(spark, table)
        if has_it or _last(transaction, once.txn_app_id, quick=known and attempts == 1) >= once.sequence:
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
        _commit(spark, transaction, staged, once, options)
        failpoint.here("adding.committed")
        return True

    try:
        if not retried(commit):
            return False
    except FileNotFoundError:
        # another driver has committed and deleted them?
        if _last(started(spark, table), once.txn_app_id, quick=False) < once.sequence:
            for each in staged:
                each.require_there(
                    files, f"table {table.name!r}, batch {once.sequence} of app {once.app_id!r}"
                )
            raise
    require_held(spark, table, once)
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
    nothing = jvm.nothing(spark)
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
    once: Once,
    options: Mapping[str, str],
) -> None:
    """Commits what ``DataFrameWriter`` would: the same operation, metrics and hooks."""

    def seq(values: list[Any]) -> JavaObject:
        return jvm.call(spark, jvm.PYTHON, "toSeq", values)

    nothing = jvm.nothing(spark)
    now = int(transaction.deltaLog().clock().getTimeMillis())
    lines = [json.dumps({"txn": {"appId": once.txn_app_id, "version": once.sequence, "lastUpdated": now}})]
    lines += [line for each in staged for line in each.adds]
    merges = any(name.lower() == "mergeschema" and value.lower() == "true" for name, value in options.items())
    operation = jvm.new(
        spark,
        f"{jvm.DELTA}.DeltaOperations$Write",
        jvm.field(spark, "org.apache.spark.sql.SaveMode", "Append"),
        jvm.some(spark, seq([])),  # partitionBy
        nothing,  # predicate
        jvm.some(spark, once.metadata),
        nothing,  # isDynamicPartitionOverwrite
        nothing,  # canOverwriteSchema
        jvm.some(spark, True) if merges else nothing,
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
        metrics[name] = jvm.call(spark, _METRICS, "createMetric", spark._jsc.sc(), name)
        metrics[name].set(figure)
    transaction.registerSQLMetrics(spark._jsparkSession, jvm.call(spark, jvm.PYTHON, "toScalaMap", metrics))
    transaction.registerPostCommitHook(jvm.field(spark, f"{jvm.DELTA}.hooks.AutoCompact$", "MODULE$"))
    actions = [jvm.call(spark, f"{jvm.DELTA}.actions.Action", "fromJson", line) for line in lines]
    transaction.commit(seq(actions), operation)
