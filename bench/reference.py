"""The references: a Python source that returns ready batches, and a Python Arrow sink that only counts rows.

They do not use txmq, and do the least work that a Python source and sink of Spark can do.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit  # Spark 4.2; tests import this module on 4.1

BODY_BYTES = 100
BATCH_ROWS = 16_384
READY_SCHEMA = (
    "queue string, partition int, offset bigint, exchange string, routing_key string, body binary, "
    "timestamp timestamp, redelivered boolean"
)


def bodies(rows: int) -> pa.Array:
    """``rows`` bodies of 100 random bytes."""
    data = os.urandom(BODY_BYTES * rows)
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(BODY_BYTES), rows, [None, pa.py_buffer(data)])
    return fixed.cast(pa.binary())


def ready_batch(rows: int) -> pa.RecordBatch:
    """A batch of the eight columns that the txmq source has."""
    now = datetime.datetime.now(tz=datetime.timezone.utc)
    columns = {
        "queue": pa.array(["orders"] * rows, pa.string()),
        "partition": pa.array([0] * rows, pa.int32()),
        "offset": pa.array(range(rows), pa.int64()),
        "exchange": pa.array([""] * rows, pa.string()),
        "routing_key": pa.array(["orders"] * rows, pa.string()),
        "body": bodies(rows),
        "timestamp": pa.array([now] * rows, pa.timestamp("us", tz="UTC")),
        "redelivered": pa.array([False] * rows, pa.bool_()),
    }
    return pa.RecordBatch.from_pydict(columns)


@dataclass
class Slice(InputPartition):
    rows: int


class ReadySource(DataSource):
    """Options: ``total`` rows in all, ``step`` rows per micro-batch, ``tasks`` per micro-batch."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> str:
        return READY_SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ReadyReader(int(self.options["total"]), int(self.options["step"]), int(self.options["tasks"]))


class ReadyReader(DataSourceStreamReader):
    def __init__(self, total: int, step: int, tasks: int) -> None:
        self.total, self.step, self.tasks = total, step, tasks

    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"next": min(self.total, start["next"] + self.step)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        rows = end["next"] - start["next"]
        return [Slice(rows // self.tasks + (task < rows % self.tasks)) for task in range(self.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Slice)
        batch = ready_batch(min(BATCH_ROWS, partition.rows))
        left = partition.rows
        while left:
            yield batch.slice(0, min(left, batch.num_rows))
            left -= min(left, batch.num_rows)

    def commit(self, end: dict[str, int]) -> None:
        return


@dataclass
class Counted(WriterCommitMessage):
    rows: int


class CountingSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "counting"

    def streamWriter(self, schema: StructType, overwrite: bool) -> CountingWriter:
        return CountingWriter()


class CountingWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Counted:
        return Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[Any], batchId: int) -> None:
        return

    def abort(self, messages: list[Any], batchId: int) -> None:
        return
