"""The Delta ledger: complete, in order, never ahead of the engine, repaired by whoever comes next."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from broker_core.micro_batch import ledger as ledger_rules
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.ledger.delta_ledger import DeltaLedger
from connector.ledger.listener import mirror_offsets
from tests.progress import GUARD_S, wait_until
from tests.spark.pipelines import delta_rows, delta_transactions
from tests.spark.test_source import ADMITTED

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def decide(rig: Any, app_id: str, batches: int) -> None:
    """Batches that consume nothing, decided straight at the engine."""
    engine = rig.broker.engine
    last = engine.last_entry(app_id)
    first = 0 if last is None else last.batch_id + 1
    for batch_id in range(first, first + batches):
        opened = engine.open_batch(app_id, "query", batch_id, "fail")
        engine.commit_batch(app_id, "query", batch_id, opened.token, [])


@ADMITTED
@pytest.mark.parametrize("sync", [pytest.param(True, marks=pytest.mark.soak), False])
def test_every_batch_has_its_row_with_the_offsets_it_consumed(rig: Any, tmp_path: Path, sync: bool) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    rig.publish("in", "c")
    table = tmp_path / "ledger"

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue="out")

    each = transactional(fn, url=rig.broker.url, app_id="app", ledger=str(table), ledger_sync=sync)
    writer = (
        rig.stream("in", maxOffsetsPerTrigger=2)
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", rig.checkpoint())
    )
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    each.flush(GUARD_S)
    rows = sorted(delta_rows(table), key=lambda row: row["batch_id"])
    told = [
        (
            row["app_id"],
            row["query_id"],
            row["log"],
            row["start_offset"],
            row["end_offset"],
            row["messages"],
            row["published"],
        )
        for row in rows
    ]
    assert told == [("app", query.id, "in", 0, 2, 2, 2), ("app", query.id, "in", 2, 3, 1, 1)]
    assert [version for _, version in delta_transactions(table)] == [1, 2]
    assert rig.broker.engine.unmirrored("app") == []


def test_a_long_backlog_is_one_merge_that_a_stale_writer_cannot_double(rig: Any, tmp_path: Path) -> None:
    table = tmp_path / "ledger"
    decide(rig, "app", 8)
    ledger = DeltaLedger(rig.spark.newSession(), str(table), rig.broker.engine, "app")
    stale = rig.broker.engine.unmirrored("app")
    ledger.write_missing()
    name = f"txmq-ledger:app@{rig.broker.engine.identity()}"
    assert delta_transactions(table) == [(name, 1), (name, 8)]
    ledger._append(rig.spark, stale[4])  # what another driver had begun
    assert sorted(row["batch_id"] for row in delta_rows(table)) == list(range(8))
    decide(rig, "app", 1)
    ledger.write_missing()
    assert sorted(row["batch_id"] for row in delta_rows(table)) == list(range(9))
    (row,) = [row for row in delta_rows(table) if row["batch_id"] == 8]
    assert (row["log"], row["start_offset"], row["messages"]) == (None, None, 0)


@pytest.mark.soak  # test_tables_changed.py adds a column to a table
def test_a_column_that_somebody_adds_stops_neither_an_append_nor_a_merge(rig: Any, tmp_path: Path) -> None:
    table = tmp_path / "ledger"
    ledger = DeltaLedger(rig.spark.newSession(), str(table), rig.broker.engine, "app")
    decide(rig, "app", 1)
    ledger.write_missing()
    rig.spark.sql(f"ALTER TABLE delta.`{table}` ADD COLUMN note STRING")
    for waiting in (1, 4):
        decide(rig, "app", waiting)
        ledger.write_missing()
    assert sorted(row["batch_id"] for row in delta_rows(table)) == list(range(6))
    assert rig.broker.engine.unmirrored("app") == []


DAMAGES = {
    "DELETE": "DELETE FROM delta.`{table}` WHERE batch_id IN (0, 3)",
    "TRUNCATE": "TRUNCATE TABLE delta.`{table}`",
    "RESTORE": "RESTORE TABLE delta.`{table}` TO VERSION AS OF 0",
    "removed": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.soak), True])
def test_what_others_take_from_a_ledger_is_completed_from_the_engine(
    request: pytest.FixtureRequest,
    rig: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    background: bool,
) -> None:
    table = tmp_path / "ledger"
    decide(rig, "app", 1)
    ledger = DeltaLedger(rig.spark.newSession(), str(table), rig.broker.engine, "app")
    if background:
        ledger.start()
    ledger.flush(GUARD_S)
    decide(rig, "app", 4)
    ledger.flush(GUARD_S)
    written = 5
    damages = list(DAMAGES.items())
    if not request.config.getoption("--soak-rounds"):  # an append finds the first one, a merge the last one
        damages = [damages[0], damages[-1]]
    for number, (what, damage) in enumerate(damages):
        if damage:
            rig.spark.sql(damage.format(table=table))
        else:
            shutil.rmtree(table)
        caplog.clear()
        appends, merges = 1, 4
        for waiting in ((appends,), (merges,))[number % 2] if background else (appends, merges):
            decide(rig, "app", waiting)
            ledger.flush(GUARD_S)
            written += waiting
        assert sorted(row["batch_id"] for row in delta_rows(table)) == list(range(written)), what
        (told,) = [each.getMessage() for each in caplog.records if "has lost rows" in each.getMessage()]
        assert what in told and str(table) in told and "written again" in told, told
    ledger.close()
    rig.spark.sql(f"DELETE FROM delta.`{table}` WHERE batch_id = 1")
    decide(rig, "app", 1)
    caplog.clear()
    DeltaLedger(rig.spark.newSession(), str(table), rig.broker.engine, "app").write_missing()
    assert sorted(row["batch_id"] for row in delta_rows(table)) == list(range(written + 1)), "at the start"
    assert "found at the start. batch 2 is written again" in caplog.text


@pytest.mark.soak
def test_a_ledger_says_which_batches_nobody_has_any_more_and_is_not_alarmed_by_what_keeps_its_rows(
    rig: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_rules, "KEPT_ENTRIES", 2)
    table = tmp_path / "ledger"
    ledger = DeltaLedger(rig.spark.newSession(), str(table), rig.broker.engine, "app")
    for batch in range(5):
        decide(rig, "app", 1)
        ledger.write_missing()
        if batch == 3:
            rig.spark.sql(f"OPTIMIZE delta.`{table}`")
            rig.spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('note' = 'kept')")
    assert "has lost rows" not in caplog.text
    rig.spark.sql(f"TRUNCATE TABLE delta.`{table}`")
    decide(rig, "app", 1)
    kept = [entry.sequence for entry in rig.broker.engine.entries("app")]
    ledger.write_missing()
    assert sorted(row["batch_id"] + 1 for row in delta_rows(table)) == kept and kept[0] > 1
    assert (
        f"of the batches 1 to {kept[0] - 1}, which the engine does not keep any more, the table has 0"
        in caplog.text
    )


def test_the_next_start_repairs_what_a_stopped_writer_left(rig: Any, tmp_path: Path) -> None:
    table = tmp_path / "ledger"
    decide(rig, "app", 2)
    with mirror_offsets(rig.spark, ledger=str(table), url=rig.broker.url, app_id="app") as mirror:
        mirror.flush(GUARD_S)
    assert sorted(row["batch_id"] for row in delta_rows(table)) == [0, 1]


def test_a_native_sinks_batches_reach_the_table_without_a_flush(rig: Any, tmp_path: Path) -> None:
    table = tmp_path / "ledger"
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    with mirror_offsets(rig.spark, ledger=str(table), url=rig.broker.url, app_id="app"):
        sink = rig.sink(rig.stream("in").select("body"), queue="out").trigger(availableNow=True)
        sink.start().awaitTermination()
        wait_until(lambda: table.exists() and delta_rows(table), "the listener hears of the batch")
    (row,) = delta_rows(table)
    assert (row["log"], row["start_offset"], row["end_offset"], row["messages"], row["published"]) == (
        "in",
        0,
        2,
        2,
        2,
    )


def test_a_ledger_without_a_table_is_refused(rig: Any) -> None:
    with pytest.raises(OptionError, match="mirror_offsets needs a ledger"):
        mirror_offsets(rig.spark, ledger="", url=rig.broker.url, app_id="app")
