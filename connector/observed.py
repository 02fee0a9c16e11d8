"""The broken messages that an execution of decoded rows has met, so that ``tx.reject`` need not read them.

An append of the good rows parses the broken ones too. Spark's metrics bring their places to the driver.
Not here: what is broken (``decoded.py``), whether Spark has executed every row (``plan.py``).
Invariant: unless every partition has told, and every broken row of it, nothing is known, and the rows are
read again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from connector.dead_letters import CHECKED_COLUMNS, PLACE
from connector.plan import executed_whole, metered
from connector.table import is_connect

_PREFIX = "txmq_broken_"
_BROKEN, _TASK = "txmq_broken", "txmq_task"
# Spark keeps the metrics of each task for its pages, as text. So a note is two numbers, and there are few.
_MOST = 250  # notes of a job; a batch with more is read again
_WORDS, _BITS = 8, 62  # the tasks that have told, as bits of numbers of Spark
_CODES, _PARTITIONS = 1 << 16, 1 << 14
_ONE_QUEUE = ("first_queue", "last_queue")


@dataclass(frozen=True)
class Metric:
    """``reasons``: what a note has numbers for. ``sums``: whether it has the checksum of the body."""

    name: str
    reasons: tuple[str, ...]
    sums: bool


_metrics: WeakKeyDictionary[DataFrame, Metric] = WeakKeyDictionary()  # of the frame with the broken rows


def watched(
    frame: DataFrame, columns: StructType, broken: Column, reason: Column, reasons: Sequence[str]
) -> tuple[DataFrame, Column, Metric | None]:
    """``frame`` whose execution tells about its broken rows. Returns the frame, the condition of a good row,
    and the metric, None if there can be none. ``columns``: those of the messages; ``reasons``: those that a
    reason may be; a row with another one is read again.
    """
    types = {each.name: each.dataType.simpleString() for each in columns.fields}
    placed = all(types.get(name) == kind for name, kind in PLACE.items())
    if not placed or frame.isStreaming or is_connect(frame):
        return frame, ~broken, None
    metric = Metric(f"{_PREFIX}{uuid.uuid4().hex}", tuple(dict.fromkeys(reasons)), "body" in columns.names)
    code = F.array_position(F.array(*map(F.lit, metric.reasons)), reason)
    checksum = F.crc32(F.col("body")) if metric.sums else F.lit(0)
    packed = F.when(
        code.between(1, _CODES - 1)
        & F.col("partition").between(0, _PARTITIONS - 1)
        & F.col("queue").isNotNull(),
        (checksum.cast("bigint") * _PARTITIONS + F.col("partition")) * _CODES + code,
    )
    noted = frame.select("*", broken.alias(_BROKEN), F.spark_partition_id().alias(_TASK))
    found = F.col(_BROKEN)
    # Spark evaluates a note, and so the reason, only where the offset is not null. Within the code that it
    # compiles for each row, the reasons of a dozen fields are more than the JVM compiles of one method.
    note, at = F.struct("offset", packed.alias("packed")), F.when(found, F.col("offset"))
    metrics = [
        F.count(F.when(found, 1)).alias("broken"),
        F.min(F.when(found, F.col("queue"))).alias(_ONE_QUEUE[0]),
        F.max(F.when(found, F.col("queue"))).alias(_ONE_QUEUE[1]),
        F.max_by(note, at, _MOST).alias("notes"),
        *(F.bit_or(_word(number)).alias(f"tasks{number}") for number in range(_WORDS)),
    ]
    return noted.observe(metric.name, *metrics), ~found, metric


def _word(number: int) -> Column:
    bit = F.col(_TASK) - number * _BITS
    return F.when(bit.between(0, _BITS - 1), F.expr(f"shiftleft(1L, {_TASK} - {number * _BITS})"))


def remember(rejected: DataFrame, metric: Metric | None) -> None:
    """``rejected`` are the rows that ``metric`` tells of."""
    if metric is not None:
        _metrics[rejected] = metric


def to_write(rows: DataFrame) -> tuple[DataFrame, DataFrame]:
    """``rows`` with a plan of their own, which nobody else executes, and the rows of that plan for a writer,
    which would make another one of it.
    """
    if not _metrics or is_connect(rows):
        return rows, rows
    own: Any = rows.select("*")
    execution = own._jdf.queryExecution()
    if _PREFIX not in execution.analyzed().toString():
        return rows, rows
    session: Any = rows.sparkSession._jsparkSession
    written = session.internalCreateDataFrame(execution.toRdd(), own._jdf.schema(), False)
    return own, DataFrame(written, rows.sparkSession)


class Seen:
    """What the executions within a micro-batch say about it. ``whole``: one has executed every row."""

    def __init__(self) -> None:
        self.whole = False
        self._told: dict[
            str, tuple[dict[str, Any], int]
        ] = {}  # by the name of the metric: it, the partitions

    def note(self, frame: DataFrame, batch: DataFrame, *, stages: bool) -> None:
        """``frame`` was executed. ``stages``: it stages rows (:func:`executed_whole`)."""
        if not executed_whole(frame, batch, stages=stages):
            return
        self.whole = True
        if _metrics:
            with suppress(Exception):  # Spark's internals: what is not known is read again
                for name, tasks, row in metered(frame, _PREFIX):
                    self._told[name] = _python(frame, row), tasks

    def broken(self, rejected: DataFrame) -> pa.RecordBatch | None:
        """All rows of ``rejected``, as CHECKED_COLUMNS; None if that is not certain."""
        metric = _metrics.get(rejected)
        if metric is None or metric.name not in self._told:
            return None
        return broken_rows(metric, *self._told[metric.name])


def _python(frame: DataFrame, row: Any) -> dict[str, Any]:
    jvm: Any = frame.sparkSession._jvm
    utils = jvm.org.apache.spark.sql.api.python.PythonSQLUtils
    pickled: Any = CPickleSerializer()
    found: dict[str, Any] = pickled.loads(utils.toPyRow(row)).asDict()
    return found


def broken_rows(metric: Metric, told: Mapping[str, Any], tasks: int) -> pa.RecordBatch | None:
    """What a metric of a job with ``tasks`` has told, as CHECKED_COLUMNS; None if it is not complete."""
    bits = sum((told[f"tasks{number}"] or 0) << number * _BITS for number in range(_WORDS))
    first, last = (told[name] for name in _ONE_QUEUE)
    packed = told["notes"] or ()
    if any(number is None for _, number in packed):  # the row has more than a note can say
        return None
    notes = [_note(metric, first, *note) for note in packed]
    places = {note[: len(PLACE)] for note in notes}
    complete = 0 < tasks <= _WORDS * _BITS and bits == (1 << tasks) - 1
    if not complete or first != last or not told["broken"] == len(notes) == len(places):
        return None
    columns = zip(*sorted(notes, key=lambda note: note[: len(PLACE)]), strict=True)
    arrays = map(pa.array, columns if notes else [[]] * len(CHECKED_COLUMNS), CHECKED_COLUMNS.types)
    return pa.RecordBatch.from_arrays(list(arrays), schema=CHECKED_COLUMNS)


def _note(metric: Metric, queue: str, offset: int, packed: int) -> tuple[str, int, int, str, int | None]:
    rest, code = divmod(packed, _CODES)
    checksum, partition = divmod(rest, _PARTITIONS)
    return queue, partition, offset, metric.reasons[code - 1], checksum if metric.sums else None
