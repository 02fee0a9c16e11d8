"""The Spark session of the benchmarks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession

BASE = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
    "spark.sql.adaptive.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
}


@contextlib.contextmanager
def session(
    name: str, settings: Mapping[str, str] | None = None, packages: Sequence[str] = ()
) -> Iterator[SparkSession]:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").appName(name)
    for key, value in {**BASE, **(settings or {})}.items():
        builder = builder.config(key, value)
    spark = configure_spark_with_delta_pip(builder, list(packages)).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        for query in spark.streams.active:
            query.stop()
        spark.stop()
