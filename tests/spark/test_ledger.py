"""The Delta ledger: complete, in order, never ahead of the engine, repaired by whoever comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.errors import OptionError
from connector.foreach_batch import BatchTransaction, transactional
from connector.ledger import DeltaLedger
from connector.listener import mirror_offsets
from tests.progress import wait_until
from tests.spark.pipelines import delta_rows, delta_transactions

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


def decide(rig: Any, app_id: str, batches: int) -> None:
    """Batches that consume nothing, decided straight at the engine."""
    engine = rig.broker.engine
    last = engine.last_entry(app_id)
    first = 0 if last is None else last.batch_id + 1
    for batch_id in range(first, first + batches):
        opened = engine.open_batch(app_id, "query", batch_id, "fail")
        engine.commit_batch(app_id, "query", batch_id, opened.token, [])


@pytest.mark.parametrize("sync", [True, False])
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
    each.flush(60)
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


def test_the_next_start_repairs_what_a_stopped_writer_left(rig: Any, tmp_path: Path) -> None:
    table = tmp_path / "ledger"
    decide(rig, "app", 2)
    with mirror_offsets(rig.spark, ledger=str(table), url=rig.broker.url, app_id="app") as mirror:
        mirror.flush(60)
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
    with pytest.raises(OptionError, match="mirror_offsets without ledger"):
        mirror_offsets(rig.spark, ledger="", url=rig.broker.url, app_id="app")
