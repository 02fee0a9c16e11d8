"""Delta tables that outlive the broker's data directory: made anew, restored, or written by an earlier
version.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import CheckpointMismatch, NotApplied, cause
from broker_core.launcher import Broker
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.delta import jvm, log
from connector.delta.before.append_rows import append
from connector.delta.resolve import resolve
from connector.ledger.delta_ledger import DeltaLedger
from connector.tables.commit_id import CommitId, txn_app_id
from tests.spark.conftest import Rig
from tests.spark.pipelines import delta_rows, delta_transactions
from tests.spark.test_tables_changed import dies, run_sql
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]


class Place:
    """A data directory and a checkpoint that come and go, and a table and a Delta ledger that stay."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.root = spark, root
        self.table, self.ledger = root / "lake", root / "ledger"
        self.has_ledger = True
        self.rig = self.open()

    def open(self, checkpoint: str = "checkpoint") -> Rig:
        self.checkpoint = checkpoint
        self.rig = Rig(Broker.open(self.root / "broker"), self.spark, self.root)
        self.rig.declare("in")
        return self.rig

    def close(self) -> None:
        self.rig.broker.close()

    def run(self, *bodies: str, app_id: str = "app", **more: Any) -> None:
        """One query over ``bodies``, each of them a micro-batch."""

        def fn(batch: DataFrame, tx: BatchTransaction) -> None:
            tx.append(batch.selectExpr("CAST(body AS STRING) AS body"), str(self.table))

        for body in bodies:
            self.rig.publish("in", body)
        if self.has_ledger:
            more |= {"ledger": str(self.ledger), "ledger_sync": True}
        each = transactional(fn, url=self.rig.broker.url, app_id=app_id, **more)
        stream = self.rig.stream(
            "in", app_id, maxOffsetsPerTrigger=1, onNewCheckpoint=more.get("on_new_checkpoint", "fail")
        )
        writer = stream.writeStream.foreachBatch(each).option(
            "checkpointLocation", self.rig.checkpoint(self.checkpoint)
        )
        writer.trigger(availableNow=True).start().awaitTermination()

    def bodies(self) -> list[str]:
        return sorted(row["body"] for row in delta_rows(self.table))


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Iterator[Place]:
    made = Place(spark, tmp_path)
    yield made
    made.close()


@pytest.mark.soak
def test_the_rows_of_a_data_directory_made_anew_reach_a_table_that_was_kept(place: Place) -> None:
    place.run("a", "b")
    place.close()
    shutil.rmtree(place.root / "broker")
    shutil.rmtree(place.root / "checkpoint")
    place.open()
    with pytest.raises(Exception) as raised:  # the ledger that was kept says that it is not the beginning
        place.run("c")
    assert "has decided 2 batches" in str(cause(raised.value)) and place.bodies() == ["a", "b"]
    place.ledger = place.root / "another ledger"
    place.run("d")
    assert place.bodies() == ["a", "b", "c", "d"]
    assert sorted(row["batch_id"] for row in delta_rows(place.ledger)) == [0, 1]
    assert place.rig.broker.engine.unapplied("app") == [] and place.rig.broker.engine.unmirrored("app") == []


def behind_its_table(place: Place, *later: str) -> None:
    """The broker is restored to the time before these batches."""
    place.close()
    shutil.copytree(place.root / "broker", place.root / "backup", dirs_exist_ok=True)
    place.open(place.checkpoint)
    place.run(*later)
    place.close()
    shutil.rmtree(place.root / "broker")
    shutil.copytree(place.root / "backup", place.root / "broker")
    place.open(f"{place.checkpoint}.2")


def test_a_data_directory_restored_one_batch_older_stops_before_the_decision(place: Place) -> None:
    place.run("a")
    behind_its_table(place, "b")
    with pytest.raises(Exception) as raised:
        place.run("x", on_new_checkpoint="resume")
    error = cause(raised.value)
    assert isinstance(
        error, CheckpointMismatch
    ) and "holds batch 2 of app 'app', and the broker has decided only 1" in str(error)
    assert place.rig.bodies("in") == ["x"] and place.bodies() == ["a", "b"]  # nothing is consumed
    # somebody who decides in spite of it hears that the append was skipped, and so does who mirrors the
    # ledger
    engine = place.rig.broker.engine
    opened = engine.open_batch("app", "third", 0, "resume")
    decided = engine.commit_batch("app", "third", 0, opened.token, []).entry
    txn = txn_app_id("app", engine.identity(), resolve(place.spark, str(place.table)).location)
    with pytest.raises(CheckpointMismatch, match="Delta has skipped batch 2"):
        append(
            place.spark,
            resolve(place.spark, str(place.table)),
            lambda session: session.createDataFrame([("x",)], "body string"),
            CommitId.of(decided, txn),
        )
    told = r"holds batch 2 .*mirrored only 1: .*stays decided.*RESTORE TABLE \S*ledger` TO VERSION AS OF 0"
    with pytest.raises(CheckpointMismatch, match=f"{told}.* or name another ledger"):
        DeltaLedger(place.spark.newSession(), str(place.ledger), engine, "app").write_missing()
    DeltaLedger(place.spark.newSession(), str(place.root / "another"), engine, "app").write_missing()
    rows = delta_rows(place.root / "another")
    assert sorted((row["sequence"], row["token"]) for row in rows)[1] == (2, decided.token) and len(rows) == 2
    assert engine.unmirrored("app") == []


def test_by_sql_alone_a_batch_that_is_too_far_back_in_its_table_stops_the_query_after_the_decision(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Connect. Somebody has made as many commits since as are looked through."""
    place.has_ledger = False
    place.run("a")
    behind_its_table(place, "b")
    place.spark.sql(f"INSERT INTO delta.`{place.table}` VALUES ('of somebody')")
    monkeypatch.setattr(jvm, "only_sql", lambda _spark: True)
    monkeypatch.setattr(log, "SQL_COMMITS", 1)
    assert "Delta has skipped batch 2" in outcome(place, "x")
    assert place.rig.bodies("in") == [] and place.bodies() == ["a", "b", "of somebody"]
    assert [entry.sequence for entry in place.rig.broker.engine.unapplied("app")] == [2]


def outcome(place: Place, *bodies: str) -> str:
    """The error, or what there is without one."""
    try:
        place.run(*bodies, on_new_checkpoint="resume")
    except Exception as error:
        return str(error)
    engine, table = place.rig.broker.engine, resolve(place.spark, str(place.table))
    commits = [commit.metadata for commit in log.commits(place.spark, table)]
    return f"{place.bodies()}, {engine.last_entry('app')}, unapplied {engine.unapplied('app')}, {commits}"


def stopped(place: Place, *bodies: str) -> str:
    with pytest.raises(Exception) as raised:
        place.run(*bodies, on_new_checkpoint="resume")
    error = cause(raised.value)
    assert isinstance(error, CheckpointMismatch), raised.value
    return str(error)


def restores(text: str) -> list[str]:
    return re.findall(r"RESTORE TABLE \S+ TO VERSION AS OF \d+", text)


@pytest.mark.parametrize("altered", [False, True])
def test_a_batch_whose_files_were_cleared_before_data_and_table_were_put_back_is_had_as_the_error_says(
    place: Place, altered: bool
) -> None:
    """Its first append had to write the rows again, so the table does not have the files either."""
    place.has_ledger = False
    place.run("a")
    lake, set_property = f"delta.`{place.table}`", "ALTER TABLE {t} SET TBLPROPERTIES ('of' = '{n}')"
    failpoint.arm("foreach.decided", dies)
    with pytest.raises(Exception, match="dies here"):
        place.run("b")
    failpoint.disarm()
    place.close()
    shutil.copytree(place.root / "broker", place.root / "backup")
    place.open("second")
    run_sql(place, [set_property], t=lake, n="one")
    place.run("c", on_new_checkpoint="resume")
    assert place.bodies() == ["a", "b", "c"]
    place.close()
    shutil.rmtree(place.root / "broker")
    shutil.copytree(place.root / "backup", place.root / "broker")
    place.open("third")
    place.spark.sql(f"RESTORE TABLE {lake} TO VERSION AS OF 0")
    run_sql(place, [set_property] if altered else [], t=lake, n="two")
    with pytest.raises(Exception) as raised:
        place.run("c", on_new_checkpoint="resume")
    error = cause(raised.value)
    assert isinstance(error, NotApplied) and "data files with 1 decided rows are gone" in str(error)
    (restore,) = restores(str(error))
    place.spark.sql(restore)
    place.run(on_new_checkpoint="resume")
    assert place.bodies() == ["a", "b", "c"] and place.rig.broker.engine.unapplied("app") == []


@pytest.mark.parametrize("what", ["others write", "VACUUM"])
def test_who_does_what_the_error_of_a_newer_table_says_loses_no_row_of_others(
    place: Place, what: str
) -> None:
    place.has_ledger = False
    place.run("a")
    behind_its_table(place, "b", "c")
    lake = f"delta.`{place.table}`"
    if what == "others write":
        place.spark.sql(f"INSERT INTO {lake} VALUES ('of somebody')")
        text = stopped(place, "b", "c")
        assert "would also undo commits of others (1)" in text and restores(text) == []
    else:
        run_sql(place, [f"OPTIMIZE {lake}", f"VACUUM {lake} RETAIN 0 HOURS"])
        text = stopped(place, "b", "c")
        (restore,) = restores(text)  # maintenance is no row of others
        with pytest.raises(Exception, match="Not all files from version"):
            place.spark.sql(restore).collect()
    (release,) = re.findall(r"`txmq (app release .*?)`", text)
    options = ["--yes", "--url", place.rig.broker.url]
    assert main([*release.replace("QUEUE", "in").split(), *options]) == 0
    place.checkpoint = "of another app"
    place.run(app_id="another", on_new_checkpoint="resume")
    assert place.bodies() == sorted(["a", "b", "b", "c", "c"] + ["of somebody"] * (what == "others write"))
    assert place.rig.bodies("in") == []


def test_what_a_restore_would_take_of_others_is_counted_behind_the_first_later_batch(place: Place) -> None:
    """Neither what they wrote before it, nor what a RESTORE has undone."""
    place.has_ledger = False
    place.run("a")
    somebody = "INSERT INTO delta.`{t}` VALUES ('of somebody')"
    identity = place.rig.broker.engine.identity()

    def of_others() -> tuple[int | None, int]:
        table = resolve(place.spark, str(place.table))
        found = log.later(place.spark, table, txn_app_id("app", identity, table.location), 1)
        return found.version, found.of_others

    run_sql(place, [somebody], t=str(place.table))
    place.run("b")
    newest = of_others()
    assert newest[1] == 0 and newest[0] is not None
    run_sql(place, [somebody, "OPTIMIZE delta.`{t}`"], t=str(place.table))
    place.run("c")
    run_sql(place, ["DELETE FROM delta.`{t}` WHERE body = 'x'", somebody], t=str(place.table))
    assert of_others() == (newest[0], 2)
    run_sql(place, ["RESTORE TABLE delta.`{t}` TO VERSION AS OF {v}"], t=str(place.table), v=str(newest[0]))
    assert of_others() == newest
    run_sql(place, [somebody], t=str(place.table))
    assert of_others() == (newest[0], 1)


@pytest.mark.soak
def test_a_table_that_is_put_back_as_the_error_says_takes_the_batches_of_restored_data(place: Place) -> None:
    """The same for its ledger, with batches of other programs in between, and for a second time."""

    def put_back(text: str) -> None:
        (restore,) = restores(text)
        place.spark.sql(restore).collect()

    place.run("a")
    behind_its_table(place, "b", "c")
    text = stopped(place, "d")
    place.spark.sql(f"INSERT INTO delta.`{place.table}` VALUES ('of somebody')")
    assert restores(stopped(place)) == [] and place.bodies() == ["a", "b", "c", "of somebody"]
    put_back(text)  # somebody means it
    put_back(stopped(place))  # the ledger: the batch of d is decided, and in the table
    assert place.bodies() == ["a", "d"]
    for body in "ef":
        place.run(body, on_new_checkpoint="resume")
    assert place.bodies() == ["a", "d", "e", "f"]
    behind_its_table(place, "g")
    put_back(stopped(place, "h"))
    put_back(stopped(place))
    place.run("i", on_new_checkpoint="resume")
    assert place.bodies() == ["a", "d", "e", "f", "h", "i"]
    engine = place.rig.broker.engine
    assert engine.unapplied("app") == engine.unmirrored("app") == [] and place.rig.bodies("in") == []
    rows = delta_rows(place.ledger)
    assert sorted(row["sequence"] for row in rows) == [1, 2, 3, 4, 5, 6]


@pytest.mark.soak
def test_a_table_whose_older_copy_was_put_back_is_noticed_and_its_missing_batches_are_named_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "older copy" in record.getMessage()]
        caplog.clear()
        return found

    place.run("a")
    shutil.copytree(place.table, place.root / "older")
    place.run("b", "c")
    assert warnings() == []
    shutil.rmtree(place.table)
    shutil.move(place.root / "older", place.table)
    place.spark.sql(f"INSERT INTO delta.`{place.table}` VALUES ('of somebody')")
    place.run("d", "e")
    (told,) = warnings()
    assert "it lost the batches 2 to 3 of app 'app'" in told and "`txmq app ledger app`" in told
    assert place.bodies() == ["a", "d", "e", "of somebody"]
    place.run("f")
    place.spark.sql(f"RESTORE TABLE delta.`{place.table}` TO VERSION AS OF 0").collect()  # somebody means it
    place.run("g")
    place.spark.sql(f"DROP TABLE delta.`{place.table}`")
    place.run("h")
    assert warnings() == []


@pytest.mark.soak  # no version was released
def test_ledger_rows_that_an_earlier_version_wrote_are_not_written_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = place.rig.broker.engine
    for number in range(3):
        opened = engine.open_batch("app", "earlier", number, "fail")
        engine.commit_batch("app", "earlier", number, opened.token, [])
    ledger = DeltaLedger(place.spark.newSession(), str(place.ledger), engine, "app")
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_writer", ("", "txmq-ledger:app"))
        patch.setattr(engine, "mark_mirrored", lambda *_: None)
        for entry in engine.unmirrored("app")[:2]:
            ledger._append(place.spark, entry)
    DeltaLedger(place.spark.newSession(), str(place.ledger), engine, "app").write_missing()
    assert sorted(row["batch_id"] for row in delta_rows(place.ledger)) == [0, 1, 2]
    assert [app for app, _ in delta_transactions(place.ledger)] == ["txmq-ledger:app"] * 2 + [
        f"txmq-ledger:app@{engine.identity()}"
    ]
