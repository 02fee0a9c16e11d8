"""Runs a notebook on this machine, cell by cell, with what Databricks gives it.

    python examples/run_notebook.py examples/notebooks/upserts.py [NAME=VALUE of a widget ...]

It has ``spark``, ``dbutils`` (widgets, secrets, fs.rm, library.restartPython), ``display``, ``%pip`` and
``%run``. It refuses what works on one machine and not on every compute of Databricks: a checkpoint or a table
at a path that is not in the volume, a table on files, a broker's directory in the volume, a package that is
neither a wheel of the volume nor in INSTALLABLE, a name from before ``restartPython``, a widget of a notebook
that ``%run`` runs, ``format("txmq")`` before it is registered, a query without an end or a checkpoint,
and the names of ABSENT.

Not here: what a notebook does. ``%pip`` installs nothing: this Python has ``pip install '.[spark]'``.
"""

from __future__ import annotations

import ast
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
CLASSIC = "standard and serverless compute are Spark Connect, without a JVM and RDDs"
CLUSTER = "serverless compute has no caches, and neither settings nor an environment of yours"
ABSENT = {
    **dict.fromkeys(("sparkContext", "_jvm", "_jsc", "_jdf", "_jsparkSession", "rdd"), CLASSIC),
    **dict.fromkeys(("cache", "persist", "conf", "environ", "getenv"), CLUSTER),
}
ON_FILES = re.compile(r"\bLOCATION\s+'|\bCREATE\b.*\bTABLE\b.*\bdelta\.`", re.IGNORECASE | re.DOTALL)


class Restarted(Exception):
    """``restartPython``: the names of the notebook are gone, its widgets are not."""


class Refused(Exception):
    """The notebook does what a cluster could not."""


class Widgets:
    def __init__(self, values: Mapping[str, str]) -> None:
        self._given, self._values = dict(values), dict[str, str]()
        self.of_another = False  # while %run runs a notebook

    def text(self, name: str, default: str, label: str = "") -> None:
        if self.of_another:
            raise Refused(
                f"a notebook that %run runs has the default of its widget {name!r}, whatever is entered: "
                "declare it in the notebook that is opened"
            )
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
        self._volume, self._figures, self.sources = volume, 0, set[str]()
        wheel = str(volume / "txmq-0.1.0-py3-none-any.whl")
        local = {"catalog": "spark_catalog", "schema": "txmq", "volume": str(volume), "wheel": wheel}
        self._widgets = Widgets({**local, **widgets})
        dbutils = SimpleNamespace(
            widgets=self._widgets,
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
            self._execute("\n" * number + "\n".join(lines), f"{path.name} cell {number}")
        elif any(line and not line.startswith("#") for line in lines):
            raise Refused(f"{path.name}, cell {number}: {magic[0]!r} needs a cell of its own")
        elif magic[0].startswith("%pip install "):
            self._install(magic[0].split()[2:])
        elif magic[0].startswith("%run "):
            self._widgets.of_another = True
            self.run(path.parent / f"{magic[0].split()[1]}.py")
            self._widgets.of_another = False
        elif not magic[0].startswith("%md"):
            raise Refused(f"{path.name}, cell {number}: {magic[0]!r} is no magic command of a notebook")

    def _execute(self, source: str, name: str) -> None:
        """``source``: each cell begins at another line, for a traceback."""
        tree = ast.parse(source, name)
        for node in ast.walk(tree):
            word = node.attr if isinstance(node, ast.Attribute) else getattr(node, "arg", None)
            if word in ABSENT:
                raise Refused(f"{name}: {word!r}: {ABSENT[word]}")
        exec(compile(tree, name, "exec"), self.names)

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

    def require_option(self, holder: Any, key: str, value: object) -> None:
        """``holder``: the reader or writer that gets it."""
        if key.lower() == "checkpointlocation":
            self.require_reachable(value)
            holder.has_checkpoint = True
        elif key.lower() == "data":
            self.require_a_disk(value)

    def require_registered(self, name: str) -> None:
        """Spark looks for data sources in the Python of the cluster; %pip installs into the notebook's."""
        if name == "txmq" and name not in self.sources:
            raise Refused("Spark does not find txmq in the Python of a notebook: spark.dataSource.register")


def guard(notebook: Notebook, spark: Any) -> None:
    """Checks what the cells of the notebook give to Spark, classic or Connect, and to txmq."""
    import txmq
    from connector.batch.batch_transaction import BatchTransaction

    reader, writer = type(spark.read), type(spark.range(1).write)
    stream = spark.readStream.format("rate").load().writeStream

    def options(holder: Any, **named: Any) -> None:
        for name, value in named.items():
            notebook.require_option(holder, name, value)

    for kind in (reader, writer, type(spark.readStream), type(stream)):
        _before(kind, "format", lambda _, name: notebook.require_registered(name))
        _before(kind, "option", notebook.require_option)
        _before(kind, "options", options)
    for kind, methods in (
        (reader, ("load", "parquet", "json", "csv")),
        (writer, ("save", "parquet", "json")),
    ):
        for method in methods:
            _before(kind, method, lambda _, path=None, *__, **___: notebook.require_reachable(path))
    for method in ("append", "merge", "delete", "overwrite"):
        _before(
            BatchTransaction, method, lambda _, rows, table, *__, **___: notebook.require_reachable(table)
        )
    for name in ("transactional", "connect", "apps", "queues"):
        _before(txmq, name, lambda *_, **named: _require_places(notebook, named))
    _before(type(spark.dataSource), "register", lambda _, source: notebook.sources.add(source.name()))
    _before(type(spark), "sql", lambda _, text, *__, **___: _require_no_files(text))
    _guard_ends(type(stream))
    opened = txmq.Broker.open

    def open_broker(directory: Any, *arguments: Any, **named: Any) -> Any:
        notebook.require_a_disk(directory)
        return opened(directory, *arguments, **named)

    txmq.Broker.open = staticmethod(open_broker)  # type: ignore[assignment,method-assign]


def _require_places(notebook: Notebook, named: Mapping[str, Any]) -> None:
    for name in ("checkpoint", "ledger"):
        notebook.require_reachable(named.get(name))
    if named.get("data") is not None:
        notebook.require_a_disk(named["data"])


def _require_no_files(text: str) -> None:
    if ON_FILES.search(text):
        raise Refused(f"{text}: Unity Catalog has no table on files of a volume. Give it a name alone")


def _guard_ends(kind: Any) -> None:
    """A query needs a trigger that ends it, and a checkpoint."""

    def triggered(writer: Any, **trigger: Any) -> None:
        writer.ends = trigger.get("availableNow") is True

    def start(writer: Any, *_: Any, **__: Any) -> None:
        if not getattr(writer, "ends", False):
            raise Refused("serverless compute takes trigger(availableNow=True) alone")
        if not getattr(writer, "has_checkpoint", False):
            raise Refused("a query needs the option checkpointLocation, in a volume")

    _before(kind, "trigger", triggered)
    for method in ("start", "toTable"):
        _before(kind, method, start)


def _before(kind: Any, method: str, check: Callable[..., object]) -> None:
    """``check`` comes first where a cell calls the function: txmq and Spark have directories of their own."""
    done = getattr(kind, method)

    def checked(*arguments: Any, **named: Any) -> Any:
        if " cell " in sys._getframe(1).f_code.co_filename:
            check(*arguments, **named)
        return done(*arguments, **named)

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
    guard(notebook, spark)
    notebook.run(Path(path))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
