"""The figures that need Spark: source_rows, sink_rows, append_rows, append_threads, append_small_ms,
merge_rows, micro_batch_overhead_ms, small_commit_read.

Each compares txmq with the reference in one session. Rates use the time of ``addBatch``, the work of a
micro-batch.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import txmq
from bench.broker import fanout, fill, serving
from bench.commits import BODY
from bench.reference import CountingSink, ReadySource
from bench.report import Figure, against, beyond, note
from bench.session import session
from txmq import Broker, BrokerClient

SOURCE_ROWS = 4_000_000
SINK_ROWS = 2_000_000
APPENDED_ROWS = 500_000  # in a batch
APPENDED_BATCHES = 5
THREADS = 4
THREADS_ROWS = 100_000  # in a batch, for each table
THREADS_BATCHES = 4
THREADS_REPETITIONS = 3
MERGED_ROWS = 100_000  # in a batch
MERGED_INTO = 1_000_000
MERGED_BATCHES = 4
MERGED_REPETITIONS = 3
SMALL_ROWS = 10
SMALL_BATCHES = 30
REPETITIONS = 5
SMALL_COMMITS = 200_000
SMALL_THREADS = 16
ONE_ROW_BATCHES = 40
ONE_ROW_ROUNDS = 4
LIMIT_S = 300.0

_count = itertools.count()


def open_spark() -> Any:
    return session("bench", txmq.recommended_conf())


def run(writer: Any, folder: Path, rows: int, batches: int = 1) -> list[dict[str, Any]]:
    """Run a query until it has read ``rows`` in at least so many micro-batches; return the progress of those
    with rows. On Spark Connect, only the sources have ``numInputRows``.
    """
    query = writer.option("checkpointLocation", str(folder / f"checkpoint-{next(_count)}")).start()
    deadline = time.monotonic() + LIMIT_S
    try:
        while True:
            progress = [
                {**item, "numInputRows": sum(source["numInputRows"] for source in item["sources"])}
                for item in query.recentProgress
            ]
            progress = [item for item in progress if item["numInputRows"]]
            if len(progress) >= batches and sum(item["numInputRows"] for item in progress) >= rows:
                return progress
            if not query.isActive:
                raise query.exception() or RuntimeError("the query ended early")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{sum(item['numInputRows'] for item in progress)} of {rows} rows after {LIMIT_S} s"
                )
            time.sleep(0.05)
    finally:
        query.stop()


def rate(progress: list[dict[str, Any]]) -> float:
    return float(
        sum(item["numInputRows"] for item in progress)
        / sum(item["durationMs"]["addBatch"] for item in progress)
        * 1000
    )


def ready(spark: SparkSession, total: int, step: int, tasks: int) -> DataFrame:
    spark.dataSource.register(ReadySource)
    return spark.readStream.format("ready").options(total=total, step=step, tasks=tasks).load()


def source_rows(folder: Path) -> list[Figure]:
    queues = [f"orders-{number}" for number in range(REPETITIONS + 1)]
    with serving(folder / "source") as served, open_spark() as spark:
        with BrokerClient(served.url) as client:
            fanout(client, "orders", queues)
            fill(client, "orders", "", SOURCE_ROWS)
        found, references = [], []
        for queue in queues:
            reference = ready(spark, SOURCE_ROWS, SOURCE_ROWS, 2)
            references.append(rate(run(reference.writeStream.format("noop"), folder, SOURCE_ROWS)))
            source = (
                spark.readStream.format("txmq")
                .options(url=served.url, queue=queue, appId=f"bench-{queue}", minPartitions=2)
                .load()
            )
            assert len(source.columns) == 8
            found.append(rate(run(source.writeStream.format("noop"), folder, SOURCE_ROWS)))
        return [against("source_rows", found[1:], references[1:], "rows/s")]


def sink_rows(folder: Path) -> list[Figure]:
    with serving(folder / "sink") as served, open_spark() as spark:
        spark.dataSource.register(CountingSink)
        with BrokerClient(served.url) as client, client.channel() as channel:
            channel.queue_declare("orders")
        found, references = [], []
        for repetition in range(REPETITIONS + 1):
            rows = ready(spark, SINK_ROWS, SINK_ROWS, 2).select("body")
            references.append(rate(run(rows.writeStream.format("counting"), folder, SINK_ROWS)))
            writer = rows.writeStream.format("txmq").options(
                url=served.url, queue="orders", appId=f"bench-{repetition}"
            )
            found.append(rate(run(writer, folder, SINK_ROWS)))
        return [against("sink_rows", found[1:], references[1:], "rows/s")]


def appends(
    spark: SparkSession,
    url: str,
    folder: Path,
    batches: int,
    rows: int,
    tasks: int,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The progress of foreachBatch with ``tx.append``, and with a plain append, to tables that exist."""
    name = f"append-{next(_count)}"
    columns = ["body", "length(body) AS size"]
    tables = {kind: str(folder / f"{name}-{kind}") for kind in ("once", "plain")}

    def frame() -> DataFrame:
        return ready(spark, batches * rows, rows, tasks).select("body")

    for table in tables.values():
        spark.createDataFrame([], "body binary, size int").write.format("delta").save(table)

    def once(batch: DataFrame, tx: Any) -> None:
        tx.append(batch.selectExpr(*columns), tables["once"])

    def plain(batch: DataFrame, _batch_id: int) -> None:
        batch.selectExpr(*columns).write.format("delta").mode("append").save(tables["plain"])

    reference = run(frame().writeStream.foreachBatch(plain), folder, batches * rows, batches)
    each = txmq.transactional(once, url=url, app_id=name)
    found = run(frame().writeStream.foreachBatch(each), folder, batches * rows, batches)
    counts = [spark.read.format("delta").load(table).count() for table in tables.values()]
    assert counts == [batches * rows] * 2, counts
    return found, reference


def append_rows(folder: Path) -> list[Figure]:
    """Without the first batch of each query: there txmq rehearses the append, once in the life of a process,
    which takes about a second.
    """

    with serving(folder / "append") as served, open_spark() as spark:
        found, references = [], []
        for _ in range(REPETITIONS + 1):
            once, plain = appends(spark, served.url, folder, APPENDED_BATCHES, APPENDED_ROWS, 2)
            found.append(rate(once[1:]))
            references.append(rate(plain[1:]))
        return [against("append_rows", found[1:], references[1:], "rows/s")]


def append_threads(folder: Path) -> list[Figure]:
    """Four tables in each batch, by four threads: ``tx.append`` beside plain appends."""
    found, references = [], []
    with serving(folder / "append-threads") as served, open_spark() as spark:
        for _ in range(THREADS_REPETITIONS + 1):
            once, plain = _appends_in_threads(spark, served.url, folder)
            found.append(rate(once[1:]))
            references.append(rate(plain[1:]))
    return [against("append_threads", found[1:], references[1:], "rows/s")]


def _appends_in_threads(
    spark: SparkSession, url: str, folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The progress of foreachBatch with ``tx.append`` in threads, and with plain appends in threads."""
    name, total = f"threads-{next(_count)}", THREADS_BATCHES * THREADS_ROWS
    tables = {kind: [str(folder / f"{name}-{kind}{n}") for n in range(THREADS)] for kind in ("once", "plain")}
    for table in itertools.chain(*tables.values()):
        spark.createDataFrame([], "body binary").write.format("delta").save(table)

    def frame() -> DataFrame:
        return ready(spark, total, THREADS_ROWS, 2).select("body")

    def once(batch: DataFrame, tx: Any) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda table: tx.append(batch.select("body"), table), tables["once"]))

    def plain(batch: DataFrame, _batch_id: int) -> None:
        def write(table: str) -> None:
            batch.select("body").write.format("delta").mode("append").save(table)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(write, tables["plain"]))

    # Spark counts the rows of a batch once for each execution of it
    reference = run(frame().writeStream.foreachBatch(plain), folder, THREADS * total, THREADS_BATCHES)
    each = txmq.transactional(once, url=url, app_id=name)
    found = run(frame().writeStream.foreachBatch(each), folder, THREADS * total, THREADS_BATCHES)
    for table in itertools.chain(*tables.values()):
        assert spark.read.format("delta").load(table).count() == total
    return found, reference


def append_small_ms(folder: Path) -> list[Figure]:
    """The time of an append of a few rows beyond that of a plain one, in the median of batches."""

    def times(progress: list[dict[str, Any]]) -> list[float]:
        return [item["durationMs"]["addBatch"] for item in progress][3:]

    found: list[float] = []
    references: list[float] = []
    with serving(folder / "append-small") as served, open_spark() as spark:
        for number in range(3):
            once, plain = appends(spark, served.url, folder, SMALL_BATCHES, SMALL_ROWS, 1)
            if number:
                found += times(once)
                references += times(plain)
    return [beyond("append_small_ms", found, references)]


def _merges(spark: SparkSession, url: str, folder: Path) -> tuple[float, float]:
    """The rates of foreachBatch with ``tx.merge``, and with a plain MERGE, into equal tables. Half of the
    rows of a batch update a row of the table, the others are inserted.
    """
    name = f"merge-{next(_count)}"
    on = "t.id = s.id"
    tables = {kind: str(folder / f"{name}-{kind}") for kind in ("once", "plain")}

    def frame() -> DataFrame:
        return ready(spark, MERGED_BATCHES * MERGED_ROWS, MERGED_ROWS, 2).select("body")

    held = spark.range(0, MERGED_INTO, 1, 2).selectExpr(
        "id * 2 AS id", "CAST(repeat(md5(CAST(id AS STRING)), 3) AS BINARY) AS body"
    )
    for table in tables.values():
        held.write.format("delta").save(table)

    def given(batch: DataFrame, batch_id: int) -> DataFrame:
        row = f"((row >> 33) * {MERGED_ROWS // 2} + (row & {(1 << 33) - 1}))"  # 0, 1, 2 ... over both tasks
        spread = 2 * MERGED_INTO // MERGED_ROWS
        numbered = batch.selectExpr("monotonically_increasing_id() AS row", "body")
        return numbered.selectExpr(f"{row} * {spread} + {2 * batch_id} + {row} % 2 AS id", "body")

    def once(batch: DataFrame, tx: Any) -> None:
        tx.merge(given(batch, tx.batch_id), tables["once"], on, update=True, insert=True, keys=["id"])

    def plain(batch: DataFrame, batch_id: int) -> None:
        table = DeltaTable.forPath(batch.sparkSession, tables["plain"]).alias("t")
        merge = table.merge(given(batch, batch_id).alias("s"), on)
        merge.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()

    rows = MERGED_BATCHES * MERGED_ROWS
    reference = run(frame().writeStream.foreachBatch(plain), folder, rows)
    each = txmq.transactional(once, url=url, app_id=name)
    found = run(frame().writeStream.foreachBatch(each), folder, rows)
    counts = [spark.read.format("delta").load(table).count() for table in tables.values()]
    assert counts == [MERGED_INTO + rows // 2] * 2, counts
    return rate(found[1:]), rate(reference[1:])


def merge_rows(folder: Path) -> list[Figure]:
    """Rows of the batch. Without the first batch of each query, as ``append_rows``."""
    with serving(folder / "merge") as served, open_spark() as spark:
        pairs = [_merges(spark, served.url, folder) for _ in range(MERGED_REPETITIONS + 1)]
        found, references = ([pair[place] for pair in pairs[1:]] for place in (0, 1))
        return [against("merge_rows", found, references, "rows/s")]


def micro_batch_overhead_ms(folder: Path) -> list[Figure]:
    """Both run one task per micro-batch; the figure is the median time of a whole trigger."""

    def trigger_ms(progress: list[dict[str, Any]]) -> list[float]:
        return [item["durationMs"]["triggerExecution"] for item in progress if item["numInputRows"] == 1][3:]

    def parts_ms(progress: list[dict[str, Any]]) -> dict[str, float]:
        names = sorted({name for item in progress for name in item["durationMs"]})
        return {
            name: statistics.median(item["durationMs"].get(name, 0) for item in progress) for name in names
        }

    found: list[float] = []
    references: list[float] = []
    with serving(folder / "overhead") as served, open_spark() as spark:
        spark.dataSource.register(CountingSink)
        for round_number in range(ONE_ROW_ROUNDS + 1):
            incoming, outgoing, app = (f"{name}-{round_number}" for name in ("in", "out", "app"))
            with BrokerClient(served.url) as client, client.channel() as channel:
                channel.queue_declare(incoming)
                channel.queue_declare(outgoing)
                channel.tx_select()
                for _ in range(ONE_ROW_BATCHES):
                    channel.publish(BODY, routing_key=incoming)
                    channel.tx_commit()
            reference = ready(spark, ONE_ROW_BATCHES, 1, 1).select("body").writeStream.format("counting")
            trivial = run(reference, folder, ONE_ROW_BATCHES)
            source = (
                spark.readStream.format("txmq")
                .options(url=served.url, queue=incoming, appId=app, maxOffsetsPerTrigger=1)
                .load()
            )
            writer = (
                source.select("body")
                .writeStream.format("txmq")
                .options(url=served.url, queue=outgoing, appId=app)
            )
            progress = run(writer, folder, ONE_ROW_BATCHES)
            if round_number:
                references += trigger_ms(trivial)
                found += trigger_ms(progress)
    note(f"micro_batch_overhead_ms: txmq {parts_ms(progress)}; reference {parts_ms(trivial)}")
    return [beyond("micro_batch_overhead_ms", found, references)]


def _fill_by_small_commits(data: Path, queue: str) -> None:
    def commits(broker: Broker) -> None:
        with broker.channel() as channel:
            channel.tx_select()
            for _ in range(SMALL_COMMITS // SMALL_THREADS):
                channel.publish(BODY, routing_key=queue)
                channel.tx_commit()

    with Broker.open(data) as broker:
        with broker.channel() as channel:
            channel.queue_declare(queue)
            channel.queue_declare("one-commit")
        threads = [threading.Thread(target=commits, args=(broker,)) for _ in range(SMALL_THREADS)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        note(
            f"{SMALL_COMMITS:,} commits of one message by {SMALL_THREADS} threads: "
            f"{time.perf_counter() - started:.1f} s"
        )


def small_commit_read(folder: Path) -> list[Figure]:
    """Batch reads, which consume nothing, by Spark; and the same by a client, without Spark's time."""
    data = folder / "small"
    _fill_by_small_commits(data, "small-commits")
    with serving(data) as served, open_spark() as spark, BrokerClient(served.url) as client:
        fill(client, "", "one-commit", SMALL_COMMITS)

        def by_spark(queue: str) -> float:
            started = time.perf_counter()
            spark.read.format("txmq").options(url=served.url, queue=queue).load().write.format("noop").mode(
                "overwrite"
            ).save()
            return SMALL_COMMITS / (time.perf_counter() - started)

        def by_client(queue: str) -> float:
            started = time.perf_counter()
            log = client.logs([queue])[0]
            available = client.available([log])[log]
            rows = sum(batch.num_rows for batch in client.browse([(log, available.start, available.end)]))
            assert rows == SMALL_COMMITS
            return float(rows / (time.perf_counter() - started))

        figures = []
        for figure, read in (("small_commit_read", by_spark), ("small_commit_read_client", by_client)):
            found, references = [], []
            for _ in range(2 * REPETITIONS + 2):
                found.append(read("small-commits"))
                references.append(read("one-commit"))
            figures.append(against(figure, found[2:], references[2:], "rows/s"))
        return figures
