"""The broken messages that an execution of decoded rows has met, so that ``tx.reject`` need not read them.

An append of the good rows parses the broken ones too. Spark's metrics bring their places to the driver.
Not here: what is broken (``decoded.py``), whether Spark has executed every row (``plan.py``).
Invariant: unless every partition has told, and every broken row of it, nothing is known, and the rows are
read again.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from connector.dead_letters import CHECKED_COLUMNS, PLACE, checked_columns
from connector.plan import executed_whole, metered
from connector.table import is_connect

_PREFIX = "txmq_broken_"
_NOTE, _TASK = "txmq_note", "txmq_task"
_MOST = 10_000  # notes that the metrics of a job hold; a batch with more is read again
_TASKS = 1 << 15  # bits of Spark's bitmap

_metrics: WeakKeyDictionary[DataFrame, str] = WeakKeyDictionary()  # of the frame with the broken rows


def watched(
    frame: DataFrame, columns: StructType, broken: Column, reason: Column
) -> tuple[DataFrame, Column, str]:
    """``frame`` whose execution tells about its broken rows. Returns the frame, the condition of a good row,
    and the name of the metric, "" if there can be none. ``columns``: those of the messages.
    """
    types = {each.name: each.dataType.simpleString() for each in columns.fields}
    placed = all(types.get(name) == kind for name, kind in PLACE.items())
    if not placed or frame.isStreaming or is_connect(frame):
        return frame, ~broken, ""
    name = f"{_PREFIX}{uuid.uuid4().hex}"
    note = F.when(broken, F.struct(*checked_columns(columns, reason)))
    noted = frame.select("*", note.alias(_NOTE), F.spark_partition_id().alias(_TASK))
    metrics = [
        F.count(_NOTE).alias("broken"),
        F.max_by(F.col(_NOTE), F.col(f"{_NOTE}.offset"), _MOST).alias("notes"),
        F.bitmap_construct_agg(F.when(F.col(_TASK) < _TASKS, F.col(_TASK))).alias("tasks"),
    ]
    return noted.observe(name, *metrics), F.col(_NOTE).isNull(), name


def remember(rejected: DataFrame, metric: str) -> None:
    """``rejected`` are the rows that ``metric`` tells of."""
    if metric:
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
        self._broken: dict[str, pa.RecordBatch] = {}  # by the name of the metric

    def note(self, frame: DataFrame, batch: DataFrame, *, stages: bool) -> None:
        """``frame`` was executed. ``stages``: it stages rows (:func:`executed_whole`)."""
        if not executed_whole(frame, batch, stages=stages):
            return
        self.whole = True
        if _metrics:
            with suppress(Exception):  # Spark's internals: what is not known is read again
                for name, tasks, row in metered(frame, _PREFIX):
                    broken = _broken(_python(frame, row), tasks)
                    if broken is not None:
                        self._broken[name] = broken

    def broken(self, rejected: DataFrame) -> pa.RecordBatch | None:
        """All rows of ``rejected``, as CHECKED_COLUMNS; None if that is not certain."""
        return self._broken.get(_metrics.get(rejected, ""))


def _python(frame: DataFrame, row: Any) -> dict[str, Any]:
    jvm: Any = frame.sparkSession._jvm
    utils = jvm.org.apache.spark.sql.api.python.PythonSQLUtils
    pickled: Any = CPickleSerializer()
    found: dict[str, Any] = pickled.loads(utils.toPyRow(row)).asDict()
    return found


def _broken(told: dict[str, Any], tasks: int) -> pa.RecordBatch | None:
    bits = int.from_bytes(bytes(told["tasks"] or b""), "little")
    notes = [tuple(note) for note in told["notes"] or ()]
    places = {note[: len(PLACE)] for note in notes}
    if not 0 < tasks <= _TASKS or bits != (1 << tasks) - 1 or not told["broken"] == len(notes) == len(places):
        return None
    columns = zip(*sorted(notes, key=lambda note: note[: len(PLACE)]), strict=True)
    arrays = map(pa.array, columns if notes else [[]] * len(CHECKED_COLUMNS), CHECKED_COLUMNS.types)
    return pa.RecordBatch.from_arrays(list(arrays), schema=CHECKED_COLUMNS)
