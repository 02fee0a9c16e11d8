"""Appends as files: Delta writes them before the decision, invisible, and one commit adds them after it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

from broker_core.core import failpoint
from broker_core.core.errors import NotApplied, OptionError, cause
from broker_core.engine import StagedBranch
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.delta.before import append_rows
from connector.stream import staging
from tests.spark.conftest import settings
from tests.spark.pipelines import delta_actions, delta_rows, delta_transactions, hidden_files
from tests.spark.test_foreach_batch import run
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

BODY = "CAST(body AS STRING) AS v"


@pytest.fixture
def lake(rig: Any, tmp_path: Path) -> Path:
    """A table that exists, and a queue."""
    rig.declare("in", "out")
    rig.spark.sql(f"CREATE TABLE delta.`{tmp_path}/lake` (v STRING) USING delta")
    return tmp_path / "lake"


def append_to(table: Any) -> Callable[[DataFrame, BatchTransaction], None]:
    return lambda batch, tx: tx.append(batch.selectExpr(BODY), str(table))


def values(table: Path) -> list[str]:
    return sorted(row["v"] for row in delta_rows(table))


def data_files(table: Path) -> list[str]:
    return sorted(path.name for path in table.rglob("part-*.parquet") if "_txmq" not in path.parts)


def commits(table: Path) -> list[dict[str, Any]]:
    return [action["commitInfo"] for action in delta_actions(table) if "commitInfo" in action]


def run_each(rig: Any, fn: Callable[[DataFrame, BatchTransaction], None]) -> None:
    """One query, with a batch for each two messages."""
    each = transactional(fn, url=rig.broker.url, app_id="app")
    writer = rig.stream("in", maxOffsetsPerTrigger=2).writeStream.foreachBatch(each)
    writer = writer.option("checkpointLocation", rig.checkpoint()).trigger(availableNow=True)
    writer.start().awaitTermination()


# -- one job, one commit -------------------------------------------------------------------------------------


def test_the_files_of_an_append_are_written_once_before_the_decision_and_added_after_it(
    rig: Any, lake: Path
) -> None:
    rig.publish("in", "a", "b", "c")
    found: list[int] = []

    def staged(_name: str) -> None:
        found.extend((lake / name).stat().st_ino for name in hidden_files(lake))
        assert data_files(lake) == [] and len(commits(lake)) == 1

    failpoint.arm("foreach.staged", staged)
    run(rig, append_to(lake))
    assert values(lake) == ["a", "b", "c"] and hidden_files(lake) == []
    # the file of the table is the one that was written before the decision
    assert found and sorted(found) == sorted(path.stat().st_ino for path in lake.glob("part-*.parquet"))
    told = commits(lake)[-1]
    assert (told["operation"], told["operationParameters"]["mode"]) == ("WRITE", "Append")
    assert told["isBlindAppend"] and told["operationMetrics"]["numOutputRows"] == "3"
    assert json.loads(told["userMetadata"])["sequence"] == 1
    assert [version for _, version in delta_transactions(lake)] == [1]


def test_several_appends_to_one_table_are_one_commit_and_an_empty_one_is_none(rig: Any, lake: Path) -> None:
    rig.publish("in", "a", "b")

    def twice(batch: DataFrame, tx: BatchTransaction) -> None:
        append_to(lake)(batch, tx)
        append_to(f"{lake}/")(batch, tx)
        tx.append(batch.where("false").selectExpr(BODY), str(lake))

    run(rig, twice)
    assert values(lake) == ["a", "a", "b", "b"] and len(delta_transactions(lake)) == 1
    rig.publish("in", "c")
    run(rig, lambda batch, tx: tx.append(batch.where("false").selectExpr(BODY), str(lake)))
    assert len(delta_transactions(lake)) == 1 and rig.bodies("in") == [] and hidden_files(lake) == []


@pytest.mark.soak  # test_foreach_batch.py shows it of tx.publish
def test_the_batch_is_executed_once_unless_the_append_may_not_have_executed_it_whole(
    rig: Any, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[int] = []
    execute = staging.execute
    monkeypatch.setattr(staging, "execute", lambda frame: (executed.append(1), execute(frame)))
    ways: list[tuple[Callable[[DataFrame], DataFrame], int]] = [
        (lambda rows: rows, 0),  # as it is analysed
        (lambda rows: rows.where("length(body) > 0"), 0),  # as it was planned
        (lambda rows: rows.where("1 = 2"), 1),
        (lambda rows: rows.limit(1), 2),
    ]
    for way, times in ways:
        rig.publish("in", "a", "b")
        with settings(rig.spark, {"spark.sql.adaptive.enabled": "true"}):  # the plan is looked at
            run(rig, lambda batch, tx, way=way: tx.append(way(batch).selectExpr(BODY), str(lake)))
        assert len(executed) == times and rig.bodies("in") == []


def test_an_attempt_that_fails_or_loses_leaves_no_files_and_no_rows(rig: Any, lake: Path) -> None:
    rig.publish("in", "a")

    def fails(batch: DataFrame, tx: BatchTransaction) -> None:
        append_to(lake)(batch, tx)
        assert hidden_files(lake)
        raise KeyError("mine")

    with pytest.raises(Exception, match="mine"):
        run(rig, fails)
    assert hidden_files(lake) == [] and data_files(lake) == []

    def overtaken(batch: DataFrame, tx: BatchTransaction) -> None:
        """Another driver decides this batch meanwhile, without rows."""
        append_to(lake)(batch, tx)
        engine = rig.broker.engine
        token = engine.open_batch(tx.app_id, tx.query_id, tx.batch_id, "fail").token
        none: list[StagedBranch] = []
        engine.commit_batch(tx.app_id, tx.query_id, tx.batch_id, token, none)

    run(rig, overtaken)
    assert hidden_files(lake) == [] and values(lake) == []
    # what a driver that died has left is deleted behind the next decision
    left = next(filter(Path.is_dir, (lake / "_txmq").iterdir())) / "1.dead" / "0"
    later = left.parents[1] / "9.alive" / "0"
    for place in (left, later):
        place.mkdir(parents=True)
        (place / "part.parquet").write_text("")
    rig.publish("in", "b")
    run(rig, append_to(lake))
    assert values(lake) == ["b"] and not left.exists() and later.exists()


# -- kinds of tables -----------------------------------------------------------------------------------------

NAMED = "'delta.columnMapping.mode' = 'name'"
ROWS = [
    "CAST(offset AS INT) AS id",
    "CASE WHEN offset % 3 = 0 THEN NULL ELSE concat('p /%=é', offset % 2) END AS p",
    "named_struct('x', CAST(offset AS INT), 'y', array(named_struct('z', 'é'))) AS s",
    "map('k', CAST(offset AS DOUBLE)) AS m",
    "TIMESTAMP '2020-01-02 03:04:05.678901' AS t",
    "CAST(1.25 AS DECIMAL(10,2)) AS d",
    "DATE '0001-01-01' AS day",
]
COLUMNS = (
    "id INT, p STRING, s STRUCT<x: INT, y: ARRAY<STRUCT<z: STRING>>>, m MAP<STRING, DOUBLE>, t TIMESTAMP, "
    "d DECIMAL(10,2), day DATE"
)
# name: (columns, clauses)
TABLES: dict[str, tuple[str, str]] = {
    "partitioned": (
        COLUMNS,
        "PARTITIONED BY (p, day, t) TBLPROPERTIES ('delta.dataSkippingNumIndexedCols' = '0')",
    ),
    "featured": (
        COLUMNS,
        f"PARTITIONED BY (p) TBLPROPERTIES ({NAMED}, 'delta.enableDeletionVectors' = 'true', "
        "'delta.enableRowTracking' = 'true', 'delta.enableChangeDataFeed' = 'true', "
        "'delta.enableInCommitTimestamps' = 'true', 'delta.checkpointPolicy' = 'v2')",
    ),
    "clustered": (
        f"{COLUMNS}, g BIGINT GENERATED ALWAYS AS (CAST(id + 1 AS BIGINT)), short VARCHAR(3), other INT",
        "CLUSTER BY (id) TBLPROPERTIES ('delta.autoOptimize.autoCompact' = 'true', "
        "'delta.randomizeFilePrefixes' = 'true')",
    ),
}


def test_every_kind_of_table_gets_the_rows_of_an_append_from_files(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.declare("in")
    rig.publish("in", *"abcdefg")
    told: list[str] = []
    why = append_rows.why_rows

    def form(*table: Any) -> str:
        told.append(why(*table))
        return told[-1]

    monkeypatch.setattr(append_rows, "why_rows", form)
    for name, (columns, clauses) in TABLES.items():
        rig.spark.sql(f"CREATE OR REPLACE TABLE files_{name} ({columns}) USING delta {clauses}")
    # rows that were there before, and one that is hidden in its file
    rig.spark.sql("INSERT INTO files_featured (id, p) VALUES (100, 'x'), (101, 'x')")
    rig.spark.sql("DELETE FROM files_featured WHERE id = 100")

    def every(batch: DataFrame, tx: BatchTransaction) -> None:
        for name in TABLES:
            tx.append(batch.selectExpr(*ROWS), f"files_{name}", mergeSchema=name == "clustered")

    run(rig, every)
    assert rig.broker.engine.unapplied("app") == []
    assert told == [""] * len(TABLES), "a table did not take files"
    appended = rig.spark.range(7).withColumnRenamed("id", "offset").selectExpr(*ROWS)
    for name in TABLES:
        more = (
            ["CAST(id + 1 AS BIGINT) AS g", "NULL AS short", "NULL AS other"] if name == "clustered" else []
        )
        wanted = appended.selectExpr("*", *more).collect()
        rows = rig.spark.table(f"files_{name}").collect()
        there = [row["id"] for row in rows if row["id"] >= 100]
        assert there == ([101] if name == "featured" else [])
        rows = [row for row in rows if row["id"] < 100]
        assert sorted(map(str, rows)) == sorted(map(str, wanted)), name
    changes = rig.spark.sql("SELECT * FROM table_changes('files_featured', 3)").collect()
    assert [row["_change_type"] for row in changes] == ["insert"] * 7
    ids = rig.spark.sql("SELECT _metadata.row_id AS r FROM files_featured").collect()
    assert len({row["r"] for row in ids}) == 8


@pytest.mark.soak
def test_tables_that_take_no_files_take_rows_and_a_line_of_the_log_says_why(
    rig: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig.declare("in")
    rig.publish("in", "a")
    tables: dict[str, tuple[str, dict[str, Any], str]] = {
        "identified": ("v STRING, id BIGINT GENERATED ALWAYS AS IDENTITY", {}, "identity"),
        "defaulted": ("v STRING, w INT DEFAULT 7", {}, "has a default"),
        "padded": ("v STRING, c CHAR(3)", {}, "of type CHAR"),
        "widened": ("w INT", {"mergeSchema": True}, "adds columns"),
        "opted": ("v STRING", {"dataChange": True}, "the option dataChange"),
        "new": ("", {}, "does not exist yet"),
        "taking": ("v STRING", {"mergeSchema": True, "maxRecordsPerFile": 1}, "as files"),
    }
    for name, (columns, _, _) in tables.items():
        rig.spark.sql(f"DROP TABLE IF EXISTS form_{name}")
        if columns:
            more = "TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')"
            rig.spark.sql(f"CREATE TABLE form_{name} ({columns}) USING delta {more}")

    def every(batch: DataFrame, tx: BatchTransaction) -> None:
        for name, (_, options, _) in [*tables.items(), ("taking", tables["taking"])]:
            tx.append(batch.selectExpr(BODY), f"form_{name}", **options)

    with caplog.at_level(logging.INFO, "txmq"):
        run(rig, every)
    for name, (_, _, told) in tables.items():
        lines = [record.getMessage() for record in caplog.records if f"form_{name}'" in record.getMessage()]
        assert len(lines) == 1 and told in lines[0], (name, lines)
        rows = ["a", "a"] if name == "taking" else ["a"]
        assert [row["v"] for row in rig.rows_in(f"form_{name}")] == rows, name


# -- what happens between the steps --------------------------------------------------------------------------


def between(rig: Any, point: str, act: Callable[[], Any]) -> None:
    """``act`` once at a failpoint of the next run."""
    failpoint.disarm()
    failpoint.arm(point, lambda _name: act())


def test_a_vacuum_that_retains_nothing_takes_no_row_at_any_step(rig: Any, lake: Path) -> None:
    retain_nothing = {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}
    points = ("files.written", "foreach.staged", "foreach.decided", "adding.copied", "adding.committed")
    done: list[str] = []

    def vacuum(name: str) -> None:
        rig.spark.sql(f"VACUUM delta.`{lake}` RETAIN 0 HOURS")
        done.append(name)

    rig.publish("in", "a", "b")
    rig.publish("in", "c", "d")
    for point in points:
        failpoint.arm(point, vacuum, hit=2)  # of a batch that finds files of another one
    with settings(rig.spark, retain_nothing):
        run_each(rig, append_to(lake))
    assert done == list(points)
    assert values(lake) == ["a", "b", "c", "d"]
    assert hidden_files(lake) == [] and len(delta_transactions(lake)) == 2


def test_other_writers_and_optimize_between_the_steps_lose_and_double_nothing(rig: Any, lake: Path) -> None:
    points = ("foreach.decided", "adding.copied", "adding.committed", "adding.complete")

    def others(name: str) -> None:
        rig.spark.sql(f"INSERT INTO delta.`{lake}` VALUES ('{name}')")
        rig.spark.sql(f"OPTIMIZE delta.`{lake}`")

    rig.publish("in", "a", "b")
    rig.publish("in", "c", "d")
    for point in points:
        failpoint.arm(point, others, hit=2)
    run_each(rig, append_to(lake))
    assert values(lake) == sorted([*points, "a", "b", "c", "d"])


def test_two_drivers_that_add_the_same_files_at_the_same_time_add_them_once(rig: Any, lake: Path) -> None:
    """In the first batch of a process and in a later one: they ask Delta in two ways what the table has."""
    other = transactional(append_to(lake), url=rig.broker.url, app_id="app").apply
    overtaken: list[str] = []

    def overtake(name: str) -> None:
        other.decided(rig.spark, rig.broker.engine)
        overtaken.append(name)

    for number in range(2):
        rig.publish("in", f"{number}a", f"{number}b")
        failpoint.arm("adding.copied", overtake, hit=2 * number + 1)
    run_each(rig, append_to(lake))
    assert len(overtaken) == 2 and values(lake) == ["0a", "0b", "1a", "1b"]
    assert [version for _, version in delta_transactions(lake)] == [1, 2] and hidden_files(lake) == []


CHANGES: dict[str, str] = {
    "column": "ALTER TABLE {table} ADD COLUMN w INT",
    "property": "ALTER TABLE {table} SET TBLPROPERTIES ('delta.appendOnly' = 'false')",
    "mapping": f"ALTER TABLE {{table}} SET TBLPROPERTIES ({NAMED})",
    "replaced": "",  # another schema, and as if all of it were new
    "constraint": "ALTER TABLE {table} ADD CONSTRAINT short CHECK (length(v) < 9)",  # it refuses the rows
}


def change(rig: Any, name: str, lake: Path) -> None:
    if name == "column":  # and a driver was killed while it wrote the log of the hidden directory
        for append in (lake / "_txmq").glob("*/*/*"):
            (append / "_delta_log").mkdir()
            (append / "_delta_log" / f"{0:020d}.json").touch()
    if CHANGES[name]:
        rig.spark.sql(CHANGES[name].format(table=f"delta.`{lake}`"))
        return
    writer = rig.spark.createDataFrame([], "v STRING, p INT").write.format("delta").mode("overwrite")
    writer.option("overwriteSchema", True).save(str(lake))


@pytest.mark.parametrize(
    ("point", "changes"),
    [
        ("adding.started", ["column", "replaced", "constraint"]),
        pytest.param("adding.started", list(CHANGES), marks=pytest.mark.soak),
        ("adding.copied", ["constraint"]),
        pytest.param("adding.copied", ["column", "constraint"], marks=pytest.mark.soak),
    ],
)
def test_a_table_that_changes_before_the_commit_gets_the_rows_written_again(
    rig: Any, tmp_path: Path, point: str, changes: list[str]
) -> None:
    """Before the check of the shape, and behind it, where Delta finds the conflict."""
    rig.declare("in")
    rig.publish("in", "longer-than-9", "also-longer")
    lakes = {name: tmp_path / name for name in changes}
    for number, (name, lake) in enumerate(lakes.items()):
        rig.spark.sql(f"CREATE TABLE delta.`{lake}` (v STRING) USING delta")
        act = lambda _point, name=name, lake=lake: change(rig, name, lake)  # noqa: E731
        failpoint.arm(point, act, hit=number + 1)

    def every(batch: DataFrame, tx: BatchTransaction) -> None:
        for lake in lakes.values():
            append_to(lake)(batch, tx)

    with pytest.raises(Exception) as raised:
        run(rig, every)
    assert isinstance(cause(raised.value), NotApplied), str(raised.value)[:2000]
    assert "CHECK constraint short" in str(raised.value)
    failpoint.disarm()
    rig.spark.sql(f"ALTER TABLE delta.`{lakes['constraint']}` DROP CONSTRAINT short")
    run(rig, every)
    assert rig.broker.engine.unapplied("app") == []
    for name, lake in lakes.items():
        assert values(lake) == ["also-longer", "longer-than-9"], name
        assert hidden_files(lake) == []


def test_a_table_that_changes_between_its_check_and_its_files_takes_rows(rig: Any, lake: Path) -> None:
    rig.publish("in", "a", "b")
    between(rig, "files.resolved", lambda: rig.spark.sql(f"ALTER TABLE delta.`{lake}` ADD COLUMN w INT"))
    seen: list[bool] = []
    failpoint.arm("foreach.decided", lambda _name: seen.append(bool(hidden_files(lake))))
    run(rig, append_to(lake))
    assert seen == [False] and values(lake) == ["a", "b"]


@pytest.mark.soak  # test_tables_changed.py renames a table in the same step
def test_a_table_whose_name_moves_before_the_commit_gets_the_rows_at_its_new_place(
    rig: Any, tmp_path: Path
) -> None:
    rig.declare("in")
    rig.publish("in", "a", "b")
    create = "CREATE TABLE moved (v STRING) USING delta LOCATION '{place}'"
    rig.spark.sql("DROP TABLE IF EXISTS moved")
    rig.spark.sql(create.format(place=tmp_path / "old"))

    def move() -> None:
        rig.spark.sql("DROP TABLE moved")
        rig.spark.sql(create.format(place=tmp_path / "new"))

    between(rig, "foreach.decided", move)
    run(rig, append_to("moved"))
    assert values(tmp_path / "new") == ["a", "b"] and values(tmp_path / "old") == []
    assert hidden_files(tmp_path / "old") == [] and rig.broker.engine.unapplied("app") == []


def test_a_table_on_another_file_system_takes_rows(
    rig: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "held").mkdir()
    hadoop = rig.spark.sparkContext._jsc.hadoopConfiguration()
    hadoop.set("fs.viewfs.mounttable.test.link./held", f"file:{tmp_path / 'held'}")
    lake = "viewfs://test/held/lake"
    rig.spark.sql(f"CREATE TABLE delta.`{lake}` (v STRING) USING delta")
    rig.declare("in")
    rig.publish("in", "a", "b")
    with caplog.at_level(logging.INFO, "txmq"):
        run(rig, append_to(lake))
    assert "as rows" in caplog.text and "not on a disk" in caplog.text
    assert values(tmp_path / "held" / "lake") == ["a", "b"]


def test_a_table_dropped_with_its_files_stops_and_they_are_given_up_only_by_name(
    rig: Any, lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def skip(*more: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(
            [
                "app",
                "skip",
                "--yes",
                "app",
                "1",
                "--to",
                str(tmp_path / "skipped"),
                "--url",
                rig.broker.url,
                *more,
            ]
        )
        return code, "".join(capsys.readouterr())

    rig.publish("in", "a", "b")
    between(rig, "foreach.decided", lambda: shutil.rmtree(lake))
    with pytest.raises(Exception) as raised:
        run(rig, append_to(lake))
    error = cause(raised.value)
    assert isinstance(error, OptionError) and "was dropped" in str(error) and "2 rows wait" in str(error)
    assert "--lost" in str(error)
    # made again, it is another table, without the files
    rig.spark.sql(f"CREATE TABLE delta.`{lake}` (v STRING) USING delta")
    failpoint.disarm()
    with pytest.raises(Exception) as raised:
        run(rig, append_to(lake))
    error = cause(raised.value)
    assert isinstance(error, NotApplied) and "with 2 decided rows are gone" in str(error)
    assert main(["app", "unapplied", "app", "--url", rig.broker.url, "--json"]) == 0
    (waiting,) = json.loads(capsys.readouterr().out)
    assert (waiting["rows"], waiting["held"]) == (2, "files")
    code, told = skip()
    assert code != 0 and "are gone" in told and len(rig.broker.engine.unapplied("app")) == 1
    assert skip("--lost")[0] == 0 and rig.broker.engine.unapplied("app") == []
    rig.publish("in", "c")
    run(rig, append_to(lake))
    assert values(lake) == ["c"]


@pytest.mark.soak
def test_the_rows_of_files_are_skipped_to_parquet_with_the_names_and_types_of_the_append(
    rig: Any, tmp_path: Path
) -> None:
    rig.declare("in")
    rig.publish("in", *"abcdefg")
    columns, clauses = TABLES["featured"]
    lake = tmp_path / "lake"
    rig.spark.sql(f"CREATE TABLE delta.`{lake}` ({columns}) USING delta {clauses}")
    between(rig, "foreach.decided", lambda: failpoint.ACTIONS["raise"]("here"))
    with pytest.raises(Exception, match="failpoint here"):
        run(rig, lambda batch, tx: tx.append(batch.selectExpr(*ROWS), str(lake)))
    rows = rig.spark.read.format("delta").load(str(lake))
    assert rows.count() == 0
    arguments = [
        "app",
        "skip",
        "--yes",
        "app",
        "1",
        "--to",
        str(tmp_path / "skipped"),
        "--url",
        rig.broker.url,
    ]
    assert main(arguments) == 0
    (file,) = (tmp_path / "skipped").iterdir()
    assert pq.read_table(file).num_rows == 7
    rig.spark.read.parquet(str(file)).write.format("delta").mode("append").save(str(lake))
    found = sorted(rig.spark.read.format("delta").load(str(lake)).collect(), key=lambda row: row["id"])
    assert [row["id"] for row in found] == list(range(7))
    assert [row["p"] for row in found[:3]] == [None, "p /%=é1", "p /%=é0"]
    assert found[3]["s"]["y"][0]["z"] == "é" and found[3]["m"] == {"k": 3.0}
    assert str(found[3]["t"]) == "2020-01-02 03:04:05.678901" and str(found[3]["day"]) == "0001-01-01"
    failpoint.disarm()
    run(rig, append_to(lake))
    assert rig.broker.engine.unapplied("app") == []
