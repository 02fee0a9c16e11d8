"""What people write in foreachBatch: functions that a pipeline runs, and how they are called.

A way is ``(batch, tx, effects, pipeline)``; ``effects(rows, tx)`` publishes the column ``body`` of its rows, appends
them and passes them to ``after_commit``. ``CALLS`` are functions for foreachBatch that call a transactional one.

Not here: the processes that run and kill them (``pipelines.py``, ``jobs.py``), what is right (``test_user_code.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import pandas as pd
import psutil
import pyarrow as pa
from pyspark import InheritableThread, StorageLevel, TaskContext
from pyspark.sql import DataFrame, Row, Window
from pyspark.sql import functions as F

from broker_core.core.errors import OptionError
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.tables.table import is_connect
from connector.typed.decode import decode
from tests.progress import wait_until
from tests.spark.cloned_session import beside_the_root
from tests.spark.shapes import OTHER

Effects = Callable[[DataFrame, BatchTransaction], None]
Way = Callable[[DataFrame, BatchTransaction, Effects, dict[str, Any]], Any]
Each = Callable[[DataFrame, int], None]

TEXT = "CAST(body AS STRING) AS body"
_kept: dict[str, BatchTransaction] = {}  # app -> tx of its first batch
_first: dict[str, DataFrame] = {}  # and that batch


def bodies(rows: list[Row]) -> list[tuple[str]]:
    return [(bytes(row["body"]).decode(),) for row in rows]


# -- threads and pools ---------------------------------------------------------------------------------------
def marked(batch: DataFrame, tx: BatchTransaction) -> DataFrame:
    """Rows as ``effects`` makes them."""
    return batch.selectExpr(TEXT, f"'{tx._opened.token}' AS marker", f"{tx.sequence} AS sequence")


def three(batch: DataFrame, tx: BatchTransaction, pipeline: dict[str, Any]) -> list[Callable[[], None]]:
    """The operations of ``effects``, apart."""
    rows = marked(batch, tx)
    return [
        partial(tx.publish, rows.selectExpr("concat(body, ':', marker) AS body"), queue=pipeline["out"]),
        partial(tx.append, rows, f"{pipeline['lake']}/first"),
        partial(tx.after_commit, rows, "collect"),
    ]


def thread_pool(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(operation) for operation in three(batch, tx, pipeline)]:
            each.result()


def threads(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    of: dict[str, Any] = {"session": batch.sparkSession} if is_connect(batch) else {}
    started = [InheritableThread(operation, **of) for operation in three(batch, tx, pipeline)]
    for each in started:
        each.start()
    for each in started:
        each.join()


def coroutines(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    async def every() -> None:
        await asyncio.gather(*(asyncio.to_thread(each) for each in three(batch, tx, pipeline)))

    asyncio.run(every())


def upper_twice(body: str) -> tuple[str]:
    return (body.upper().lower(),)


def process_pool(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """Processes work on rows that were collected."""
    given = [body for (body,) in bodies(batch.collect())]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        made = list(processes.map(upper_twice, given))
    effects(batch.sparkSession.createDataFrame(made, "body string"), tx)


# -- actions, caches, other frames ---------------------------------------------------------------------------
def several_actions(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    if batch.isEmpty():
        return
    assert batch.count() == len(batch.collect()) == batch.agg(F.count("*")).first()[0]
    assert batch.take(1) and batch.limit(1).count() == 1 and batch.where("false").count() == 0
    batch.write.mode("overwrite").parquet(f"{pipeline['lake']}.side/{tx.batch_id}")
    effects(batch, tx)


def persisted(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    batch.persist(StorageLevel.MEMORY_ONLY)
    batch.count()
    effects(batch, tx)
    batch.unpersist(blocking=True)


def unpersisted_between(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    """The cache goes before ``tx`` reads, and another one stays for ever."""
    batch.cache().count()
    batch.unpersist()
    rows = batch.selectExpr(TEXT).cache()
    rows.count()
    effects(rows, tx)
    batch.sparkSession.catalog.clearCache()


def checkpointed(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    effects(batch.localCheckpoint(), tx)


def rdd(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    rows = batch.rdd.map(lambda row: (row["offset"], row["body"].decode())).sortByKey()
    effects(batch.sparkSession.createDataFrame(rows, "offset long, body string"), tx)


def to_pandas(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    frame = batch.selectExpr(TEXT).toPandas()
    effects(batch.sparkSession.createDataFrame(frame, "body string"), tx)


def collected(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    given = bodies(list(batch.toLocalIterator()))
    effects(batch.sparkSession.createDataFrame(given, "body string"), tx)


def views(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    spark = batch.sparkSession
    batch.createOrReplaceTempView("batch")
    batch.createOrReplaceGlobalTempView(f"batch_{tx.app_id.replace('-', '_')}")
    spark.sql(f"CREATE OR REPLACE TEMP VIEW texts AS SELECT {TEXT} FROM batch")
    spark.udf.register("same", lambda text: text, "string")
    effects(spark.sql("SELECT same(body) AS body FROM texts"), tx)
    spark.catalog.dropTempView("batch")


def other_session(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """Rows of a session that is not the one of the batch."""
    session = batch.sparkSession.newSession()
    effects(session.createDataFrame(bodies(batch.collect()), "body string"), tx)


def settings(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    spark = batch.sparkSession
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    spark.sparkContext.setJobGroup("mine", "a group of the user's own")
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", "mine")
    effects(batch.repartition(3), tx)


def shuffled(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    number = F.row_number().over(Window.orderBy("offset"))
    texts = batch.select(F.expr(TEXT), number.alias("number"))
    again = batch.select(F.expr(TEXT)).groupBy("body").count()
    effects(texts.join(again, "body").orderBy("number"), tx)


def own_table(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """Only what the table does not have is appended to it."""
    before = batch.sparkSession.read.format("delta").load(f"{pipeline['lake']}/first")
    effects(batch.selectExpr(TEXT).join(before, "body", "left_anti"), tx)


def union(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """Several appends to one table, of parts."""
    rows = marked(batch, tx)
    tx.publish(rows.selectExpr("concat(body, ':', marker) AS body"), queue=pipeline["out"])
    for half in ("body < 'c'", "body >= 'c'"):
        tx.append(rows.where(half), f"{pipeline['lake']}/first")
    tx.after_commit(rows, "collect")


# -- other queries -------------------------------------------------------------------------------------------
def nested_read(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """Batch reads and writes of the broker within the function; the messages of the batch are there until it ends."""
    reader = batch.sparkSession.read.format("txmq").option("url", pipeline["url"])
    waiting = reader.option("queue", pipeline["queue"]).load().selectExpr(TEXT)
    assert waiting.count() >= batch.count()
    effects(batch.selectExpr(TEXT).join(waiting, "body", "left_semi"), tx)


def inner_stream(
    batch: DataFrame, tx: BatchTransaction, pipeline: dict[str, Any], call: Callable[[Each], Each]
) -> None:
    """A stream of another app and queue, to its end."""
    inner = f"{tx.app_id}.inner"
    stream = batch.sparkSession.readStream.format("txmq").option("url", pipeline["url"])
    rows = stream.option("queue", f"{pipeline['queue']}.{OTHER}").option("appId", inner).load()
    each = transactional(
        lambda batch, tx: tx.append(batch.selectExpr(TEXT), f"{pipeline['lake']}.inner"),
        url=pipeline["url"],
        app_id=inner,
    )
    writer = rows.writeStream.foreachBatch(call(each))
    writer = writer.option("checkpointLocation", f"{pipeline['checkpoint']}.inner")
    writer.trigger(availableNow=True).start().awaitTermination()


def nested_stream(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    inner_stream(batch, tx, pipeline, lambda each: each)
    effects(batch, tx)


def rate_stream(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """A stream that outlives the function, of a source that is not txmq."""
    spark = batch.sparkSession
    name = f"rate_{tx.app_id.replace('-', '_')}"
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    query = rate.writeStream.format("memory").queryName(name).start()
    try:
        effects(batch, tx)
    finally:
        query.stop()


# -- errors --------------------------------------------------------------------------------------------------
def swallowed(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """Actions and operations that fail, and a function that goes on."""
    broken = F.udf(lambda body: 1 // 0, "string")
    rows = batch.select(broken("body").alias("body"))
    for fails in (
        rows.collect,
        lambda: tx.publish(rows, queue=pipeline["out"]),
        lambda: tx.append(marked(rows, tx), f"{pipeline['lake']}/first"),
        lambda: tx.publish(batch.select("offset"), queue=pipeline["out"]),
        lambda: tx.after_commit(batch, "nothing of this name"),
    ):
        with contextlib.suppress(Exception):
            fails()
            raise AssertionError("it did not fail")
    effects(batch, tx)


def half_swallowed(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    """One task has staged its rows when another one fails for good; then the rows are staged again."""

    def broken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            if "a" in rows.column("body").to_pylist() or "c" in rows.column("body").to_pylist():
                raise RuntimeError("this task fails")
            yield rows

    rows = batch.selectExpr(TEXT).repartition(2, "body")
    with contextlib.suppress(Exception):
        tx.publish(rows.mapInArrow(broken, "body string"), queue=pipeline["out"])
    with contextlib.suppress(Exception):
        tx.append(marked(rows.mapInArrow(broken, "body string"), tx), f"{pipeline['lake']}/first")
    effects(batch, tx)


def retried(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """The worker of a task is killed when its rows are through, once for each batch; Spark runs the task again."""
    flag = f"{pipeline['lake']}.killed.{tx.batch_id}"

    def dying(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            yield rows
            if not os.path.exists(flag):
                Path(flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    effects(batch.selectExpr(TEXT).mapInArrow(dying, "body string"), tx)


# -- executors that are processes of their own (``test_executors.py``) -----------------------------------------
def executor() -> int:
    """The process that runs the task that calls this."""
    return next(
        each.pid for each in psutil.Process().parents() if "CoarseGrainedExecutorBackend" in each.cmdline()
    )


def executor_killed(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    """The executor of a task is killed when its rows are through, once for each batch."""
    flag = f"{pipeline['lake']}.killed.{tx.batch_id}"

    def dying(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            yield rows
            if not os.path.exists(flag):
                Path(flag).touch()
                os.kill(executor(), signal.SIGKILL)
                signal.pause()

    effects(batch.selectExpr(TEXT).mapInArrow(dying, "body string"), tx)


def speculated(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """A task waits until a second attempt, which Spark starts because the other tasks are done, has its rows."""
    flag = f"{pipeline['lake']}.speculated.{tx.batch_id}"

    def slow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber():
            Path(flag).touch()
        elif context.partitionId() == 0:
            wait_until(lambda: os.path.exists(flag), "a second attempt runs")

    effects(batch.selectExpr(TEXT).repartition(2).mapInArrow(slow, "body string"), tx)


CLUSTER: dict[str, Way] = {way.__name__: way for way in (executor_killed, speculated)}


# -- code in tasks -------------------------------------------------------------------------------------------
class Counting:
    """A function of rows that counts, so its values differ from execution to execution."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, text: str) -> str:
        self.seen += 1
        return f"{text}#{os.getpid()}.{self.seen}"


def counting_udf(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """Values of no row are equal in two executions, and of a published row nothing is executed twice."""
    count = F.udf(Counting(), "string").asNondeterministic()
    rows = batch.select(F.expr(TEXT), F.rand().alias("r"), F.expr("uuid()").alias("u"))
    effects(rows.withColumn("counted", count("body")).drop("r", "u", "counted"), tx)


def generators(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    def frames(given: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        """It holds a frame back until the next one comes, and the end."""
        held: pd.DataFrame | None = None
        for frame in given:
            if held is not None:
                yield held
            held = frame
        if held is not None:
            yield held

    def each(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(body=frame["body"].str.strip())

    rows = batch.selectExpr(TEXT).mapInPandas(frames, "body string")
    effects(rows.groupBy("body").applyInPandas(each, "body string"), tx)


def side_effects(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """``foreach``, ``foreachPartition`` and an accumulator of the user's own."""
    context = batch.sparkSession.sparkContext
    rows = context.accumulator(0)
    names = context.broadcast({"a": "a"})
    batch.foreach(lambda row: rows.add(1))
    batch.foreachPartition(lambda part: [names.value for _ in part] and None)
    assert rows.value == batch.count()
    effects(batch, tx)


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        thread_pool, threads, coroutines, process_pool, several_actions, persisted, unpersisted_between,
        checkpointed, rdd, to_pandas, collected, views, other_session, settings, shuffled, own_table, union,
        nested_read, nested_stream, rate_stream, swallowed, half_swallowed, retried, counting_udf, generators,
        side_effects,
    )
}  # fmt: skip


# -- what is refused -----------------------------------------------------------------------------------------
async def a_coroutine(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    effects(batch, tx)


def a_generator(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> Generator[None]:
    effects(batch, tx)
    yield


def a_future(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> Future[None]:
    """Nobody waits for it, and it begins when the batch is decided."""
    begins: Future[None] = Future()
    return begins


def kept_tx(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """The ``tx`` of the first batch is used for the second one."""
    effects(batch, _kept.setdefault(tx.app_id, tx))


def tx_in_a_task(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    batch.foreachPartition(lambda rows: tx.publish(rows, queue=pipeline["out"]))  # type: ignore[arg-type]


def tx_in_a_udf(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    sends = F.udf(lambda body: tx.sequence, "int")
    effects(batch.withColumn("sent", sends("body")), tx)


def tx_in_a_process(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        processes.submit(tx.publish, "rows").result()


def caught_in_a_thread(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    def fails() -> None:
        with contextlib.suppress(Exception):
            tx.publish(batch.select("offset"), queue=pipeline["out"])

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    effects(batch, tx)


def task_that_always_fails(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    effects(batch, tx)
    broken = F.udf(lambda body: 1 // 0, "string")
    tx.publish(batch.select(broken("body").alias("body")), queue=pipeline["out"])


def tx_in_another_query(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    """A stream within the function stages its rows in the transaction of the other one."""

    def call(each: Each) -> Each:
        def stages(rows: DataFrame, number: int) -> None:
            each(rows, number)
            tx.publish(rows.select("body"), queue=pipeline["out"])

        return stages

    with contextlib.suppress(Exception):
        inner_stream(batch, tx, pipeline, call)
    effects(batch, tx)


def kept_batch(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """The frame of the first batch is read in the second one, and its rows are consumed by then."""
    first = _first.setdefault(tx.app_id, batch)
    effects(first, tx)


def evolves_to_an_interval(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    """A merge that would give its table a column of a type that no table of Delta has."""
    effects(batch, tx)
    rows = marked(batch, tx).selectExpr("*", "INTERVAL '1' DAY AS lasts")
    tx.merge(rows, f"{pipeline['lake']}/first", "t.body = s.body", insert=True, merge_schema=True)


def no_frame(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """What is no DataFrame of Spark, in each operation."""
    table = f"{pipeline['lake']}/first"
    given: Any = batch.selectExpr(TEXT).toPandas()
    refused: list[str] = []
    no_frames = [given, given.values.tolist(), decode(batch, "body string", "csv"), None]
    if not is_connect(batch):
        no_frames.append(batch.rdd)
    for rows in no_frames:
        for operation in (
            partial(tx.publish, rows, queue=pipeline["out"]),
            partial(tx.append, rows, table),
            partial(tx.merge, rows, table, "t.body = s.body", insert=True),
            partial(tx.delete, rows, table, "t.body = s.body"),
            partial(tx.overwrite, rows, table, "true"),
            partial(tx.after_commit, rows, "collect"),
        ):
            try:
                operation()
            except OptionError as error:
                refused.append(error.summary)
    assert len(refused) == 6 * len(no_frames) and all(" got rows of the type " in each for each in refused), (
        refused
    )
    tx.reject(given)


def frame_in_another_query(
    batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]
) -> None:
    """A stream within the function stages the rows of this batch in the transaction of its own app."""

    def call(each: Each) -> Each:
        return transactional(
            lambda _rows, tx: tx.append(batch.selectExpr(TEXT), f"{pipeline['lake']}.inner"),
            url=pipeline["url"],
            app_id=f"{pipeline['app']}.inner",
        )

    inner_stream(batch, tx, pipeline, call)


def exits(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    effects(batch, tx)
    sys.exit("the function has had enough")


def cancelled(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """The error is no Exception, and Spark would wait for ever for an answer."""

    async def gives_up() -> None:
        effects(batch, tx)
        cast(asyncio.Task[None], asyncio.current_task()).cancel()
        await asyncio.sleep(0)

    asyncio.run(gives_up())


def interrupted(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """As a library does that gives a thread a time limit; Spark would wait for ever for an answer."""
    effects(batch, tx)
    raise KeyboardInterrupt("the time is over")


def forked(batch: DataFrame, tx: BatchTransaction, effects: Effects, pipeline: dict[str, Any]) -> None:
    """What a forked process stages nobody would decide, and the function does not look at how it ended."""
    rows = batch.select("body")  # the process has no gateway to the JVM of its own
    child = get_context("fork").Process(target=tx.publish, args=(rows,), kwargs={"queue": pipeline["out"]})
    child.start()
    child.join()


REFUSED: dict[str, tuple[Way, str]] = {
    way.__name__: (way, told)
    for way, told in (
        (a_coroutine, "returned a coroutine"),
        (a_generator, "returned a generator"),
        (a_future, "returned a Future"),
        (kept_tx, "after the function returned"),
        (tx_in_a_task, "tx cannot leave the driver"),
        (tx_in_a_udf, "tx cannot leave the driver"),
        (tx_in_a_process, "tx cannot leave the driver"),
        (caught_in_a_thread, "body"),
        (task_that_always_fails, "ZeroDivisionError"),
        (tx_in_another_query, "in a batch of another query"),
        (kept_batch, "of another batch"),
        (frame_in_another_query, "would consume its rows too"),
        (evolves_to_an_interval, "unsupported data types: [lasts"),
        (no_frame, "tx.reject got rows of the type DataFrame: give a DataFrame of Spark"),
        (exits, "raised SystemExit: the function has had enough"),
        (cancelled, "raised CancelledError"),
        (interrupted, "raised KeyboardInterrupt: the time is over"),
        (forked, "in a process that the function has forked"),
    )
}


EVERY = {**WAYS, **CLUSTER, **{name: way for name, (way, _) in REFUSED.items()}}


# -- how a transactional function is called ------------------------------------------------------------------
def directly(each: Each, pipeline: dict[str, Any]) -> Each:
    return each


def by_a_function(each: Each, pipeline: dict[str, Any]) -> Each:
    """Some of the rows, kept and counted."""

    def call(batch: DataFrame, number: int) -> None:
        rows = batch.where("body IS NOT NULL").persist()
        rows.count()
        each(rows, number)
        rows.unpersist()

    return call


def two_apps(each: Each, pipeline: dict[str, Any]) -> Each:
    """Two transactions of one batch, of which each would consume it."""
    other = transactional(
        lambda batch, tx: tx.append(batch.selectExpr(TEXT), f"{pipeline['lake']}.inner"),
        url=pipeline["url"],
        app_id=f"{pipeline['app']}.inner",
    )

    def call(batch: DataFrame, number: int) -> None:
        other(batch, number)
        each(batch, number)

    return call


def twice(each: Each, pipeline: dict[str, Any]) -> Each:
    """Each call gets a part of the rows; what the second one does would be lost."""

    def call(batch: DataFrame, number: int) -> None:
        each(batch.where("CAST(body AS STRING) IN ('a', 'c')"), number)
        each(batch.where("CAST(body AS STRING) IN ('b', 'd')"), number)

    return call


def caught(each: Each, pipeline: dict[str, Any]) -> Each:
    """Spark takes the batch for done, and its messages would be acknowledged."""
    failing = transactional(lambda batch, tx: 1 / 0, url=pipeline["url"], app_id=pipeline["app"])

    def call(batch: DataFrame, number: int) -> None:
        with contextlib.suppress(ZeroDivisionError):
            failing(batch, number)

    return call


def in_a_thread(each: Each, pipeline: dict[str, Any]) -> Each:
    def call(batch: DataFrame, number: int) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(each, batch, number).result()

    return call


def by_itself(each: Each, pipeline: dict[str, Any]) -> Each:
    """The function calls what calls it, which would wait for itself."""
    return within(pipeline, lambda whole, batch, number: whole(batch, number))


def within_its_own(each: Each, pipeline: dict[str, Any]) -> Each:
    """Another one of the same app would decide the batch, without what the function has staged; also in a thread."""

    def calls(whole: Each, batch: DataFrame, number: int) -> None:
        kind = threading.Thread if is_connect(batch) else InheritableThread
        thread = kind(target=lambda: told.extend(error_of(each, batch, number)))
        told: list[Exception] = []
        thread.start()
        thread.join()
        assert "was called by its own function" in str(told)
        each(batch, number)

    return within(pipeline, calls)


def within_another(each: Each, pipeline: dict[str, Any]) -> Each:
    """One of another app would decide the batch, and consume what the function has read."""
    out = pipeline["out"]
    other = transactional(
        lambda rows, tx: tx.publish(rows, queue=out), url=pipeline["url"], app_id=f"{pipeline['app']}.inner"
    )

    def calls(whole: Each, batch: DataFrame, number: int) -> None:
        other(batch.sparkSession.sql("SELECT 'x' AS body"), number)

    return within(pipeline, calls)


def error_of(each: Each, batch: DataFrame, number: int) -> Iterator[Exception]:
    try:
        each(batch, number)
    except Exception as error:
        yield error


def within(pipeline: dict[str, Any], calls: Callable[[Each, DataFrame, int], None]) -> Each:
    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body"), queue=pipeline["out"])
        calls(whole, batch, tx.batch_id)

    whole = transactional(fn, url=pipeline["url"], app_id=pipeline["app"])
    return whole


def joined_before(each: Each, pipeline: dict[str, Any]) -> Each:
    """With rows that are no part of the query."""
    return lambda batch, number: each(batch.crossJoin(batch.sparkSession.range(1).select()), number)


def rows_of_nobody(each: Each, pipeline: dict[str, Any]) -> Each:
    """With a frame that has nothing of the batch, while one query runs."""
    return lambda batch, number: each(batch.sparkSession.sql("SELECT X'61' AS body"), number)


def computed_and_checkpointed(each: Each, pipeline: dict[str, Any]) -> Each:
    """With a frame whose plan leads to nothing that the query has read."""
    return lambda batch, number: each(batch.selectExpr(TEXT).localCheckpoint(), number)


CALLS: dict[str, Callable[[Each, dict[str, Any]], Each]] = {
    call.__name__: call
    for call in (
        directly,
        by_a_function,
        two_apps,
        twice,
        caught,
        in_a_thread,
        by_itself,
        within_its_own,
        within_another,
    )
}
ON_CONNECT = {
    "beside_the_root": beside_the_root,
    "joined_before": joined_before,
    "rows_of_nobody": rows_of_nobody,
    "computed_and_checkpointed": computed_and_checkpointed,
}
REFUSED_CALLS = {
    "caught": "was not called for it, or its error was caught",
    "two_apps": "give both the same",
    "in_a_thread": "called outside a query",
    "by_itself": "was called by its own function",
    "within_its_own": "was called by its own function",
    "within_another": "by that of another app",
}
