"""Runs a notebook on this machine, cell by cell, with what Databricks gives it.

    python examples/run_notebook.py examples/notebooks/upserts.py [NAME=VALUE of a widget ...]

It has ``spark``, ``dbutils`` (widgets, secrets, fs.rm, library.restartPython), ``display``, ``%pip`` and
``%run``. It refuses what works on one machine and not on a cluster: a checkpoint or a table at a path that is
not in the volume, a broker's directory in the volume, a package that is neither a wheel of the volume nor in
INSTALLABLE, and a name from before ``restartPython``.

Not here: what a notebook does. ``%pip`` installs nothing: this Python has ``pip install '.[spark]'``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CELL = "# COMMAND ----------"
MAGIC = "# MAGIC "
INSTALLABLE = {"pika"}  # what a notebook may name besides the wheel
Check = Callable[[object], None]


class Restarted(Exception):
    """``restartPython``: the names of the notebook are gone, its widgets are not."""


class Refused(Exception):
    """The notebook does what a cluster could not."""


class Widgets:
    def __init__(self, values: Mapping[str, str]) -> None:
        self._given, self._values = dict(values), dict[str, str]()

    def text(self, name: str, default: str, label: str = "") -> None:
        self._values.setdefault(name, self._given.get(name, default))

    def get(self, name: str) -> str:
        if name not in self._values:
            raise Refused(f"no widget has the name {name!r}: declare it with dbutils.widgets.text first")
        return self._values[name]


class Notebook:
    """``volume``: the directory that stands for /Volumes/CATALOG/SCHEMA/VOLUME."""

    def __init__(
        self,
        spark: Any,
        volume: Path,
        widgets: Mapping[str, str],
        display: Callable[[Any], None] | None = None,
    ) -> None:
        self._volume, self._figures = volume, 0
        wheel = str(volume / "txmq-0.1.0-py3-none-any.whl")
        local = {"catalog": "spark_catalog", "schema": "txmq", "volume": str(volume), "wheel": wheel}
        dbutils = SimpleNamespace(
            widgets=Widgets({**local, **widgets}),
            library=SimpleNamespace(restartPython=self._restart),
            fs=SimpleNamespace(rm=self._remove),
            secrets=SimpleNamespace(get=lambda scope, key: os.environ["TXMQ_PASSWORD"]),
        )
        self._frame = display or (lambda frame: frame.show(20, truncate=80))
        self._base = {"__name__": "__main__", "spark": spark, "dbutils": dbutils, "display": self._display}
        self.names: dict[str, Any] = dict(self._base)

    def run(self, path: Path) -> None:
        for number, cell in enumerate(path.read_text().split(CELL), 1):
            try:
                self._cell(path, cell.strip("\n"), number)
            except Restarted:
                self.names = dict(self._base)

    def _cell(self, path: Path, cell: str, number: int) -> None:
        lines = [line for line in cell.splitlines() if line != "# Databricks notebook source"]
        magic = [line.removeprefix(MAGIC) for line in lines if line.startswith(MAGIC)]
        if not magic:
            source = "\n" * number + "\n".join(lines)  # another line for each cell in a traceback
            exec(compile(source, f"{path.name} cell {number}", "exec"), self.names)
        elif magic[0].startswith("%pip install "):
            self._install(magic[0].split()[2:])
        elif magic[0].startswith("%run "):
            self.run(path.parent / f"{magic[0].split()[1]}.py")
        elif not magic[0].startswith("%md"):
            raise Refused(f"{path.name}, cell {number}: {magic[0]!r} is no magic command of a notebook")

    def _install(self, packages: list[str]) -> None:
        for each in packages:
            name = str(self.names[each[1:]]) if each.startswith("$") else each
            wheel = re.fullmatch(r"(.*\.whl)(\[[\w,-]+\])?", name)
            if name not in INSTALLABLE and not (wheel and Path(wheel[1]).is_relative_to(self._volume)):
                raise Refused(f"%pip install {name}: install the wheel from a volume")

    def _restart(self) -> None:
        raise Restarted

    def _remove(self, path: str, recurse: bool = False) -> None:
        self.require_reachable(path)
        shutil.rmtree(path) if recurse else Path(path).unlink()

    def _display(self, shown: Any) -> None:
        if not hasattr(type(shown), "savefig"):  # a DataFrame of Connect has an attribute of any name
            self._frame(shown)
            return
        self._figures += 1
        shown.savefig(self._volume / f"figure-{self._figures}.png")

    def require_reachable(self, path: object) -> None:
        """Every process of a cluster has volumes, and tables by their names."""
        if isinstance(path, str) and "/" in path and not Path(path).is_relative_to(self._volume):
            raise Refused(
                f"{path}: other processes of a cluster cannot reach it. Use a volume, or the name of a table"
            )

    def require_a_disk(self, path: object) -> None:
        if Path(str(path)).resolve().is_relative_to(self._volume.resolve()):
            raise Refused(
                f"{path}: a volume is no disk for a broker. Use a directory of the driver, or a broker's url"
            )


def guard(notebook: Notebook) -> None:
    """Checks each path that the notebook gives to Spark and txmq."""
    from pyspark.sql import DataFrameReader, DataFrameWriter
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from connector.batch.batch_transaction import BatchTransaction
    from txmq import Broker

    def option(name: object, value: object = None) -> None:
        if str(name).lower() == "checkpointlocation":
            notebook.require_reachable(value)

    _before(DataStreamWriter, "option", option)
    for kind, method in ((DataFrameReader, "load"), (DataFrameWriter, "save")):
        _before(kind, method, lambda path=None, *_: notebook.require_reachable(path))
    for method in ("append", "merge", "delete", "overwrite"):
        _before(BatchTransaction, method, lambda _rows, table, *_: notebook.require_reachable(table))
    opened = Broker.open

    def open_broker(directory: Any, *arguments: Any, **named: Any) -> Broker:
        notebook.require_a_disk(directory)
        return opened(directory, *arguments, **named)

    Broker.open = staticmethod(open_broker)  # type: ignore[method-assign]


def _before(kind: Any, method: str, check: Callable[..., None]) -> None:
    done = getattr(kind, method)

    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        if " cell " in sys._getframe(1).f_code.co_filename:  # txmq itself has directories of its own
            check(*arguments)
        return done(self, *arguments, **named)

    setattr(kind, method, checked)


def session(folder: Path) -> Any:
    """A session with Delta on this machine, whose catalog has its tables in ``folder``."""
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    from txmq import recommended_conf

    builder = SparkSession.builder.master("local[2]").appName("notebook").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    builder = builder.config(
        "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    )
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    for key, value in recommended_conf().items():
        builder = builder.config(key, value)
    spark = configure_spark_with_delta_pip(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def main(path: str, *widgets: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="txmq-notebook-"))
    (folder / "volume").mkdir()
    spark = session(folder)
    notebook = Notebook(spark, folder / "volume", dict(each.split("=", 1) for each in widgets))
    guard(notebook)
    notebook.run(Path(path))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
