"""Sources that are not txmq: a batch is known by the offsets that Spark's offset log has for it, and an older checkpoint
that is put back loses nothing, in a classic session and on Spark Connect.

Not here: drivers that are killed (``tests/crash/test_spark_crash.py``), ranges of txmq (``test_connect.py``, S4).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from broker_core.engines import connect
from connector.batch.foreach_batch import transactional
from tests.spark.jobs import to_the_end
from tests.spark.pipelines import Driver, Pipeline, Served, delta_rows
from tests.spark.sessions import CONNECT
from tests.spark.successor import run_each

pytestmark = [pytest.mark.spark, pytest.mark.slow]

OLDER = "an older checkpoint was restored. Nothing was done"
UNTOLD = "of which offsets is not told here"
NOT_TOLD = "give transactional checkpoint=, the checkpointLocation of the query"


def errors_of(
    spark: SparkSession, scratch: Path, pipelines: list[Pipeline], session: str
) -> list[str | None]:
    if session == "connect":
        return Driver(scratch, pipelines, session={"connect": "true"}).require_done_each()
    return run_each(spark, pipelines)


def kept(pipeline: Pipeline, *before: list[str], **more: Any) -> Pipeline:
    """Another run of it, behind ``before``."""
    return replace(pipeline, before=list(before), **more)


def copied(of: Pipeline) -> list[str]:
    return ["copy", of.checkpoint, f"{of.checkpoint}-old"]


def restored(of: Pipeline) -> list[str]:
    return ["copy", f"{of.checkpoint}-old", of.checkpoint]


def files_before(*names: str) -> list[list[str]]:
    return [["file", name] for name in names]


def two_batches_behind(of: Pipeline) -> list[tuple[Pipeline, str]]:
    """Runs with the error of each: two batches were decided since the copy, and then the newest checkpoint comes back."""
    newest = f"{of.checkpoint}-new"
    return [
        (kept(of, *files_before("1", "2")), ""),
        (kept(of, copied(of), *files_before("3", "4")), ""),
        (kept(of, ["copy", of.checkpoint, newest], restored(of), *files_before("5", "6")), OLDER),
        (kept(of), OLDER),
        (kept(of, ["copy", newest, of.checkpoint]), ""),
    ]


# test_connect.py goes two batches back on Connect before a change lands
SESSIONS = ["connect"] if CONNECT else ["classic", pytest.param("connect", marks=pytest.mark.soak)]


@pytest.mark.parametrize("session", SESSIONS)
def test_row_16_an_older_checkpoint_of_files_stops_and_both_ways_on_that_the_error_names_lose_nothing(
    spark: SparkSession, tmp_path: Path, session: str
) -> None:
    """``behind``: ``two_batches_behind``; ``last``: one batch was decided since the copy,
    and a new checkpoint goes on with another directory; ``again``: Spark lost a commit alone, and replays the batch;
    ``both``: a queue beside the files; ``untold``: the session alone
    says where the checkpoint is.
    """
    served = Served(tmp_path / "broker")
    try:
        behind, last, again, untold = (
            Pipeline.create(name, served.url, tmp_path, source="files", tables=[])
            for name in ("behind", "last", "again", "untold")
        )
        both = Pipeline.create("both", served.url, tmp_path, ["m1"], source="both", tables=[])
        if session == "connect":
            behind = replace(behind, ledger="auto")

        new = {
            "checkpoint": f"{last.checkpoint}-new",
            "on_new_checkpoint": "resume",
            "lake": f"{last.lake}-new",
        }
        runs: list[tuple[Pipeline, str]] = [
            *two_batches_behind(behind),
            (kept(last, *files_before("1")), ""),
            (kept(last, copied(last), *files_before("2")), ""),
            (kept(last, restored(last), *files_before("3")), OLDER),
            (kept(last, *files_before("3"), **new), ""),
            (kept(again, *files_before("1", "2")), ""),
            (kept(again, ["remove", f"{again.checkpoint}/commits/1"], *files_before("3")), ""),
            (kept(both, *files_before("1")), ""),
            (kept(both, copied(both), *files_before("2"), ["send", "m2"]), ""),
            (kept(both, restored(both), *files_before("3")), OLDER),
            (
                kept(untold, *files_before("1", "2"), checkpoint_of="session"),
                NOT_TOLD if session == "connect" else "",
            ),
            (kept(untold, checkpoint_of="function"), ""),
        ]
        errors = errors_of(spark, tmp_path, [each for each, _ in runs], session)
        for (pipeline, wanted), error in zip(runs, errors, strict=True):
            assert (error is None) == (wanted == "") and wanted in (error or ""), (pipeline, error)
        behind.require_once(["1", "2", "3", "4", "5", "6"])
        assert [body.partition(":")[0] for body in last.published()] == ["1", "2", "3"]
        again.require_once(["1", "2", "3"])
        untold.require_once(["1", "2"])
        assert [body.partition(":")[0] for body in both.published()] == ["1", "2", "m1", "m2"]
        if session == "connect":
            assert len(delta_rows(Path(f"{behind.checkpoint}_ledger"))) == behind.entries()
    finally:
        served.stop()


Start = Callable[[DataFrame], DataStreamWriter]


class Files:
    """A directory that a query reads, one file a batch, and its checkpoint."""

    def __init__(self, rig: Any, directory: Path) -> None:
        self._rig = rig
        self.directory = directory
        self.checkpoint = Path(rig.checkpoint())
        directory.mkdir()

    def add(self, *names: str) -> None:
        for name in names:
            (self.directory / f".{name}").write_text(f"{name}\n")
            (self.directory / f".{name}").rename(self.directory / name)

    def stream(self) -> DataFrame:
        reader = self._rig.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        return reader.load(str(self.directory)).selectExpr("value AS body")

    def copy(self, source: str, to: str) -> None:
        shutil.rmtree(self._rig.directory / to, ignore_errors=True)
        shutil.copytree(self._rig.directory / source, self._rig.directory / to)


@pytest.fixture
def files(rig: Any, tmp_path: Path) -> Files:
    rig.declare("out")
    return Files(rig, tmp_path / "files")


def test_row_16_the_sink_stops_at_an_older_checkpoint_of_files_and_replays_a_batch_once(
    rig: Any, files: Files, planned_once: None
) -> None:
    def go() -> None:
        to_the_end(rig.sink(files.stream(), queue="out"))

    files.add("1", "2")
    go()
    files.copy("checkpoint", "older")
    (files.checkpoint / "commits" / "1").unlink()
    files.add("3")
    go()  # batch 1 is replayed, and answered ALREADY
    files.copy("checkpoint", "newest")
    files.copy("older", "checkpoint")
    files.add("4")
    for _ in range(2):
        with pytest.raises(Exception, match=OLDER):
            go()
    assert sorted(rig.bodies("out")) == ["1", "2", "3"]
    files.copy("newest", "checkpoint")
    go()
    assert sorted(rig.bodies("out")) == ["1", "2", "3", "4"]


def test_the_sink_of_files_whose_checkpoint_it_cannot_read_is_refused_and_both_ways_on_that_the_error_names_work(
    rig: Any, files: Files, planned_once: None
) -> None:
    """The location comes from the session, so that the sink is not told it."""
    where = "spark.sql.streaming.checkpointLocation"
    files.add("1", "2")

    def writer() -> DataStreamWriter:
        made = files.stream().writeStream.format("txmq").queryName("named")
        return made.options(url=rig.broker.url, appId="app", queue="out")

    rig.spark.conf.set(where, rig.checkpoint("all"))
    try:
        with pytest.raises(Exception, match="the option checkpointLocation on a disk of the driver"):
            to_the_end(writer())
        assert rig.bodies("out") == []
        to_the_end(writer().option("checkpointLocation", str(Path(rig.checkpoint("all")) / "named")))
        assert sorted(rig.bodies("out")) == ["1", "2"]

        def go(**where: str) -> None:
            each = transactional(
                lambda batch, tx: tx.publish(batch, queue="out"), url=rig.broker.url, app_id="other", **where
            )
            to_the_end(files.stream().writeStream.foreachBatch(each).queryName("another"))

        if CONNECT:
            with pytest.raises(Exception, match=NOT_TOLD):
                go()
        go(**({"checkpoint": str(Path(rig.checkpoint("all")) / "another")} if CONNECT else {}))
        assert sorted(rig.bodies("out")) == ["1", "1", "2", "2"]
    finally:
        rig.spark.conf.unset(where)


def test_row_16_a_copy_of_a_checkpoint_in_another_place_stops_an_object_that_has_run_its_query(
    rig: Any, tmp_path: Path
) -> None:
    """The query is the same by its id, and the offset log is that of the copy."""
    rig.declare("out")
    files, checkpoint, copy = tmp_path / "files", tmp_path / "checkpoint", tmp_path / "copy"
    files.mkdir()
    each = transactional(
        lambda batch, tx: tx.publish(batch.selectExpr("value AS body"), queue="out"),
        url=rig.broker.url,
        app_id="app",
    )

    def start(place: Path, name: str) -> None:
        (files / name).write_text(name)
        writer = rig.spark.readStream.text(str(files)).writeStream.foreachBatch(each)
        to_the_end(writer.option("checkpointLocation", str(place)))

    start(checkpoint, "1")
    shutil.copytree(checkpoint, copy)
    start(checkpoint, "2")
    with pytest.raises(Exception, match=OLDER):
        start(copy, "3")
    start(checkpoint, "4")
    assert sorted(rig.bodies("out")) == ["1", "2", "3", "4"]


def test_row_16_the_sink_that_reads_files_beside_a_queue_and_not_its_checkpoint_loses_no_row(
    rig: Any, files: Files, planned_once: None
) -> None:
    """The location comes from the session. Of the older checkpoints, ``last`` lacks exactly the last batch, so that Spark
    gives its number and its range of the queue to another file. Both ways on that the errors name lose nothing.
    """
    where, checkpoint = "spark.sql.streaming.checkpointLocation", Path(rig.checkpoint("all")) / "named"
    rig.declare("in")

    def go(*names: str, **options: object) -> None:
        files.add(*names)
        rows = rig.stream("in").selectExpr("CAST(body AS STRING) AS body").union(files.stream())
        made = rows.writeStream.format("txmq").queryName("named")
        to_the_end(made.options(url=rig.broker.url, appId="app", queue="out", **options))

    rig.spark.conf.set(where, rig.checkpoint("all"))
    try:
        rig.publish("in", "a")
        go("1")
        files.copy("all/named", "older")
        rig.publish("in", "b")
        go("2")
        last = max(int(each.name) for each in (checkpoint / "commits").glob("[0-9]*"))
        (checkpoint / "commits" / str(last)).unlink()
        rig.publish("in", "c")
        go("3")
        wanted = ["1", "2", "3", "a", "b", "c"]
        assert sorted(rig.bodies("out")) == wanted and rig.bodies("in") == []
        files.copy("all/named", "last")
        rig.publish("in", "d")
        go("4")
        files.copy("all/named", "newest")
        wanted = sorted([*wanted, "4", "d"])
        rig.publish("in", "e")
        for older in ("older", "last"):
            files.copy(older, "all/named")
            for _ in range(2):
                with pytest.raises(Exception, match=OLDER):
                    go(f"5{older}")
            assert sorted(rig.bodies("out")) == wanted and rig.bodies("in") == ["e"]
        files.copy("newest", "all/named")
        with pytest.raises(Exception, match="the option checkpointLocation on a disk of the driver"):
            go()  # one file beside the message, and one in a batch of its own
        assert len(rig.bodies("out")) == len(wanted) + 2 and rig.bodies("in") == []
        rig.spark.conf.unset(where)
        go("6", checkpointLocation=checkpoint)
        wanted = sorted([*wanted, "5last", "5older", "6", "e"])
        assert sorted(rig.bodies("out")) == wanted
    finally:
        rig.spark.conf.unset(where)


@pytest.mark.soak  # test_resume.py has the rule
@pytest.mark.parametrize("session", SESSIONS)
def test_c7_an_app_of_files_goes_on_behind_its_ledger_with_a_new_checkpoint_and_a_later_start(
    spark: SparkSession, tmp_path: Path, session: str
) -> None:
    """Spark has not committed the last batch, which the engine knows from the ledger alone."""
    served = Served(tmp_path / "broker")
    try:
        app = Pipeline.create(
            "app",
            served.url,
            tmp_path,
            source="files",
            tables=[],
            ledger=str(tmp_path / "ledger"),
            ledger_sync=True,
        )
        (error,) = errors_of(spark, tmp_path, [kept(app, ["file", "1"], ["file", "2"])], session)
        assert error is None, error
        with closing(connect(served.url)) as engine:
            behind = engine.identity("app")
        served.stop()
        shutil.rmtree(tmp_path / "broker")
        served.start()
        app.declare()
        more = {"on_new_checkpoint": "resume", "resume_from": behind}
        new = {"checkpoint": f"{app.checkpoint}-new", "lake": f"{app.lake}-new"}
        runs = [
            kept(app, ["remove", f"{app.checkpoint}/commits/1"], ["file", "3"], **more),
            kept(app, ["file", "3"], **more, **new),
        ]
        first, second = errors_of(spark, tmp_path, runs, session)
        assert first is not None and UNTOLD in first and second is None, (first, second)
        assert [body.partition(":")[0] for body in app.published()] == ["3"]
        assert app.entries() == 3
    finally:
        served.stop()
