"""The JVMs of Spark sessions in tests: the jars of Delta on their class path, and an archive of the classes that they
load, because loading those is half of what a session of seconds costs.

``python -m tests.jvm`` finds the jars and writes the archive, once for an environment (``make test``). Without
them, sessions start as those of any user, and slower. A JVM ignores an archive of another JDK or of other jars.

Not here: the settings of a session (``tests/conftest.py``).
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench.jars import missing_in_spark, resolve

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
# A JVM of a test lives for seconds: what an optimizing compiler costs never pays. Loading the classes fills the
# metaspace, and must not collect all garbage each time it grows.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m"
AS_USERS_DO = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.adaptive.enabled": "true",
}
QUIET = "-Xlog:disable -Xlog:all=error:stderr"  # by default, the JVM complains about archives on stdout


def delta() -> str:
    """The coordinate that ``configure_spark_with_delta_pip`` asks for."""
    spark = ".".join(version("pyspark").split(".")[:2])
    return f"io.delta:delta-spark_{spark}_2.13:{version('delta-spark')}"


def submit_arguments(archive: str) -> str:
    """The value of PYSPARK_SUBMIT_ARGS. The class path has the jars, so Ivy is not asked again."""
    return shlex.join(
        [
            "--conf",
            "spark.jars.packages=",
            "--driver-class-path",
            os.pathsep.join(missing_in_spark(resolve([delta()]))),
            "--driver-java-options",
            f"{archive} {QUIET}",
            "pyspark-shell",
        ]
    )


def use_archive() -> None:
    """From here on, sessions of this process and of its children start with the archive, if there is one."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", OPTIONS)
    if ARCHIVE.exists():
        os.environ.setdefault("PYSPARK_SUBMIT_ARGS", submit_arguments(f"-XX:SharedArchiveFile={ARCHIVE}"))


def write_archive() -> None:
    """Runs each kind of query once, and keeps the classes that its JVM has loaded at its end."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", OPTIONS)
    mine = ARCHIVE.with_suffix(f".{os.getpid()}")
    os.environ["PYSPARK_SUBMIT_ARGS"] = submit_arguments(f"-XX:ArchiveClassesAtExit={mine}")
    from pyspark import SparkContext

    from tests.spark import jobs
    from tests.spark.pipelines import Pipeline, Served, specification

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        served = Served(scratch / "broker")
        try:
            ledger = str(scratch / "ledger")
            pipelines = [
                Pipeline.create("effects", served.url, scratch, "abcd", ledger=ledger, ledger_sync=True),
                Pipeline.create("counts", served.url, scratch, "abcd", fn="counts"),
                Pipeline.create("rate", served.url, scratch, source="rate", batches=1),
                Pipeline.create("fails", served.url, scratch, "a", fn="fail_batch_once"),
            ]
            jobs.main(specification(scratch, pipelines, session=AS_USERS_DO))
        finally:
            served.stop()
        process = SparkContext._gateway.proc
        process.stdin.close()  # at the end of its input the JVM exits, and writes the archive
        process.wait()
    mine.replace(ARCHIVE)


if __name__ == "__main__":
    write_archive()
