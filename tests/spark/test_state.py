"""The state of the broker as DataFrames: what each table shows, to whom, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.client.admin import RemoteAdmin
from broker_core.client.broker import BrokerClient
from broker_core.core import failpoint
from broker_core.core import password as passwords
from connector import state
from connector.batch.foreach_batch import BatchTransaction, transactional
from tests.spark.jobs import to_the_end
from txmq.cli import main

pytestmark = pytest.mark.spark

CHEAP = passwords.Cost(4)


def table(rig: Any, name: str, **options: Any) -> Any:
    chosen = {"url": rig.broker.url, "table": name, **options}
    return rig.spark.read.format("txmq").options(**chosen).load()


def rows(rig: Any, name: str, **options: Any) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in table(rig, name, **options).collect()]


def pipeline(rig: Any) -> None:
    """One micro-batch of the app ``app``: two of three messages of ``in`` go to ``out`` and into a table."""
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    to_the_end(rig.sink(rig.stream("in").select("body"), queue="out"))
    rig.publish("in", "c")


@pytest.mark.usefixtures("planned_once")
def test_each_table_shows_what_the_broker_has(rig: Any) -> None:
    pipeline(rig)
    by_name = {row["name"]: row for row in rows(rig, "queues")}
    assert set(by_name) == {"in", "out"}
    assert (by_name["in"]["messages"], by_name["in"]["next_offset"], by_name["in"]["owner"]) == (1, 3, "app")
    assert by_name["out"]["oldest_s"] >= by_name["in"]["oldest_s"] >= 0
    (app,) = rows(rig, "apps")
    assert (app["app_id"], app["queues"], app["lag"], app["unapplied"]) == ("app", ["in"], 1, 0)
    assert app["lag_s"] >= 0
    ledger = rows(rig, "ledger")
    (entry,) = [row for row in ledger if row["messages"]]
    assert (entry["app_id"], entry["ranges"]) == ("app", {"in": {"start": 0, "end": 2}})
    assert (entry["published"], entry["applied"], entry["tables"]) == (2, True, [])
    history = rows(rig, "transactions")
    assert [row["sequence"] for row in history] == sorted((row["sequence"] for row in history), reverse=True)
    (batch,) = [row for row in history if row["sequence"] == entry["transaction"]]
    assert (batch["app_id"], batch["listener"], batch["committed_at"]) == (
        "app",
        "spark",
        entry["committed_at"],
    )
    assert batch["ledger_sequence"] == entry["sequence"]
    assert {(each["effect"], each["queue"], each["entries"]) for each in batch["effects"]} == {
        ("consumed", "in", 2),
        ("published", "out", 2),
    }
    assert batch["effects"][0]["ranges"] == [{"start": 0, "end": 2}]
    (last,) = [row for row in history if row["effects"] and row["effects"][-1]["queue"] == "in"][:1]
    assert (last["app_id"], last["batch_id"]) == (None, None)
    assert rows(rig, "consumers") == []


@pytest.mark.usefixtures("interpreted")
def test_the_history_and_the_ledger_are_read_page_by_page(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    rig.declare("q")
    for number in range(7):
        rig.publish("q", str(number))
    monkeypatch.setattr(state, "PAGE", 3)
    admin = RemoteAdmin(BrokerClient(rig.broker.url))
    found = [each.sequence for page in state._pages("transactions", admin) for each in page]
    monkeypatch.undo()
    assert found == [row["sequence"] for row in rows(rig, "transactions")] and len(found) >= 7


def test_what_is_no_table_read_is_one_clear_error(rig: Any) -> None:
    refusals = {
        "allowed: transactions, ledger, queues, apps, consumers": lambda: table(rig, "nothing").schema,
        "option 'queue' .* is for .*not for a table read": lambda: table(rig, "queues", queue="q").schema,
        "which is no stream": lambda: (
            rig.spark.readStream.format("txmq")
            .options(url=rig.broker.url, table="queues")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", rig.checkpoint())
            .start()
            .awaitTermination()
        ),
        "option 'table' .*not for a batch write": lambda: (
            rig.spark.sql("SELECT 'a' AS body")
            .write.format("txmq")
            .options(url=rig.broker.url, table="queues")
            .mode("append")
            .save()
        ),
        "leave .schema\\(\\) out": lambda: (
            rig.spark.read.schema("a INT")
            .format("txmq")
            .options(url=rig.broker.url, table="queues")
            .load()
            .collect()
        ),
    }
    for text, read in refusals.items():
        with pytest.raises(Exception, match=text):
            read()


@pytest.mark.usefixtures("planned_once")
def test_each_user_sees_what_the_other_listeners_show(rig: Any) -> None:
    pipeline(rig)
    for user, tags in {"watcher": ("monitoring",), "plain": (), "other": ()}.items():
        rig.broker.accounts.add_user(user, passwords.hashed(user, CHEAP), tags)
    rig.broker.accounts.set_permissions("plain", "^$", "^$", "^out$")

    def seen(user: str, name: str) -> list[dict[str, Any]]:
        return rows(rig, name, user=user, password=user)

    assert [row["name"] for row in seen("watcher", "queues")] == ["in", "out"]
    assert [row["app_id"] for row in seen("watcher", "ledger")] == [
        row["app_id"] for row in seen("watcher", "apps") for _ in range(len(seen("watcher", "ledger")))
    ]
    for name in ("queues", "apps", "consumers"):
        with pytest.raises(Exception, match="needs the tag"):
            seen("plain", name)
    assert seen("plain", "ledger") == []
    effects = [each for row in seen("plain", "transactions") for each in row["effects"]]
    assert effects and {each["queue"] for each in effects} == {"out"}
    assert {row["app_id"] for row in seen("plain", "transactions")} == {None}
    with pytest.raises(Exception, match="refused"):
        seen("other", "ledger")


def test_a_column_of_a_table_is_what_its_schema_says(rig: Any) -> None:
    with rig.broker.channel() as channel:
        channel.queue_declare("q", arguments={"x-max-length": 10, "x-overflow": "reject-publish"})
    (row,) = rows(rig, "queues")
    assert {
        name: json.loads(text) if text.isdigit() else text for name, text in row["arguments"].items()
    } == {
        "x-max-length": 10,
        "x-overflow": "reject-publish",
    }
    assert (row["owner"], row["oldest_s"]) == (None, None)


def versions_of(table: str, spark: Any) -> dict[str, int]:
    """By the last word of the operation, as Delta says it."""
    history = spark.sql(f"DESCRIBE HISTORY delta.`{table}`").collect()
    return {row.operation: row.version for row in history}


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("fails", [False, True], ids=["", "the first apply is not marked"])
def test_a_transaction_says_the_version_of_each_table(
    rig: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    lake, other = str(tmp_path / "lake"), str(tmp_path / "other")
    for made in (lake, other):
        rig.spark.sql(f"CREATE TABLE delta.`{made}` (body STRING) USING delta")
    rig.declare("in")
    rig.publish("in", "a", "b")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        rows = batch.selectExpr("CAST(body AS STRING) AS body")
        tx.append(rows, lake)
        tx.append(rows.where("false"), other)
        tx.merge(rows, lake, "t.body = s.body", update={"body": "upper(s.body)"})

    def run() -> None:
        each = transactional(fn, url=rig.broker.url, app_id="app")
        writer = rig.stream("in").writeStream.foreachBatch(each)
        to_the_end(writer.option("checkpointLocation", rig.checkpoint()))

    if fails:
        failpoint.arm("foreach.applied.1", "raise")
        with pytest.raises(Exception, match="failpoint foreach"):
            run()
        failpoint.disarm()
        (waiting,) = rows(rig, "ledger")
        assert [each["version"] for each in waiting["tables"]] == [None] * len(waiting["tables"])
    run()
    found, lake = versions_of(lake, rig.spark), f"file:{lake}"
    (entry,) = rows(rig, "ledger")
    assert {
        (each["table"], each["operation"], each["version"]) for each in entry["tables"] if each["rows"]
    } == {
        (lake, "append", found["WRITE"]),
        (lake, "merge", found["MERGE"]),
    }
    (shown,) = [row for row in rows(rig, "transactions") if row["sequence"] == entry["transaction"]]
    assert shown["tables"] == entry["tables"]
    assert main(["history", "show", str(entry["transaction"]), "--url", rig.broker.url]) == 0
    text = capsys.readouterr().out
    assert f"append of 2 rows to {lake}, version {found['WRITE']}" in text
    assert f"merge of 2 rows to {lake}, version {found['MERGE']}" in text
