"""What a classic session does before the decision, or notices, and Spark Connect does not, as the pages say: each test has
both sides, and runs over both sessions.

Not here: what both do alike (all other files), tests of classic sessions alone (``classic.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import cause
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.ledger.delta_ledger import DeltaLedger
from connector.table_formats import table_format
from tests.progress import GUARD_S
from tests.spark.pipelines import delta_rows
from tests.spark.sessions import CONNECT
from tests.spark.test_foreach_batch import run
from tests.spark.test_ledger import decide
from tests.spark.test_merge import held, made, rows

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

Act = Callable[[DataFrame, BatchTransaction, str], None]

CAST = "cast(s.id AS INT)"
# of the rows (a, 1) and (b, 2): refused before the decision in a classic session, and a part of what it says
TRIED: dict[str, tuple[Act, str]] = {
    "the rehearsal of an append": (
        lambda given, tx, table: tx.append(given, table, mergeSchema="maybe"),
        "Delta would refuse it",
    ),
    "the rehearsal of an overwrite": (
        lambda given, tx, table: tx.overwrite(given, table, "n > (SELECT 0)"),
        "Delta would refuse it",
    ),
    "a part of on": (
        lambda given, tx, table: tx.merge(given, table, f"t.n = {CAST}", update=True),
        "cannot be cast",
    ),
    "a condition": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", delete=f"{CAST} > 0"),
        "cannot be cast",
    ),
    "a value": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update={"n": CAST}),
        "cannot be cast",
    ),
    "a function": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update={"n": "halved(s.n)"}),
        "temporary function or variable",
    ),
    "a variable in an overwrite": (
        lambda given, tx, table: tx.overwrite(given, table, "n >= lowest"),
        "cannot be resolved",
    ),
    "a variable in a delete": (
        lambda given, tx, table: tx.delete(given, table, "t.id = s.id AND t.n >= lowest"),
        "temporary function or variable",
    ),
}
ON_CONNECT_TOO = "a variable in a delete"


def of_the_session(batch: DataFrame) -> None:
    batch.sparkSession.udf.register("halved", lambda n: n // 2, "int")
    batch.sparkSession.sql("DECLARE OR REPLACE VARIABLE lowest INT DEFAULT 1")


def test_what_a_classic_session_tries_before_the_decision_is_staged_on_connect(
    rig: Any, tmp_path: Path
) -> None:
    """Each case within one micro-batch, which then fails."""
    rig.declare("in")
    table = made(rig, tmp_path / "lake")
    rig.publish("in", "a1", "b2")
    told = rig.notes()

    def every(batch: DataFrame, tx: BatchTransaction) -> None:
        of_the_session(batch)
        for act, _ in TRIED.values():
            text = ""
            try:
                act(rows(batch), tx, table)
            except Exception as error:
                text = str(cause(error) or error)
            told.append(text)
        raise RuntimeError(f"{len(tx.branches)} operations are staged")

    with pytest.raises(Exception, match=f"{len(TRIED) - 1 if CONNECT else 0} operations are staged"):
        run(rig, every)
    for name, text in zip(TRIED, told, strict=True):
        assert text == "" if CONNECT and name != ON_CONNECT_TOO else TRIED[name][1] in text, f"{name}: {text}"
    assert rig.bodies("in") == ["a1", "b2"] and rig.broker.engine.last_entry("app") is None


@pytest.mark.parametrize("value", [CAST, "halved(s.n)"])
def test_what_is_not_tried_on_connect_fails_after_the_decision_with_the_rows_kept(
    rig: Any, tmp_path: Path, value: str
) -> None:
    """The function is one of the session, which forgets it before the decision."""
    rig.declare("in")
    table = made(rig, tmp_path / "lake")
    rig.publish("in", "a1", "b2")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        of_the_session(batch)
        tx.merge(rows(batch), table, "t.id = s.id", update={"n": value})
        batch.sparkSession.sql("DROP TEMPORARY FUNCTION halved")

    with pytest.raises(Exception, match="TXMQ_NOT_APPLIED" if CONNECT else "TXMQ_OPTION"):
        run(rig, fn)
    assert held(rig, table) == [("a", 10), ("b", 20), ("z", 30)]
    engine = rig.broker.engine
    assert (engine.last_entry("app") is not None) == bool(engine.unapplied("app")) == CONNECT
    assert rig.bodies("in") == ([] if CONNECT else ["a1", "b2"])


def test_every_operation_widens_a_table_over_connect_too_and_an_append_there_has_no_files(
    rig: Any, tmp_path: Path
) -> None:
    tables = {name: tmp_path / name for name in ("append", "overwrite", "merge", "files")}
    for table in tables.values():
        rig.spark.sql(
            f"CREATE TABLE delta.`{table}` (v INT) USING delta TBLPROPERTIES ('delta.enableTypeWidening' = 'true')"
        )
    rig.declare("in")
    rig.publish("in", "a")
    there = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        large = batch.selectExpr("5000000000L AS v")
        tx.append(large, str(tables["append"]), mergeSchema=True)
        tx.append(batch.selectExpr("5 AS v"), str(tables["files"]))
        there.append((tables["files"] / "_txmq").exists())
        tx.overwrite(large, str(tables["overwrite"]), "true", mergeSchema=True)
        tx.merge(large, str(tables["merge"]), "t.v = s.v", insert=True, merge_schema=True)

    run(rig, fn)
    for name, table in tables.items():
        found = rig.spark.read.format("delta").load(str(table))
        kind, value = ("int", 5) if name == "files" else ("bigint", 5000000000)
        assert (name, found.dtypes, [row["v"] for row in found.collect()]) == (name, [("v", kind)], [value])
    assert list(there) == [not CONNECT]
    assert rig.spark.sql("SHOW TABLES LIKE 'txmq_rehearsal*'").collect() == []


def test_a_change_of_schema_is_tried_after_the_decision_where_the_session_may_make_no_table(
    rig: Any, tmp_path: Path
) -> None:
    """Where the tables of its database would be is a file."""
    rig.declare("in")
    rig.publish("in", "a")
    table, place = tmp_path / "lake", tmp_path / "closed"
    rig.spark.sql(f"CREATE TABLE delta.`{table}` (v INT) USING delta")
    rig.spark.sql(f"CREATE DATABASE closed LOCATION '{place}'")
    place.rmdir()
    place.touch()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        batch.sparkSession.catalog.setCurrentDatabase("closed")
        rows = batch.selectExpr("1 AS v", "INTERVAL '1' DAY AS w")
        tx.merge(rows, str(table), "t.v = s.v", insert=True, merge_schema=True)

    try:
        with pytest.raises(Exception, match="TXMQ_NOT_APPLIED" if CONNECT else "TXMQ_OPTION"):
            run(rig, fn)
    finally:
        rig.spark.catalog.setCurrentDatabase("default")  # on Connect it is the session of the batch
        rig.spark.sql("DROP DATABASE closed")


def test_a_table_whose_older_copy_was_put_back_stops_no_query_and_is_not_noticed_on_connect(
    rig: Any, tmp_path: Path
) -> None:
    rig.declare("in")
    table, older = tmp_path / "lake", tmp_path / "older"

    def go(body: str) -> None:
        rig.publish("in", body)
        run(rig, lambda batch, tx: tx.append(batch.selectExpr("CAST(body AS STRING) AS body"), str(table)))

    go("a")
    shutil.copytree(table, older)
    go("b")
    entry = rig.broker.engine.last_entry("app")
    shutil.rmtree(table)
    shutil.move(older, table)
    found = table_format().resolve(rig.spark, str(table))
    assert table_format().lacks(rig.spark, found, entry.in_tables[0].version, entry.token) == (not CONNECT)
    go("c")
    assert sorted(row["body"] for row in delta_rows(table)) == ["a", "c"]


def test_rows_that_others_take_from_a_ledger_are_noticed_by_the_next_batch_and_on_connect_by_the_next_start(
    rig: Any, tmp_path: Path
) -> None:
    place = tmp_path / "ledger"
    decide(rig, "app", 2)
    ledger = DeltaLedger(rig.spark, str(place), rig.broker.engine, "app")
    ledger.flush(GUARD_S)
    rig.spark.sql(f"DELETE FROM delta.`{place}` WHERE batch_id = 0").collect()
    decide(rig, "app", 1)
    ledger.flush(GUARD_S)
    assert sorted(row["batch_id"] for row in delta_rows(place)) == ([1, 2] if CONNECT else [0, 1, 2])
    decide(rig, "app", 1)
    DeltaLedger(rig.spark, str(place), rig.broker.engine, "app").write_missing()
    assert sorted(row["batch_id"] for row in delta_rows(place)) == [0, 1, 2, 3]


def test_on_connect_the_ledger_is_written_within_each_batch_and_in_a_classic_session_at_last(
    rig: Any, tmp_path: Path
) -> None:
    rig.declare("in")
    rig.publish("in", "a", "b")
    place, there = tmp_path / "ledger", rig.notes()

    def fn(_batch: DataFrame, _tx: BatchTransaction) -> None:
        there.append(len(delta_rows(place)))

    run(rig, fn, ledger=str(place), options={"maxOffsetsPerTrigger": 1})
    assert list(there) == [0, 1] or (not CONNECT and list(there) == [0, 0])
    assert len(delta_rows(place)) == 2


def test_of_two_queries_that_read_one_frame_each_has_its_own_batches(rig: Any, tmp_path: Path) -> None:
    """Of a queue, the second one is refused (``test_stream_reader.py``)."""
    rig.declare("out", "out2")
    (tmp_path / "files").mkdir()
    frame = rig.spark.readStream.text(str(tmp_path / "files")).selectExpr("value AS body")

    def start(app: str, queue: str) -> Any:
        each = transactional(lambda batch, tx: tx.publish(batch, queue=queue), url=rig.broker.url, app_id=app)
        writer = frame.writeStream.foreachBatch(each).option("checkpointLocation", rig.checkpoint(app))
        return writer.start()

    queries = [start("one", "out"), start("two", "out2")]
    try:
        for body in "ab":
            (tmp_path / f".{body}").write_text(f"{body}\n")
            (tmp_path / f".{body}").rename(tmp_path / "files" / body)
            for query in queries:
                query.processAllAvailable()
        assert rig.bodies("out") == rig.bodies("out2") == ["a", "b"]
        assert [rig.broker.engine.last_entry(app).sequence for app in ("one", "two")] == [2, 2]
    finally:
        for query in queries:
            query.stop()
