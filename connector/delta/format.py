"""Delta as a table format: the methods of the port, each one call of a module beside this one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core.engine import FILES, ToApply
from connector.delta import commits, isolated_session, jvm, log, resolve, transient
from connector.delta.after import make_change
from connector.delta.after.add_files import Adding
from connector.delta.before import append_rows, staged_files
from connector.delta.before import check_change as changes
from connector.delta.before.staged_files import StagedFiles
from connector.delta.exported_files import DeltaExportedFiles
from connector.delta.last_commit import LastCommits
from connector.delta.table_files import TableFiles, hidden_directory, sweep
from connector.tables.change import Change
from connector.tables.commit_id import CommitId
from connector.tables.table import Table, in_sql
from connector.tables.table_format import (
    CONFLICT_TIMEOUT_S,
    PLAIN,
    Attempt,
    CheckResult,
    ExportedFiles,
    HiddenFiles,
    Rows,
    Writing,
)


class Delta:
    """As ``TableFormat`` says. One that was pickled knows nothing of this process. ``conflict_timeout_s``:
    how long a commit is repeated that conflicts with those of other writers.
    """

    def __init__(self, conflict_timeout_s: float = CONFLICT_TIMEOUT_S) -> None:
        self._limit_s = conflict_timeout_s
        self._commits = LastCommits()
        self._adding = Adding(self._commits, conflict_timeout_s)
        self._staged: dict[str, StagedFiles] = {}  # by their directories, until these are dropped

    def __reduce__(self) -> tuple[type[Delta], tuple[float]]:
        return Delta, (self._limit_s,)

    def resolve(self, spark: SparkSession, spelling: str) -> Table:
        return resolve.resolve(spark, spelling, self._commits)

    def read(self, spark: SparkSession, table: Table) -> DataFrame:
        return spark.table(in_sql(table.name))

    writing = staticmethod(append_rows.writing)
    disturbances = staticmethod(log.disturbances)
    context = staticmethod(isolated_session.context_of)
    sequences = staticmethod(log.stored_versions)
    commits_of = staticmethod(log.commits_of)
    later = staticmethod(log.later)
    lacks = staticmethod(log.lacks)

    def only_latest(self, spark: SparkSession) -> bool:
        return jvm.only_sql(spark)

    # -- before the decision ---------------------------------------------------------------------------------
    def check_append(
        self, spark: SparkSession, table: Table, schema: StructType, writing: Writing
    ) -> CheckResult:
        why = append_rows.why_rows(spark, table, schema, writing.options)
        found = append_rows.check_append(
            spark, table, schema, writing, rehearses=bool(why or writing.options)
        )
        evaluates = bool(why) or append_rows.evaluates(table)
        return CheckResult(lambda rows: append_rows.fit_rows(rows, found), why, evaluates)

    settled = staticmethod(changes.settled)
    check_change = staticmethod(changes.check)

    def stage(
        self, rows: DataFrame, table: Table, options: Mapping[str, str], attempt: Attempt, number: int
    ) -> HiddenFiles | None:
        place = f"{hidden_directory(attempt)}/{number}"
        files = TableFiles.at(table.location)
        staged = staged_files.write(rows, table, options, files, place, self._commits)
        if staged is not None and not staged.rows:
            files.delete(place)
        elif staged is not None:
            self._staged[place] = staged
        return staged

    def lost(self, location: str, attempt: Attempt) -> list[str]:
        files = TableFiles.at(location)
        return [path for place in self._places(attempt) for path in files.missing(self._staged[place].places)]

    def _places(self, attempt: Attempt) -> list[str]:
        ours = f"{hidden_directory(attempt)}/"
        return [place for place in tuple(self._staged) if place.startswith(ours)]

    def drop(self, location: str, attempt: Attempt) -> None:
        for place in self._places(attempt):
            self._staged.pop(place, None)  # another thread drops what is of its table
        TableFiles.at(location).delete(hidden_directory(attempt))

    sweep = staticmethod(sweep)

    # -- after it --------------------------------------------------------------------------------------------
    decided = staticmethod(isolated_session.decided)

    has = staticmethod(commits.has)
    transient = staticmethod(transient.why)

    def append(
        self, spark: SparkSession, table: Table, rows: Rows, once: CommitId, writing: Writing = PLAIN
    ) -> int | None:
        version = commits.once_more(
            once, lambda id: append_rows.append(spark, table, rows, id, writing, self._limit_s)
        )
        return self._commits.committed(table, version)

    def add(
        self,
        spark: SparkSession,
        table: Table,
        parts: Sequence[tuple[ToApply, Iterable[pa.RecordBatch]]],
        rows: Rows | None,
        once: CommitId,
        options: Mapping[str, str],
    ) -> int | None:
        staged = [
            self._staged.get(part.target[FILES]["directory"]) or StagedFiles.of(part, batches)
            for part, batches in parts
        ]
        target = parts[0][0].target
        place = target["location"]
        files = TableFiles.at(place)
        if table.location == place and rows is None:
            added = commits.once_more(
                once, lambda id: self._adding.add(spark, table, files, staged, id, options)
            )
            if added is not None:
                return added.version
        # the table has changed or moved since: Delta writes the rows again
        schema = StructType.fromJson(json.loads(target["schema"]))

        def all_rows(session: SparkSession) -> DataFrame:
            frames = [each.frame(session, table, place, schema, once) for each in staged]
            return reduce(DataFrame.unionByName, [*frames, *([rows(session)] if rows is not None else [])])

        return self.append(spark, table, all_rows, once, Writing(options))

    def change(
        self,
        spark: SparkSession,
        table: Table,
        change: Change,
        rows: Rows,
        once: CommitId,
        context: Mapping[str, object] | None = None,
    ) -> int | None:
        version = commits.once_more(
            once, lambda id: make_change.change(spark, table, change, rows, id, context, self._limit_s)
        )
        return self._commits.committed(table, version)

    # -- without Spark ---------------------------------------------------------------------------------------
    def exported_files(self, part: ToApply, batches: Iterable[pa.RecordBatch]) -> ExportedFiles:
        schema = StructType.fromJson(json.loads(part.target["schema"]))
        return DeltaExportedFiles(StagedFiles.of(part, batches), part.target["location"], schema)
