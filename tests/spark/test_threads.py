"""``tx`` in threads: a batch is decided with all that it reads, whoever has executed it, and with every operation
that its function began, or not at all.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.sql import DataFrame

from broker_core.core import failpoint
from broker_core.core.errors import NotApplied, OptionError, cause
from connector.batch import batch_transaction
from connector.batch.batch_reads import BatchReads
from connector.batch.foreach_batch import BatchTransaction, transactional
from tests.spark.pipelines import delta_rows
from tests.spark.sessions import CONNECT
from tests.spark.test_tables_changed import Driver, dies

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

Fn = Callable[[DataFrame, BatchTransaction], None]
TEXT = "CAST(body AS STRING) AS body"


def start(rig: Any, fn: Fn, app_id: str = "app", frame: DataFrame | None = None, **more: Any) -> Any:
    resume = more.get("on_new_checkpoint", "fail")
    rows = (
        rig.stream("in", app_id, maxOffsetsPerTrigger=2, onNewCheckpoint=resume) if frame is None else frame
    )
    each = transactional(fn, url=rig.broker.url, app_id=app_id, **more)
    writer = rows.writeStream.foreachBatch(each).option("checkpointLocation", rig.checkpoint("checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()


def tables(tmp_path: Path) -> dict[str, list[str]]:
    lake = tmp_path / "lake"
    return {each.name: sorted(row["body"] for row in delta_rows(each)) for each in sorted(lake.iterdir())}


def pool(batch: DataFrame, tx: BatchTransaction, lake: str) -> None:
    """The usual way to write several tables at the same time."""
    rows = batch.selectExpr(TEXT)
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(tx.append, rows, f"{lake}/{name}") for name in ("a", "b", "b")]
        done.append(threads.submit(tx.publish, batch.select("body"), queue="out"))
        for each in done:
            each.result()


def pool_of_joblib(batch: DataFrame, tx: BatchTransaction, lake: str) -> None:
    """What joblib's threading backend has."""
    rows = batch.selectExpr(TEXT)
    with ThreadPool(2) as threads:
        done = [threads.apply_async(tx.append, (rows, f"{lake}/{name}")) for name in ("a", "b", "b")]
        done.append(threads.apply_async(lambda: tx.publish(batch.select("body"), queue="out")))
        for each in done:
            each.get()


def inheritable(batch: DataFrame, tx: BatchTransaction, lake: str) -> None:
    session = batch.sparkSession
    threads = [InheritableThread(lambda: tx.publish(batch.select("body"), queue="out"), session=session)]
    threads += [
        InheritableThread(
            lambda name=name: tx.append(batch.selectExpr(TEXT), f"{lake}/{name}"), session=session
        )
        for name in ("a", "b", "b")
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def coroutines(batch: DataFrame, tx: BatchTransaction, lake: str) -> None:
    async def every() -> None:
        await asyncio.gather(
            asyncio.to_thread(tx.publish, batch.select("body"), queue="out"),
            *(asyncio.to_thread(tx.append, batch.selectExpr(TEXT), f"{lake}/{name}") for name in "abb"),
        )

    asyncio.run(every())


def cached_by_a_thread(batch: DataFrame, tx: BatchTransaction, lake: str) -> None:
    """No task of the thread of the stream reads the source."""
    batch.persist()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(batch.count).result()
    one_by_one(batch, tx, lake)
    batch.unpersist()


def one_by_one(batch: DataFrame, tx: BatchTransaction, lake: str) -> None:
    for name in ("a", "b", "b"):
        tx.append(batch.selectExpr(TEXT), f"{lake}/{name}")
    tx.publish(batch.select("body"), queue="out")


def nothing_waits_for(batch: DataFrame, tx: BatchTransaction, lake: str) -> None:
    """The operations are under way when the function returns."""
    under_way = threading.Semaphore(0)
    mine: Any = tx._operations.one

    def one(name: str) -> Any:
        held = mine(name)
        under_way.release()
        return held

    tx._operations.one = one  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda: tx.publish(batch.select("body"), queue="out"))]
    threads += [
        threading.Thread(target=lambda name=name: tx.append(batch.selectExpr(TEXT), f"{lake}/{name}"))
        for name in ("a", "b", "b")
    ]
    with tx._operations.one("publish"):  # none can end before all have begun
        for each in threads:
            each.start()
        for _ in range(1 + len(threads)):
            assert under_way.acquire(timeout=60)


WAYS = [pool, pool_of_joblib, inheritable, coroutines, cached_by_a_thread, one_by_one]


def test_a_batch_consumes_its_range_and_does_every_operation_in_whatever_thread(
    rig: Any, tmp_path: Path
) -> None:
    """Each way is a micro-batch of one query; then the last batch is repeated, and the checkpoint is lost."""
    rig.declare("in", "out")
    for _ in WAYS:
        rig.publish("in", "a", "b")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        WAYS[tx.batch_id % len(WAYS)](batch, tx, str(tmp_path / "lake"))

    start(rig, fn)
    ranges = {}
    for number in range(len(WAYS)):
        (row,) = [each for each in rig.broker.engine.unmirrored("app") if each.sequence == number + 1]
        ranges[WAYS[number].__name__] = row.ranges, row.messages, row.published
    assert ranges == {
        way.__name__: ({"in": (2 * number, 2 * number + 2)}, 2, 2) for number, way in enumerate(WAYS)
    }
    once = sorted(["a", "b"] * len(WAYS))
    assert tables(tmp_path) == {"a": once, "b": sorted(once * 2)} and sorted(rig.bodies("out")) == once

    checkpoint = Path(rig.checkpoint("checkpoint"))
    for name in (f"{len(WAYS) - 1}", f".{len(WAYS) - 1}.crc"):  # as if killed before Spark's commit log
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    start(rig, fn)
    shutil.rmtree(checkpoint)
    start(rig, fn, on_new_checkpoint="resume")
    assert tables(tmp_path) == {"a": once, "b": sorted(once * 2)} and sorted(rig.bodies("out")) == once


def test_what_a_thread_has_shuffled_is_consumed_too(rig: Any) -> None:
    """An aggregation of the stream: the second execution of the batch reads shuffle files, not the source. On Connect
    nothing tells what the first one has read, and the source acknowledges it when it claims the next range.
    """
    rig.declare("in", "out")
    rig.publish("in", "a", "b", "a")
    counted = rig.stream("in", "app").groupBy("body").count()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(batch.collect).result()
        tx.publish(batch.selectExpr("concat(CAST(body AS STRING), count) AS body"), queue="out")

    each = transactional(fn, url=rig.broker.url, app_id="app")
    writer = counted.writeStream.outputMode("update").foreachBatch(each)
    writer = writer.option("checkpointLocation", rig.checkpoint("checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    entry = rig.broker.engine.last_entry("app")
    ranges = {} if CONNECT else {"in": (0, 3)}
    assert (entry.ranges, sorted(rig.bodies("out")), rig.bodies("in")) == (ranges, ["a2", "b1"], [])


def test_a_batch_in_one_thread_asks_the_broker_for_no_range(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own tasks have noted it, and that is certain."""
    rig.declare("in", "out")
    rig.publish("in", "a")
    asked: list[bool] = []
    note = BatchReads.note

    def noted(self: BatchReads, *arguments: Any) -> None:
        asked.append(not self.by_tasks)
        note(self, *arguments)

    monkeypatch.setattr(BatchReads, "note", noted)
    start(rig, lambda batch, tx: tx.publish(batch.select("body"), queue="out"))
    assert asked == [False] and rig.bodies("out") == ["a"]


def test_what_is_under_way_when_the_function_returns_is_part_of_the_batch(rig: Any, tmp_path: Path) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    start(rig, lambda batch, tx: nothing_waits_for(batch, tx, str(tmp_path / "lake")))
    assert tables(tmp_path) == {"a": ["a", "b"], "b": ["a", "a", "b", "b"]}
    assert sorted(rig.bodies("out")) == ["a", "b"] and rig.bodies("in") == []


@pytest.mark.parametrize("where", ["a future that nobody asks", "caught in the thread"])
def test_an_operation_that_fails_in_a_thread_fails_the_batch(rig: Any, tmp_path: Path, where: str) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")

    def fails(batch: DataFrame, tx: BatchTransaction) -> None:
        try:
            tx.publish(batch.select("body"), queue="out", exchange="amq.direct")
        except OptionError:
            if not where.startswith("caught"):
                raise

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        with ThreadPoolExecutor(2) as threads:
            threads.submit(fails, batch, tx)
            threads.submit(tx.append, batch.selectExpr(TEXT), str(tmp_path / "lake"))

    with pytest.raises(Exception) as raised:
        start(rig, fn)
    assert "publish has queue='out' and also exchange" in str(cause(raised.value))
    assert rig.broker.engine.last_entry("app") is None and not (tmp_path / "lake").exists()
    assert sorted(rig.bodies("in")) == ["a", "b"]


def test_an_operation_after_the_function_returned_is_refused_and_says_so(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b", "c", "d")
    kept: list[BatchTransaction] = []
    refused = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        kept.append(tx)
        if len(kept) == 2:
            for operation in (lambda: kept[0].publish(batch.select("body"), queue="out"),
                              lambda: kept[0].append(batch, "lake"), lambda: kept[0].merge(batch, "lake", "true", insert=True),
                              lambda: kept[0].after_commit(batch, "f"), lambda: kept[0].reject(batch)):  # fmt: skip
                with pytest.raises(OptionError) as raised:
                    operation()
                refused.append(str(raised.value))

    start(rig, fn)
    assert len(refused) == 5 and all(" after the function returned" in text for text in refused)
    assert rig.bodies("out") == [] and rig.bodies("in") == []


@pytest.mark.parametrize(("point", "decided"), [("foreach.executed", False), ("foreach.decided", True)])
def test_an_operation_in_a_thread_after_the_function_returned_fails_the_batch_until_that_is_decided(
    rig: Any, point: str, decided: bool
) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    refused: list[BaseException | None] = []

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        def late(_name: str) -> None:
            with ThreadPoolExecutor(1) as threads:
                refused.append(threads.submit(tx.publish, batch.select("body"), queue="out").exception())

        failpoint.arm(point, late)

    try:
        if decided:
            start(rig, fn)
        else:
            with pytest.raises(Exception, match="after the function returned"):
                start(rig, fn)
    finally:
        failpoint.disarm()
    assert "tx.publish was called after the function returned" in str(refused)
    assert (rig.broker.engine.last_entry("app") is not None) == decided
    assert rig.bodies("out") == [] and rig.bodies("in") == ([] if decided else ["a", "b"])


def test_two_threads_never_share_a_directory_of_files(rig: Any, tmp_path: Path) -> None:
    """The threads meet between the number of an append and its files."""
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    lake = str(tmp_path / "lake")
    rig.spark.createDataFrame([("seed", 0)], "body string, thread int").write.format("delta").save(lake)
    met = threading.Barrier(2, timeout=60)
    to_write = batch_transaction.to_write

    def meeting(rows: DataFrame) -> Any:
        met.wait()
        return to_write(rows)

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
            patch.setattr(batch_transaction, "to_write", meeting)
            list(threads.map(lambda n: tx.append(batch.selectExpr(TEXT, f"{n} AS thread"), lake), (1, 2)))

    start(rig, fn)
    found = sorted((row["body"], row["thread"]) for row in delta_rows(Path(lake)))
    assert found == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("seed", 0)]


@pytest.mark.soak
def test_the_tables_of_a_function_in_threads_are_applied_side_by_side_each_once(
    rig: Any, tmp_path: Path
) -> None:
    """Two threads meet before their commits; one table has got a constraint that its rows violate."""
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    lake = tmp_path / "lake"
    for name in "ab":
        rig.spark.createDataFrame([], "body string").write.format("delta").save(str(lake / name))
    met = threading.Barrier(2, timeout=120)

    def altered(_name: str) -> None:
        check = f"ALTER TABLE delta.`{lake / 'b'}` ADD CONSTRAINT none CHECK (body > 'b')"
        rig.spark.newSession().sql(check)

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        pool(batch, tx, str(lake))
        failpoint.arm("foreach.decided", altered)
        for hit in (1, 2):
            failpoint.arm("adding.started", lambda _name: met.wait(), hit=hit)

    try:
        with pytest.raises(Exception) as raised:
            start(rig, fn)
    finally:
        failpoint.disarm()
    assert isinstance(cause(raised.value), NotApplied) and "does not take its rows" in str(raised.value)
    assert tables(tmp_path) == {"a": ["a", "b"], "b": []}  # the other table does not wait for the repair
    rig.spark.sql(f"ALTER TABLE delta.`{lake / 'b'}` DROP CONSTRAINT none")
    start(rig, fn)
    assert tables(tmp_path) == {"a": ["a", "b"], "b": ["a", "a", "b", "b"]}
    assert sorted(rig.bodies("out")) == ["a", "b"] and rig.bodies("in") == []


def test_threads_make_new_tables_of_the_catalog_each_with_the_commit_of_the_batch(
    rig: Any, tmp_path: Path
) -> None:
    """Two commits meet: Delta takes from the session whose commit it is that makes such a table."""
    rig.spark.sql(f"CREATE DATABASE many LOCATION '{tmp_path}/many'")
    names = [f"many.t{number}" for number in range(4)]

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(tx.append, rows, name) for name in names]:
                done.result()

    driver = Driver(rig, "app", fn)
    try:
        for number in range(2):
            assert driver.batch(number, rig.spark.range(number, number + 1).toDF("n")) is None
            for name in names:
                assert sorted(row.n for row in rig.spark.table(name).collect()) == list(range(number + 1))
        assert driver.waiting == []
    finally:
        rig.spark.sql("DROP DATABASE many CASCADE")


def test_one_operation_in_a_thread_and_the_tables_beside_one_that_refuses_get_their_rows_at_the_stop(
    rig: Any, tmp_path: Path
) -> None:
    """A start that finds such a batch undone does its tables in turn, and stops at the first that refuses."""
    places = {name: str(tmp_path / name) for name in ("first", "merge", "overwrite", "append")}
    for place in places.values():
        rig.spark.sql(f"CREATE TABLE delta.`{place}` (n BIGINT) USING delta")

    def fn(rows: DataFrame, tx: BatchTransaction) -> None:
        tx.append(rows, places["first"])
        tx.merge(rows, places["merge"], "t.n = s.n", insert=True)
        tx.overwrite(rows, places["overwrite"], "n >= 0")
        with ThreadPoolExecutor(1) as threads:
            threads.submit(tx.append, rows, places["append"]).result()

    def check(what: str) -> None:
        rig.spark.newSession().sql(f"ALTER TABLE delta.`{places['first']}` {what}")

    def found() -> list[list[int]]:
        return [sorted(row["n"] for row in delta_rows(Path(place))) for place in places.values()]

    driver = Driver(rig, "app", fn)
    failpoint.arm("foreach.decided", lambda _name: check("ADD CONSTRAINT none CHECK (n < 0)"))
    error = driver.batch(0, rig.spark.range(1).toDF("n"))
    assert isinstance(error, NotApplied) and "first" in str(error) and driver.waiting == [1], error
    assert found() == [[], [0], [0], [0]]
    failpoint.disarm()
    check("DROP CONSTRAINT none")
    driver.apply(rig.spark)
    assert found() == [[0]] * 4 and driver.waiting == []

    failpoint.arm("foreach.decided", lambda name: (check("ADD CONSTRAINT none CHECK (n < 1)"), dies(name)))
    error = driver.batch(1, rig.spark.range(1, 2).toDF("n"))
    assert "the driver dies here" in str(error) and driver.waiting == [2]
    failpoint.disarm()
    with pytest.raises(NotApplied, match="first"):
        driver.apply(rig.spark)
    assert found() == [[0]] * 4
    check("DROP CONSTRAINT none")
    driver.apply(rig.spark)
    assert found() == [[0, 1], [0, 1], [1], [0, 1]] and driver.waiting == []
