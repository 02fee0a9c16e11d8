"""A thread that has what Spark gives to that of a streaming query, for batches that a test executes itself."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession


def write_checkpoint(place: Path, query_id: str, batch_id: int = 0) -> str:
    """What Spark has written before it runs a batch of a source that is not txmq; done again, it is the same."""
    (place / "offsets").mkdir(parents=True, exist_ok=True)
    (place / "metadata").write_text(json.dumps({"id": query_id}))
    (place / "offsets" / str(batch_id)).write_text(f'v1\n{{}}\n{{"logOffset":{batch_id}}}')
    return str(place)


@contextmanager
def query_thread(spark: SparkSession, query_id: str, batch_id: int | None = None) -> Iterator[None]:
    """Of a run of its own: what is done again in it is a replay, and no second call."""
    properties = {"sql.streaming.queryId": query_id, "spark.jobGroup.id": uuid.uuid4().hex}
    if batch_id is not None:
        properties["streaming.sql.batchId"] = str(batch_id)
    for name, value in properties.items():
        spark.sparkContext.setLocalProperty(name, value)
    try:
        yield
    finally:
        for name in properties:
            spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]
