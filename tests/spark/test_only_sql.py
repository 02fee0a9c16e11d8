"""A session with a Delta whose classes are not those of delta-spark, as in a vendor's runtime: Delta is used by SQL
alone. The names of the classes are changed here; the session and its Delta are real.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from connector.batch.foreach_batch import BatchTransaction
from connector.delta import jvm, log
from connector.delta.format import Delta
from connector.delta.resolve import resolve
from connector.tables.commit_id import CommitId
from tests.spark.pipelines import delta_transactions
from tests.spark.test_foreach_batch import run
from tests.spark.test_merge import held, made, rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


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


@pytest.fixture
def jobs(rig: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of a table by a job over its log."""
    asked: list[str] = []
    kind: Any = type(rig.spark)
    known = kind.sql

    def sql(session: Any, text: str, *more: Any, **named: Any) -> Any:
        asked.extend(text.split()[1:2] if text.startswith("DESCRIBE ") else [])
        return known(session, text, *more, **named)

    monkeypatch.setattr(kind, "sql", sql)
    return asked


def append(rig: Any, tables: Delta, table: str, sequence: int) -> int | None:
    batch = {"app_id": "app", "sequence": sequence, "token": f"token {sequence}", "txn_app_id": "app@x/y"}
    once = CommitId("app@x/y", sequence, batch, 0)
    rows = f"SELECT 'k' AS id, {sequence} AS n, false AS gone"
    return tables.append(rig.spark, tables.resolve(rig.spark, table), lambda session: session.sql(rows), once)


def test_a_commit_is_found_where_its_session_says_and_else_in_the_history(
    rig: Any, tmp_path: Path, other_classes: None, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, tables = made(rig, tmp_path / "appended"), Delta()
    assert append(rig, tables, table, 1) == 1 and jobs == ["DETAIL"]
    monkeypatch.setattr(log, "_LAST", "spark.txmq.test.last")
    for sequence, said in enumerate(("0", "77", "no number"), 2):  # of another table, of none
        rig.spark.conf.set("spark.txmq.test.last", said)
        jobs.clear()
        assert append(rig, tables, table, sequence) == sequence and jobs == ["HISTORY"]
    rig.spark.conf.unset("spark.txmq.test.last")


def test_what_a_table_is_like_is_asked_only_where_another_commit_than_the_last_known_is_there(
    rig: Any, tmp_path: Path, other_classes: None, jobs: list[str]
) -> None:
    path, tables = tmp_path / "table", Delta()
    table = made(rig, path)

    def asked() -> bool:
        """Whether a job was; what is found is always what another process finds."""
        jobs.clear()
        found = tables.resolve(rig.spark, table)
        was = bool(jobs)
        assert found == Delta().resolve(rig.spark, table)
        return was

    append(rig, tables, table, 1)
    assert not asked()
    rig.spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.checkpointInterval' = '7')")
    assert asked()
    append(rig, tables, table, 2)
    assert not asked()
    assert tables.resolve(rig.spark, table).properties == {"delta.checkpointInterval": "7"}
    rig.spark.sql(
        f"CREATE OR REPLACE TABLE delta.`{table}` USING delta AS SELECT 'k' AS id, 1 AS n, true AS gone"
    )
    assert asked()
    version = append(rig, tables, table, 3)
    (path / "_delta_log" / f"{version:020d}.crc").unlink()
    assert asked()
    shutil.rmtree(path)
    made(rig, path)
    for _ in range(version or 0):  # as many commits as there were
        rig.spark.sql(f"INSERT INTO delta.`{table}` VALUES ('theirs', 1, false)")
    assert asked()


def test_two_spellings_of_a_new_table_are_operations_of_their_own_until_it_is_there(
    rig: Any, tmp_path: Path, other_classes: None
) -> None:
    place = tmp_path / "new"
    rig.declare("in")

    def each(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(rows(batch), str(place))
        tx.append(rows(batch), f"file:{place}")

    rig.publish("in", "a1", "b2")
    run(rig, each)
    assert held(rig, str(place)) == [("a", 1), ("a", 1), ("b", 2), ("b", 2)]
    assert len(delta_transactions(place)) == 2
    rig.publish("in", "c3")
    run(rig, each)
    assert [row for row in held(rig, str(place)) if row == ("c", 3)] == [("c", 3)] * 2
    assert len(delta_transactions(place)) == 3


def test_a_session_without_delta_is_told_apart(rig: Any, other_classes: None) -> None:
    assert jvm.only_sql(rig.spark)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jvm, "_reads_delta", lambda spark: False)
        with pytest.raises(OptionError, match="the Spark session has no Delta"):
            resolve(rig.spark, "/lake/none")
