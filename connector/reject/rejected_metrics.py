"""The broken messages that an execution of decoded rows has met, so that ``tx.reject`` need not read them.

An append of the good rows parses the broken ones too. Spark's metrics bring their places to the driver.
Not here: what is broken (``typed/decode.py``), whether Spark has executed every row (``plan.py``).
Invariant: unless every partition has reported each of its broken rows, the metric counts for nothing, and
the rows are read again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from connector.reject.dead_letters import CHECKED_COLUMNS, PLACE
from connector.reject.plan import executed_whole, partitions, task_metrics
from connector.sql import quoted
from connector.tables.table import is_connect

_PREFIX = "txmq_broken_"
OWN_COLUMNS = _BROKEN, _TASK = "txmq_broken", "txmq_task"
# Spark keeps the metrics of each task for its pages, as text. So a note is two numbers, and there are few.
_MOST = 250  # notes of a job; a batch with more is read again
_WORDS, _BITS = 8, 62  # the tasks that have reported, as bits of numbers of Spark
_CODES, _PARTITIONS = 1 << 16, 1 << 14
_ONE_QUEUE = ("first_queue", "last_queue")


@dataclass(frozen=True)
class Notes:
    """``broken``: what a metric needs of a broken row, null of a good one.
    ``reasons``: what a note may say.
    """

    broken: Column
    note: Column
    metrics: list[Column]
    reasons: tuple[str, ...]
    of: Watchable


@dataclass(frozen=True)
class Metric:
    """The metric of an execution."""

    name: str
    reasons: tuple[str, ...]
    of: Watchable


_open: WeakSet[Metric] = WeakSet()  # of frames that may be executed
_metrics: WeakKeyDictionary[DataFrame, Metric] = WeakKeyDictionary()  # of the frame with the broken rows


@dataclass(frozen=True)
class Watchable:
    """Rows that a metric can report. ``sums``: they have a body; ``words``: for so many tasks."""

    sums: bool
    words: int


def watchable(frame: DataFrame) -> Watchable | None:
    """How a metric can report the rows of ``frame``; None if it cannot."""
    types = {each.name: each.dataType.simpleString() for each in frame.schema.fields}
    placed = all(types.get(name) == kind for name, kind in PLACE.items())
    # ``max_by`` gives the rows of several maxima from Spark 4.2 on
    if not placed or frame.isStreaming or is_connect(frame) or "k" not in signature(F.max_by).parameters:
        return None
    tasks = partitions(frame) or _WORDS * _BITS
    return Watchable("body" in types, min(-(-tasks // _BITS), _WORDS))


def of_broken(column: str) -> Column:
    """A column that a broken row has kept."""
    return F.col(_BROKEN).getField(column)


def notes_of(
    broken: Column, reason: Column, reasons: Sequence[str], columns: Sequence[str], rows: Watchable
) -> Notes:
    """``reason``: of a broken row, one of ``reasons``, over the ``columns`` that it has kept
    (:func:`of_broken`); a row with another one is read again.
    """
    numbered = tuple(dict.fromkeys(reasons))
    code = F.array_position(F.array(*map(F.lit, numbered)), reason)
    # a record of Kafka may have no body, and counts as one with an empty body (``dead_letters.py``)
    checksum = F.coalesce(F.crc32(of_broken("body")), F.lit(0)) if rows.sums else F.lit(0)
    packed = F.when(
        code.between(1, _CODES - 1)
        & of_broken("partition").between(0, _PARTITIONS - 1)
        & of_broken("queue").isNotNull(),
        (checksum.cast("bigint") * _PARTITIONS + of_broken("partition")) * _CODES + code,
    )
    metrics = [
        F.count(F.col(_BROKEN)).alias("broken"),
        F.min(of_broken("queue")).alias(_ONE_QUEUE[0]),
        F.max(of_broken("queue")).alias(_ONE_QUEUE[1]),
        *(F.bit_or(_word(number)).alias(f"tasks{number}") for number in range(rows.words)),
    ]
    names = dict.fromkeys([*PLACE, *(["body"] if rows.sums else []), *columns])
    row = F.when(broken, F.struct(*(F.col(quoted(name)) for name in names))).alias(_BROKEN)
    note = F.struct(of_broken("offset").alias("offset"), packed.alias("packed"))
    return Notes(row, note, metrics, numbered, rows)


def watch(frame: DataFrame, columns: Sequence[Column], notes: Notes) -> tuple[DataFrame, Metric]:
    """``columns`` of the good rows of ``frame``, and the metric that their execution reports."""
    metric = Metric(f"{_PREFIX}{uuid.uuid4().hex}", notes.reasons, notes.of)
    every = frame.select(*columns, notes.broken, F.spark_partition_id().alias(_TASK))
    # Spark evaluates a note, and so the reason, only where the offset is not null. Within the code that it
    # compiles for each row, the reasons of a dozen fields are more than the JVM compiles of one method.
    most = F.max_by(notes.note, of_broken("offset"), _MOST).alias("notes")
    good = every.observe(metric.name, *notes.metrics, most).where(F.col(_BROKEN).isNull()).drop(*OWN_COLUMNS)
    _open.add(metric)
    return good, metric


def _word(number: int) -> Column:
    bit = F.col(_TASK) - number * _BITS
    return F.when(bit.between(0, _BITS - 1), F.expr(f"shiftleft(1L, {_TASK} - {number * _BITS})"))


def remember(rejected: DataFrame, metric: Metric | None) -> None:
    """``rejected`` are the rows that ``metric`` counts."""
    if metric is not None:
        _metrics[rejected] = metric


def to_write(rows: DataFrame) -> tuple[DataFrame, DataFrame]:
    """``rows`` with a plan of their own, which nobody else executes, and the rows of that plan for a writer,
    which would make another one of it.
    """
    if not _open or is_connect(rows):
        return rows, rows
    own: Any = rows.select("*")
    execution = own._jdf.queryExecution()
    if _PREFIX not in execution.analyzed().toString():
        return rows, rows
    session: Any = rows.sparkSession._jsparkSession
    written = session.internalCreateDataFrame(execution.toRdd(), own._jdf.schema(), False)
    return own, DataFrame(written, rows.sparkSession)


class Executions:
    """What the executions within a micro-batch say about it. ``whole``: one has executed every row."""

    def __init__(self) -> None:
        self.whole = False
        # by the name of the metric: it, the partitions
        self._metrics: dict[str, tuple[dict[str, Any], int]] = {}

    def note(self, frame: DataFrame, batch: DataFrame, *, stages: bool, rdd_id: int | None = None) -> bool:
        """``frame`` was executed: whether that was the whole batch, as :func:`executed_whole` says."""
        if not executed_whole(frame, batch, stages=stages, rdd_id=rdd_id):
            return False
        self.whole = True
        if _open:
            with suppress(Exception):  # Spark's internals: what is not known is read again
                for name, tasks, row in task_metrics(frame, _PREFIX):
                    self._metrics[name] = _python(frame, row), tasks
        return True

    def broken(self, rejected: DataFrame | Metric | None) -> pa.RecordBatch | None:
        """All rows of ``rejected``, as CHECKED_COLUMNS; None if that is not certain."""
        metric = _metrics.get(rejected) if isinstance(rejected, DataFrame) else rejected
        if metric is None or metric.name not in self._metrics:
            return None
        return broken_rows(metric, *self._metrics[metric.name])


def _python(frame: DataFrame, row: Any) -> dict[str, Any]:
    jvm: Any = frame.sparkSession._jvm
    utils = jvm.org.apache.spark.sql.api.python.PythonSQLUtils
    pickled: Any = CPickleSerializer()
    found: dict[str, Any] = pickled.loads(utils.toPyRow(row)).asDict()
    return found


def broken_rows(metric: Metric, metrics: Mapping[str, Any], tasks: int) -> pa.RecordBatch | None:
    """What a metric of a job with ``tasks`` has reported, as CHECKED_COLUMNS; None if it is not complete."""
    words = metric.of.words
    bits = sum((metrics[f"tasks{number}"] or 0) << number * _BITS for number in range(words))
    first, last = (metrics[name] for name in _ONE_QUEUE)
    packed = metrics["notes"] or ()
    if any(number is None for _, number in packed):  # the row has more than a note can say
        return None
    notes = [_note(metric, first, *note) for note in packed]
    places = {note[: len(PLACE)] for note in notes}
    complete = 0 < tasks <= words * _BITS and bits == (1 << tasks) - 1
    if not complete or first != last or not metrics["broken"] == len(notes) == len(places):
        return None
    columns = zip(*sorted(notes, key=lambda note: note[: len(PLACE)]), strict=True)
    arrays = map(pa.array, columns if notes else [[]] * len(CHECKED_COLUMNS), CHECKED_COLUMNS.types)
    return pa.RecordBatch.from_arrays(list(arrays), schema=CHECKED_COLUMNS)


def _note(metric: Metric, queue: str, offset: int, packed: int) -> tuple[str, int, int, str, int | None]:
    rest, code = divmod(packed, _CODES)
    checksum, partition = divmod(rest, _PARTITIONS)
    return queue, partition, offset, metric.reasons[code - 1], checksum if metric.of.sums else None
