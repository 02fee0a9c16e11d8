"""A transaction of Delta that adds files: begun, asked and committed by calls of the JVM, as few as it takes.

Not here: what is added, and when (``add_files.py``).
Invariant: what is committed is what ``DataFrameWriter`` would commit: the same operation, metrics and hooks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from connector.delta import jvm
from connector.delta.before.staged_files import StagedFiles
from connector.delta.last_commit import LastCommit
from connector.delta.log import version_in_checksum
from connector.delta.resolve import log_at
from connector.tables.commit_id import CommitId

if TYPE_CHECKING:  # a client of Spark Connect has no py4j
    from py4j.java_gateway import JavaObject
    from pyspark import SparkContext

_METRICS = "org.apache.spark.sql.execution.metric.SQLMetrics"
_FIGURES = ("numFiles", "numOutputRows", "numOutputBytes")


def begin(spark: SparkSession, location: str, last: LastCommit | None) -> JavaObject:
    """A transaction on the table as it is now; ``last``: its last commit, if that is known."""
    nothing = jvm.nothing(spark)
    if last is None:
        return log_at(spark, location).startTransaction(nothing, nothing)
    return jvm.new(spark, f"{jvm.DELTA}.OptimisticTransaction", last.log, nothing, last.snapshot)


def last_version(
    transaction: JavaObject, txn_app_id: str, last: LastCommit | None, *, quick: bool = False
) -> int:
    """The last txnVersion of an app. Delta notes it as read: a commit with another one conflicts.

    ``quick``: from the checksum of the version, if that names the app. The state of a table is a job of Spark
    over its log, and most of the first batch of a driver.
    """
    found = None
    if last is not None and last.txn[0] == txn_app_id:
        found = last.txn[1]
    elif quick:
        found = version_in_checksum(transaction.snapshot(), txn_app_id)
    if found is None:
        return int(transaction.txnVersion(txn_app_id))
    transaction.readTxn().append(txn_app_id)
    return found


class DeltaCommitter:
    """``commit``, with objects of the JVM that it keeps. Not to be used by two threads at the same time."""

    def __init__(self) -> None:
        self._session: SparkContext | None = None  # what they belong to

    def commit(
        self,
        spark: SparkSession,
        transaction: JavaObject,
        staged: Sequence[StagedFiles],
        once: CommitId,
        options: Mapping[str, str],
    ) -> int:
        """Commits ``staged`` and returns the version."""
        self._keep(spark)
        now = time.time_ns() // 1_000_000
        lines = [
            json.dumps({"txn": {"appId": once.txn_app_id, "version": once.sequence, "lastUpdated": now}})
        ]
        lines += [line for each in staged for line in each.adds]
        figures = {
            "numFiles": sum(len(each.adds) for each in staged),
            "numOutputRows": sum(each.rows for each in staged),
            "numOutputBytes": sum(each.size_bytes for each in staged),
        }
        for name, metric in self._metrics.items():
            metric.set(figures[name])
        transaction.registerSQLMetrics(spark._jsparkSession, self._figures)
        transaction.registerPostCommitHook(jvm.field(spark, f"{jvm.DELTA}.hooks.AutoCompact$", "MODULE$"))
        actions = [jvm.call(spark, f"{jvm.DELTA}.actions.Action", "fromJson", line) for line in lines]
        return int(transaction.commit(_seq(spark, actions), self._operation(spark, once, options)))

    def _keep(self, spark: SparkSession) -> None:
        if self._session is spark.sparkContext:
            return
        context: object = spark._jsc.sc()
        self._metrics = {name: jvm.call(spark, _METRICS, "createMetric", context, name) for name in _FIGURES}
        self._figures = jvm.call(spark, jvm.PYTHON, "toScalaMap", self._metrics)
        self._no_columns = jvm.some(spark, _seq(spark, []))
        self._session = spark.sparkContext

    def _operation(self, spark: SparkSession, once: CommitId, options: Mapping[str, str]) -> JavaObject:
        nothing = jvm.nothing(spark)
        merges = any(
            name.lower() == "mergeschema" and value.lower() == "true" for name, value in options.items()
        )
        return jvm.new(
            spark,
            f"{jvm.DELTA}.DeltaOperations$Write",
            jvm.field(spark, "org.apache.spark.sql.SaveMode", "Append"),
            self._no_columns,  # partitionBy
            nothing,  # predicate
            jvm.some(spark, once.metadata),
            nothing,  # isDynamicPartitionOverwrite
            nothing,  # canOverwriteSchema
            jvm.some(spark, True) if merges else nothing,
            nothing,  # replaceOn
            nothing,  # replaceUsing
        )


def _seq(spark: SparkSession, values: list[object]) -> JavaObject:
    return jvm.call(spark, jvm.PYTHON, "toSeq", values)
