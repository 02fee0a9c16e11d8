"""A job of the demo as a client of Spark Connect, without a JVM and without py4j.

``python -m tests.spark.demo_client REMOTE JOB URL FOLDER``: JOB is ``job_1`` or ``job_2`` of examples/flights.py.
Without JOB's session nothing of it differs. It ends when ``FOLDER/stop`` is there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FLIGHTS = Path(__file__).resolve().parents[2] / "examples" / "flights.py"


def flights() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flights", FLIGHTS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flights"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def main(remote: str, job: str, url: str, folder: str) -> None:
    for name in ("py4j", "pyspark.core"):  # what pyspark-client does not have
        sys.modules[name] = None  # type: ignore[assignment]
    from pyspark.sql import SparkSession

    def session(_name: str) -> Any:
        return SparkSession.builder.remote(remote).getOrCreate()

    demo = flights()
    demo.__dict__["spark_session"] = session
    getattr(demo, job)(url, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
