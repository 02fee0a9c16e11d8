"""As much of Spark and Delta as a micro-batch touches: DataFrames of in-process partitions, tasks that are
retried, tables with txnVersion.

Not here: anything of ours. What Spark does and when is taken from what was measured on 4.2.0
(ARCHITECTURE.md).

Invariant: a table is a list of commits; one whose txnVersion is not above the stored one for its txnAppId is
skipped, silently.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from connector.delta.log import Commit
from tests.model.actors import Actor, point

Task = Callable[[], Iterator[pa.RecordBatch]]
_TYPES = {"string": StringType(), "int": IntegerType(), "bigint": LongType(), "timestamp": TimestampType()}
_task = threading.local()


class FakeTaskContext:
    """What ``TaskContext.get()`` answers, per thread."""

    def partitionId(self) -> int:
        return int(_task.partition)

    def attemptNumber(self) -> int:
        return int(_task.attempt)

    def getLocalProperty(self, key: str) -> str | None:
        found: str | None = _task.properties.get(key)
        return found


def install_task_context(monkeypatch: Any) -> None:
    monkeypatch.setattr(TaskContext, "_taskContext", FakeTaskContext())


def struct_type(schema: str | StructType) -> StructType:
    if isinstance(schema, StructType):
        return schema
    return StructType(
        [StructField(name, _TYPES[kind]) for name, kind in (column.split() for column in schema.split(","))]
    )


TAGS = "spark.job.tags"


@dataclass(frozen=True)
class Query:
    id: str
    runId: str

    def explain(self, extended: bool) -> None:
        print("~StreamingDataSourceV2ScanRelation[body#1] txmq")


@dataclass(eq=False)  # a key, as a SparkContext
class Session:
    """One query's session; ``properties`` are what Spark puts into the local properties of its tasks."""

    world: Any
    properties: dict[str, str] = field(default_factory=dict)
    views: dict[str, list[tuple[Any, ...]] | Frame] = field(default_factory=dict)
    session_id: str = ""  # of Spark Connect
    active: Sequence[Query] = ()  # the queries of the session

    @property
    def sparkContext(self) -> Session:
        return self

    @property
    def _jsc(self) -> Session:
        return self

    def sc(self) -> Session:
        return self

    def isStopped(self) -> bool:
        return False

    @property
    def streams(self) -> Session:
        return self

    @property
    def conf(self) -> Session:
        return self

    def sql(self, statement: str) -> Change:
        return Change(self, statement)

    def getLocalProperty(self, key: str) -> str | None:
        return self.properties.get(key)

    def setLocalProperty(self, key: str, value: str) -> None:
        self.properties[key] = value

    def newSession(self) -> Session:
        return Session(self.world, dict(self.properties))

    def getTags(self) -> set[str]:
        return set(filter(None, self.properties.get(TAGS, "").split(",")))

    def addTag(self, tag: str) -> None:
        self.properties[TAGS] = ",".join(sorted({*self.getTags(), tag}))

    def removeTag(self, tag: str) -> None:
        self.properties[TAGS] = ",".join(sorted(self.getTags() - {tag}))

    def addListener(self, _listener: Any) -> None:
        """The end of a query is a kill here."""

    def set(self, key: str, value: str) -> None:
        self.properties[key] = value

    def unset(self, key: str) -> None:
        self.properties.pop(key, None)

    def range(self, start: int, end: int, step: int, tasks: int) -> Frame:
        numbers = list(range(start, end, step))
        share = -(-len(numbers) // tasks)
        parts = [numbers[at : at + share] for at in range(0, len(numbers), share)]
        return Frame(
            self, [lambda part=part: iter([_numbers(part)]) for part in parts], struct_type("id bigint")
        )

    def createDataFrame(self, rows: list[Any], _schema: str) -> Rows:
        return Rows(self, [tuple(row) for row in rows])


def _numbers(values: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(values, pa.int64())})


@dataclass
class Rows:
    """A local frame, of the Delta ledger's rows."""

    sparkSession: Session
    rows: list[tuple[Any, ...]]

    def coalesce(self, _parts: int) -> Rows:
        return self

    def createOrReplaceTempView(self, name: str) -> None:
        self.sparkSession.views[name] = self.rows

    @property
    def write(self) -> Writer:
        return Writer(self.sparkSession, lambda: self.rows)


class Frame:
    """A DataFrame of one task per partition; executing it runs real code in tasks that may die, be repeated
    or come too late.
    """

    def __init__(
        self, session: Session, tasks: list[Task], schema: StructType, partitions: list[Any] | None = None
    ) -> None:
        """``partitions``: of the source, for a micro-batch."""
        self.sparkSession = session
        self.schema = schema
        self.partitions = partitions or []
        self._tasks = tasks

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def mapInArrow(
        self,
        function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        schema: str | StructType,
    ) -> Frame:
        tasks: list[Task] = [lambda task=task: iter(function(task())) for task in self._tasks]
        return Frame(self.sparkSession, tasks, struct_type(schema))

    def collect(self) -> list[dict[str, Any]]:
        return [
            row
            for batches in self.execute(lambda batches: list(batches))
            for batch in batches
            for row in batch.to_pylist()
        ]

    def execute(self, function: Callable[[Iterator[pa.RecordBatch]], Any]) -> list[Any]:
        """``function`` over each partition in a task; one result per partition, whatever was run twice."""
        return [self._run(number, task, function) for number, task in enumerate(self._tasks)]

    def _run(self, partition: int, task: Task, function: Callable[[Iterator[pa.RecordBatch]], Any]) -> Any:
        mode = point("task")
        session = self.sparkSession
        properties = {} if session.world.threads else dict(session.properties)

        def attempt(number: int) -> Any:
            _task.partition, _task.attempt, _task.properties = partition, number, properties
            return function(task())

        if mode == "repeated":  # it did all of its work, and its executor died with the answer
            attempt(0)
            return attempt(1)
        if mode == "zombie":  # it hangs for now, speculation runs another, and it wakes at any time
            self.sparkSession.world.actors.append(Actor(f"zombie task {partition}", lambda: attempt(0)))
            return attempt(1)
        return attempt(0)

    def createOrReplaceTempView(self, name: str) -> None:
        self.sparkSession.views[name] = self

    def persist(self) -> None:
        pass

    def unpersist(self) -> None:
        pass

    @property
    def write(self) -> Writer:
        return Writer(self.sparkSession, lambda: [tuple(row.values()) for row in self.collect()])


class Writer:
    """``frame.write.format("delta")``: one Delta commit."""

    def __init__(self, session: Session, rows: Callable[[], list[tuple[Any, ...]]]) -> None:
        self._session = session
        self._rows = rows
        self._options: dict[str, str] = {}

    def format(self, _name: str) -> Writer:
        return self

    mode = format

    def option(self, name: str, value: str) -> Writer:
        self._options[name] = value
        return self

    def options(self, **options: str) -> Writer:
        self._options.update(options)
        return self

    def save(self, table: str) -> None:
        rows = self._rows()
        point("delta commit")
        metadata = json.loads(self._options.get("userMetadata", "{}"))
        self._session.world.delta.append(
            table, self._options.get("txnAppId", ""), int(self._options.get("txnVersion", -1)), rows, metadata
        )


@dataclass
class DeltaCommit:
    app: str
    version: int
    rows: list[tuple[Any, ...]]
    metadata: dict[str, Any]


class Delta:
    """Every Delta table of the world, by name."""

    def __init__(self) -> None:
        self.tables: dict[str, list[DeltaCommit]] = {}

    def version(self, table: str, app: str) -> int:
        return max((commit.version for commit in self.tables.get(table, ()) if commit.app == app), default=0)

    def versions(self, table: str, prefix: str) -> dict[str, int]:
        apps = {commit.app for commit in self.tables.get(table, ()) if commit.app.startswith(prefix)}
        return {app: self.version(table, app) for app in apps}

    def append(
        self, table: str, app: str, version: int, rows: Iterable[tuple[Any, ...]], metadata: dict[str, Any]
    ) -> None:
        if app and version <= self.version(table, app):
            return
        self.tables.setdefault(table, []).append(DeltaCommit(app, version, list(rows), metadata))

    def history(self, table: str) -> Iterator[Commit]:
        """Newest first."""
        commits = self.tables.get(table, [])
        return iter(
            [Commit(version, 0, commits[version].metadata) for version in reversed(range(len(commits)))]
        )

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return [row for commit in self.tables.get(table, ()) for row in commit.rows]


class Change:
    """``MERGE INTO t AS t USING v AS s ON ...``: a commit of the rows, whatever they change. If it only inserts by
    equal columns, which are the first ones: of the rows that the table has not.
    """

    FORM = re.compile(r"MERGE INTO (?P<table>\S+) AS t USING (?P<view>\S+) AS s ON (?P<rest>.*)", re.DOTALL)
    ONLY_INSERTS = re.compile(r"\((?P<key>[^\n]*<=>[^\n]*)\)\s*WHEN NOT MATCHED THEN INSERT \*\s*")

    def __init__(self, session: Session, statement: str) -> None:
        found = self.FORM.fullmatch(statement)
        assert found is not None, statement
        self._session = session
        self._table = found["table"].removeprefix("delta.`").removesuffix("`")
        self._given = session.views[found["view"]]
        inserts = self.ONLY_INSERTS.fullmatch(found["rest"])
        self._key = inserts["key"].count("<=>") if inserts is not None else 0

    def collect(self) -> list[Any]:
        delta, conf = self._session.world.delta, self._session.properties
        if isinstance(self._given, Frame):
            rows = [tuple(row.values()) for row in self._given.collect()]
        else:
            rows = list(self._given)
        point("delta merge" if self._key else "delta commit")
        if self._key:
            held = {row[: self._key] for row in delta.rows(self._table)}
            rows = [row for row in rows if row[: self._key] not in held]
        write = "spark.databricks.delta.write"
        metadata = json.loads(conf["spark.databricks.delta.commitInfo.userMetadata"])
        app, version = conf[f"{write}.txnAppId"], int(conf[f"{write}.txnVersion"])
        delta.append(self._table, app, version, rows, metadata)
        return []


@contextmanager
def isolated(
    session: Session, settings: Mapping[str, str] | None = None, _context: object = None
) -> Iterator[Session]:
    """As ``connector.delta.isolated_session``."""
    yield Session(session.world, {**session.properties, **(settings or {})})


class ConcurrentQuery(Exception):
    """Another driver has written this batch to the checkpoint's log: multiple queries use one checkpoint."""


_query_ids = itertools.count(1)


@dataclass
class Checkpoint:
    """Spark's offset log and commit log. A batch id is written once to each, by whoever comes first."""

    query_id: str
    offsets: dict[int, str] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)

    def add_offsets(self, batch_id: int, end: dict[str, Any]) -> None:
        if batch_id in self.offsets:
            raise ConcurrentQuery(f"offsets of batch {batch_id} are logged")
        self.offsets[batch_id] = json.dumps(end)

    def add_commit(self, batch_id: int) -> None:
        if batch_id in self.commits:
            raise ConcurrentQuery(f"batch {batch_id} is in the commit log")
        self.commits.add(batch_id)

    def end(self, batch_id: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.offsets[batch_id])
        return found

    def copy(self) -> Checkpoint:
        return Checkpoint(self.query_id, dict(self.offsets), set(self.commits))
