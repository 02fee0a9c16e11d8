"""What Spark 4.1 asks of a Python source, and in which order: ``stream/without_admission_control.py`` rests on
that. Skipped on later versions (``make matrix`` runs it).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from connector.stream.spark_version import has_admission_control

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(has_admission_control(), reason="only on Spark 4.1"),
]

WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"


class Recorded(DataSource):
    """Ends at the number in ``folder``/end, and notes each call in ``folder``/calls."""

    @classmethod
    def name(cls) -> str:
        return "recorded"

    def schema(self) -> str:
        return "n int"

    def streamReader(self, schema: Any) -> Reader:
        return Reader(self.options["folder"])


class Reader(DataSourceStreamReader):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def _note(self, *words: object) -> None:
        with Path(self.folder, "calls").open("a") as file:
            print(*words, file=file)

    def initialOffset(self) -> dict[str, int]:
        self._note("initialOffset")
        return {"at": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        self._note("latestOffset")
        return {"at": int(Path(self.folder, "end").read_text())}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        self._note("partitions", start["at"], end["at"])
        return [InputPartition(end["at"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (partition.value,)

    def commit(self, end: dict[str, int]) -> None:
        self._note("commit", end["at"])


def calls(spark: SparkSession, folder: Path, end: int, *, fails: bool = False) -> list[str]:
    """Of one run with Trigger.AvailableNow, until it ends."""
    (folder / "end").write_text(str(end))
    (folder / "calls").write_text("")

    def each(batch: DataFrame, _batch_id: int) -> None:
        batch.collect()
        if fails:
            raise RuntimeError("as told")

    rows = spark.readStream.format("recorded").option("folder", str(folder)).load()
    query = rows.writeStream.foreachBatch(each).option("checkpointLocation", str(folder / "checkpoint"))
    try:
        query.trigger(availableNow=True).start().awaitTermination()
    except Exception:
        if not fails:
            raise
    return (folder / "calls").read_text().splitlines()


def test_spark_names_its_newest_end_first_and_each_range_that_it_plans(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.dataSource.register(Recorded)
    new = ["latestOffset", "initialOffset", "partitions 0 1"]
    assert calls(spark, tmp_path, 1) == new
    assert calls(spark, tmp_path, 1) == ["partitions 1 1", "latestOffset"]
    assert calls(spark, tmp_path, 2, fails=True) == [
        "partitions 1 1",
        "latestOffset",
        "commit 1",
        "partitions 1 2",
    ]
    assert calls(spark, tmp_path, 3) == ["partitions 2 2", "partitions 1 2"], (
        "one batch: the one that was planned"
    )
    assert calls(spark, tmp_path, 3) == ["partitions 2 2", "latestOffset", "commit 2", "partitions 2 3"]


def test_the_wrapper_for_available_now_asks_for_an_end_before_spark_names_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.dataSource.register(Recorded)
    spark.conf.set(WRAPPER, "true")
    try:
        calls(spark, tmp_path, 1)
        assert calls(spark, tmp_path, 2)[:3] == ["latestOffset", "partitions 1 1", "latestOffset"]
    finally:
        spark.conf.unset(WRAPPER)
