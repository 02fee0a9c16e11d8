"""Runs a notebook as ``examples/run_notebook.py`` does, and prints each frame that is displayed as a line of JSON, with
DISPLAYED in front: ``python -m tests.spark.notebook_run NOTEBOOK FOLDER [NAME=VALUE ...]``.

With ``remote=sc://...`` the session is a client of Spark Connect without a JVM, without py4j and with settings that cannot
be changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from examples.run_notebook import Notebook, guard, session

DISPLAYED = "displayed: "


def display(frame: Any) -> None:
    print(DISPLAYED + json.dumps([row.asDict() for row in frame.collect()], default=str), flush=True)


def client(remote: str) -> Any:
    from tests.spark.connect_client import refuse

    for name in ("py4j", "pyspark.core"):  # what pyspark-client does not have
        sys.modules[name] = None  # type: ignore[assignment]
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.conf import RuntimeConf

    spark = SparkSession.builder.remote(remote).getOrCreate()
    for method in ("set", "unset"):
        setattr(RuntimeConf, method, refuse)
    return spark


def main(notebook: str, folder: str, *words: str) -> None:
    widgets = dict(word.split("=", 1) for word in words)
    remote, volume = widgets.pop("remote", ""), Path(folder) / "volume"
    volume.mkdir(parents=True)
    spark = client(remote) if remote else session(Path(folder))
    running = Notebook(spark, volume, widgets, display)
    guard(running, spark)
    try:
        running.run(Path(notebook))
        assert spark.range(3).count() == 3, "a platform's session is not the notebook's to stop"
    finally:
        if not remote:
            spark.stop()  # the JVM is for the next notebook too


if __name__ == "__main__":
    main(*sys.argv[1:])
