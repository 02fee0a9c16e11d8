"""Appends that a table does not take: found before the decision where they can be, and never the end of a
pipeline where they cannot.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.types import IntegerType, StructField, StructType

from broker_core.core import failpoint
from broker_core.core.errors import NotApplied, OptionError, cause
from connector.batch.batch_transaction import BatchTransaction
from connector.delta.format import Delta
from connector.delta.resolve import resolve
from connector.tables.table_format import Writing
from tests.spark.pipelines import delta_actions, hidden_files
from tests.spark.test_append_files import append_to, run_each, values
from tests.spark.test_foreach_batch import run
from txmq.cli import main

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

# name: (table, columns of the rows, options, what the error says; None where the append must succeed). Cases with
# the same words for a table share it.
CASES: dict[str, tuple[str, list[str], dict[str, Any], str | None]] = {
    "fits": ("(v INT) USING delta", ["5L AS v"], {}, None),
    "narrows": ("(v INT) USING delta", ["5000000000L AS v"], {}, "does not fit into int"),
    "not_null": ("(v INT NOT NULL) USING delta", ["CAST(NULL AS INT) AS v"], {}, "NOT NULL and has a null"),
    "nested_not_null": (
        "(s STRUCT<a: INT NOT NULL>) USING delta",
        ["named_struct('a', CAST(NULL AS INT)) AS s"],
        {},
        "null in a NOT NULL field",
    ),
    "char": ("(v CHAR(1)) USING delta", ["'abc' AS v"], {}, "has a longer value"),
    "missing": ("(v INT, w INT) USING delta", ["1 AS v"], {}, None),
    "parquet": ("(v INT) USING parquet", ["1 AS v"], {}, "format parquet"),
    "generated": (
        "(v INT, g INT GENERATED ALWAYS AS (v + 1)) USING delta",
        ["1 AS v", "7 AS g"],
        {},
        "generated as",
    ),
    "generated_alone": (
        "(v INT, g INT GENERATED ALWAYS AS (v + 1)) USING delta COMMENT 'it is left out'",
        ["1 AS v"],
        {},
        None,
    ),
    "identity": (
        "(id BIGINT GENERATED ALWAYS AS IDENTITY, v INT) USING delta",
        ["5L AS id", "1 AS v"],
        {},
        "IDENTITY: leave it out",
    ),
    "option": ("(v INT) USING delta", ["1 AS v"], {"mergeSchema": "maybe"}, "Delta would refuse it"),
    "merges": ("(v INT) USING delta COMMENT 'it grows'", ["1 AS v", "2 AS w"], {"mergeSchema": True}, None),
    "odd_name": (
        "(v INT) USING delta",
        ["1 AS v", "2 AS `w x`"],
        {"mergeSchema": True},
        "Delta would refuse it",
    ),
    "check": (
        "(v INT) USING delta; ALTER TABLE checked_check ADD CONSTRAINT pos CHECK (v > 0)",
        ["-1 AS v"],
        {},
        "violates CHECK constraint pos",
    ),
}


def test_an_append_that_the_table_refuses_stops_before_anything_is_consumed(rig: Any) -> None:
    """Each case within one micro-batch; then the batch goes on with those that fit, and at last it fails with
    one that does not.
    """
    tables: dict[str, str] = {}
    for name, (ddl, *_) in CASES.items():
        if ddl not in tables:
            tables[ddl] = f"checked_{name}"
            rig.spark.sql(f"DROP TABLE IF EXISTS checked_{name}")
            for statement in f"CREATE TABLE checked_{name} {ddl}".split(";"):
                rig.spark.sql(statement)
    rig.declare("in", "out")
    rig.publish("in", "x")
    told: dict[str, str | None] = {}

    def append(batch: DataFrame, tx: BatchTransaction, name: str) -> None:
        ddl, columns, options, _ = CASES[name]
        tx.append(batch.selectExpr(*columns), tables[ddl], **options)

    def every_case(batch: DataFrame, tx: BatchTransaction) -> None:
        for name in CASES:
            told[name] = None
            try:
                append(batch, tx, name)
            except Exception as error:
                told[name] = str(cause(error) or error)

    run(rig, every_case)
    for name, (*_, wanted) in CASES.items():
        found = told[name]
        assert found is None if wanted is None else wanted in str(found), f"{name}: {found}"
    for ddl, table in tables.items():
        if table != "checked_parquet":
            taken = [name for name, (of, *_, wanted) in CASES.items() if of == ddl and wanted is None]
            assert len(rig.rows_in(table)) == len(taken), table
    assert rig.spark.table("checked_parquet").count() == 0
    assert rig.broker.engine.unapplied("app") == []
    rig.publish("in", "y")

    def one_does_not_fit(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue="out")
        append(batch, tx, "fits")
        append(batch, tx, "narrows")

    with pytest.raises(Exception, match="does not fit into int"):
        run(rig, one_does_not_fit)
    assert (
        rig.bodies("in") == ["y"]
        and rig.bodies("out") == []
        and rig.broker.engine.last_entry("app").sequence == 1
    )
    assert len(rig.rows_in("checked_fits")) == 1


@pytest.mark.soak  # a cost, not a rule
def test_a_rehearsal_leaves_nothing_and_an_append_as_files_has_none(
    rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def counted(**named: str) -> str:
        made.append(make(**named))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", counted)
    rig.spark.sql(f"CREATE TABLE delta.`{tmp_path / 'there'}` (v INT) USING delta")
    schema = StructType([StructField("v", IntegerType())])

    def check(name: str, **options: str) -> tuple[int, bool]:
        before, table = len(made), resolve(rig.spark, str(tmp_path / name))
        checked = Delta().check_append(rig.spark, table, schema, Writing(options))
        return len(made) - before, bool(checked.by_rows)

    assert check("there") == (0, False)
    assert check("new") == (1, True)
    assert check("there", userMetadata="x") == (1, True)  # an option that means more than to files
    for _ in range(2):  # what was refused is tried again
        with pytest.raises(OptionError, match="Delta would refuse it"):
            check("new", mergeSchema="maybe")
    assert len(made) == 4 and not any(map(os.path.exists, made)) and not (tmp_path / "new").exists()


@pytest.mark.soak
def test_what_a_table_refuses_after_the_decision_waits_and_can_be_skipped_to_files(
    rig: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is altered between the decision and the append; it is mended for one batch, and the next one
    is skipped.
    """
    rig.spark.sql("CREATE OR REPLACE TABLE altered (v STRING) USING delta")
    rig.declare("in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr("CAST(body AS STRING) AS v"), "altered")

    def altered_meanwhile(batch: DataFrame, tx: BatchTransaction) -> None:
        fn(batch, tx)
        (body,) = [bytes(row["body"]).decode() for row in batch.collect()]
        rig.spark.sql(f"ALTER TABLE altered ADD CONSTRAINT other CHECK (v <> '{body}')")

    rig.publish("in", "first")
    with pytest.raises(Exception) as raised:
        run(rig, altered_meanwhile)
    error = cause(raised.value)
    assert (
        isinstance(error, NotApplied)
        and "does not take its rows" in str(error)
        and "txmq app skip" in str(error)
    )
    rig.spark.sql("ALTER TABLE altered DROP CONSTRAINT other")
    run(rig, fn)
    assert [row["v"] for row in rig.rows_in("altered")] == ["first"]

    rig.publish("in", "second")
    with pytest.raises(Exception, match="TXMQ_NOT_APPLIED"):
        run(rig, altered_meanwhile)
    capsys.readouterr()
    assert main(["app", "unapplied", "app", "--url", rig.broker.url, "--json"]) == 0
    (waiting,) = json.loads(capsys.readouterr().out)
    assert (waiting["sequence"], waiting["to"], waiting["rows"]) == (2, "spark_catalog.default.altered", 1)
    assert (
        "CHECK constraint other" in waiting["error"]
        and waiting["since"] > "2026"
        and waiting["from"] == {"in": "1-1"}
    )
    assert (
        main(
            [
                "app",
                "skip",
                "--yes",
                "app",
                "2",
                "--to",
                str(tmp_path / "skipped"),
                "--url",
                rig.broker.url,
                "--json",
            ]
        )
        == 0
    )
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert pq.read_table(file).to_pylist() == [{"v": "second"}]
    rig.publish("in", "third")
    run(rig, fn)
    assert sorted(row["v"] for row in rig.spark.table("altered").collect()) == ["first", "third"]


def test_what_others_did_to_a_table_between_two_batches_holds_before_the_next_decision(
    rig: Any, tmp_path: Path
) -> None:
    """Of a table that another process has changed, this one knows nothing but its own last commit."""
    lake = tmp_path / "lake"
    rig.spark.sql(f"CREATE TABLE delta.`{lake}` (v STRING) USING delta")
    rig.declare("in")
    rig.publish("in", "a", "b")
    rig.publish("in", "c", "d")
    rig.publish("in", "e", "longer-than-9")

    def replaced(_name: str) -> None:
        """With as many commits, and another schema."""
        shutil.rmtree(lake)
        rig.spark.sql(f"CREATE TABLE delta.`{lake}` (v STRING, w INT) USING delta")
        rig.spark.sql(f"INSERT INTO delta.`{lake}` VALUES ('other', 1)")

    def constrained(_name: str) -> None:
        """By a process that this session does not know of."""
        told = next(action for action in delta_actions(lake) if "metaData" in action)
        told["metaData"]["configuration"]["delta.constraints.short"] = "length(v) < 9"
        needs = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 3}}
        lines = "".join(json.dumps(action) + "\n" for action in (needs, told))
        (lake / "_delta_log" / f"{3:020d}.json").write_text(lines)

    failpoint.arm("foreach.marked", replaced)
    failpoint.arm("foreach.marked", constrained, hit=2)
    try:
        with pytest.raises(Exception, match="violates CHECK constraint short"):
            run_each(rig, append_to(lake))
    finally:
        failpoint.disarm()
    assert values(lake) == ["c", "d", "other"] and hidden_files(lake) == []
    assert rig.broker.engine.unapplied("app") == [] and rig.bodies("in") == ["e", "longer-than-9"]


def test_a_table_that_its_catalog_manages_is_refused_before_anything_is_consumed(
    rig: Any, tmp_path: Path
) -> None:
    """Such a table is made by a catalog alone, so its protocol is written by hand."""
    table = tmp_path / "managed"
    log = table / "_delta_log" / f"{0:020d}.json"
    properties = (
        "'delta.enableInCommitTimestamps' = 'true', 'delta.feature.vacuumProtocolCheck' = 'supported'"
    )
    rig.spark.sql(
        f"CREATE TABLE delta.`{tmp_path / 'plain'}` (v STRING) USING delta TBLPROPERTIES ({properties})"
    )
    plain = (tmp_path / "plain" / "_delta_log" / log.name).read_text()
    actions = [json.loads(line) for line in plain.splitlines()]
    for action in actions:
        for features in ("readerFeatures", "writerFeatures"):
            if "protocol" in action:
                action["protocol"][features].append("catalogManaged")
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))
    rig.declare("in")
    rig.publish("in", "a")
    with pytest.raises(Exception) as raised:
        run(rig, append_to(table))
    error = cause(raised.value)
    assert isinstance(error, OptionError) and "is managed by its catalog" in str(error), raised.value
    assert rig.bodies("in") == ["a"] and rig.broker.engine.last_entry("app") is None
    assert [path.name for path in table.rglob("*.parquet")] == []
    run(rig, append_to(tmp_path / "plain"))  # as the error says
    assert values(tmp_path / "plain") == ["a"] and rig.bodies("in") == []
