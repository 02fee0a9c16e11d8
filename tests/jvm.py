"""The JVMs of tests: the jars of Delta on the class path of Spark sessions, and archives of the classes that Spark and
Kafka load, because loading those is half of what a session or a node of seconds costs.

``python -m tests.jvm`` finds the jars and writes the archives, once for an environment (``make test``). Without
them, sessions and nodes start as those of any user, and slower. A JVM ignores an archive of another JDK or of other
jars.

Not here: the settings of a session (``tests/conftest.py``).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.jars import submit_arguments
from bench.kafka_server import cluster
from tests.fork_server import fork_here
from tests.forked import OF_SPARK

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
KAFKA_ARCHIVE = Path(sys.prefix) / "kafka-classes.jsa"
# A JVM of a test lives for seconds: what an optimizing compiler costs never pays. Loading the classes fills the
# metaspace, and must not collect all garbage each time it grows. With one compiler there is room for 48 MB of code:
# a session fills that in half a minute, and from then on compiles what was thrown away, a quarter of its CPU time.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m -XX:ReservedCodeCacheSize=240m"
# What a query leaves dies soon: with a third of the heap for it, collections were a twelfth of the CPU time of a session.
YOUNG = "-Xmn512m"
AS_USERS_DO = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.adaptive.enabled": "true",
}
# The queries of tests, beside those of the pipelines: what others do to a table.
STATEMENTS = (
    "CREATE TABLE recorded (k STRING, n INT) USING delta TBLPROPERTIES ('delta.columnMapping.mode' = 'name')",
    "INSERT INTO recorded VALUES ('a', 1), ('b', 2)",
    "UPDATE recorded SET n = 3 WHERE k = 'a'",
    "ALTER TABLE recorded ADD COLUMN z INT",
    "ALTER TABLE recorded ADD CONSTRAINT named CHECK (k <> '')",
    "DELETE FROM recorded WHERE k = 'b'",
    "OPTIMIZE recorded",
)
RECORDED = ("join-of-two-queues", "watermark", "state-in-pandas", "processor-in-pandas", "typed")  # of shapes
QUIET = "-Xlog:disable -Xlog:all=error:stderr"  # by default, the JVM complains about archives on stdout


def use_startup() -> None:
    """From here on, Python processes that are started find the packages, installed or not, and begin with
    ``startup/sitecustomize.py``.
    """
    first = [str(ROOT), str(ROOT / "tests" / "startup")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*first, os.environ.get("PYTHONPATH", "")]))


def with_archive(option: str) -> str:
    """PYSPARK_SUBMIT_ARGS of sessions that use an archive, or write one."""
    return submit_arguments(f"{option} {YOUNG} {QUIET}".strip())


def use_archive() -> None:
    """From here on, sessions of this process and of its children start with the archive, if there is one."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", OPTIONS)
    if ARCHIVE.exists():
        os.environ.setdefault("PYSPARK_SUBMIT_ARGS", with_archive(f"-XX:SharedArchiveFile={ARCHIVE}"))


def with_settings(settings: Mapping[str, str]) -> str:
    """PYSPARK_SUBMIT_ARGS of this process, with settings for scripts that have none of their own."""
    chosen = shlex.join(word for setting in settings.items() for word in ("--conf", "=".join(setting)))
    return f"{chosen} {os.environ.get('PYSPARK_SUBMIT_ARGS') or with_archive('')}"


def of_kafka() -> list[str]:
    """The options of Kafka's JVMs."""
    return [*QUIET.split(), f"-XX:SharedArchiveFile={KAFKA_ARCHIVE}"] if KAFKA_ARCHIVE.exists() else []


@contextlib.contextmanager
def _written(archive: Path) -> Iterator[str]:
    """The option of a JVM that writes the archive at its end, which is before the end of the context."""
    mine = archive.with_suffix(f".{os.getpid()}")
    yield f"-XX:ArchiveClassesAtExit={mine}"
    mine.replace(archive)


@contextlib.contextmanager
def _kafka(folder: Path) -> Iterator[str | None]:
    """The address of a node that leaves an archive; None where its jars cannot be had."""
    with contextlib.ExitStack() as stack:
        option = stack.enter_context(_written(KAFKA_ARCHIVE))
        try:
            url = stack.enter_context(cluster(folder, heap="512m", options=[option])).bootstrap
        except SystemExit as error:
            print(error, file=sys.stderr)
            stack.pop_all()
            yield None
        else:
            yield f"kafka://{url}"


def write_archives() -> None:
    """Runs each kind of query once; the JVM of the session and the node keep the classes that they have loaded."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", OPTIONS)
    from pyspark import SparkContext

    from tests.spark import jobs
    from tests.spark.kafka_pipelines import KafkaPipeline
    from tests.spark.pipelines import CHANGED, Pipeline, Served, empty_table
    from tests.spark.shapes import MESSAGES, OTHER

    def session_has_ended() -> None:
        if SparkContext._gateway is not None:
            SparkContext._gateway.proc.communicate()

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        scratch = Path(name)
        (scratch / "kafka").mkdir()
        os.environ["PYSPARK_SUBMIT_ARGS"] = with_archive(stack.enter_context(_written(ARCHIVE)))
        stack.callback(session_has_ended)
        kafka = stack.enter_context(_kafka(scratch / "kafka"))
        served = Served(scratch / "broker")
        stack.callback(served.stop)

        def made(app: str, messages: Iterable[str] = "abcd", **more: Any) -> Pipeline:
            return Pipeline.create(app, served.url, scratch, messages, **more)

        pipelines = [
            made("effects", ledger=str(scratch / "ledger"), ledger_sync=True),
            made("counts", fn="counts"),
            made("rate", (), source="rate", batches=1),
            made("fails", "a", fn="fail_batch_once"),
            made("changes", fn="changes", tables=[]),
        ]
        # as tests run them
        shaped = {"typed": "rejects"}
        interpreted = [
            made(f"{shape}-shape", MESSAGES[shape], shape=shape, fn=shaped.get(shape, "effects"))
            for shape in RECORDED
        ]
        interpreted += [made("changes-again", fn="changes", tables=[])]
        if kafka is not None:
            pipelines.append(KafkaPipeline.create("kafka", kafka, scratch, "abcd"))
        for pipeline in (*pipelines, *interpreted):
            if pipeline.shape:
                replace(pipeline, queue=f"{pipeline.queue}.{OTHER}").declare()
            if pipeline.fn == "changes":
                empty_table(Path(pipeline.lake) / "changed", CHANGED)
        spark = jobs.session(AS_USERS_DO, str(scratch))
        for pipeline in pipelines:
            jobs.attempt(spark, asdict(pipeline))
        for setting in jobs.PLANNED_ONCE.items():
            spark.conf.set(*setting)
        for pipeline in interpreted:
            jobs.attempt(spark, asdict(pipeline))
        for statement in STATEMENTS:
            spark.sql(statement).collect()
        spark.stop()
        # At the end of its input the JVM of the session exits and writes its archive; beside it, the node does.
        SparkContext._gateway.proc.stdin.close()


if __name__ == "__main__":
    use_startup()
    fork_here(OF_SPARK)
    write_archives()
