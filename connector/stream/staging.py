"""The tasks of a micro-batch on the executors: rows into branches, and rows of branches back.

Not here: the decision, and which branches belong to it (batch/foreach_batch.py).

Invariant: there is one branch per partition, also for an empty one: that of the attempt whose result Spark
kept. A branch is durable before its task returns it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from broker_core.core.errors import OptionError, cause, one_line
from broker_core.engine import BranchHeader, BranchKind, StagedBranch
from broker_core.message import spans
from connector.arrow_type import arrow_type
from connector.options import AddressOptions
from connector.reject.dead_letters import Rejection
from connector.sql import has, plain
from connector.stream.schema import to_messages
from connector.tables.table import is_connect

_TYPES: dict[str, T.DataType] = {"str": T.StringType(), "int": T.LongType()}
# not as text, which the JVM would have to parse for each staging
_STAGED_COLUMNS = T.StructType(
    [T.StructField(each.name, _TYPES[str(each.type)]) for each in fields(StagedBranch)]
)
_NOTHING = T.StructType().add("nothing", T.IntegerType())
_STAGED_SCHEMA = pa.schema(arrow_type(_STAGED_COLUMNS))
ROWS_PER_READ_TASK = 200_000


def staging_frame(
    rows: DataFrame, of: BranchHeader, address: AddressOptions, rejection: Rejection | None = None
) -> DataFrame:
    """A frame that stages ``rows``, one row per branch; ``of``: the header of each, but for its task.

    ``rejection``: the rows are places of messages, and what is staged are their dead letters.
    """
    kind, target = of.kind, of.target
    if kind != "publish":
        _check_types(rows.schema, _of(kind, target))
    frame, names = positional(rows)
    parent = spans.current() if kind == "publish" and rejection is None else ""

    def stage_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from connector.stream import staging

        context = TaskContext.get()
        if context is None:
            raise AssertionError("stage_task runs outside a Spark task")
        number, attempt = context.partitionId(), context.attemptNumber()
        header = replace(of, branch=uuid.uuid4().hex, partition=number, attempt=attempt)
        engine = address.engine()
        rows = staging.with_names(batches, names)
        staged = (
            rejection.messages(engine, rows) if rejection else staging.prepared(kind, target, rows, parent)
        )
        yield staging.described(engine.stage(header, staged))

    return frame.mapInArrow(stage_task, _STAGED_COLUMNS)


def positional(rows: DataFrame) -> tuple[DataFrame, list[str]]:
    """The rows for PySpark's ``mapInArrow``, which reads a name as a path of fields, and their names;
    none if they are kept.
    """
    names = rows.columns
    if plain(names):
        return rows, []
    return rows.toDF(*(f"c{number}" for number in range(len(names)))), names


def with_names(batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The batches of :func:`positional` rows, with their names."""
    return (batch.rename_columns(list(names)) for batch in batches) if names else batches


def staged(frame: DataFrame) -> list[StagedBranch]:
    """Execute a staging frame; the branches of the attempts that Spark kept. Raises a task's error."""
    try:
        rows = frame.collect()
    except Exception as error:
        found = cause(error)
        if found is None:
            raise
        raise found from None  # without Spark's stack trace
    return [StagedBranch(*(row[name] for name in _STAGED_SCHEMA.names)) for row in rows]


def described(branch: StagedBranch) -> pa.RecordBatch:
    row = {name: getattr(branch, name) for name in _STAGED_SCHEMA.names}
    return pa.RecordBatch.from_pylist([row], _STAGED_SCHEMA)


def prepared(
    kind: BranchKind, target: Mapping[str, object], batches: Iterable[pa.RecordBatch], parent: str = ""
) -> Iterator[pa.RecordBatch]:
    """The batches for the engine: messages in the message schema, table rows without NOT NULL.

    ``parent``: the trace context of messages that have none. The rows of several frames are read as one
    stream, and one of them may have nulls. Raises OptionError for a text that is not UTF-8: Spark may have
    one, Arrow may not.
    """
    if kind == "publish":
        yield from (to_messages(batch, parent) for batch in batches)
        return
    of = _of(kind, target)
    for batch in batches:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise OptionError(
                    f"{of}: column {name!r} has a value that cannot be staged ({one_line(error)[:200]})",
                    "where a text is not UTF-8, make it binary, or valid with make_valid_utf8",
                ) from None
        yield batch.cast(pa.schema(map(_nullable, batch.schema)))


def _nullable(field: pa.Field) -> pa.Field:
    """The field with nulls allowed at every level; the keys of a map have none."""
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_nullable(each) for each in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(_nullable(kind.key_field).with_nullable(False), _nullable(kind.item_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_nullable(kind.value_field))
    return field.with_type(kind).with_nullable(True)


def _of(kind: BranchKind, target: Mapping[str, object]) -> str:
    """What the rows are for, for an error."""
    return f"table {target['table']!r}" if "table" in target else f"{kind} {target['name']!r}"


def _check_types(schema: T.StructType, of: str) -> None:
    """Raises OptionError for a type that Spark has and its Arrow rows have not."""
    for column in schema:
        if has(column.dataType, T.YearMonthIntervalType, T.CalendarIntervalType):
            raise OptionError(
                f"{of}: column {column.name!r} has type {column.dataType.simpleString()}, "
                "which Spark cannot give to Python",
                "cast it, for example to a number of months",
            )


def execute(frame: DataFrame) -> None:
    """Execute every partition without effect: state stores are written, and the range is recorded as read."""

    def drained(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        yield from ()

    positional(frame)[0].mapInArrow(drained, _NOTHING).collect()


def rows_of(
    spark: SparkSession, branches: Sequence[str], rows: int, schema: T.StructType, address: AddressOptions
) -> DataFrame:
    """The rows of decided branches as a frame of ``schema``; few rows make one task and one file."""
    names = list(branches)
    tasks = max(1, min(len(names), -(-rows // ROWS_PER_READ_TASK)))

    def read_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chosen = [names[index] for batch in batches for index in batch.column(0).to_pylist()]
        if chosen:
            yield from address.engine().read_branches(chosen)

    return spark.range(0, len(names), 1, tasks).mapInArrow(read_task, schema)


def no_rows(spark: SparkSession, schema: T.StructType) -> DataFrame:
    """A frame that Spark plans as empty: writing it starts no Python process."""
    if is_connect(spark):
        return spark.createDataFrame([], schema)
    jvm: Any = spark._jvm
    session = spark._jsparkSession
    return DataFrame(
        session.createDataFrame(jvm.java.util.ArrayList(), session.parseDataType(schema.json())), spark
    )
