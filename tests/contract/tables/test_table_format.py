"""What every table format does (``connector/tables/table_format.py``): each commit once, checked before it is
decided.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker_core.core.errors import CheckpointMismatch, NotApplied, OptionError, cause
from broker_core.engine import LedgerEntry, ToApply
from connector.sql import nullable
from connector.tables.change import Change, Merge, Overwrite
from connector.tables.checks import last_stored, require_numbers
from connector.tables.commit_id import CommitId
from connector.tables.table_format import HiddenFiles, Writing
from connector.tables.when import When
from tests.contract.tables.bench import APP, TableBench
from tests.progress import wait_until

pytestmark = pytest.mark.spark

ON = "t.id = s.id"
UPSERT = Merge.parse(ON, update={"n": "t.n + s.n"}, insert=True)
DELETE = Merge.parse(ON, delete=True)


# -- each commit once ----------------------------------------------------------------------------------------
@pytest.mark.soak  # with Delta, tests/spark/test_merge.py shows it
def test_every_step_of_a_batch_is_one_commit_however_often_it_is_done(bench: TableBench) -> None:
    """All of them again by another process, with another writer in between; and the next batch."""
    table = bench.create("lake")

    def append(once: CommitId) -> int | None:
        return bench.append(table, once, ("a", 1), ("b", 2))

    steps: list[Callable[[CommitId], int | None]] = [
        append,
        lambda once: bench.change(table, UPSERT, once, ("a", 10), ("c", 30)),
        lambda once: bench.change(table, DELETE, once, ("b", 0)),
        lambda once: bench.change(table, Overwrite.parse("n > 20", {}), once, ("x", 21), ("y", 22)),
        append,
    ]
    versions = [act(bench.once(table, 1, step)) for step, act in enumerate(steps)]
    assert versions == [1, 2, 3, 4, 5]
    done = [("a", 1), ("a", 11), ("b", 2), ("x", 21), ("y", 22)]
    assert bench.rows(table) == done
    assert bench.versions(table) == 1 + len(steps)
    bench.insert(table, ("other", 0))
    bench.tables = bench.another()
    assert [act(bench.once(table, 1, step)) for step, act in enumerate(steps)] == versions
    assert bench.rows(table) == [*done[:3], ("other", 0), *done[3:]]
    bench.change(table, DELETE, bench.once(table, 2), ("a", 0))
    bench.change(table, DELETE, bench.once(table, 1, 2), ("other", 0))  # of the first batch: it is there
    assert bench.rows(table) == [("b", 2), ("other", 0), ("x", 21), ("y", 22)]
    bench.append(table, bench.once(table, 3, 7), ("z", 0))
    held = {app: last_stored(bench.tables, bench.spark, bench.found(table), once.txn_app_id)
            for app in (APP, "another") for once in [bench.once(table, 1, app=app)]}  # fmt: skip
    assert held == {APP: (0, 3), "another": (0, 0)}


@pytest.mark.parametrize("kind", [pytest.param("path", marks=pytest.mark.soak), "name"])
def test_an_append_creates_its_table_in_the_same_commit(bench: TableBench, kind: str) -> None:
    table = str(bench.place / "new") if kind == "path" else bench.found("appended_once").name
    for sequence in (1, 1, 2, 1):
        bench.append(table, bench.once(table, sequence), ("a", sequence), writing=Writing(partition_by=["n"]))
    assert bench.rows(table) == [("a", 1), ("a", 2)] and bench.versions(table) == 2


def test_a_change_without_effect_is_done_too_and_not_repeated(bench: TableBench) -> None:
    """What matches later belongs to somebody else."""
    table = bench.create("lake")
    bench.insert(table, ("a", 1), ("b", 2))
    sweep = Merge.parse(ON, clauses=[When.not_matched_by_source("t.n > 5").delete()])
    changes: list[tuple[Change, list[Any]]] = [
        (Merge.parse(ON, update={"n": "-1"}), [("q", 0)]),
        (sweep, [("a", 0)]),
        (Overwrite.parse("n > 5", {}), []),
    ]
    for step, (change, rows) in enumerate(changes):
        bench.change(table, change, bench.once(table, 1, step), *rows)
    bench.insert(table, ("q", 8))
    for step, (change, rows) in enumerate(changes):
        bench.change(table, change, bench.once(table, 1, step), *rows)
    assert bench.rows(table) == [("a", 1), ("b", 2), ("q", 8)]


def test_a_merge_of_all_columns_does_the_same_when_it_names_them(bench: TableBench) -> None:
    """As the decision stores it; and a column that is added later changes nothing then."""
    columns = "id STRING, `n.m` BIGINT, `a-b` STRUCT<x: INT, y: STRING>, `Ünit` STRING"
    star, named = (bench.create(name, columns) for name in ("star", "named"))
    rows = ("'a'", "'b'"), ("'b'", "'c'")
    merge = Merge.parse(ON, update=True, insert=True)
    found = bench.found(named)
    context = bench.tables.context(bench.spark)
    settled = bench.tables.settled(found, ["ID", "n.m", "a-b", "ünit", "more"], merge, context)
    assert settled != merge and "*" not in settled.sql("t", "s")
    for number, keys in enumerate(rows):
        frame = " UNION ALL ".join(
            f"SELECT {key} AS ID, {number} AS `n.m`, named_struct('Y', 'y{number}', 'x', {number}L) AS `a-b`, "
            f"'u{number}' AS `ünit`, 'unknown' AS more" for key in keys
        )  # fmt: skip
        for table, change in ((star, merge), (named, settled)):
            given = lambda session, frame=frame: session.sql(frame)  # noqa: E731
            once = bench.once(table, number + 1)
            bench.tables.change(bench.spark, bench.found(table), change, given, once)

    def held(table: str) -> list[str]:
        seen = bench.tables.read(bench.spark, bench.found(table))
        return sorted(str(tuple(row)) for row in seen.collect())

    assert held(star) == held(named) and len(held(named)) == 3
    evolves = Merge.parse(ON, update=True, insert=True, evolves=True)
    assert bench.tables.settled(found, ["id"], evolves, context) == evolves


def test_two_drivers_that_change_a_table_at_the_same_time_change_it_once(bench: TableBench) -> None:
    """One overtakes the other while that reads its rows; another writer of the same session commits there
    too.
    """
    table, once = bench.create("lake"), None
    bench.insert(table, ("a", 10), ("b", 20))
    once = bench.once(table, 1)
    asked, go = bench.place / "asked", bench.place / "go"
    given = bench.given(("a", 1), ("c", 3))

    def slowly(session: SparkSession) -> DataFrame:
        return given(session).mapInArrow(waiting(asked, go), "id STRING, n INT")

    errors: list[BaseException] = []
    found, other = bench.found(table), bench.another()

    def overtake() -> None:
        try:
            wait_until(asked.exists, "the first driver reads its rows")
            bench.insert(table, ("w", 7))
            other.change(bench.spark, found, UPSERT, given, once)
        except BaseException as error:
            errors.append(error)
        finally:
            go.touch()

    thread = threading.Thread(target=overtake)
    thread.start()
    bench.tables.change(bench.spark, found, UPSERT, slowly, once)
    thread.join()
    assert errors == [] and asked.exists()
    assert bench.rows(table) == [("a", 11), ("b", 20), ("c", 3), ("w", 7)]
    left = bench.spark.conf.getAll
    assert not [name for name in left if "txnAppId" in name or "userMetadata" in name]


def waiting(asked: Path, go: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A task that says that it has begun, and goes on when it may."""

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        asked.touch()
        while not go.exists():
            time.sleep(0.01)
        yield from batches

    return wait


def test_a_number_of_another_batch_stops_and_is_found_before_the_decision_too(bench: TableBench) -> None:
    """As after a restored backup: the table would skip the commit, and the rows would be lost silently."""
    table = bench.create("lake")
    bench.append(table, bench.once(table, 2), ("a", 2))
    for sequence in (2, 1):
        theirs = bench.once(table, sequence, token="of restored data")
        with pytest.raises(
            CheckpointMismatch, match=f"batch {sequence} of app '{APP}'.*txmq app unapplied APP"
        ):
            bench.append(table, theirs, ("x", 0))
    with pytest.raises(CheckpointMismatch):
        bench.change(table, UPSERT, theirs, ("x", 0))
    with pytest.raises(CheckpointMismatch):
        bench.change(table, Overwrite.parse("true", {}), theirs, ("x", 0))
    assert bench.rows(table) == [("a", 2)]

    def guard(app: str, decided: int) -> None:
        txn = bench.once(table, 1, app=app).txn_app_id
        require_numbers(bench.tables, bench.spark, bench.found(table), txn, app, lambda: decided)

    guard(APP, 2)
    guard("another", 0)
    with pytest.raises(CheckpointMismatch, match=f"holds batch 2 of app '{APP}', .* has decided only 1"):
        guard(APP, 1)


# -- before the decision -------------------------------------------------------------------------------------
@pytest.mark.soak  # with Delta, tests/spark/test_append_checks.py and test_merge.py show it
def test_what_cannot_fit_is_refused_by_its_schema_and_a_row_when_it_is_executed(bench: TableBench) -> None:
    table = bench.create("lake", "id STRING NOT NULL, n INT")
    only = bench.create("only", append_only=True)
    before = bench.versions(table)
    rows = bench.given(("a", 1), (None, 2))(bench.spark)
    doubled = rows.selectExpr("id AS ID", "id")
    merge = Merge.parse("t.n = s.n", update=True, insert=True)
    refused: list[tuple[Any, str]] = [
        (
            lambda: bench.check(table, rows.selectExpr("id", "1 AS added")),
            "no column 'added': drop it, or set",
        ),
        (lambda: bench.check(table, rows.selectExpr("n AS id")), "column 'id' is int, not string: cast it"),
        (lambda: bench.check(table, doubled), "column 'id' occurs twice"),
        (lambda: bench.check(table, rows, Merge.parse("t.no = s.id", delete=True)), "no"),
        (lambda: bench.check(table, rows, Merge.parse(ON, update={"no": "1"})), "no"),
        (lambda: bench.check(table, rows, Overwrite.parse("no > 1", {})), "no"),
        (lambda: bench.check(only, rows, DELETE), "append-only"),
        (lambda: bench.check(table, rows).ready(rows).collect(), "'id' is NOT NULL and has a null"),
        (lambda: bench.check(table, rows, merge).ready(rows).collect(), "'id' is NOT NULL and has a null"),
        (
            lambda: (
                bench.check(table, rows, Overwrite.parse("n > 1", {})).ready(rows.where("n = 1")).collect()
            ),
            "outside of what is overwritten",
        ),
    ]
    for number, (act, told) in enumerate(refused):
        with pytest.raises(Exception) as raised:
            act()
        error = cause(raised.value)
        assert isinstance(error, OptionError) and told in str(error), (number, str(raised.value)[:300])
    # what passes
    wide = rows.where("id = 'a'").selectExpr("id", "CAST(n AS BIGINT) AS n", "7 AS added")
    assert tuple(bench.check(table, wide, mergeSchema="true").ready(wide).collect()[0]) == ("a", 1, 7)
    assert len(bench.check(only, rows, Merge.parse(ON, insert=True)).ready(rows).collect()) == 2
    assert bench.rows(table) == [] and bench.versions(table) == before


# -- files that are written before it ------------------------------------------------------------------------
class Append:
    """One append as files: staged, and what the engine then holds of it."""

    def __init__(self, bench: TableBench, table: str, sequence: int, token: str, *rows: Any) -> None:
        self.bench, self.table = bench, table
        self.attempt = bench.attempt(table, sequence, token)
        self.once = bench.once(table, sequence, token=token)
        found = bench.found(table)
        given = bench.given(*rows)(bench.spark)
        checked = bench.check(table, given)
        assert checked.by_rows == ""
        staged = bench.tables.stage(checked.ready(given), found, {}, self.attempt, 0)
        assert staged is not None
        self.staged: HiddenFiles = staged
        about = {"table": found.name, "location": found.location, "schema": nullable(given.schema).json()}
        self.part = ToApply("append", {**about, **staged.target()}, (), 1)

    def add(self, rows: DataFrame | None = None) -> None:
        tables, spark = self.bench.tables, self.bench.spark
        held = [(self.part, iter([self.staged.batch()]))]
        tables.add(spark, self.bench.found(self.table), held, rows, self.once, {})

    def exported_files(self) -> tuple[list[str], list[dict[str, Any]]]:
        """(missing, rows) of the files without Spark."""
        files = self.bench.tables.exported_files(self.part, iter([self.staged.batch()]))
        assert len(files) == 1
        return files.missing(), [row for batch in files.rows() for row in batch.to_pylist()]


@pytest.mark.soak  # with Delta, tests/spark/test_append_files.py shows it
def test_files_are_invisible_until_they_are_added_once(bench: TableBench) -> None:
    table = bench.create("lake")
    before = bench.versions(table)
    append = Append(bench, table, 1, "t1", ("a", 1), ("b", 2))
    assert append.staged.rows == 2 and bench.rows(table) == [] and bench.versions(table) == before
    assert append.exported_files() == ([], [{"id": "a", "n": 1}, {"id": "b", "n": 2}])
    append.add()
    bench.sql("DELETE FROM {table} WHERE id = 'b'", table)
    bench.tables = bench.another()
    append.add()
    assert bench.rows(table) == [("a", 1)], "it was added again"
    second = Append(bench, table, 2, "t2", ("c", 3))
    bench.tables.drop(append.part.target["location"], append.attempt)
    second.add()
    assert bench.rows(table) == [("a", 1), ("c", 3)], "a file of the table was deleted with its attempt"
    third = Append(bench, table, 2, "of restored data", ("x", 0))
    with pytest.raises(CheckpointMismatch):
        third.add()
    assert bench.rows(table) == [("a", 1), ("c", 3)]


@pytest.mark.soak  # with Delta, tests/spark/test_append_files.py shows it
def test_files_of_attempts_that_lost_are_deleted_and_no_decided_ones(bench: TableBench) -> None:
    table = bench.create("lake")
    lost, waits, next_one = (
        Append(bench, table, *which, ("a", 1)) for which in ((1, "lost"), (1, "waits"), (2, "undecided"))
    )
    entry = LedgerEntry(APP, 1, "q", 1, "waits", {}, 0, 0, 0)
    bench.tables.sweep(waits.part.target["location"], waits.attempt, lambda: [entry])
    assert [len(each.exported_files()[0]) for each in (lost, waits, next_one)] == [1, 0, 0]
    bench.tables.drop(next_one.part.target["location"], next_one.attempt)
    assert next_one.exported_files()[0] and not waits.exported_files()[0]
    waits.add()
    assert bench.rows(table) == [("a", 1)]
    with pytest.raises(NotApplied, match="1 of 1 data files with 1 decided rows are gone"):
        next_one.add()


@pytest.mark.soak  # with Delta, tests/spark/test_append_files.py shows it
def test_a_table_that_changed_behind_the_files_gets_their_rows_again_beside_others(bench: TableBench) -> None:
    table = bench.create("lake")
    stale = bench.found(table)
    append = Append(bench, table, 1, "t1", ("a", 1))
    bench.sql("ALTER TABLE {table} ADD COLUMN more INT", table)
    attempt = bench.attempt(table, 2, "late")
    assert bench.tables.stage(bench.given(("x", 0))(bench.spark), stale, {}, attempt, 0) is None
    for _ in range(2):
        append.add(bench.given(("b", 2))(bench.spark))
    assert bench.rows(table) == [("a", 1), ("b", 2)]
