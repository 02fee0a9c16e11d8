"""A Spark driver for tests: runs pipelines in one session, dies where it is told to, and says how each
pipeline ended.

``python -m tests.spark.jobs SPECIFICATION.json``: ``{"session": {...}, "death": {...} | null, "pipelines":
[{...}]}``, see :mod:`tests.spark.pipelines`, which writes it. One JSON line per pipeline goes to stdout:
``{"app": ..., "error": ... | null}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
from pyspark.sql import DataFrame, SparkSession

from broker_core.client.broker import BrokerClient
from broker_core.core import failpoint
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.conf import recommended_conf
from connector.stream.spark_version import has_admission_control
from connector.tables.table import is_connect
from connector.typed.decode import decode
from tests.fork_server import fork_here
from tests.forked import OF_SPARK
from tests.progress import GUARD_S
from tests.spark import user_code
from tests.spark.recipes import recipe
from tests.spark.sessions import WORKER, start
from tests.spark.shapes import OTHER, shaped

# Most of what a query of seconds costs: compiling its code, and, for each file, processes that read a link and set a
# mode, for the file and for its checksum. tests/spark has sessions that compile.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
# A tenth of what is left: planning the stages of a query again while it runs. Tests of what looks at plans keep that.
PLANNED_ONCE = {**INTERPRETED, "spark.sql.adaptive.enabled": "false"}
QUICK = {
    **PLANNED_ONCE,
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
}


def session(more: dict[str, str], scratch: str) -> SparkSession:
    """A small session with Delta."""
    chosen = {
        "spark.master": "local[2,4]",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        "spark.log.level": "ERROR",
        **QUICK,
        **recommended_conf(),
        **more,
    }
    connect = chosen.pop("connect", "")
    return start("jobs", chosen, connect=bool(connect))


def to_the_end(writer: Any) -> None:
    """Runs a query until all that is there has been read, in as many batches as its limits say. On Spark 4.1,
    Trigger.AvailableNow is one batch of a Python source.
    """
    if has_admission_control():
        writer.trigger(availableNow=True).start().awaitTermination()
        return
    query = writer.start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()


def die(spark: SparkSession, pipelines: list[dict[str, Any]], death: dict[str, Any]) -> None:
    """Runs each pipeline until it reaches its failpoint, where its thread stays, or the process of its source, or on
    Spark Connect that of its function; then all of them die at once.

    ``how``: ``group`` kills driver, JVM and sources, ``driver`` only the Python driver, ``worker`` first the process that
    comes to each failpoint, of Spark Connect, so that its query fails, and then as ``group``; ``stop`` suspends the driver; after
    SIGCONT the pipelines go on, and ``then`` says what it dies of.
    """
    going_on = threading.Event()
    threads = []
    for pipeline, (at, hit) in zip(pipelines, death["at"], strict=True):
        reached = threading.Event()

        def stay(_name: str, reached: threading.Event = reached) -> None:
            reached.set()
            going_on.wait()

        failpoint.disarm()
        elsewhere = at.startswith("connector.") or is_connect(spark)
        if not elsewhere:
            failpoint.arm(at, stay, hit=hit)
        action = "kill" if death["how"] == "worker" else "stop"
        Path(death["sources"]).write_text(f"{at}@{hit}={action}" if elsewhere else "")
        before = suspended_processes()
        if death["how"] == "worker":
            if attempt(spark, pipeline) is None:
                missed(pipeline["app"], at)
            continue
        threads.append(threading.Thread(target=attempt, args=(spark, pipeline)))
        threads[-1].start()
        while not reached.wait(0.05) and not (elsewhere and suspended_processes() > before):
            if not threads[-1].is_alive():
                missed(pipeline["app"], at)
    Path(death["reached"]).touch()
    if death["how"] in ("group", "worker"):
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL if death["how"] == "driver" else signal.SIGSTOP)
    going_on.set()
    for thread in threads:
        thread.join()
    if death["then"]:
        die(spark, death["then"]["pipelines"], {**death["then"], "then": None})


def missed(app: str, at: str) -> NoReturn:
    print(f"{app} ended and did not reach {at}", file=sys.stderr, flush=True)
    os._exit(1)


def suspended_processes() -> int:
    """How many descendants of this process are suspended."""
    return sum(map(is_suspended, psutil.Process().children(recursive=True)))


def is_suspended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def function(pipeline: dict[str, Any]) -> Any:
    """The pipeline's ``fn(batch, tx)``. ``marker`` differs in every attempt, so rows of two attempts cannot
    be taken for one.
    """
    lake = pipeline["lake"]

    def effects(batch: DataFrame, tx: BatchTransaction) -> None:
        marker = uuid.uuid4().hex
        rows = batch.selectExpr(
            "CAST(body AS STRING) AS body", f"'{marker}' AS marker", f"{tx.sequence} AS sequence"
        )
        tx.publish(rows.selectExpr("concat(body, ':', marker) AS body"), queue=pipeline["out"])
        for number, table in enumerate(pipeline["tables"]):
            tx.append(rows if number == 0 else rows.where("body LIKE '%'"), f"{lake}/{table}")
        tx.after_commit(rows, "collect")

    def changes(batch: DataFrame, tx: BatchTransaction) -> None:
        """``n`` tells which operations were done, in which order and how often; for the rows that are overwritten,
        only that it was done last.
        """
        rows = batch.selectExpr("CAST(body AS STRING) AS body", f"'{uuid.uuid4().hex}' AS marker", "1 AS n")
        table = f"{lake}/changed"
        tx.publish(rows.selectExpr("concat(body, ':', marker) AS body"), queue=pipeline["out"])
        tx.append(rows, table)
        update = {"n": "t.n * 10 + 2", "marker": "concat(t.marker, s.marker)"}
        tx.merge(rows, table, "t.body = s.body", update=update, keys=["body"])
        tx.delete(rows.where("body = 'b'"), table, "t.body = s.body AND t.n = 12")
        tx.overwrite(rows.where("body = 'c'").selectExpr("body", "marker", "3 AS n"), table, "body = 'c'")
        tx.after_commit(rows, "collect")

    def nothing(batch: DataFrame, tx: BatchTransaction) -> None:
        pass

    def two_actions(batch: DataFrame, tx: BatchTransaction) -> None:
        first = sorted(bytes(row["body"]) for row in batch.select("body").collect())
        assert first == sorted(bytes(row["body"]) for row in batch.select("body").collect())
        effects(batch, tx)

    def fail_once(batch: DataFrame, tx: BatchTransaction) -> None:
        flag = f"{lake}.failed"

        def broken(batches: Iterator[Any]) -> Iterator[Any]:
            for rows in batches:
                yield rows
                if not os.path.exists(flag):
                    Path(flag).touch()
                    raise RuntimeError("the first attempt fails after its rows")

        tx.publish(
            batch.selectExpr("concat(CAST(body AS STRING), ':x') AS body").mapInArrow(broken, "body string"),
            queue=pipeline["out"],
        )

    def fail_batch_once(batch: DataFrame, tx: BatchTransaction) -> None:
        effects(batch, tx)
        flag = Path(f"{lake}.failed")
        if not flag.exists():
            flag.touch()
            raise RuntimeError("the function fails after it has staged everything")

    def counts(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr("body", "count", f"{tx.sequence} AS sequence"), f"{lake}/counts")

    def recipes(batch: DataFrame, tx: BatchTransaction) -> None:
        rows = batch.selectExpr("offset", f"concat('{tx.app_id}:', CAST(body AS STRING)) AS body")
        for table in pipeline["tables"]:
            tx.append(rows, f"{lake}/{table}")
        for name in pipeline["targets"]:
            tx.after_commit(rows, name)

    def rejects(batch: DataFrame, tx: BatchTransaction) -> None:
        decoded = decode(batch, "body string", "csv")
        effects(decoded.good, tx)
        tx.reject(decoded, queue=f"{pipeline['queue']}.{OTHER}")

    ways = (effects, changes, nothing, two_actions, fail_once, fail_batch_once, counts, recipes, rejects)
    if (way := user_code.EVERY.get(pipeline["fn"])) is not None:
        return lambda batch, tx: way(batch, tx, effects, pipeline)
    return {made.__name__: made for made in ways}[pipeline["fn"]]


def source(spark: SparkSession, pipeline: dict[str, Any]) -> DataFrame:
    if pipeline.get("source") == "rate":
        rows = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", 2)
            .option("numPartitions", 2)
            .load()
        )
        return rows.selectExpr("CAST(value AS STRING) AS body")
    if pipeline.get("source") == "files":
        return files(spark, pipeline)
    reader = (
        spark.readStream.format("txmq")
        .option("url", pipeline["url"])
        .option("queue", pipeline["queue"])
        .option("appId", pipeline["app"])
    )
    reader = reader.option("onNewCheckpoint", pipeline["on_new_checkpoint"])
    for name, value in {**pipeline.get("options", {}), **pipeline.get("settings", {})}.items():
        reader = reader.option(name, value)
    # a store of state for each partition and side of a join is most of what a small query with state costs
    spark.conf.set("spark.sql.shuffle.partitions", "1" if pipeline["shape"] else "2")
    if pipeline["shape"]:
        return shaped(pipeline["shape"], reader, pipeline["queue"])
    rows = reader.load()
    if pipeline.get("source") == "both":
        return rows.selectExpr("CAST(body AS STRING) AS body").union(files(spark, pipeline))
    return (
        rows.selectExpr("CAST(body AS STRING) AS body").groupBy("body").count()
        if pipeline["fn"] == "counts"
        else rows
    )


def files(spark: SparkSession, pipeline: dict[str, Any]) -> DataFrame:
    """The lines of the files of a pipeline, one file a batch."""
    reader = spark.readStream.format("text").option("maxFilesPerTrigger", 1)
    return reader.load(pipeline["files"]).selectExpr("value AS body")


def prepare(pipeline: dict[str, Any]) -> None:
    """What happens before the query starts: ``["copy", from, to]`` of a checkpoint, ``["remove", path]``,
    ``["file", name]``, which has its name as its only line, ``["send", body]``,
    ``["arm", failpoint, action]``, ``["wake", id]`` of a suspended driver, until it has died.
    """
    arm()
    for word, *values in pipeline["before"]:
        if word == "copy":
            shutil.rmtree(values[1], ignore_errors=True)
            shutil.copytree(values[0], values[1])
        elif word == "remove":
            Path(values[0]).unlink()
        elif word == "file":
            path = Path(pipeline["files"], values[0])
            path.parent.mkdir(exist_ok=True)
            path.with_name(f".{path.name}").write_text(f"{path.name}\n")
            path.with_name(f".{path.name}").rename(path)
        elif word == "send":
            with BrokerClient(pipeline["url"]) as client, client.channel() as channel:
                channel.publish(values[0].encode(), routing_key=pipeline["queue"])
        elif word == "wake":
            suspended = psutil.Process(int(values[0]))
            os.killpg(suspended.pid, signal.SIGCONT)  # with the functions of Spark Connect
            while suspended.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
        else:
            arm(*values)


def arm(*named: str) -> None:
    """A failpoint and its action; without one, none is armed. In the function on Spark Connect too, whose process, as that
    of a source, reads a file where it starts.
    """
    failpoint.disarm()
    if named:
        failpoint.arm(*named)
    listed = os.environ.get("TXMQ_FAILPOINTS", "")
    if listed.startswith("@"):
        Path(listed[1:]).write_text("=".join(named))


def run(spark: SparkSession, pipeline: dict[str, Any]) -> None:
    """One query, to the end of what is there; started again where Spark gave up a Python process, for which it waits
    ten seconds on any machine.
    """
    while True:
        try:
            run_once(spark, pipeline)
            return
        except Exception as error:
            if "Python worker failed to connect back" not in str(error):
                raise


def run_once(spark: SparkSession, pipeline: dict[str, Any]) -> None:
    def collect(rows: DataFrame, sequence: int) -> None:
        with open(f"{pipeline['lake']}.collected", "a") as log:
            log.write(json.dumps([sequence, sorted(row["body"] for row in rows.collect())]) + "\n")

    targets = {name: recipe(name, address) for name, address in pipeline["targets"].items()}
    each = transactional(
        function(pipeline),
        url=pipeline["url"],
        app_id=pipeline["app"],
        ledger=pipeline.get("ledger"),
        ledger_sync=pipeline.get("ledger_sync", False),
        after_commit={"collect": collect, **targets},
        on_new_checkpoint=pipeline["on_new_checkpoint"],
        persist=pipeline.get("persist", False),
        settings=pipeline.get("settings") or None,
        resume_from=pipeline.get("resume_from"),
        checkpoint=pipeline["checkpoint"] if pipeline["checkpoint_of"] == "function" else None,
    )
    called = (user_code.CALLS | user_code.ON_CONNECT)[pipeline["call"]](each, pipeline)
    writer = source(spark, pipeline).writeStream.foreachBatch(called)
    if pipeline["checkpoint_of"] == "query":
        writer = writer.option("checkpointLocation", pipeline["checkpoint"])
    else:
        place = Path(pipeline["checkpoint"])
        spark.conf.set("spark.sql.streaming.checkpointLocation", str(place.parent))
        writer = writer.queryName(place.name)
    writer = writer.outputMode("update") if pipeline["fn"] == "counts" else writer
    batches = pipeline.get("batches")
    if batches is None:
        to_the_end(writer)
    else:  # a source without end
        query = writer.start()
        while (query.lastProgress is None or query.lastProgress.batchId < batches - 1) and query.isActive:
            time.sleep(0.05)
        failed = query.exception()
        query.stop()
        if failed is not None:
            raise failed
    each.flush(GUARD_S)


def error_of(spark: SparkSession, pipeline: dict[str, Any]) -> str | None:
    """With which its query ended."""
    try:
        run(spark, pipeline)
    except Exception as failed:
        return str(failed)
    return None


def attempt(spark: SparkSession, pipeline: dict[str, Any]) -> str | None:
    """Says on stdout how the query ended."""
    error = error_of(spark, pipeline)
    print(json.dumps({"app": pipeline["app"], "error": error}), flush=True)
    return error


def main(specification: dict[str, Any]) -> None:
    spark = session(specification["session"], specification["scratch"])
    if specification["death"]:
        die(spark, specification["pipelines"], specification["death"])
    else:
        for pipeline in specification["pipelines"]:
            prepare(pipeline)
            attempt(spark, pipeline)
    spark.stop()


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    fork_here([*OF_SPARK, *([WORKER] if told["session"].get("connect") else [])])
    main(told)
