"""Rows of an append as data files that Delta's own writer has written, and not committed.

Delta writes them with the snapshot of the table and the path of a hidden directory: one job
over the rows, with the layout, the statistics and the constraints of the table. The actions that its commit
would have are staged, one for each file.

Not here: which tables take files (``append_rows.py``), the commit (``after/add_files.py``).
Invariant: the lines are those of a Delta log of the hidden directory: protocol, metadata, files. With them
the rows can be read again, whatever becomes of the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType, TimestampType

from broker_core.core import failpoint
from broker_core.core.errors import NotApplied, OptionError, cause
from broker_core.engine import FILES, ToApply
from connector.delta import jvm
from connector.delta.before.rehearsal import refused
from connector.delta.commits import put_back
from connector.delta.last_commit import LastCommits
from connector.delta.resolve import digest, log_at, look_at
from connector.delta.table_files import TableFiles
from connector.sql import quoted
from connector.tables.commit_id import CommitId
from connector.tables.table import Table
from connector.tables.target import LOST

if TYPE_CHECKING:  # a client of Spark Connect has no py4j
    from py4j.java_gateway import JavaObject

_COLUMN = "action"
_ZONE = "zone"
_UNPARTITIONED = '"partitionColumns":[]'  # as Delta writes it
_PHYSICAL = "delta.columnMapping.physicalName"
_MAPPING = "delta.columnMapping."  # the only properties of a table that matter to a reader


@dataclass(frozen=True)
class StagedFiles:
    """The files of one append. ``directory``: in the directory of the table; ``shape``: of the table, when
    they were written; ``lines``: protocol, metadata, and one for each file, as Delta's log has them.
    ``zone``: of timestamps that partition them and name none; "": there are none.
    """

    directory: str
    shape: str
    lines: tuple[str, ...]
    zone: str = ""

    @classmethod
    def of(cls, part: ToApply, rows: Iterable[pa.RecordBatch]) -> StagedFiles:
        """From a part, and the rows of its branches."""
        about = part.target[FILES]
        lines = [line for batch in rows for line in batch.column(_COLUMN).to_pylist()]
        return cls(about["directory"], about["shape"], tuple(lines), about.get(_ZONE, ""))

    @cached_property
    def adds(self) -> list[str]:
        return [line for line in self.lines if "add" in json.loads(line)]

    @property
    def metadata(self) -> dict[str, Any]:
        (found,) = [action["metaData"] for action in map(json.loads, self.lines) if "metaData" in action]
        return dict(found)

    @property
    def rows(self) -> int:
        return sum(int(json.loads(add["stats"])["numRecords"]) for add in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(int(add["size"]) for add in self.files)

    @cached_property
    def files(self) -> list[dict[str, Any]]:
        return [json.loads(line)["add"] for line in self.adds]

    @property
    def places(self) -> dict[str, str]:
        """Where each file is -> where it belongs, in the directory of the table."""
        # a path in the log is the text of a URI
        names = [unquote(add["path"]) for add in self.files]
        return {f"{self.directory}/{name}": name for name in names}

    @property
    def names_no_zone(self) -> bool:
        """Whether a timestamp that partitions the files has no zone: then it is one of the session's."""
        if not self.metadata.get("partitionColumns"):
            return False
        table = StructType.fromJson(json.loads(self.metadata["schemaString"]))
        stamps = {physical(field) for field in table if isinstance(field.dataType, TimestampType)}
        return any(
            value and not value.endswith("Z")
            for add in self.files
            for name, value in add["partitionValues"].items()
            if name in stamps
        )

    def target(self) -> dict[str, Any]:
        """What the target of the branch says about the files."""
        zone = {_ZONE: self.zone} if self.zone else {}
        return {FILES: {"directory": self.directory, "rows": self.rows, "shape": self.shape, **zone}}

    def batch(self) -> pa.RecordBatch:
        """What is staged."""
        return pa.RecordBatch.from_pydict({_COLUMN: pa.array(self.lines, pa.string())})

    def require_there(self, spark: SparkSession, table: Table, files: TableFiles, once: CommitId) -> None:
        """Raises NotApplied if a file is gone."""
        # behind a RESTORE the table may have those that were cleared
        if lost := files.copy_missing({want: have for have, want in self.places.items()}):
            raise NotApplied(
                f"{len(lost)} of {len(self.places)} data files with {self.rows} decided rows are gone "
                f"(batch {once.sequence} of app {once.app_id!r}, table {table.name!r}: "
                f"{', '.join(lost[:3])}): the table was dropped with them, or renamed, and they are in its "
                "new directory, or somebody deleted them",
                put_back(spark, table, once) + LOST,
            )

    def frame(
        self, spark: SparkSession, table: Table, location: str, schema: StructType, once: CommitId
    ) -> DataFrame:
        """The rows as a frame, for a table that has changed since. Raises NotApplied if a file is gone.
        ``location``: where the files are.
        """
        files = TableFiles.at(location)
        self.require_there(spark, table, files, once)
        files.write(f"{self.directory}/_delta_log/{0:020d}.json", "\n".join(self._readable()) + "\n")
        rows = spark.read.format("delta").load(f"{location}/{self.directory}")
        return rows.select(*(rows[quoted(column.name)] for column in schema))

    def _readable(self) -> list[str]:
        """The lines without what a table demands of its writers."""
        lines = []
        for action in map(json.loads, self.lines):
            if "metaData" in action:
                properties = action["metaData"].get("configuration", {})
                action["metaData"]["configuration"] = {
                    name: value for name, value in properties.items() if name.startswith(_MAPPING)
                }
            lines.append(json.dumps(action))
        return lines


def physical(field: StructField) -> str:
    """The name of a column in files."""
    return str(field.metadata.get(_PHYSICAL, field.name))


def write(
    rows: DataFrame,
    table: Table,
    options: Mapping[str, str],
    files: TableFiles,
    directory: str,
    commits: LastCommits,
) -> StagedFiles | None:
    """Writes ``rows`` to data files in the hidden ``directory``, durable; None if the table has changed since
    it was resolved. Raises OptionError if Delta refuses them, or the error of a task.
    """
    failpoint.here("files.resolved")
    spark = rows.sparkSession
    last = commits.of(spark, table.location)
    if last is not None:
        log, snapshot, look = last.log, last.snapshot, last.look
    else:
        log = log_at(spark, table.location)
        snapshot = log.unsafeVolatileSnapshot()
        look = look_at(snapshot)
    _, metadata, protocol = look
    if not metadata or (shape := digest(metadata, protocol)) != digest(table.metadata, table.protocol):
        return None
    try:
        files.make(directory)
    except FileNotFoundError as error:
        raise OptionError(f"table {table.name!r}: its directory is gone", "create the table again") from error
    try:
        actions = _write(spark, rows._jdf, log, snapshot, options, f"{table.location}/{directory}")
    except Exception as error:
        files.delete(directory)
        found = cause(error)
        if found is not None:
            raise found from None  # without Spark's stack trace
        if isinstance(error, AnalysisException | IllegalArgumentException):
            raise refused(table.name, error) from error
        raise
    failpoint.here("files.written")
    staged = StagedFiles(directory, shape, (protocol, metadata, *actions))
    if _UNPARTITIONED not in metadata and staged.names_no_zone:
        staged = replace(staged, zone=str(spark.conf.get("spark.sql.session.timeZone")))
    files.sync(staged.places)
    failpoint.here("files.durable")
    return staged


def _write(
    spark: SparkSession,
    rows: JavaObject,
    log: JavaObject,
    snapshot: JavaObject,
    options: Mapping[str, str],
    place: str,
) -> list[str]:
    """Delta writes to the path of a log, after the metadata of a snapshot: here they are of two tables."""
    nothing = jvm.nothing(spark)
    paths = (jvm.new(spark, jvm.PATH, f"{place}/_delta_log"), jvm.new(spark, jvm.PATH, place))
    hidden = jvm.new(
        spark, f"{jvm.DELTA}.DeltaLog", *paths, log.options(), log.allOptions(), log.clock(), nothing
    )
    chosen = nothing
    if options:
        scala = jvm.call(spark, jvm.PYTHON, "toScalaMap", dict(options))
        conf = spark._jsparkSession.sessionState().conf()
        chosen = jvm.some(spark, jvm.new(spark, f"{jvm.DELTA}.DeltaOptions", scala, conf))
    transaction = jvm.new(spark, f"{jvm.DELTA}.OptimisticTransaction", hidden, nothing, snapshot)
    actions = transaction.writeFiles(rows, chosen)
    return [str(actions.apply(number).json()) for number in range(actions.length())]
