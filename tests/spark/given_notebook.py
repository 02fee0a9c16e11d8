"""A notebook as a platform runs it: ``spark``, ``dbutils`` and ``display`` are given, and ``spark`` is a client of Spark
Connect without a JVM, without py4j and with settings that cannot be changed.

``python -m tests.spark.given_notebook REMOTE NOTEBOOK FOLDER`` runs it; the session must be there afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from tests.spark.connect_client import refuse
from tests.spark.displaying_notebook import display


class Widgets:
    def __init__(self, **values: str) -> None:
        self._values = values

    def text(self, name: str, default: str) -> None:
        self._values.setdefault(name, default)

    def get(self, name: str) -> str:
        return self._values[name]


def main(remote: str, notebook: str, folder: str) -> None:
    for name in ("py4j", "pyspark.core"):  # what pyspark-client does not have
        sys.modules[name] = None  # type: ignore[assignment]
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.conf import RuntimeConf

    spark = SparkSession.builder.remote(remote).getOrCreate()
    for method in ("set", "unset"):
        setattr(RuntimeConf, method, refuse)
    given = {
        "__name__": "__main__",
        "spark": spark,
        "dbutils": SimpleNamespace(widgets=Widgets(folder=folder)),
        "display": display,
    }
    exec(compile(Path(notebook).read_text(), notebook, "exec"), given)
    assert spark.range(3).count() == 3


if __name__ == "__main__":
    main(*sys.argv[1:])
