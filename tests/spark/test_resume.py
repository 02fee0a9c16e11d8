"""C7: an app goes on behind its Delta ledger. Both engines; Spark and Delta are real, streams are not run.

Not here: queries that resume (``test_resume_queries.py``), the engine's part (``contract/engine``).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import CheckpointMismatch
from broker_core.engine import START, LedgerEntry, Vector
from broker_core.kafka import names
from connector.delta import jvm, log
from connector.ledger.delta_ledger import LEDGER_COLUMNS, DeltaLedger, ledger_id
from connector.ledger.resume import Resume, taken_id
from connector.ledger_file import rows
from connector.table_formats import table_format
from connector.tables.checks import Checks
from connector.tables.commit_id import CommitId, txn_app_id
from tests.contract.engine.bench import APP, EngineBench
from tests.contract.engine.test_release import follow
from tests.engine.bench import Bench
from tests.kafka.bench.engine_bench import KafkaBench
from tests.spark.pipelines import delta_rows
from tests.spark.sessions import CONNECT

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

START_OF_ALL: Vector = {"in": START}


class Lost:
    """An app that has decided batches of two messages, and its ledger; then its engine loses what it knew."""

    def __init__(self, make: type[EngineBench], spark: SparkSession, place: Path) -> None:
        self.make, self.spark, self.place = make, spark, place
        self.ledger = str(place / "ledger")
        self.bench = make()
        self.sent: list[bytes] = []
        self._mirrors: dict[tuple[int, str], DeltaLedger] = {}  # by engine and table
        self.position: Vector = START_OF_ALL

    def send(self, count: int = 2) -> None:
        bodies = [f"m{len(self.sent) + number}".encode() for number in range(count)]
        self.sent += bodies
        self.bench.produce(*bodies)

    def decide(self, batches: int = 1, *, mirror: bool = True) -> LedgerEntry:
        for _ in range(batches):
            last = self.bench.engine.last_entry(APP)
            self.send()
            end = self.bench.claim(self.position)
            batch = 0 if last is None else last.batch_id + 1
            entry = self.bench.run("q", batch, self.position, end)
            self.position = end
            if mirror:
                self.mirror()
        return entry  # type: ignore[no-any-return]

    def mirror(self) -> None:
        engine = self.bench.engine
        key = id(engine), self.ledger
        if key not in self._mirrors:
            session = self.spark if CONNECT else self.spark.newSession()
            self._mirrors[key] = DeltaLedger(session, self.ledger, engine, APP)
        self._mirrors[key].write_missing()

    def lose(self) -> EngineBench:
        """The engine of before; the messages are there, or are sent again in their order."""
        before = self.bench
        if isinstance(before, KafkaBench):
            before.client.delete_topic(names.app_topic(APP))
            before.crash()
        else:
            self.bench = self.make()
            self.bench.produce(*self.sent)
        return before

    def resume(self, on_new: Any = "resume", resume_from: str | None = None, **more: Any) -> Resume:
        tables = table_format()
        return Resume(tables, more.get("ledger", self.ledger), self.bench.engine, APP, on_new, resume_from)

    def ready(self, on_new: Any = "resume", resume_from: str | None = None) -> dict[str, int]:
        return self.resume(on_new, resume_from).ready(self.spark)


@pytest.fixture(params=[Bench, pytest.param(KafkaBench, marks=pytest.mark.soak)], ids=["embedded", "kafka"])
def lost(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Lost]:
    made = Lost(request.param, spark, tmp_path)
    yield made
    failpoint.disarm()
    made.bench.close()


@pytest.fixture
def on_kafka(spark: SparkSession, tmp_path: Path) -> Iterator[Lost]:
    made = Lost(KafkaBench, spark, tmp_path)
    yield made
    failpoint.disarm()
    made.bench.close()


def test_c7_an_app_whose_engine_has_lost_its_ledger_goes_on_behind_the_table(lost: Lost) -> None:
    lost.decide(5)
    engine = lost.bench.engine.identity(APP)
    lost.lose()
    lost.send()
    where = r'up to \{"in(/0)?":10\}'
    with pytest.raises(
        CheckpointMismatch, match=rf"decided 5 batches on .*{where}, and this engine has no ledger"
    ):
        lost.ready("fail")
    if lost.make is Bench:  # the queue of another directory
        with pytest.raises(CheckpointMismatch, match=f"had other messages.*resume_from='{engine}'"):
            lost.ready()
    assert lost.ready(resume_from=engine) == {engine: 5}
    assert lost.ready("fail") == {engine: 5}, "needed once"
    assert follow(lost.bench, "new", 0, START_OF_ALL) == lost.sent[10:]
    lost.mirror()
    rows = sorted(delta_rows(Path(lost.ledger)), key=lambda row: row["sequence"])
    assert [(row["sequence"], row["end_offset"]) for row in rows] == [(n, 2 * n) for n in range(1, 7)]
    assert {row["engine"] for row in rows} == {engine, lost.bench.engine.identity(APP)}
    assert len({row["token"] for row in rows}) == 6
    # and once more
    second = lost.bench.engine.identity(APP)
    lost.lose()
    assert lost.ready(resume_from=second) == {engine: 5, second: 6}
    assert lost.bench.engine.last_entry(APP).sequence == 6  # type: ignore[union-attr]


def _sql(statement: str) -> Callable[[Lost], object]:
    return lambda lost: lost.spark.sql(statement.format(table=f"delta.`{lost.ledger}`"))


def _copied(lost: Lost) -> None:
    rows = lost.spark.read.format("delta").load(lost.ledger).collect()
    lost.ledger += "-again"
    lost.spark.createDataFrame(rows, LEDGER_COLUMNS).write.format("delta").save(lost.ledger)


_INSERT = (
    "INSERT INTO {{table}} SELECT app_id, query_id, batch_id + {up}, 'forged', log, start_offset, "
    "end_offset + 2, messages, published, committed_at, sequence + {up}, engine, log_id FROM {{table}} "
    "WHERE sequence = 2"
)
DOUBTFUL: dict[str, tuple[Callable[[Lost], object], str]] = {
    "newest deleted": (_sql("DELETE FROM {table} WHERE sequence = 2"), "newest row is of batch 1.*batch 2"),
    "truncated": (_sql("TRUNCATE TABLE {table}"), "its rows of 2 batches are gone"),
    "restored": (_sql("RESTORE TABLE {table} TO VERSION AS OF 0"), "newest row is of batch 1.*batch 2"),
    "forged end": (_sql("UPDATE {table} SET end_offset = 8 WHERE sequence = 2"), "others have changed them"),
    "forged batch": (_sql(_INSERT.format(up=1)), "does not know who wrote the rows of batch 3"),
    "forged number": (_sql(_INSERT.format(up=0)), "two batches with the number 2"),
    "forged owner": (_sql("UPDATE {table} SET engine = 'another'"), "does not know who wrote"),
    "copied": (_copied, "does not know who wrote the rows of batch 2"),
}


# only in ``make soak``: one that is refused with the same words is left
SELDOM = {"truncated", "restored", "forged batch", "forged number", "forged owner"}


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param([what for what in DOUBTFUL if what not in SELDOM], id="some"),
        pytest.param(list(DOUBTFUL), id="all", marks=pytest.mark.soak),
    ],
)
def test_c7_a_ledger_that_others_have_changed_is_refused_and_nothing_has_changed(
    on_kafka: Lost, damages: list[str]
) -> None:
    on_kafka.decide(2)
    whole = on_kafka.ledger
    on_kafka.lose()
    on_kafka.send(4)
    for what in damages:
        damage, why = DOUBTFUL[what]
        on_kafka.ledger = f"{whole} {what}"
        shutil.copytree(whole, on_kafka.ledger)
        damage(on_kafka)
        with pytest.raises(CheckpointMismatch) as refused:
            on_kafka.ready()
        told = str(refused.value)
        assert re.search(rf"cannot continue after ledger .*{why}.*Nothing was consumed", told), (what, told)
        assert on_kafka.bench.engine.last_entry(APP) is None
    assert on_kafka.bench.claim() == {"in": 8}, "no start was recorded"


@pytest.mark.soak
def test_c7_a_ledger_that_was_vacuumed_and_compacted_is_as_good(on_kafka: Lost) -> None:
    on_kafka.decide(3)
    engine, spark = on_kafka.bench.engine.identity(APP), on_kafka.spark
    on_kafka.lose()
    spark.sql(f"DELETE FROM delta.`{on_kafka.ledger}` WHERE sequence = 1")  # somebody keeps the table small
    spark.sql(f"OPTIMIZE delta.`{on_kafka.ledger}`")
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    try:
        spark.sql(f"VACUUM delta.`{on_kafka.ledger}` RETAIN 0 HOURS")
    finally:
        spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    assert on_kafka.ready() == {engine: 3}


def test_c7_a_backlog_that_was_written_in_one_commit_is_proved_too(on_kafka: Lost) -> None:
    on_kafka.decide(1)
    on_kafka.decide(4, mirror=False)
    on_kafka.mirror()
    engine = on_kafka.bench.engine.identity(APP)
    ledger_file = rows(on_kafka.ledger, ("sequence", "log", "end_offset", "engine"))
    found = sorted((row["sequence"], row["log"], row["end_offset"], row["engine"]) for row in ledger_file)
    assert found == [(n, "in/0", 2 * n, engine) for n in range(1, 6)], "read without Spark"
    on_kafka.lose()
    assert on_kafka.ready() == {engine: 5}


POINTS = ("resume.proved", "resume.taken_over", "kafka.resume.ends", "kafka.resume.entries", "resume.resumed")


def test_c7_a_resume_that_is_killed_between_two_steps_is_done_again(on_kafka: Lost) -> None:
    """Five processes die, each one step later; the sixth goes on."""
    on_kafka.decide(2)
    engine = on_kafka.bench.engine.identity(APP)
    on_kafka.lose()
    on_kafka.send()

    def die(name: str) -> None:
        raise RuntimeError(name)

    for point in POINTS:
        failpoint.arm(point, die)
        if on_kafka.bench.engine.last_entry(APP) is None:
            with pytest.raises(RuntimeError, match=point):
                on_kafka.ready()
        failpoint.disarm()
        on_kafka.bench.crash()
    assert on_kafka.ready() == {engine: 2}
    assert follow(on_kafka.bench, "new", 0, START_OF_ALL) == on_kafka.sent[4:]
    on_kafka.mirror()
    assert sorted(row["sequence"] for row in delta_rows(Path(on_kafka.ledger))) == [1, 2, 3]


def test_c7_of_two_engines_that_go_on_behind_one_ledger_one_does(spark: SparkSession, tmp_path: Path) -> None:
    """And two drivers of one engine do what one does."""
    lost = Lost(Bench, spark, tmp_path)
    lost.decide(2)
    before = lost.lose()
    engine, first = before.engine.identity(APP), lost.bench
    lost.lose()
    second = lost.bench
    lost.bench = first  # type: ignore[assignment]
    assert lost.ready(resume_from=engine) == lost.ready(resume_from=engine) == {engine: 2}
    lost.bench = second
    with pytest.raises(CheckpointMismatch, match="another engine has taken the app over since"):
        lost.ready(resume_from=engine)
    assert second.engine.last_entry(APP) is None
    lost.bench = before
    with pytest.raises(CheckpointMismatch, match="was taken over by another engine after batch 2"):
        lost.ready()


@pytest.mark.soak  # the rule is that of the test above, read in another way
def test_c7_an_engine_whose_app_went_on_elsewhere_is_refused_where_the_log_is_not_read_that_far(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SQL alone, as on Connect, the log is read for some commits; the rows of the other engine tell."""
    lost = Lost(Bench, spark, tmp_path)
    lost.decide(2)
    before = lost.lose()
    after = lost.bench
    lost.send()
    lost.ready(resume_from=before.engine.identity(APP))
    follow(after, "new", 0, START_OF_ALL)
    lost.mirror()
    monkeypatch.setattr(jvm, "only_sql", lambda spark: True)
    monkeypatch.setattr(log, "SQL_COMMITS", 1)
    assert lost.ready() == {}, "the one that goes on"
    lost.bench = before
    with pytest.raises(CheckpointMismatch, match="was taken over by another engine after batch 2"):
        lost.ready()


def test_c7_an_engine_without_the_offsets_of_the_ledger_waits_for_its_messages(
    spark: SparkSession, tmp_path: Path
) -> None:
    lost = Lost(Bench, spark, tmp_path)
    lost.decide(2)
    engine = lost.bench.engine.identity(APP)
    sent, lost.sent = lost.sent, lost.sent[:3]
    lost.lose()
    with pytest.raises(CheckpointMismatch, match="'in' ends here at 3"):
        lost.ready(resume_from=engine)
    lost.bench.produce(*sent[3:], b"next")
    assert lost.ready(resume_from=engine) == {engine: 2}
    assert follow(lost.bench, "new", 0, START_OF_ALL) == [b"next"]


def test_c7_a_batch_that_only_a_table_knows_stops_before_the_decision(on_kafka: Lost) -> None:
    """It was decided and applied, and the app's topic was deleted before the ledger had its row."""
    on_kafka.decide(2)
    engine, spark, tables = on_kafka.bench.engine.identity(APP), on_kafka.spark, table_format()
    place = str(on_kafka.place / "table")
    table = tables.resolve(spark, place)
    entry = on_kafka.decide(1, mirror=False)
    once = CommitId.of(entry, txn_app_id(APP, engine, table.location))
    tables.append(spark, table, lambda session: session.createDataFrame([("row",)], "body string"), once)
    on_kafka.lose()
    checks = Checks(tables, APP, lambda: on_kafka.bench.engine)
    checks.take_overs = on_kafka.ready()
    table = tables.resolve(spark, place)
    mine = txn_app_id(APP, on_kafka.bench.engine.identity(APP), table.location)
    with pytest.raises(
        CheckpointMismatch, match=f"has batch 3 of app '{APP}' from engine {engine}.*ends with batch 2"
    ):
        checks.guard(spark, table, mine)


def test_c7_ledgers_of_other_apps_and_of_a_new_app_are_no_ledger_of_this_one(on_kafka: Lost) -> None:
    assert on_kafka.ready("fail") == {}
    entry = on_kafka.decide(1)
    tables = table_format()
    other = Resume(tables, on_kafka.ledger, on_kafka.bench.engine, "other", "fail")
    assert other.ready(on_kafka.spark) == {}
    for name in (ledger_id("other@x", "engine"), taken_id("other@x", "engine")):
        table = tables.resolve(on_kafka.spark, on_kafka.ledger)
        once = CommitId.of(entry, name)
        tables.append(
            on_kafka.spark, table, lambda session: session.createDataFrame([], LEDGER_COLUMNS), once
        )
        assert other.ready(on_kafka.spark) == {}, "an app whose name goes on"
    assert on_kafka.ready("fail") == {}


def test_c7_a_row_of_the_ledger_says_that_its_batch_is_applied(on_kafka: Lost) -> None:
    on_kafka.decide(1)
    bench = on_kafka.bench
    opened = bench.engine.open_batch(APP, "q", 1, "fail")
    staged = bench.stage(opened.token, b"row", batch=1, kind="append", target={"table": "t", "schema": "{}"})
    bench.engine.commit_batch(APP, "q", 1, opened.token, [staged])
    on_kafka.mirror()
    assert [row["sequence"] for row in delta_rows(Path(on_kafka.ledger))] == [1]
    bench.engine.mark_applied(APP, 2)
    on_kafka.mirror()
    assert sorted(row["sequence"] for row in delta_rows(Path(on_kafka.ledger))) == [1, 2]
