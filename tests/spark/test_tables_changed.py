"""What others do to a table, and to a session, between any two steps of a micro-batch: each row once, or one clear
stop with a way on; and SQL that means what it meant when it was decided.

Not here: VACUUM at every step and the kinds of tables (``test_append_files.py``), drivers that are killed
(``tests/crash``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import OptionError, cause
from connector.batch.foreach_batch import BatchTransaction, Transactional, transactional
from tests.spark.conftest import settings
from tests.spark.jobs import PLANNED_ONCE
from tests.spark.query_thread import query_thread, write_checkpoint
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

Fn = Callable[[DataFrame, BatchTransaction], None]
AS_ROWS = {"anything": "that is no option of files"}


class Driver:
    """A driver of one app, whose micro-batches are calls of its function of foreachBatch, as Spark makes them."""

    def __init__(self, rig: Any, app_id: str, fn: Fn, **more: Any) -> None:
        self._rig, self._app_id = rig, app_id
        self._query_id = f"query of {app_id}"
        self._checkpoint = rig.directory / f"checkpoint of {app_id}"
        self._each: Transactional = transactional(
            fn, url=rig.broker.url, app_id=app_id, checkpoint=str(self._checkpoint), **more
        )

    def batch(self, number: int, rows: DataFrame) -> Exception | None:
        """The error of the micro-batch, if it has one."""
        write_checkpoint(self._checkpoint, self._query_id, number)
        with query_thread(rows.sparkSession, self._query_id, number):
            try:
                self._each(rows, number)
            except Exception as error:
                return cause(error) or error
        return None

    def apply(self, spark: SparkSession) -> None:
        """What is decided and not applied: a start does this first."""
        self._each.apply.decided(spark, self._rig.broker.engine)

    def skip(self, sequence: int, place: Any) -> None:
        arguments = [
            "app",
            "skip",
            "--yes",
            self._app_id,
            str(sequence),
            "--to",
            str(place),
            "--url",
            self._rig.broker.url,
        ]
        assert main(arguments) == 0

    @property
    def waiting(self) -> list[int]:
        return [entry.sequence for entry in self._rig.broker.engine.unapplied(self._app_id)]


def once_at(point: str, act: Callable[[], object]) -> Callable[[], bool]:
    """Does ``act`` when ``point`` is reached first; returns whether it was."""
    done: list[object] = []
    failpoint.arm(point, lambda _name: done.append(act()))
    return lambda: bool(done)


def dies(_name: str) -> None:
    raise RuntimeError("the driver dies here")


def another_session(rig: Any) -> SparkSession:
    session: SparkSession = rig.spark.newSession()
    for name, value in PLANNED_ONCE.items():
        session.conf.set(name, value)
    return session


def run_sql(rig: Any, statements: Sequence[str], **names: str) -> None:
    session = another_session(rig)
    session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    for statement in statements:
        session.sql(statement.format(**names))


# -- what others do, and everything goes on ------------------------------------------------------------------
HARMLESS: dict[str, list[str]] = {
    "a column is added": ["ALTER TABLE {t} ADD COLUMN z INT"],
    "another column is renamed": ["ALTER TABLE {t} RENAME COLUMN other TO o"],
    "another column is dropped": ["ALTER TABLE {t} DROP COLUMN other"],
    "a type is widened": [
        "ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')",
        "ALTER TABLE {t} ALTER COLUMN n TYPE BIGINT",
    ],
    "a constraint is added": ["ALTER TABLE {t} ADD CONSTRAINT named CHECK (k <> '')"],
    "features are switched on": [
        "ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true',"
        " 'delta.enableChangeDataFeed' = 'true', 'delta.enableRowTracking' = 'true')"
    ],
    "it is clustered": ["ALTER TABLE {t} CLUSTER BY (k)"],
    "it is rewritten": ["OPTIMIZE {t}", "VACUUM {t} RETAIN 0 HOURS"],
    "others write": [
        "INSERT INTO {t} (k, n) VALUES ('theirs', 1)",
        "DELETE FROM {t} WHERE k = 'theirs'",
    ],
    "it is restored": ["DELETE FROM {t} WHERE k = 'old'", "RESTORE TABLE {t} TO VERSION AS OF 1"],
}
POINTS = (
    "foreach.staged",
    "foreach.decided",
    "adding.checked",
    "adding.copied",
    "changing.started",
    "changing.checked",
)
DONE: dict[str, Callable[[DataFrame, BatchTransaction, str], None]] = {
    "files": lambda rows, tx, table: tx.append(rows, table),
    "rows": lambda rows, tx, table: tx.append(rows, table, **AS_ROWS),
    "merge": lambda rows, tx, table: tx.merge(rows, table, "t.k = s.k", update=True, insert=True),
    "remove": lambda rows, tx, table: tx.delete(rows.selectExpr("'gone' AS k"), table, "t.k = s.k"),
    "overwrite": lambda rows, tx, table: tx.overwrite(rows, table, "k LIKE 'x%'"),
}
OPERATIONS = tuple(DONE)


def doing(tables: Mapping[str, str]) -> Callable[[DataFrame, BatchTransaction], None]:
    """A function of a micro-batch with these operations, each on its table."""

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        for operation, table in tables.items():
            DONE[operation](rows, tx, table)

    return fn


def what_others_do_leaves_each_row_once(
    rig: Any, name: str, acts: Sequence[str], point: str, operations: Sequence[str] = OPERATIONS
) -> None:
    """One batch with ``operations``, each on a table of its own, and ``acts`` on all of these at ``point``."""
    tables = {operation: f"{name}_{operation}" for operation in operations}
    mapped = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    for table in tables.values():
        other = "another" in "".join(acts) and table != tables.get("merge")  # a merge of all columns sets it
        columns = "k STRING, n INT" + (", other STRING" if other else "")
        rig.spark.sql(f"CREATE TABLE {table} ({columns}) USING delta {mapped}")
        rig.spark.sql(f"INSERT INTO {table} (k, n) VALUES ('old', 0), ('gone', 0), ('x1', 0)")

    def act() -> None:
        for table in tables.values():
            if "another" not in "".join(acts) or table != tables.get("merge"):
                run_sql(rig, [statement for each in acts for statement in HARMLESS[each]], t=table)

    driver = Driver(rig, name, doing(tables))
    done = once_at(point, act)
    error = driver.batch(0, rig.spark.sql("SELECT * FROM VALUES ('x1', 1), ('x2', 2) AS rows(k, n)"))
    failpoint.disarm()
    assert error is None and done() and driver.waiting == [], f"{acts} at {point}: {error}"
    new, kept = Counter(["x1", "x2"]), Counter(["old", "gone", "x1"])
    wanted = {
        "files": new + kept,
        "rows": new + kept,
        "merge": Counter(["old", "gone", "x1", "x2"]),
        "remove": Counter(["old", "x1"]),
        "overwrite": Counter(["old", "gone", "x1", "x2"]),
    }
    for operation, table in tables.items():
        found = Counter(row["k"] for row in another_session(rig).table(table).select("k").collect())
        assert found == wanted[operation], f"{acts} at {point}, {operation}"
        rig.spark.sql(f"DROP TABLE {table}")


@pytest.mark.parametrize(
    ("acts", "point", "operations"),
    [
        (
            ["a column is added", "a type is widened", "a constraint is added"],
            "foreach.decided",
            ["rows", "merge"],
        ),
        pytest.param(  # test_append_files.py has other writers and OPTIMIZE at the steps of an append
            ["features are switched on", "it is rewritten", "others write"],
            "adding.copied",
            ["files", "merge"],
            marks=pytest.mark.soak,
        ),
        (["a column is added"], "changing.checked", ["merge", "overwrite"]),
    ],
    ids=["altered behind the decision", "written to while files are added", "altered within a change"],
)
def test_what_others_do_to_a_table_between_two_steps_leaves_each_row_once(
    rig: Any, acts: list[str], point: str, operations: list[str]
) -> None:
    what_others_do_leaves_each_row_once(rig, f"at_{point.replace('.', '_')}", acts, point, operations)


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("act", HARMLESS)
def test_everything_that_others_do_at_every_step_leaves_each_row_once(rig: Any, act: str, point: str) -> None:
    if act == "it is restored" and point.startswith("changing."):
        pytest.skip("the appends are committed by then, and a restore takes them away")
    name = f"every{list(HARMLESS).index(act)}_{POINTS.index(point)}"
    what_others_do_leaves_each_row_once(rig, name, [act], point)


def test_rows_that_were_decided_before_their_table_was_widened_are_cast(rig: Any, tmp_path: Path) -> None:
    """Delta casts what is appended to a name, and refuses it at a path."""
    paths = {form: str(tmp_path / form) for form in ("files", "rows")}
    for path in paths.values():
        rig.spark.sql(f"CREATE TABLE delta.`{path}` (k STRING, n INT) USING delta")
        rig.spark.sql(f"INSERT INTO delta.`{path}` VALUES ('old', 0)")

    def widen() -> None:
        for path in paths.values():
            run_sql(rig, HARMLESS["a type is widened"], t=f"delta.`{path}`")

    driver, widened = Driver(rig, "cast", doing(paths)), once_at("foreach.decided", widen)
    assert driver.batch(0, rig.spark.sql("SELECT * FROM VALUES ('x', 1) AS rows(k, n)")) is None
    failpoint.disarm()
    assert widened() and driver.waiting == []
    for path in paths.values():
        found = another_session(rig).read.format("delta").load(path)
        assert found.schema["n"].dataType.simpleString() == "bigint"
        assert sorted((row["k"], row["n"]) for row in found.collect()) == [("old", 0), ("x", 1)]


@pytest.mark.parametrize("altered", [False, True])
def test_a_batch_that_a_restore_takes_out_before_it_is_marked_is_applied_once_more(
    rig: Any, altered: bool
) -> None:
    """As where data and a table are put back to the same moment. It keeps the numbers of what was taken out, and
    its files; where it was altered too, they are written again.
    """
    tables = {operation: f"undone_{operation}" for operation in ("files", "rows", "merge")}
    for table in tables.values():
        rig.spark.sql(f"CREATE TABLE {table} (k STRING, n INT) USING delta")
        rig.spark.sql(f"INSERT INTO {table} VALUES ('old', 0)")
    driver, batch = (
        Driver(rig, "undone", doing(tables)),
        rig.spark.sql("SELECT * FROM VALUES ('x', 1) AS rows(k, n)"),
    )
    for _ in range(2):
        failpoint.arm("foreach.applied.2", dies)
        assert "dies here" in str(driver.batch(0, batch)) and driver.waiting == [1]
        for table in tables.values():
            run_sql(rig, [f"RESTORE TABLE {table} TO VERSION AS OF 1"])
            run_sql(rig, [f"ALTER TABLE {table} SET TBLPROPERTIES ('of' = 'others')"] if altered else [])
    failpoint.disarm()
    assert driver.batch(0, batch) is None and driver.waiting == []
    for table in tables.values():
        found = [row["k"] for row in another_session(rig).table(table).collect()]
        assert sorted(found) == ["old", "x"], table
        rig.spark.sql(f"DROP TABLE {table}")


# -- what others have done, and the next batch ----------------------------------------------------------------
def test_a_column_that_was_added_is_left_alone_by_a_merge_of_all_columns_as_by_an_append(rig: Any) -> None:
    """Unless a column of the rows is for nothing, or the new one may not be null: nothing is decided then."""
    rig.spark.sql("CREATE TABLE widened (k STRING, n INT) USING delta")

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        tx.merge(rows, "widened", "t.k = s.k", update=True, insert=True, delete="s.gone")

    driver = Driver(rig, "widens", fn)

    def batch(number: int, rows: str) -> Exception | None:
        return driver.batch(number, rig.spark.sql(f"SELECT * FROM VALUES {rows}"))

    assert batch(0, "('x', 1, false), ('y', 1, false), ('z', 1, false) AS rows(k, n, gone)") is None
    run_sql(
        rig,
        [
            "ALTER TABLE {t} ADD COLUMNS (note STRING, `a.b` INT)",
            "UPDATE {t} SET note = 'theirs', `a.b` = 1 WHERE k < 'z'",
        ],
        t="widened",
    )
    assert batch(1, "('x', 2, false), ('y', 2, true), ('w', 2, false) AS rows(k, n, gone)") is None
    wanted = [("w", 2, None, None), ("x", 2, "theirs", 1), ("z", 1, None, None)]
    assert sorted(map(tuple, another_session(rig).table("widened").collect())) == wanted
    error = batch(2, "('x', 3, false, 'misspelt') AS rows(k, n, gone, nots)")
    assert isinstance(error, OptionError) and "note" in str(error)
    run_sql(rig, ["DELETE FROM {t} WHERE note IS NULL"], t="widened")
    run_sql(rig, ["ALTER TABLE {t} ADD CONSTRAINT noted CHECK (note IS NOT NULL)"], t="widened")
    error = batch(2, "('q', 3, false) AS rows(k, n, gone)")
    assert isinstance(error, OptionError) and "violates CHECK constraint noted" in str(error)
    assert rig.broker.engine.last_entry("widens").sequence == 2
    rig.spark.sql("DROP TABLE widened")


# -- what others do, and a batch stops -----------------------------------------------------------------------
def test_files_that_go_with_their_table_before_the_decision_stop_it_and_the_replay_has_each_row_once(
    rig: Any,
) -> None:
    """Behind the decision they would be lost (``txmq app skip --lost``)."""
    rig.spark.sql("CREATE TABLE dropped (k STRING) USING delta")
    remake = ["DROP TABLE {t}", "CREATE TABLE {t} (k STRING) USING delta"]
    driver = Driver(rig, "drops", lambda rows, tx: tx.append(rows, "dropped"))
    rows = rig.spark.sql("SELECT 'x' AS k")
    done = once_at("foreach.executed", lambda: run_sql(rig, remake, t="dropped"))
    error = driver.batch(0, rows)
    failpoint.disarm()
    assert done() and isinstance(error, OptionError) and "dropped or replaced since tx.append" in str(error)
    assert rig.broker.engine.last_entry("drops") is None
    assert driver.batch(0, rows) is None
    assert [tuple(row) for row in rig.spark.table("dropped").collect()] == [("x",)]
    rig.spark.sql("DROP TABLE dropped")


def test_a_table_that_is_renamed_gets_everything_once_it_has_its_name_back(rig: Any) -> None:
    for table in ("moved_files", "moved_merge"):
        rig.spark.sql(f"CREATE TABLE {table} (k STRING, n INT) USING delta")

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        tx.append(rows, "moved_files")
        tx.merge(rows, "moved_merge", "t.k = s.k", update=True, insert=True)

    def rename(table: str, name: str) -> None:
        run_sql(rig, ["ALTER TABLE {t} RENAME TO {n}"], t=table, n=name)

    driver = Driver(rig, "moved", fn)
    done = once_at(
        "foreach.decided",
        lambda: [rename(f"moved_{kind}", f"away_{kind}") for kind in ("files", "merge")],
    )
    error = driver.batch(0, rig.spark.sql("SELECT 'x' AS k, 1 AS n"))
    assert done() and isinstance(error, OptionError)
    assert "renamed before the append of batch 1" in str(error) and "(_txmq/" in str(error)
    for kind, before in (("files", "append"), ("merge", "merge")):
        with pytest.raises(
            OptionError, match=f"renamed before the {before} of batch 1.*give it its name back"
        ):
            driver.apply(rig.spark)
        rename(f"away_{kind}", f"moved_{kind}")
    driver.apply(rig.spark)
    for table in ("moved_files", "moved_merge"):
        assert [tuple(row) for row in rig.spark.table(table).collect()] == [("x", 1)]
        rig.spark.sql(f"DROP TABLE {table}")


def test_a_change_is_not_done_on_a_table_that_replaces_its_own_and_never_silently(
    rig: Any, tmp_path: Any
) -> None:
    """Behind the check of the id Delta's analysis finds it, or its conflict detection; in the moment between these,
    nothing does, and the error says how to take the change back.
    """
    rig.spark.sql("CREATE TABLE replaced USING delta AS SELECT 'x' AS k, 1 AS n")
    replace = [
        "CREATE OR REPLACE TABLE replaced USING delta AS SELECT * FROM VALUES ('x', 5), ('y', 6) AS new(k, n)"
    ]

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        if tx.sequence == 1:
            tx.delete(rows, "replaced", "t.k = s.k")
        else:
            tx.overwrite(rows, "replaced", "k = 'x'")

    driver = Driver(rig, "replaces", fn)
    rows = rig.spark.sql("SELECT 'x' AS k, 1 AS n")

    def held() -> list[tuple[Any, ...]]:
        return sorted(map(tuple, another_session(rig).table("replaced").collect()))

    done = once_at("changing.started", lambda: run_sql(rig, replace))
    error = driver.batch(0, rows)
    assert done() and "was replaced by another one before the change of batch 1" in str(error)
    assert held() == [("x", 5), ("y", 6)] and driver.waiting == [1]
    driver.skip(1, tmp_path)
    failpoint.disarm()
    done = once_at("changing.checked", lambda: run_sql(rig, replace))
    error = driver.batch(1, rows)
    assert done() and isinstance(error, OptionError) and driver.waiting == [2]
    if "before the change" not in str(error):  # Delta has not noticed it
        (version,) = re.findall(r"RESTORE TABLE \S+ TO VERSION AS OF (\d+)", str(error))
        run_sql(rig, ["RESTORE TABLE replaced TO VERSION AS OF {v}"], v=version)
    assert held() == [("x", 5), ("y", 6)]
    driver.skip(2, tmp_path)
    rig.spark.sql("DROP TABLE replaced")


# -- another session -----------------------------------------------------------------------------------------
def test_sql_of_a_decision_means_the_same_in_the_session_that_applies_it(rig: Any) -> None:
    """Decided, and applied by another driver, whose session has another time zone, ANSI, database and so on."""
    run_sql(
        rig,
        [
            "CREATE DATABASE decides",
            "CREATE TABLE decides.over (ts TIMESTAMP, v STRING) USING delta",
            "INSERT INTO decides.over VALUES (TIMESTAMP '2025-12-31 20:00:00Z', 'stays'),"
            " (TIMESTAMP '2026-01-01 20:00:00Z', 'is replaced')",
            "CREATE TABLE decides.merged (k STRING, at TIMESTAMP, day STRING, place STRING, n INT) USING delta",
            "INSERT INTO decides.merged (k) VALUES ('x')",
            "CREATE TABLE decides.generated (ts TIMESTAMP, d DATE GENERATED ALWAYS AS (CAST(ts AS DATE)))"
            " USING delta",
            "CREATE TABLE decides.altered (ts TIMESTAMP, d DATE GENERATED ALWAYS AS (CAST(ts AS DATE)))"
            " USING delta",
        ],
    )
    values = {
        "at": "CAST(s.text AS TIMESTAMP)",
        "day": "date_format(s.TS, 'yyyy-MM-dd')",
        "place": "current_database()",
        "n": "coalesce(CAST(t.k AS INT), -1)",  # an error with ANSI
    }

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        tx.overwrite(rows.selectExpr("ts", "'new' AS v"), "over", "TS >= '2026-01-01'")
        tx.merge(rows, "merged", "t.k = s.k", update=values)
        tx.append(rows.select("ts"), "generated", **AS_ROWS)
        tx.append(rows.select("ts"), "altered")

    session = another_session(rig)
    here = {"spark.sql.session.timeZone": "Asia/Tokyo", "spark.sql.ansi.enabled": "false"}
    for name, value in here.items():
        session.conf.set(name, value)
    session.sql("USE decides")
    failpoint.arm("foreach.decided", dies)
    rows = session.sql(
        "SELECT 'x' AS k, TIMESTAMP '2025-12-31 20:00:00Z' AS ts, '2026-01-01 05:00:00' AS text"
    )
    assert "dies here" in str(Driver(rig, "decides", fn).batch(0, rows))
    failpoint.disarm()
    run_sql(rig, ["ALTER TABLE decides.altered ADD COLUMN z INT"])  # the rows of the files are written again
    another = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.ansi.enabled": "true",
        "spark.sql.caseSensitive": "true",
    }
    with settings(rig.spark, another):
        Driver(rig, "decides", fn).apply(rig.spark)
        assert rig.spark.catalog.currentDatabase() == "default"
        assert {name: rig.spark.conf.get(name) for name in another} == another
    with settings(rig.spark, {"spark.sql.session.timeZone": "UTC"}):
        shown = {
            name: rig.spark.sql(f"SELECT concat_ws(' ', *) AS row FROM decides.{name} ORDER BY row").collect()
            for name in ("over", "merged", "generated", "altered")
        }
    assert {name: [row["row"] for row in rows] for name, rows in shown.items()} == {
        "over": ["2025-12-31 20:00:00 new"],  # in Tokyo both rows are of 2026
        "merged": ["x 2025-12-31 20:00:00 2026-01-01 decides -1"],
        "generated": ["2025-12-31 20:00:00 2026-01-01"],
        "altered": ["2025-12-31 20:00:00 2026-01-01"],
    }
    rig.spark.sql("DROP DATABASE decides CASCADE")


def test_sql_that_only_this_session_understands_is_refused_before_the_decision(rig: Any) -> None:
    """Functions and variables that a start would not have; the batch goes on without them."""
    rig.spark.sql("CREATE TABLE understood USING delta AS SELECT 'x' AS k, 1 AS n")
    session = another_session(rig)
    session.udf.register("halved", lambda n: n // 2, "int")
    session.sql("DECLARE VARIABLE lowest INT DEFAULT 1")
    told: list[str] = []

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        for act in (
            lambda: tx.merge(rows, "understood", "t.k = s.k AND halved(s.n) > 0", delete=True),
            lambda: tx.delete(rows, "understood", "t.k = s.k AND t.n >= lowest"),
            lambda: tx.overwrite(rows, "understood", "n >= lowest"),
        ):
            with pytest.raises(OptionError) as raised:
                act()
            told.append(str(raised.value))
        tx.merge(rows, "understood", "t.k = s.k", update={"n": "3 * s.n"})

    error = Driver(rig, "understands", fn).batch(0, session.sql("SELECT 'x' AS k, 4 AS n"))
    assert error is None and rig.spark.table("understood").collect() == [("x", 12)]
    for name, text in zip(("halved", "lowest", "lowest"), told, strict=True):
        assert name in text, text
    assert all("temporary function or variable" in text for text in told[:2])
    assert "cannot be resolved" in told[2]  # Delta knows no variables in what an overwrite replaces
    rig.spark.sql("DROP TABLE understood")
