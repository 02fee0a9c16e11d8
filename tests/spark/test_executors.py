"""Executors that are processes of their own: one that is killed, and a task that Spark starts a second time because
it is slow. Local sessions have neither.

Not here: what people do in a batch (``user_code.py``), drivers that are killed (``tests/crash``).
"""

from __future__ import annotations

import os
from pathlib import Path

import pyspark
import pytest

from bench.jars import delta, missing_in_spark, resolve
from tests.spark import user_code
from tests.spark.pipelines import Driver, Served
from tests.spark.test_user_code import made, require_once

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.soak]  # three JVMs

CLUSTER = {
    "spark.master": "local-cluster[2,1,1024]",
    "spark.executor.memory": "512m",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
}


def test_each_row_is_there_once_where_an_executor_is_killed_or_a_slow_task_runs_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(Path(pyspark.__file__).parent))
    jars = os.pathsep.join(missing_in_spark(resolve([delta()])))
    served = Served(tmp_path / "broker")
    try:
        apps = {name: made(tmp_path, served.url, name, {"fn": name}) for name in user_code.CLUSTER}
        session = {**CLUSTER, "spark.executor.extraClassPath": jars}
        errors = Driver(tmp_path, list(apps.values()), session=session).require_done()
        assert errors == {pipeline.app: None for pipeline in apps.values()}
        for pipeline in apps.values():
            require_once(pipeline)
        for name, flag in (("executor_killed", "killed"), ("speculated", "speculated")):
            assert list(tmp_path.rglob(f"*{Path(apps[name].lake).name}.{flag}.*")), f"{flag} has not happened"
    finally:
        served.stop()
