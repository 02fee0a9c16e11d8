"""The session of a test: classic, or with ``TXMQ_SESSION=connect`` a client of a Spark Connect server that runs in the
JVM of this process. A function of foreachBatch then runs in a process of the server, with copies of what it names.

Not here: what is a test of classic sessions alone (``classic.py``).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession

from bench.ports import free_ports

CONNECT = os.environ.get("TXMQ_SESSION") == "connect"
WORKER = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"


def start(name: str, chosen: Mapping[str, str], *, connect: bool = CONNECT) -> SparkSession:
    """``chosen``: settings, with the master."""
    settings = dict(chosen)
    builder = SparkSession.builder.appName(name)
    if connect:
        from pyspark.sql.connect.client import DefaultChannelBuilder

        (port,) = free_ports(1)
        settings["spark.connect.grpc.binding.port"] = str(port)
        DefaultChannelBuilder.default_port = staticmethod(lambda: port)  # type: ignore[method-assign]
        builder = SparkSession.builder.remote(settings.pop("spark.master"))
    for key, value in settings.items():
        builder = builder.config(key, value)
    return configure_spark_with_delta_pip(builder).getOrCreate()


class Notes(Sequence[Any]):
    """A list in a file, so that a function that runs in another process can add to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def append(self, note: object) -> None:
        with self._path.open("ab") as file:
            file.write(pickle.dumps(note))

    def _read(self) -> list[Any]:
        def notes() -> Iterator[Any]:
            with self._path.open("rb") as file:
                while file.peek(1):
                    yield pickle.load(file)

        return list(notes())

    def __getitem__(self, at: Any) -> Any:
        return self._read()[at]

    def __len__(self) -> int:
        return len(self._read())

    def __eq__(self, other: object) -> bool:
        return self._read() == other

    def __repr__(self) -> str:
        return repr(self._read())
