"""Merges, deletes and overwrites of a micro-batch: what they do, in which order, once; and what is refused. That each
is one commit, also beside another driver: ``tests/contract/tables``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from delta.tables import DeltaTable
from pyspark.sql import DataFrame

from broker_core.core import failpoint
from broker_core.core.errors import NotApplied, OptionError, cause
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.stream import staging
from connector.tables.when import When
from tests.spark.conftest import settings
from tests.spark.pipelines import delta_actions, delta_transactions
from tests.spark.test_foreach_batch import run
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

# of the messages "a1", "b2", ...: id, n, and a flag
ROWS = [
    "substr(CAST(body AS STRING), 1, 1) AS id",
    "CAST(substr(CAST(body AS STRING), 2, 1) AS INT) AS n",
    "length(body) > 2 AS gone",
]


@pytest.fixture
def lake(rig: Any, tmp_path: Path) -> str:
    """A table with the rows a 10, b 20, z 30, and a queue."""
    rig.declare("in")
    return made(rig, tmp_path / "lake")


ROWS_BEFORE = "VALUES ('a', 10, NULL), ('b', 20, NULL), ('z', 30, NULL)"


def made(rig: Any, table: Path | str, columns: str = "", more: str = "") -> str:
    name = f"delta.`{table}`"
    if not columns:  # one commit, one file
        select = (
            f"/*+ COALESCE(1) */ id, n, CAST(gone AS BOOLEAN) AS gone FROM {ROWS_BEFORE} AS held(id, n, gone)"
        )
        rig.spark.sql(f"CREATE TABLE {name} USING delta AS SELECT {select}")
        return str(table)
    rig.spark.sql(f"CREATE TABLE {name} ({columns}) USING delta {more}")
    rig.spark.sql(f"INSERT INTO {name} (id, n, gone) {ROWS_BEFORE}")
    return str(table)


def rows(batch: DataFrame) -> DataFrame:
    return batch.selectExpr(*ROWS)


def held(rig: Any, table: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row)[:2] for row in rig.spark.read.format("delta").load(table).collect())


def steps_of(table: str) -> list[tuple[int, str]]:
    """(version, step) of the commits of txmq, in order."""
    return [(version, app.rpartition("/")[2][8:]) for app, version in delta_transactions(Path(table))]


CLAUSES = [
    When.matched("s.gone").delete(),
    When.matched("s.n < t.n -- only smaller ones").update({"n": "t.n + s.n"}),
    When.matched().update(),
    When.not_matched("NOT s.gone").insert({"id": "upper(s.id)", "n": "s.n"}),
    When.not_matched_by_source("t.n > 25").delete(),
    When.not_matched_by_source().update({"n": "t.n + 1000"}),
]


def test_every_operation_does_what_delta_does_with_the_same_rows(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[DataFrame] = []
    execute = staging.execute
    monkeypatch.setattr(staging, "execute", lambda frame: (again.append(frame), execute(frame)))
    rig.declare("in")
    rig.publish("in", "a1", "b9", "c3", "d4-gone")
    ours, deltas, evolving, place = (
        made(rig, tmp_path / name) for name in ("ours", "deltas", "grows", "named")
    )
    rig.spark.sql("DROP TABLE IF EXISTS merged_by_name")
    rig.spark.sql(f"CREATE TABLE merged_by_name USING delta LOCATION '{place}'")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        given, on = rows(batch), "t.id = s.id"
        tx.merge(given, ours, on, clauses=CLAUSES, keys=["ID"])
        wider = given.selectExpr("*", "n AS m")
        tx.merge(wider, evolving, on, update=True, insert={"id": "s.id"}, delete="s.gone", merge_schema=True)
        tx.delete(given.selectExpr("n * 10 AS tens"), evolving, "t.n >= s.tens AND t.n < s.tens + 5")
        nothing = given.where("false")
        gone = When.not_matched_by_source("t.id = 'd'").delete()
        tx.merge(nothing, evolving, on, clauses=[When.matched().update({"n": "0"}), gone])
        tx.merge(nothing, evolving, on, update={"n": "0"})  # no effect: no commit
        tx.merge(given, "merged_by_name", on, insert=True)
        tx.overwrite(nothing, "merged_by_name", "id = 'z'")
        tx.overwrite(given.selectExpr("id || id AS id", "CAST(n AS BIGINT) AS n"), "MERGED_by_name", "n < 10")

    with settings(rig.spark, {"spark.sql.adaptive.enabled": "true"}):  # the plan is looked at
        run(rig, fn)
    assert again == [], "the comparison of the keys has executed the batch whole"
    given = rig.spark.createDataFrame(
        [("a", 1, False), ("b", 9, False), ("c", 3, False), ("d", 4, True)], "id STRING, n INT, gone BOOLEAN"
    )
    (
        DeltaTable.forPath(rig.spark, deltas)
        .alias("t")
        .merge(given.alias("s"), "t.id = s.id")
        .whenMatchedDelete("s.gone")
        .whenMatchedUpdate("s.n < t.n", {"n": "t.n + s.n"})
        .whenMatchedUpdateAll()
        .whenNotMatchedInsert("NOT s.gone", {"id": "upper(s.id)", "n": "s.n"})
        .whenNotMatchedBySourceDelete("t.n > 25")
        .whenNotMatchedBySourceUpdate(set={"n": "t.n + 1000"})
        .execute()
    )
    assert held(rig, ours) == held(rig, deltas) == [("C", 3), ("a", 11), ("b", 29)]
    grown = rig.spark.read.format("delta").load(evolving).select("id", "n", "m").collect()
    assert sorted(map(tuple, grown), key=str) == [
        ("a", 1, 1),
        ("b", 9, 9),
        ("c", None, None),
    ]
    assert steps_of(evolving) == [(1, step) for step in STEPS[:3]]
    doubled = [("aa", 1), ("bb", 9), ("cc", 3), ("dd", 4)]
    assert held(rig, place) == sorted([("a", 10), ("b", 20), *doubled])
    told = [action["commitInfo"] for action in delta_actions(Path(place)) if "commitInfo" in action][-3:]
    assert [json.loads(each["userMetadata"])["sequence"] for each in told] == [1, 1, 1]
    assert steps_of(place) == [(1, step) for step in STEPS[:3]]


def every_kind(table: str) -> Callable[[DataFrame, BatchTransaction], None]:
    """Operations on one table, each of which sees what the one before has done."""

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        given = rows(batch)
        tx.append(given, table)
        tx.append(given.selectExpr("upper(id) AS id", "n", "gone"), table)
        tx.merge(given, table, "t.id = s.id", update={"n": "t.n + 100"}, keys=["id"])
        tx.delete(given.where("id = 'd'"), table, "t.id = s.id AND t.n > 100")
        tx.overwrite(given.selectExpr("'x' AS id", "n", "gone"), table, "id IN ('D', 'x')")
        tx.append(given.selectExpr("id || id AS id", "n", "gone"), table)

    return fn


ALL_DONE = [("C", 1), ("c", 101), ("cc", 1), ("dd", 2), ("x", 1), ("x", 2)]  # after c1, d2
STEPS = ["", "#1", "#2", "#3", "#4"]


def test_operations_on_a_table_are_done_in_the_order_of_the_calls_each_once(rig: Any, tmp_path: Path) -> None:
    """Drivers that fail around commits, with other writers and OPTIMIZE in between; and the next batch."""
    rig.declare("in")
    table = made(rig, tmp_path / "lake")
    rig.spark.sql(f"DELETE FROM delta.`{table}`")
    rig.publish("in", "c1", "d2")

    def others(_name: str) -> None:
        rig.spark.sql(f"INSERT INTO delta.`{table}` VALUES ('other', 0, true)")
        rig.spark.sql(f"OPTIMIZE delta.`{table}`")
        raise RuntimeError("stop in step 1")

    failpoint.arm("changing.committed", others)
    failpoint.arm("foreach.applied.4", "raise")
    with pytest.raises(Exception, match="stop in step 1"):
        run(rig, every_kind(table))
    with pytest.raises(OSError, match=r"foreach\.applied\.4"):
        applied(rig, every_kind(table))  # as another driver does when it starts
    failpoint.disarm()
    rig.publish("in", "c1", "d2")  # the next batch has the same ids, with the next version

    def two_steps(batch: DataFrame, tx: BatchTransaction) -> None:
        found = held(rig, table)
        assert [row for row in found if row[0] != "other"] == ALL_DONE and len(found) == 7
        assert steps_of(table) == [(1, step) for step in STEPS]
        tx.append(rows(batch).selectExpr("'x' AS id", "n", "gone"), table)
        tx.delete(rows(batch), table, "t.id IN (s.id, 'cc', 'other')")

    run(rig, two_steps)
    assert held(rig, table) == sorted([("C", 1), ("dd", 2), *[("x", 1), ("x", 2)] * 2])
    assert steps_of(table) == [(1, step) for step in STEPS] + [(2, ""), (2, "#1")]
    assert rig.broker.engine.unapplied("app") == []


def applied(rig: Any, fn: Callable[[DataFrame, BatchTransaction], None]) -> None:
    """What a new driver does first."""
    transactional(fn, url=rig.broker.url, app_id="app").apply.decided(rig.spark, rig.broker.engine)


# what else is refused: tests/contract/tables
REFUSED: dict[str, tuple[Callable[[DataFrame, BatchTransaction, str], None], str]] = {
    "no table": (lambda given, tx, table: tx.delete(given, f"{table}-no", "true"), "does not exist"),
    "no sql": (
        lambda given, tx, table: tx.delete(given, table, "t.id = s.id) OR (1"),
        "Delta would refuse it",
    ),
    "subquery": (
        lambda given, tx, table: tx.delete(given, table, "t.id IN (SELECT id FROM x)"),
        "Delta would refuse it",
    ),
    "two without condition": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update=True, delete=True),
        "Delta would refuse it",
    ),
    "type": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update={"n": "array(s.n)"}),
        "Delta would refuse it",
    ),
    "condition over s": (
        lambda given, tx, table: tx.merge(
            given.withColumn("gone", given.gone.cast("int")), table, "t.id = s.id", delete="s.gone"
        ),
        'requires the "BOOLEAN" type, however "gone" has the type "INT"',
    ),
    "condition over t": (
        lambda given, tx, table: tx.merge(
            given, table, "t.id = s.id", clauses=[When.not_matched_by_source("t.n").delete()]
        ),
        'requires the "BOOLEAN" type, however "n" has the type "INT"',
    ),
    "on text": (
        lambda given, tx, table: tx.merge(given, table, "concat(t.id, s.id)", update=True),
        'requires the "BOOLEAN" type, however "concat(id, id)" has the type "STRING"',
    ),
    "on null": (
        lambda given, tx, table: tx.merge(given, table, "null -- of no type", update=True),
        'requires the "BOOLEAN" type, however "NULL" has the type "VOID"',
    ),
    "adds columns": (
        lambda given, tx, table: tx.merge(
            given.selectExpr("*", "1 AS m"), table, "t.id = s.id", insert={"m": "s.m"}
        ),
        "Delta would refuse it",
    ),
    "no key": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update=True, keys=["no"]),
        "keys names no, which the rows do not have",
    ),
    "twice": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update=True, keys=["id", "gone"]),
        'have the same id, gone: {"id":"a","gone":false}',
    ),
    "check": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", insert={"id": "s.id", "n": "s.n - 5"}),
        "violates CHECK constraint positive",
    ),
    "narrow": (
        lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update={"n": "s.n + 3000000000"}),
        "does not fit into int",
    ),
    "option": (
        lambda given, tx, table: tx.overwrite(given, table, "true", replaceWhere="true"),
        "it is an argument of tx.overwrite",
    ),
}
# a value is not asked if no clause can write it, or if it follows from the row of the table
TAKEN: list[Callable[[DataFrame, BatchTransaction, str], None]] = [
    lambda given, tx, table: tx.merge(
        given.selectExpr("nullif(id, 'b') AS id", "n - 5 AS n", "true AS gone", "'%' AS more"),
        table,
        "t.id = s.id",
        delete="s.gone AND s.more LIKE '%'",
        update=True,
        insert=None,
    ),
    lambda given, tx, table: tx.merge(given, table, "t.id = s.id", update={"n": "t.n - s.n"}, insert=True),
    lambda given, tx, table: tx.merge(given, f"{table}-appends", "false", insert=True, keys=["id", "n"]),
]


def test_what_a_table_would_refuse_stops_before_anything_is_consumed(rig: Any, tmp_path: Path) -> None:
    """Each case within one micro-batch, which takes the others, and then fails."""
    rig.declare("in")
    columns = "id STRING NOT NULL, n INT, gone BOOLEAN"
    table = made(rig, tmp_path / "lake", columns)
    rig.spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT positive CHECK (n > 0)")
    made(rig, f"{table}-appends", columns, "TBLPROPERTIES ('delta.appendOnly' = 'true')")
    rig.publish("in", "a1", "a2", "b3", "c4")
    told: dict[str, str] = {}

    def every(batch: DataFrame, tx: BatchTransaction) -> None:
        for name, (operation, _) in REFUSED.items():
            told[name] = "nothing"
            try:
                operation(rows(batch), tx, table)
            except Exception as error:
                told[name] = str(cause(error) or error)
        assert tx.branches == [], "something of a refused operation is staged"
        for operation in TAKEN:
            operation(rows(batch), tx, table)
        raise RuntimeError(f"{sum(branch.rows for branch in tx.branches)} rows are staged")

    with pytest.raises(Exception, match="12 rows are staged"):
        run(rig, every)
    for name, (_, wanted) in REFUSED.items():
        assert wanted in told[name] and "[TXMQ_" in told[name], f"{name}: {told[name]}"
    assert rig.bodies("in") == ["a1", "a2", "b3", "c4"] and rig.broker.engine.last_entry("app") is None


def test_what_fails_after_the_decision_stops_with_a_way_out(
    rig: Any, lake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table that was dropped, one that was replaced, and a match that is ambiguous because ``on`` does not compare
    the keys: skipped, and kept in files.
    """

    def merge(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.merge(rows(batch), lake, "t.id = s.id", update=True, keys=["n"])

    def fails(act: Callable[[Any, Any], None] = run) -> Exception:
        with pytest.raises(Exception) as raised:
            act(rig, merge)
        failpoint.disarm()
        error = cause(raised.value)
        assert error is not None, str(raised.value)[:2000]
        return error

    def skipped(sequence: int) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["app", "unapplied", "app", "--url", rig.broker.url, "--json"]) == 0
        (waits,) = json.loads(capsys.readouterr().out)
        assert (waits["sequence"], waits["kind"], waits["rows"]) == (sequence, "merge", 2)
        command = ["app", "skip", "--yes", "app", str(sequence), "--to", str(tmp_path / "skipped"), "--json"]
        assert main([*command, "--url", rig.broker.url]) == 0
        (file,) = json.loads(capsys.readouterr().out)["files"]
        kept = pq.read_table(file)
        assert kept.num_rows == 2 and kept.column_names == ["id", "n", "gone"]
        about: dict[str, Any] = json.loads(kept.schema.metadata[b"txmq"])
        return about

    rig.publish("in", "a1", "b2")
    failpoint.arm("foreach.decided", lambda _name: shutil.rmtree(lake))
    error = fails()
    assert isinstance(error, OptionError) and "was dropped or renamed before the merge of batch 1" in str(
        error
    )
    made(rig, lake)
    error = fails(applied)
    assert "was replaced by another one before the merge of batch 1" in str(error) and "skip" in str(error)
    assert skipped(1)["change"]["on"] == "t.id = s.id"
    assert held(rig, lake) == [("a", 10), ("b", 20), ("z", 30)], "nothing is done on another table"

    rig.publish("in", "a1", "a2")
    error = fails()
    assert isinstance(error, NotApplied) and "does not take the merge of batch 2, app 'app'" in str(error)
    assert "MULTIPLE_SOURCE_ROW" in str(error) and "txmq app skip" in str(error)
    skipped(2)
    rig.publish("in", "a1", "b2")
    run(rig, merge)
    assert held(rig, lake) == [("a", 1), ("b", 2), ("z", 30)]


def test_a_table_that_is_replaced_or_gone_behind_its_check_gets_no_change_and_is_not_made_again(
    rig: Any, lake: str, tmp_path: Path
) -> None:
    """The function does it when all is staged. An append goes to the table that has the place then."""
    appended, gone = made(rig, tmp_path / "appended"), made(rig, tmp_path / "gone")
    other = "USING delta AS SELECT 'new' AS id, 7 AS n, false AS gone"

    def replaces(batch: DataFrame, tx: BatchTransaction) -> None:
        for table, stage in ((appended, tx.append), (lake, tx.delete)):
            stage(rows(batch), table, *(["t.id = s.id"] if table == lake else []))
            batch.sparkSession.sql(f"CREATE OR REPLACE TABLE delta.`{table}` {other}")

    def removes(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(rows(batch), gone)
        if tx.sequence == 1:  # a replay finds the table that was made again
            shutil.rmtree(gone)

    rig.publish("in", "a1", "b2")
    with pytest.raises(Exception, match="was replaced by another one before the delete of batch 1"):
        run(rig, replaces)
    assert held(rig, appended) == [("a", 1), ("b", 2), ("new", 7)]
    assert held(rig, lake) == [("new", 7)]

    rig.declare("in2")
    rig.publish("in2", "a1", "b2")
    with pytest.raises(
        Exception, match=r"was dropped or re(named before the append of batch 1|placed since)"
    ):
        run(rig, removes, app_id="removes", queue="in2", checkpoint="removes")
    assert not Path(gone).exists(), "an append makes no table anew in the place of one that was there"


ODD = ("k.e y", "a`b", "Ünit é", "MiXed", "s")  # the alias of the rows too


@pytest.mark.soak
def test_every_operation_works_with_odd_names_of_columns(rig: Any, tmp_path: Path) -> None:
    """Dots, spaces, backquotes, Unicode and another case; the name of an alias; a partition with such a name."""
    table = str(tmp_path / "odd")
    quoted = [f"`{name.replace('`', '``')}`" for name in ODD]
    columns = ", ".join(f"{name} STRING" for name in quoted)
    mapped = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    rig.spark.sql(
        f"CREATE TABLE delta.`{table}` ({columns}) USING delta PARTITIONED BY ({quoted[0]}) {mapped}"
    )
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        body = "CAST(body AS STRING)"
        named = [name.swapcase() if number % 2 else name for number, name in enumerate(quoted)]
        given = batch.selectExpr(
            f"{body} AS {named[0]}",
            *(f"concat({body}, {number}) AS {named[number]}" for number in range(1, 5)),
        )
        key = f"t.{quoted[0]} = s.{quoted[0]}"
        tx.append(given, table)
        tx.merge(
            given.where(f"{quoted[0]} <> 'a'"),
            table,
            key,
            update={quoted[1]: f"concat(s.{quoted[2]}, t.s)"},
            keys=[ODD[0].upper()],
        )
        tx.merge(
            given.where(f"{quoted[0]} = 'b'"),
            table,
            f"{key} AND t.`A``B` = 'none'",
            update=True,
            insert=True,
            keys=[ODD[0]],
        )
        tx.delete(
            given.where(f"{quoted[4]} = 'c4'"), table, f"{key} AND t.{quoted[3]} = s.{quoted[3].lower()}"
        )
        tx.overwrite(given.where(f"{quoted[0]} = 'd'"), table, f"{quoted[0]} = 'd'")

    rig.publish("in", *"abcd")
    run(rig, fn)
    found = rig.spark.read.format("delta").load(table)
    assert found.columns == list(ODD)
    plain = [(value, *(f"{value}{number}" for number in range(1, 5))) for value in "abd"]
    assert sorted(tuple(row) for row in found.collect()) == sorted([*plain, ("b", "b2b4", "b2", "b3", "b4")])
