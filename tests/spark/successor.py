"""The driver that goes on behind one that was killed, in the session of the test process: it is another process with another
Spark context, and has started already.

Not here: drivers that are killed themselves, or whose session has settings of its own (``pipelines.Driver``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from pyspark.sql import SparkSession

from broker_core.core import failpoint
from connector.conf import recommended_conf
from tests.spark import jobs
from tests.spark.conftest import in_every_session
from tests.spark.pipelines import Pipeline


def run_each(spark: SparkSession, pipelines: Iterable[Pipeline]) -> list[str | None]:
    """Each pipeline to the end of what is there, one after the other: the errors."""
    errors = []
    chosen = {name: value for name, value in recommended_conf().items() if name.startswith("spark.sql.")}
    with as_before(spark), in_every_session(spark, jobs.PLANNED_ONCE | chosen):
        for pipeline in pipelines:
            told = {**asdict(pipeline), "files": pipeline.files}
            if pipeline.before:
                jobs.prepare(told)
            errors.append(jobs.error_of(spark, told))
    return errors


@contextmanager
def as_before(spark: SparkSession) -> Iterator[None]:
    """Pipelines set what their queries need, and arm failpoints."""
    before = dict(spark.conf.getAll)
    try:
        yield
    finally:
        failpoint.disarm()
        after = dict(spark.conf.getAll)
        for name in after.keys() - before.keys():
            spark.conf.unset(name)
        for name, value in before.items():
            if after.get(name) != value:
                spark.conf.set(name, value)
