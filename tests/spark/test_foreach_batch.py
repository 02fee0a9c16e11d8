"""``transactional``: what a micro-batch promises while nothing crashes, and what it says about wrong use."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from broker_core.core import failpoint
from broker_core.core.errors import CheckpointMismatch, OptionError, Unroutable, cause
from connector.batch import after_commit, foreach_batch
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.conf import recommended_conf
from connector.stream import staging
from tests.progress import GUARD_S
from tests.spark.conftest import settings
from tests.spark.jobs import to_the_end
from tests.spark.pipelines import delta_rows, delta_transactions
from tests.spark.sessions import CONNECT

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

Fn = Callable[[DataFrame, BatchTransaction], None]


def run(
    rig: Any,
    fn: Fn,
    *,
    app_id: str = "app",
    queue: str = "in",
    checkpoint: str = "checkpoint",
    options: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """One query over what is in ``queue``, with ``options`` of its source."""
    each = transactional(fn, url=rig.broker.url, app_id=app_id, **more)
    writer = (
        rig.stream(queue, app_id, **(options or {}))
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", rig.checkpoint(checkpoint))
    )
    to_the_end(writer)
    each.flush(GUARD_S)


def refused(rig: Any, fn: Fn, **more: Any) -> str:
    """The one clear error of a batch; nothing is left of it."""
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    with pytest.raises(Exception) as raised:
        run(rig, fn, **more)
    error = cause(raised.value)
    assert error is not None, str(raised.value)[:2000]
    assert rig.bodies("out") == [] and rig.broker.engine.last_entry("app") is None
    return str(error)


def test_publishes_appends_and_consumption_of_a_batch_are_one_decision(rig: Any, tmp_path: Path) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b", "c")
    seen = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        seen.append((tx.app_id, tx.batch_id, tx.sequence))
        tx.publish(batch.selectExpr("upper(CAST(body AS STRING)) AS body"), queue="out")
        tx.append(
            batch.where("offset > 0").selectExpr("CAST(body AS STRING) AS body", "timestamp"),
            str(tmp_path / "lake"),
        )
        assert rig.bodies("out") == [] and not (tmp_path / "lake").exists()

    run(rig, fn)
    assert seen == [("app", 0, 1)]
    assert sorted(rig.bodies("out")) == ["A", "B", "C"] and rig.bodies("in") == []
    assert sorted(row["body"] for row in delta_rows(tmp_path / "lake")) == ["b", "c"]
    entry = rig.broker.engine.last_entry("app")
    assert (entry.ranges, entry.messages, entry.published, entry.applied) == ({"in": (0, 3)}, 3, 3, True)


@pytest.mark.parametrize("recommended", [True, False])
def test_a_query_whose_driver_died_while_spark_wrote_its_first_offsets_goes_on(
    rig: Any, recommended: bool
) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    offsets = Path(rig.checkpoint()) / "offsets"
    offsets.mkdir(parents=True)
    (offsets / f".0.{uuid.uuid4()}.tmp").write_text("v1\n{")
    (offsets.parent / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    name = "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart"

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue="out")

    with settings(rig.spark, {name: recommended_conf()[name] if recommended else "true"}):
        if recommended:
            run(rig, fn)
            assert sorted(rig.bodies("out")) == ["a", "b"] and rig.bodies("in") == []
        else:
            with pytest.raises(StreamingQueryException, match="STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY"):
                run(rig, fn)


def test_an_operation_that_fails_and_is_caught_does_not_say_what_the_right_one_may_have(
    rig: Any, tmp_path: Path
) -> None:
    """Appended as files and as rows, and given to a function: the failed rows have another column."""
    rig.declare("in")
    rig.publish("in", "a", "b")
    lake, seen = str(tmp_path / "lake"), rig.notes()
    ways: list[tuple[str, dict[str, str]]] = [("files", {}), ("rows", {"dataChange": "true"})]

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        wrong = batch.selectExpr("CAST(raise_error('no row') AS INT) AS other", "body")
        right = batch.selectExpr("CAST(body AS STRING) AS body")
        acts: list[Callable[[DataFrame], None]] = [
            lambda rows, name=name, options=options: tx.append(rows, f"{lake}/{name}", **options)  # type: ignore[misc]
            for name, options in ways
        ]
        for act in [*acts, lambda rows: tx.after_commit(rows, "see")]:
            with pytest.raises(Exception, match="no row"):
                act(wrong)
            act(right)

    run(
        rig,
        fn,
        after_commit={"see": lambda rows, _: seen.append(sorted(row["body"] for row in rows.collect()))},
    )
    for name, _ in ways:
        assert sorted(row["body"] for row in delta_rows(tmp_path / "lake" / name)) == ["a", "b"]
    assert seen == [["a", "b"]] and rig.bodies("in") == []


@pytest.mark.parametrize("persist", [False, True])
def test_the_batch_is_executed_again_only_where_fn_may_not_have_executed_it_whole(
    rig: Any, monkeypatch: pytest.MonkeyPatch, persist: bool
) -> None:
    """Each way is a micro-batch of one query."""
    rig.declare("in", "out")
    execute, now = staging.execute, ""
    again: dict[str, int] = {}

    def counted(frame: DataFrame) -> None:
        again[now] += 1
        execute(frame)

    monkeypatch.setattr(staging, "execute", counted)
    rows = "CAST(body AS STRING) AS body"
    ways: dict[str, Callable[[DataFrame], DataFrame | None]] = {
        "projection": lambda batch: batch.selectExpr(rows),
        "filter": lambda batch: batch.where("length(body) > 100").selectExpr(rows),
        "limit": lambda batch: batch.limit(1).selectExpr(rows),
        "never true": lambda batch: batch.where("1 = 0").selectExpr(rows),
        "another frame": lambda batch: batch.sparkSession.range(1).selectExpr("'x' AS body"),
        "aggregation": lambda batch: batch.groupBy().count().selectExpr("CAST(count AS STRING) AS body"),
        "own function over partitions": lambda batch: batch.selectExpr(rows).mapInArrow(
            lambda batches: iter(()), "body string"
        ),
        "nothing": lambda batch: None,
    }
    for _ in ways:
        rig.publish("in", "a", "b")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        nonlocal now
        now = list(ways)[tx.batch_id]
        again[now] = 0
        frame = ways[now](batch)
        if frame is not None:
            tx.publish(frame, queue="out")

    run(rig, fn, options={"maxOffsetsPerTrigger": 2}, persist=persist)
    assert rig.bodies("in") == []
    assert again == {name: 0 if name in ("projection", "filter") else 1 for name in ways}


def test_rows_of_one_step_may_differ_in_what_is_not_null(rig: Any, tmp_path: Path) -> None:
    """They wait as rows, because the table does not exist yet, and are read as one stream after the decision."""
    rig.declare("in")
    rig.publish("in", "a", "b")
    nested = "named_struct('a', array(named_struct('b', {0})), 'm', map('k', {0})) AS n"

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        spark = batch.sparkSession
        filled, empty = "CAST(id AS STRING)", "IF(id > 5, 'x', NULL)"
        for value in (filled, empty, filled):
            rows = spark.range(2).selectExpr(f"{value} AS body", nested.format(value))
            tx.append(rows, str(tmp_path / "lake"))

    run(rig, fn)
    found = [(row["body"], row["n"]) for row in delta_rows(tmp_path / "lake")]
    wanted = [
        (value, {"a": [{"b": value}], "m": [("k", value)]}) for value in ("0", "1", None, None, "0", "1")
    ]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_an_exception_of_fn_passes_unchanged_and_leaves_nothing(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue="out")
        raise KeyError("mine")

    with pytest.raises(Exception, match="KeyError: 'mine'"):
        run(rig, fn)
    assert rig.bodies("out") == [] and rig.bodies("in") == ["a"]


def test_an_exception_with_a_long_java_trace_ends_the_query_as_failed(rig: Any) -> None:
    rig.declare("in")
    rig.publish("in", "a")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        # Spark's own search of this text overflows its stack
        batch.sparkSession._jvm.java.lang.Class.forName("x" * 50_000)

    with pytest.raises(Exception, match="ClassNotFoundException"):
        run(rig, fn)


def test_a_null_body_is_one_clear_error(rig: Any) -> None:
    text = refused(
        rig, lambda batch, tx: tx.publish(batch.selectExpr("CAST(NULL AS STRING) AS body"), queue="out")
    )
    assert text.startswith("[TXMQ_OPTION] row 0 has no body (null)")


def test_a_body_of_another_type_is_one_clear_error(rig: Any) -> None:
    text = refused(rig, lambda batch, tx: tx.publish(batch.selectExpr("offset AS body"), queue="out"))
    assert "column 'body' has the type bigint; allowed: binary, string" in text


def test_a_message_to_no_queue_fails_the_whole_batch(rig: Any) -> None:
    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue="out")
        tx.publish(batch.select("body"), queue="nowhere")

    assert refused(rig, fn).startswith(f"[{Unroutable.code}] ")
    run(rig, fn, on_unroutable="drop")
    assert rig.bodies("out") == ["a", "b"]


# what an error says: the appends to one table, the last of which is refused
REFUSED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "have different options": [("body", {}), ("body", {"mergeSchema": True})],
    "have different columns": [("body", {}), ("offset", {})],
    "partitionBy names column 'day'": [("body", {"partitionBy": "day"})],
    "option 'txnVersion' cannot be set": [("body", {"txnVersion": 1})],
    "Found invalid character(s)": [("body AS `a b`", {})],
    "has type void": [("NULL AS nothing", {})],
}


def test_an_append_that_would_fail_after_the_decision_is_refused_before_it(rig: Any, tmp_path: Path) -> None:
    """All of them in one micro-batch, which fails with the last one."""
    told = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for number, (*taken, (column, options)) in enumerate(REFUSED.values()):
            table = str(tmp_path / f"lake{number}")
            for first, own in taken:
                tx.append(batch.selectExpr(first), table, **own)
            with pytest.raises(OptionError) as error:
                tx.append(batch.selectExpr(column), table, **options)
            told.append(str(error.value))
        raise error.value

    told.append(refused(rig, fn))
    assert told[-1] == told[-2]
    for expected, text in zip(REFUSED, told, strict=False):
        assert expected in text
    assert not list(tmp_path.glob("lake*"))


def test_a_function_that_after_commit_does_not_have_is_refused_before_the_decision(rig: Any) -> None:
    text = refused(
        rig, lambda batch, tx: tx.after_commit(batch.select("body"), "upsert"), after_commit={"other": print}
    )
    assert "no function 'upsert' in after_commit (there: other)" in text


def test_the_functions_of_a_batch_get_its_rows_and_sequence_and_a_token_each(rig: Any) -> None:
    rig.declare("in")
    rig.publish("in", "a", "b")
    got = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        rows = batch.selectExpr("CAST(body AS STRING) AS body")
        for name in ("with", "without", "other"):
            tx.after_commit(rows, name)

    def bodies(rows: DataFrame) -> list[str]:
        return sorted(row["body"] for row in rows.collect())

    def told(name: str) -> Callable[[DataFrame, int, str], None]:
        return lambda rows, sequence, token: got.append((name, bodies(rows), sequence, token))

    functions = {
        "with": told("with"),
        "other": told("other"),
        "without": lambda rows, sequence: got.append(("without", bodies(rows), sequence)),
    }
    run(rig, fn, after_commit=functions)
    entry = rig.broker.engine.last_entry("app")
    assert got == [
        ("with", ["a", "b"], 1, after_commit.token("with", entry)),
        ("without", ["a", "b"], 1),
        ("other", ["a", "b"], 1, after_commit.token("other", entry)),
    ]


def test_a_new_checkpoint_under_a_used_app_id_stops_with_both_ways_out(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue="out")

    run(rig, fn)
    with pytest.raises(Exception) as raised:
        run(rig, fn, checkpoint="another")
    assert isinstance(cause(raised.value), CheckpointMismatch)
    assert rig.bodies("out") == ["a"]


def test_an_error_after_the_decision_refuses_the_roll_back_and_the_replay_answers_already(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    calls: list[int] = []

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        calls.append(tx.sequence)
        tx.publish(batch.select("body"), queue="out")

    failpoint.arm("foreach.decided", "raise")
    try:
        with pytest.raises(Exception, match=r"failpoint foreach\.decided"):
            run(rig, fn)
    finally:
        failpoint.disarm()
    run(rig, fn)
    assert calls == [1] and rig.bodies("out") == ["a"] and rig.broker.engine.last_entry("app").sequence == 1


@pytest.mark.parametrize("group", [None, "mine"], ids=["none", "its own"])
def test_a_second_call_for_a_batch_is_refused_and_a_replay_is_not_whatever_job_group_the_function_has(
    rig: Any, group: str | None
) -> None:
    """What a function does after the call fails once, and Spark replays the batch in the same process."""
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    each = transactional(
        lambda batch, tx: tx.publish(batch.select("body"), queue="out"), url=rig.broker.url, app_id="app"
    )
    parts = ["CAST(body AS STRING) = 'a'", "CAST(body AS STRING) = 'b'"]

    def go(batch: DataFrame, number: int) -> None:
        batch.sparkSession.sparkContext.setLocalProperty("spark.jobGroup.id", group)  # type: ignore[arg-type]
        for part in parts:
            each(batch.where(part), number)

    for told in ("was called twice for batch 0", ""):
        writer = rig.stream("in").writeStream.foreachBatch(go)
        writer = writer.option("checkpointLocation", rig.checkpoint())
        if told:
            with pytest.raises(Exception, match=told):
                to_the_end(writer)
            parts.pop()
        else:
            to_the_end(writer)
    assert rig.bodies("out") == ["a"], "the error has told that the first call decided the batch"


def test_tx_is_of_no_use_after_its_function(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a")
    kept: list[BatchTransaction] = []
    run(rig, lambda batch, tx: kept.append(tx))
    with pytest.raises(OptionError, match="after the function returned"):
        kept[0].publish(rig.spark.range(1).selectExpr("'x' AS body"), queue="out")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"fn": "x"}, "takes a function"),
        ({"url": None}, "'url' or 'data' is missing"),
        ({"data": "here"}, "exclude each other"),
        ({"app_id": " "}, "'appId'"),
        ({"on_unroutable": "ignore"}, "allowed: "),
        ({"on_new_checkpoint": "maybe"}, "allowed: "),
        ({"after_commit": {"upsert": 1}}, "give a function f(rows, sequence)"),
        ({"after_commit": {"upsert": lambda rows: None}}, "takes the arguments (rows)"),
        ({"ledger_sync": True}, "ledger_sync=True needs a ledger"),
    ],
)
def test_wrong_arguments_are_one_clear_error(wrong: dict[str, Any], expected: str) -> None:
    arguments = {"fn": print, "url": "txmq://127.0.0.1:1", "app_id": "app", **wrong}
    fn = arguments.pop("fn")
    with pytest.raises(OptionError) as raised:
        transactional(fn, **arguments)
    assert expected in str(raised.value)


def _module_function(batch: DataFrame, tx: BatchTransaction) -> None: ...


def test_the_callable_object_can_be_pickled(spark: SparkSession) -> None:
    made = transactional(_module_function, url="txmq://127.0.0.1:1", app_id="app", ledger="somewhere")
    again = pickle.loads(pickle.dumps(made))
    assert (
        isinstance(again, foreach_batch.Transactional)
        and again.app_id == "app"
        and again.address == made.address
    )


def test_several_appends_to_one_table_are_one_delta_commit(rig: Any, tmp_path: Path) -> None:
    rig.declare("in")
    rig.publish("in", "a", "b")
    lake = tmp_path / "lake"

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for spelling in (str(lake), f"{lake}/", f"file:{lake}"):
            tx.append(batch.selectExpr("CAST(body AS STRING) AS body"), spelling)

    run(rig, fn)
    assert [(app.partition("@")[0], version) for app, version in delta_transactions(lake)] == [("app", 1)]
    assert sorted(row["body"] for row in delta_rows(lake)) == ["a", "a", "a", "b", "b", "b"]


def test_columns_with_dots_and_backquotes_reach_a_function_after_the_decision(rig: Any) -> None:
    """PySpark reads such a name as a path of fields where rows go through Python."""
    rig.declare("in")
    rig.publish("in", "a")
    got = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.after_commit(batch.selectExpr("CAST(body AS STRING) AS `a.b`", "1 AS `c``d`", "2 AS e"), "f")

    run(rig, fn, after_commit={"f": lambda rows, _sequence: got.append((rows.columns, rows.collect()))})
    assert got == [(["a.b", "c`d", "e"], [("a", 1, 2)])]


def test_a_batch_that_several_operations_read_is_counted_once_with_persist_auto(rig: Any) -> None:
    """And ``ledger="auto"`` is beside the checkpoint."""
    rig.declare("in", "out")
    for body in "abcd":
        rig.publish("in", body)

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for _ in range(3):
            tx.publish(batch.select("body"), queue="out")

    each = transactional(
        fn, url=rig.broker.url, app_id="app", persist="auto", ledger="auto", ledger_sync=True
    )
    stream = rig.stream("in", maxOffsetsPerTrigger=2).writeStream.foreachBatch(each)
    stream = stream.option("checkpointLocation", rig.checkpoint())
    query = stream.start()  # with availableNow, Spark 4.1 makes one batch
    query.processAllAvailable()
    sources = [source for progress in query.recentProgress for source in json.loads(progress.json)["sources"]]
    sums = {progress["numInputRows"] for progress in query.recentProgress}
    assert query.lastProgress.numInputRows is not None
    query.stop()  # Connect tells what the sources had, and neither their sum nor an offset that is no text
    assert (sums == {None}) == CONNECT
    first, source = [source for source in sources if source["numInputRows"]]
    assert (first["numInputRows"], source["numInputRows"]) == (6, 2)
    ends = [source["endOffset"], source["latestOffset"]]
    assert [json.loads(end) if isinstance(end, str) else end for end in ends] == [{"in": 4}] * 2
    assert not source.get("metrics") and "Python" in source["description"], (
        "Spark has other words now: use them"
    )
    rows = delta_rows(Path(f"{rig.checkpoint()}_ledger"))
    assert sorted((row["sequence"], row["end_offset"]) for row in rows) == [(1, 2), (2, 4)]
    assert sorted(rig.bodies("out")) == sorted("abcd" * 3)
