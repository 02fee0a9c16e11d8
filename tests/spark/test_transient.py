"""A table that does not take a decided batch for now: the batch waits, the error says that another start is enough, and
that start applies it once.

Not here: which errors these are (``tests/connector/delta/test_transient.py``), a table that refuses a batch
(``test_append_checks.py``), a volume that was read-only (``tests/crash/test_volume_of_tables.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import NotAppliedYet
from connector.batch.foreach_batch import BatchTransaction
from connector.delta import commits
from connector.stream import staging
from tests.failing_volume import failing_volume
from tests.spark.test_tables_changed import Driver

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("planned_once")]

COMMITS = 3  # of another writer, in a row


class BusyWriter:
    """Another writer that commits each time that a merge has begun to read its rows, ``count`` times."""

    def __init__(self, spark: SparkSession, table: str, place: Path, count: int) -> None:
        self._spark, self._table, self._place = spark, table, place
        self._count = count
        self.commits = 0
        self._ended = threading.Event()

    def rows(self, frame: DataFrame) -> DataFrame:
        place = self._place

        def wait(batches: Iterator[Any]) -> Iterator[Any]:
            (place / "asked").touch()
            while not (place / "idle").exists() and (place / "asked").exists():
                threading.Event().wait(0.01)
            yield from batches

        return frame.mapInArrow(wait, frame.schema)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        (self._place / "idle").unlink(missing_ok=True)
        self._ended.clear()
        thread = threading.Thread(target=self._write)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _write(self) -> None:
        session = self._spark.newSession()
        before = self.commits
        while not self._ended.wait(0.01) and self.commits < before + self._count:
            if (self._place / "asked").exists():
                session.sql(f"UPDATE delta.`{self._table}` SET n = n + 100 WHERE body = 'k'")
                self.commits += 1
                (self._place / "asked").unlink()
        (self._place / "idle").touch()


def test_a_merge_beside_a_busy_writer_waits_for_it_or_says_that_another_start_is_enough(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, spark = str(tmp_path / "busy"), rig.spark
    spark.sql(f"CREATE TABLE delta.`{table}` (body STRING, n INT) USING delta")
    spark.sql(f"INSERT INTO delta.`{table}` VALUES ('a', 0), ('k', 0)")
    busy = BusyWriter(spark, table, tmp_path, COMMITS)
    rows_of = staging.rows_of
    monkeypatch.setattr(staging, "rows_of", lambda *given: busy.rows(rows_of(*given)))
    monkeypatch.setattr(commits, "_PAUSES_S", (0.05,))

    def merge(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.merge(batch, table, "t.body = s.body", update={"n": "t.n + s.n"}, insert=True)

    given = spark.createDataFrame([("a", 1), ("b", 5)], "body STRING, n INT")
    patient = Driver(rig, "busy", merge, conflict_timeout_s=3600)
    with busy.running():
        assert patient.batch(0, given) is None
    found = {row["body"]: row["n"] for row in rig.rows_in(table)}
    assert found == {"a": 1, "b": 5, "k": 100 * COMMITS} and busy.commits == COMMITS

    hasty = Driver(rig, "busy", merge, conflict_timeout_s=0)
    with busy.running():
        error = hasty.batch(1, given)
    assert isinstance(error, NotAppliedYet), error
    assert "Another writer commits to it" in str(error) and "start the query again" in str(error)
    assert "skip" not in str(error) and "repair" not in str(error)
    assert hasty.waiting == [2]
    (tmp_path / "idle").touch()
    assert Driver(rig, "busy", merge, conflict_timeout_s=3600).batch(1, given) is None
    found = {row["body"]: row["n"] for row in rig.rows_in(table)}
    assert found == {"a": 2, "b": 10, "k": 100 * busy.commits} and hasty.waiting == []


@pytest.mark.parametrize(
    "kind", ["files", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("rows", "merge"))]
)
def test_a_full_disk_of_a_table_is_told_and_the_batch_is_applied_once_when_there_is_room(
    rig: Any, tmp_path: Path, kind: str
) -> None:
    with failing_volume(tmp_path) as volume:
        table, filler = str(volume.path / "lake"), volume.path / "filler"
        rig.spark.sql(f"CREATE TABLE delta.`{table}` (body STRING) USING delta")

        def fn(batch: DataFrame, tx: BatchTransaction) -> None:
            if kind == "merge":
                tx.merge(batch, table, "t.body = s.body", insert=True)
            else:
                tx.append(batch, table, **({"anything": "no option of files"} if kind == "rows" else {}))

        def fill(_name: str) -> None:
            with filler.open("wb", 0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            with filler.open("ab", 0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(512))

        rows = rig.spark.createDataFrame([(f"row {number}",) for number in range(20)], "body STRING")
        driver = Driver(rig, "full", fn)
        failpoint.arm("foreach.decided", fill)
        error = driver.batch(0, rows)
        failpoint.disarm()
        assert isinstance(error, NotAppliedYet), error
        assert "is full" in str(error) and "start the query again" in str(error) and "skip" not in str(error)
        assert driver.waiting == [1]
        assert isinstance(Driver(rig, "full", fn).batch(0, rows), NotAppliedYet), "it is as full as before"
        filler.unlink()
        assert Driver(rig, "full", fn).batch(0, rows) is None
        assert sorted(row["body"] for row in rig.rows_in(table)) == sorted(
            row["body"] for row in rows.collect()
        )
        assert driver.waiting == []
