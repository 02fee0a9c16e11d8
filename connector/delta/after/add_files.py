"""The Delta commit that adds staged files to their table, once (C5).

1. The table has the shape that it had when the files were written; else the caller appends their rows.
2. The files get a second name, or a copy, in the layout of the table. The hidden ones stay: VACUUM may delete
   what no commit names yet.
3. One Delta commit adds them. It carries (txnAppId, txnVersion), and conflicts with another one that does.
4. What VACUUM has deleted between 2 and 3 is copied again.

Not here: when this is done, and the end of the hidden files, which is behind step 4 (``batch/apply.py``).
Invariant: every step may be repeated, by any number of drivers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import SparkSession

from broker_core.core import failpoint
from connector.delta import log
from connector.delta.after.transaction import DeltaCommitter, begin, last_version
from connector.delta.before.staged_files import StagedFiles
from connector.delta.commits import require_commit, retry, was_committed
from connector.delta.last_commit import LastCommit, LastCommits, commit_file
from connector.delta.resolve import digest
from connector.delta.table_files import TableFiles
from connector.tables.commit_id import CommitId
from connector.tables.table import Table

if TYPE_CHECKING:  # a client of Spark Connect has no py4j
    from py4j.java_gateway import JavaObject


class AddResult(NamedTuple):
    version: int | None  # None: not known


class Adding:
    """What a process adds for its app. ``last``: the last commits of its tables."""

    def __init__(self, last: LastCommits, limit_s: float) -> None:
        self._last = last
        self._limit_s = limit_s
        self._free: list[DeltaCommitter] = []  # those that no thread uses now

    def add(
        self,
        spark: SparkSession,
        table: Table,
        files: TableFiles,
        staged: Sequence[StagedFiles],
        once: CommitId,
        options: Mapping[str, str],
    ) -> AddResult | None:
        """One Delta commit of ``staged``, or none if the table has that of ``once``. None, with nothing done,
        if the table has another shape now.

        Raises CheckpointMismatch as ``append`` does, NotApplied if a file is gone.
        """
        places = {have: want for each in staged for have, want in each.places.items()}
        has_it = was_committed(spark, table, once) is not None
        failpoint.here("adding.started")
        first, version = True, -1
        transaction: JavaObject | None = None

        def commit() -> bool:
            nonlocal first, transaction, version
            last = self._last.of(spark, table.location) if first else None
            quick, first = first, False
            transaction = begin(spark, table.location, last)
            if has_it or last_version(transaction, once.txn_app_id, last, quick=quick) >= once.sequence:
                return True
            # 1
            shape = last.shape if last is not None else _shape(transaction)
            if any(each.shape != shape for each in staged):
                return False
            failpoint.here("adding.checked")
            # 2
            files.copy(places)
            failpoint.here("adding.copied")
            # 3
            with self._committer() as committer:
                version = committer.commit(spark, transaction, staged, once, options)
            failpoint.here("adding.committed")
            return True

        try:
            if not retry(commit, self._limit_s):
                return None
        except FileNotFoundError:
            # another driver has committed and deleted them?
            if last_version(begin(spark, table.location, None), once.txn_app_id, None) < once.sequence:
                for each in staged:
                    each.require_there(spark, table, files, once)
                raise
        assert transaction is not None
        found: int | None = version
        if version < 0 or not self._read_back(spark, table, files, staged, once, transaction, version):
            found = require_commit(spark, table, once)
        # 4. of no use, and deleted by the next VACUUM, if the rows were written in another way
        files.copy_missing(places)
        failpoint.here("adding.complete")
        return AddResult(found)

    @contextlib.contextmanager
    def _committer(self) -> Iterator[DeltaCommitter]:
        try:
            committer = self._free.pop()
        except IndexError:
            committer = DeltaCommitter()
        yield committer
        self._free.append(committer)

    def _read_back(
        self,
        spark: SparkSession,
        table: Table,
        files: TableFiles,
        staged: Sequence[StagedFiles],
        once: CommitId,
        transaction: JavaObject,
        version: int,
    ) -> bool:
        """Whether the file of ``version`` is that of ``once``; then what the table is like now is noted."""
        try:
            text, stamp = files.read(commit_file(version))
        except OSError:  # cleaned, or stored elsewhere by a catalog that coordinates commits
            return False
        lines = text.split("\n")
        commit_info = next((line for line in lines if line.startswith('{"commitInfo"')), "{}")
        if not log.is_of(log.user_metadata(json.loads(commit_info).get("commitInfo", {})), once.batch):
            return False
        shape = staged[0].shape
        if digest(table.metadata, table.protocol) == shape and not any(
            line.startswith(('{"metaData"', '{"protocol"')) for line in lines
        ):
            delta = transaction.deltaLog()
            snapshot = delta.unsafeVolatileSnapshot()
            if int(snapshot.version()) == version:
                look = table.table_id, table.metadata, table.protocol
                txn = once.txn_app_id, once.sequence
                self._last.note(
                    table.location,
                    LastCommit(version, stamp, look, shape, txn, delta, snapshot, spark.sparkContext),
                )
        return True


def _shape(transaction: JavaObject) -> str:
    return digest(str(transaction.metadata().json()), str(transaction.protocol().json()))
