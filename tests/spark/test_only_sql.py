"""A session with a Delta whose classes are not those of delta-spark, as in a vendor's runtime: Delta is used by SQL
alone. The names of the classes are changed here; the session and its Delta are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from connector.batch.foreach_batch import BatchTransaction
from connector.delta import jvm
from connector.delta.resolve import resolve
from tests.spark.pipelines import delta_transactions
from tests.spark.test_foreach_batch import run
from tests.spark.test_merge import held, made, rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


@pytest.fixture
def other_classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    jvm._has_delta.cache_clear()
    monkeypatch.setattr(jvm, "DELTA", "org.example.delta")
    yield
    jvm._has_delta.cache_clear()


@pytest.mark.soak
def test_every_operation_of_a_batch_works_by_sql_alone_and_is_there_once(
    rig: Any, tmp_path: Path, other_classes: None
) -> None:
    rig.declare("in")
    merged, appended, replaced = (made(rig, tmp_path / name) for name in ("merged", "appended", "replaced"))
    doomed = made(rig, tmp_path / "doomed")

    def each(batch: DataFrame, tx: BatchTransaction) -> None:
        given = rows(batch)
        tx.merge(given, merged, on="t.id = s.id", update=True, insert=True)
        tx.append(given, appended)
        tx.overwrite(given, replaced, where="n < 25")
        tx.delete(given, doomed, on="t.id = s.id")

    rig.publish("in", "a1", "y2")
    run(rig, each, ledger=str(tmp_path / "ledger"), ledger_sync=True)
    assert held(rig, merged) == [("a", 1), ("b", 20), ("y", 2), ("z", 30)]
    assert held(rig, appended) == [("a", 1), ("a", 10), ("b", 20), ("y", 2), ("z", 30)]
    assert held(rig, replaced) == [("a", 1), ("y", 2), ("z", 30)]
    assert held(rig, doomed) == [("b", 20), ("z", 30)]
    assert rig.spark.read.format("delta").load(str(tmp_path / "ledger")).count() == 1
    for table in (merged, appended, replaced, doomed):
        assert len(delta_transactions(Path(table))) == 1


def test_a_session_without_delta_is_told_apart(rig: Any, other_classes: None) -> None:
    assert jvm.only_sql(rig.spark)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jvm, "_reads_delta", lambda spark: False)
        with pytest.raises(OptionError, match="the Spark session has no Delta"):
            resolve(rig.spark, "/lake/none")
