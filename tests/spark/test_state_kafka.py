"""The state of a real Kafka as DataFrames and at the command line: what apps of txmq did, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import txmq
from connector.batch.foreach_batch import BatchTransaction, transactional
from tests.spark.kafka_pipelines import PARTITIONS, make_topics, send
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

APP = "state.app"


def rows(spark: SparkSession, url: str, table: str) -> list[dict[str, Any]]:
    frame = spark.read.format("txmq").options(url=url, table=table).load()
    return [row.asDict(recursive=True) for row in frame.collect()]


@pytest.mark.soak
def test_the_state_of_apps_on_kafka(
    spark: SparkSession, kafka_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_topics(kafka_url, "state.in", "state.out")
    send(kafka_url, "state.in", ["a", "b", "c"])
    lake = str(tmp_path / "lake")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        assert batch.schema.names[-1] == "transaction"
        tx.append(batch.selectExpr("CAST(body AS STRING) AS body", "transaction"), lake)
        tx.publish(batch.select("body"), queue="state.out")

    stream = spark.readStream.format("txmq").options(url=kafka_url, queue="state.in", appId=APP)
    each = transactional(fn, url=kafka_url, app_id=APP)
    writer = stream.option("includeTransaction", "true").load().writeStream.foreachBatch(each)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    send(kafka_url, "state.in", ["late"])

    assert {row["transaction"] for row in spark.read.format("delta").load(lake).collect()} == {None}
    entry = [row for row in rows(spark, kafka_url, "ledger") if row["app_id"] == APP and row["messages"]][-1]
    assert (entry["transaction"], entry["published"], entry["applied"]) == (None, 3, True)
    assert set(entry["ranges"]) == {f"state.in/{number}" for number in range(PARTITIONS)}
    ((table, version),) = [(each["table"], each["version"]) for each in entry["tables"]]
    assert (table.removeprefix("file:"), version) == (lake, 0)
    (batch,) = [
        row
        for row in rows(spark, kafka_url, "transactions")
        if (row["app_id"], row["ledger_sequence"]) == (APP, entry["sequence"])
    ]
    assert (batch["sequence"], batch["tables"]) == (None, entry["tables"])
    assert sum(each["entries"] for each in batch["effects"]) == 3
    (app,) = [row for row in rows(spark, kafka_url, "apps") if row["app_id"] == APP]
    assert app["lag"] == 1 and app["lag_s"] >= 0
    topics = {row["name"]: row for row in rows(spark, kafka_url, "queues")}
    assert topics["state.in"]["logs"] == PARTITIONS and topics["state.in"]["oldest_s"] is None
    with pytest.raises(Exception, match="has no consumers of AMQP"):
        rows(spark, kafka_url, "consumers")
    assert APP in set(txmq.apps(kafka_url)["app_id"]) and "state.in" in set(txmq.queues(kafka_url)["name"])

    at = ("--url", kafka_url)
    assert main(["history", "show", f"{APP}/{entry['sequence']}", *at]) == 0
    text = capsys.readouterr().out
    assert f"batch {entry['sequence']} of app {APP}" in text and "published 3" in text and "version 0" in text
    assert main(["history", "list", "--last", "1000", *at, "--json"]) == 0
    assert f"{APP}/{entry['sequence']}" in [row["app"] for row in json.loads(capsys.readouterr().out)]
    log = next(name for name, span in entry["ranges"].items() if span["end"] > span["start"])
    assert main(["message", "show", log, str(entry["ranges"][log]["start"]), *at]) == 0
    text = capsys.readouterr().out
    assert "ready" in text and "published" in text and f"app {APP} batch {entry['batch_id']}" in text
    for wrong, why in (
        (["history", "show", "7"], "commits of Kafka have no numbers"),
        (["history", "show", f"{APP}/99"], "has no batch 99"),
        (["message", "show", "state.in", "0"], "is not a log of Kafka"),
    ):
        assert main([*wrong, *at]) == 1
        assert why in capsys.readouterr().err
