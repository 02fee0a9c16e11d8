"""`txmq app skip --refused`: what a table refuses after the decision goes to a file or a queue, and the rest to the
table, each row once, wherever the driver dies.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from broker_core.core import failpoint
from broker_core.core.errors import NotApplied, OptionError, QueueNotFound, cause
from broker_core.engine import Engine
from broker_core.engines import connect
from broker_core.message.properties import Properties
from connector.batch.foreach_batch import BatchTransaction
from tests.spark.kafka_pipelines import KafkaPipeline
from tests.spark.pipelines import Driver, Pipeline, delta_rows, empty_table
from tests.spark.successor import run_each
from tests.spark.test_append_checks import run
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("planned_once")]

STEPS = ["rows.evaluated", "rows.written", "rows.applied", "foreach.applied.1"]


def require_stopped(rig: Any, fn: Any, kind: type[Exception]) -> str:
    with pytest.raises(Exception) as raised:
        run(rig, fn)
    error = cause(raised.value)
    assert isinstance(error, kind), raised.value
    return str(error)


def require_dead(rig: Any, fn: Any, step: str) -> None:
    """The driver reaches this step, and dies there."""
    failpoint.arm(step, "raise")
    try:
        with pytest.raises(Exception, match=f"failpoint {step}"):
            run(rig, fn)
    finally:
        failpoint.disarm()


def refused(directory: Path) -> list[tuple[str, str]]:
    """(value, reason) of the rows in the files."""
    rows = [row for file in sorted(directory.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert not list(directory.glob(".*")), "nothing unfinished is left"
    return sorted((row["v"], row["__txmq_reason"]) for row in rows)


def test_only_the_rows_that_a_table_refuses_are_skipped_each_once_wherever_the_driver_dies(
    rig: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An append of files and a merge of rows, of which each table refuses other rows after the decision; and a table
    that refuses none.
    """
    files, merged, sound, skipped = "kept_files", "kept_merge", "kept_sound", tmp_path / "skipped"
    for table in (files, merged, sound):
        rig.spark.sql(f"CREATE OR REPLACE TABLE {table} (v STRING) USING delta")
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        rows = batch.selectExpr("CAST(body AS STRING) AS v")
        tx.append(rows, files)
        tx.merge(rows, merged, "t.v = s.v", insert=True)
        tx.append(rows, sound)

    def altered(batch: DataFrame, tx: BatchTransaction) -> None:
        fn(batch, tx)
        rig.spark.sql(f"ALTER TABLE {files} ADD CONSTRAINT one CHECK (v NOT IN ('b', 'g'))")
        rig.spark.sql(f"ALTER TABLE {merged} ADD CONSTRAINT two CHECK (v <> 'c')")

    rig.publish("in", *"abcdefg")
    assert "does not take its rows" in require_stopped(rig, altered, NotApplied)
    told = main(
        [
            "app",
            "skip",
            "--yes",
            "app",
            "1",
            "--refused",
            "--to",
            str(skipped),
            "--url",
            rig.broker.url,
            "--json",
        ]
    )
    assert told == 0 and json.loads(capsys.readouterr().out.splitlines()[-1])["rows_to"] == str(skipped)
    rig.publish("in", "h")
    for step in STEPS:
        require_dead(rig, fn, step)
        if step == "rows.written":  # what is in the file stays there, whatever becomes of the table
            rig.spark.sql(f"ALTER TABLE {files} DROP CONSTRAINT one")
    run(rig, fn)
    assert sorted(row["v"] for row in rig.spark.table(files).collect()) == list("acdefh")
    assert sorted(row["v"] for row in rig.spark.table(merged).collect()) == list("abdefgh")
    assert sorted(row["v"] for row in rig.spark.table(sound).collect()) == list("abcdefgh")
    found = refused(skipped)
    assert [value for value, _ in found] == ["b", "c", "g"]
    assert "CHECK constraint one" in found[0][1] and "CHECK constraint two" in found[1][1]
    assert rig.broker.engine.unapplied("app") == [] and rig.bodies("in") == []


def test_no_row_of_an_overwrite_is_left_out_because_that_would_delete_what_it_replaces(
    rig: Any, tmp_path: Path
) -> None:
    rig.spark.sql("CREATE OR REPLACE TABLE kept_over (v STRING, w STRING) USING delta")
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.overwrite(batch.selectExpr("CAST(body AS STRING) AS v", "'w' AS w"), "kept_over", "w = 'w'")

    def altered(batch: DataFrame, tx: BatchTransaction) -> None:
        fn(batch, tx)
        batch.sparkSession.sql("ALTER TABLE kept_over ADD CONSTRAINT one CHECK (v <> 'b')")

    rig.publish("in", "a", "b")
    require_stopped(rig, altered, NotApplied)
    (part,) = rig.broker.engine.unapplied("app")[0].to_apply
    rig.broker.engine.note("app", 1, part.branches, "rows_to", str(tmp_path / "skipped"))
    assert "deletes rows that its source lacks" in require_stopped(rig, fn, OptionError)
    assert not (tmp_path / "skipped").exists()


def test_where_a_row_of_the_table_decides_what_it_refuses_all_rows_are_skipped_as_the_error_says(
    rig: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the given rows alone one violates another constraint: it is left out, and the merge is refused still."""
    rig.spark.sql("CREATE OR REPLACE TABLE kept_sums (v STRING, n INT) USING delta")
    rig.spark.sql("INSERT INTO kept_sums VALUES ('a', 30)")
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        rows = batch.selectExpr("CAST(body AS STRING) AS v", "1 AS n")
        tx.merge(rows, "kept_sums", "t.v = s.v", update={"n": "t.n + s.n"}, insert=True)

    def altered(batch: DataFrame, tx: BatchTransaction) -> None:
        fn(batch, tx)
        rig.spark.sql("ALTER TABLE kept_sums ADD CONSTRAINT one CHECK (n < 31)")
        rig.spark.sql("ALTER TABLE kept_sums ADD CONSTRAINT two CHECK (v <> 'c')")

    def skip(*words: str) -> None:
        assert main(["app", "skip", "--yes", "app", "1", *words, "--url", rig.broker.url]) == 0

    rig.publish("in", *"abc")
    assert "(with --refused only those" in require_stopped(rig, altered, NotApplied)
    skip("--refused", "--to", str(tmp_path / "refused"))
    text = require_stopped(rig, fn, NotApplied)
    assert "can leave out no other row" in text and text.endswith(
        "`txmq app skip APP SEQUENCE --to DIR --table TABLE`"
    )
    assert [value for value, _ in refused(tmp_path / "refused")] == ["c"]
    skip("--to", str(tmp_path / "skipped"), "--table", "spark_catalog.default.kept_sums")
    rig.publish("in", "d")
    run(rig, fn)
    assert sorted(map(tuple, rig.spark.table("kept_sums").collect())) == [("a", 30), ("d", 1)]
    (file,) = (tmp_path / "skipped").glob("*.parquet")
    assert sorted(pq.read_table(file).column("v").to_pylist()) == list("abc")
    assert rig.broker.engine.unapplied("app") == [] and rig.bodies("in") == []


def test_a_table_that_lost_a_column_of_decided_rows_is_to_be_repaired(rig: Any, tmp_path: Path) -> None:
    by_name = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    rig.spark.sql(f"CREATE OR REPLACE TABLE kept_lost (v STRING, w STRING) USING delta {by_name}")
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr("CAST(body AS STRING) AS v", "'w' AS w"), "kept_lost")

    def altered(batch: DataFrame, tx: BatchTransaction) -> None:
        fn(batch, tx)
        rig.spark.sql("ALTER TABLE kept_lost RENAME COLUMN w TO x")

    rig.publish("in", "a")
    require_stopped(rig, altered, NotApplied)
    (part,) = rig.broker.engine.unapplied("app")[0].to_apply
    rig.broker.engine.note("app", 1, part.branches, "rows_to", str(tmp_path / "skipped"))
    text = require_stopped(rig, fn, NotApplied)
    assert "has no column 'w', of batch 1" in text and "repair the table and start the query again" in text
    rig.spark.sql("ALTER TABLE kept_lost RENAME COLUMN x TO w")
    run(rig, fn)
    assert [tuple(row) for row in rig.spark.table("kept_lost").collect()] == [("a", "w")]


# app -> the failpoint at which its driver is killed
KILLED = {
    "file-evaluated": "rows.evaluated",
    "file-written": "rows.written",
    "file-applied": "rows.applied",
    "queue-evaluated": "rows.evaluated",
    "queue-staged": "rows.staged",
    "queue-published": "rows.written",
    "queue-applied": "rows.applied",
    "queue-marking": "foreach.applied.0",
}
ON_KAFKA = "queue-staged", "queue-published"  # the others are soak
SELDOM = {
    "file-evaluated",
    "file-applied",
    "queue-evaluated",
    "queue-applied",
    "queue-marking",
}  # so are these


def letters(engine: Engine, queue: str) -> list[tuple[str, dict[str, Any]]]:
    """(body, headers) of what is in a queue."""
    slices = [(log, one.start, one.end) for log, one in engine.available(engine.logs([queue])).items()]
    rows = [row for batch in engine.browse(slices) for row in batch.to_pylist()]
    return sorted((row["body"].decode(), dict(Properties.decode(row["properties"]).headers)) for row in rows)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("engine", "chosen"),
    [
        pytest.param("embedded", [step for step in KILLED if step not in SELDOM], id="embedded"),
        pytest.param("embedded", [*KILLED], id="embedded, every step", marks=pytest.mark.soak),
        pytest.param("kafka", [*ON_KAFKA], id="kafka", marks=pytest.mark.soak),
        pytest.param("kafka", [*KILLED], id="kafka, every step", marks=pytest.mark.soak),
    ],
)
def test_each_row_is_once_in_the_table_or_where_refused_ones_go_wherever_the_driver_is_killed(
    rig: Any, tmp_path: Path, engine: str, chosen: list[str], request: pytest.FixtureRequest
) -> None:
    """Each app has its own batch, half of which its table refuses after the decision; ``SIGKILL`` ends the driver
    at another step of each, and a new one goes on with all of them. ``SELDOM`` are killed in ``make soak``.
    """
    kind: type[Pipeline] = Pipeline
    if engine == "kafka":
        kind = KafkaPipeline
        rig = type(rig)(SimpleNamespace(url=request.getfixturevalue("kafka_url")), rig.spark, tmp_path)
    prefix, url = f"{engine}-{len(chosen)}", rig.broker.url
    apps = {step: kind.create(f"{prefix}-{step}", url, tmp_path, "abcd", fn="nothing") for step in chosen}
    for step, pipeline in apps.items():
        table = Path(pipeline.lake) / "first"
        empty_table(table, {"v": "string"})

        def altered(batch: DataFrame, tx: BatchTransaction, table: Path = table) -> None:
            tx.append(batch.selectExpr("CAST(body AS STRING) AS v"), str(table))
            altering = f"ALTER TABLE delta.`{table}` ADD CONSTRAINT one CHECK (v NOT IN ('b', 'd'))"
            batch.sparkSession.sql(altering)

        with pytest.raises(Exception, match="does not take its rows"):
            run(rig, altered, app_id=pipeline.app, queue=pipeline.queue, checkpoint=pipeline.checkpoint)
        where = (
            ["--queue", pipeline.out]
            if step.startswith("queue")
            else ["--to", str(tmp_path / f"{step}.refused")]
        )
        assert main(["app", "skip", "--yes", pipeline.app, "1", "--refused", *where, "--url", url]) == 0
    dying = [(KILLED[step], 1) for step in apps]
    Driver(tmp_path, list(apps.values()), at=dying).require_killed()
    for step in apps.keys() & {"file-written", "queue-published"}:
        # what was decided stays, whatever becomes of the table
        rig.spark.sql(f"ALTER TABLE delta.`{apps[step].lake}/first` DROP CONSTRAINT one")
    assert set(run_each(rig.spark, apps.values())) == {None}
    reader = connect(url)
    for step, pipeline in apps.items():
        table = Path(pipeline.lake) / "first"
        assert sorted(row["v"] for row in delta_rows(table)) == ["a", "c"], step
        assert reader.unapplied(pipeline.app) == [], step
        if step.startswith("file"):
            assert [value for value, _ in refused(tmp_path / f"{step}.refused")] == ["b", "d"], step
            continue
        (first, headers), (second, _) = letters(reader, pipeline.out)
        assert (first, second) == ('{"v":"b"}', '{"v":"d"}'), step
        assert "CHECK constraint one" in headers["x-reject-reason"]
        told = [headers[f"x-reject-{name}"] for name in ("app", "operation", "sequence", "batch")]
        assert told == [pipeline.app, "append", 1, 0] and headers["x-reject-table"].endswith(str(table))
        assert headers["x-reject-row"] in range(4)  # in the order of the partitions
    if engine == "embedded":
        left = [(each.app_id, each.rows) for each in reader.staged_batches()]
        assert left == [("", 2)], "of queue-staged"


@pytest.mark.soak
def test_rows_go_to_a_queue_that_is_there_or_the_command_is_refused(
    rig: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.spark.sql("CREATE OR REPLACE TABLE kept_queue (v STRING) USING delta")
    rig.declare("in", "gone")

    def altered(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.merge(batch.selectExpr("CAST(body AS STRING) AS v"), "kept_queue", "t.v = s.v", insert=True)
        rig.spark.sql("ALTER TABLE kept_queue ADD CONSTRAINT one CHECK (v <> 'b')")

    rig.publish("in", "a", "b")
    require_stopped(rig, altered, NotApplied)
    skip = ["app", "skip", "--yes", "app", "1", "--url", rig.broker.url]
    assert main([*skip, "--refused", "--queue", "nowhere"]) != 0 and "nowhere" in capsys.readouterr().err
    assert main([*skip, "--queue", "gone"]) != 0 and "--queue is for --refused" in capsys.readouterr().err
    assert main([*skip, "--refused", "--queue", "gone", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows_to"] == "queue:gone"
    with rig.broker.channel() as channel:
        channel.queue_delete("gone")
    assert "no queue 'gone' in vhost '/': declare it first" in require_stopped(rig, altered, QueueNotFound)
    assert rig.rows_in("kept_queue") == [] and len(rig.broker.engine.unapplied("app")) == 1
    rig.declare("gone")
    run(rig, altered)
    assert [row["v"] for row in rig.rows_in("kept_queue")] == ["a"]
    ((body, headers),) = letters(rig.broker.engine, "gone")
    assert (body, headers["x-reject-operation"]) == ('{"v":"b"}', "merge")
