"""The notebooks are real: each is in Databricks' source format and runs from its first to its last cell with what the
platform sets, as ``examples/run_notebook.py`` stands in for it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.java_gateway import launch_gateway

from broker_core.client.broker import BrokerClient
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.launcher import Broker
from connector.stream.spark_version import has_admission_control
from examples.run_notebook import Notebook, Refused
from tests.forked import spark_forks
from tests.gates import seldom
from tests.jvm import with_settings
from tests.progress import GUARD_S, run_to_end
from tests.spark.jobs import QUICK
from tests.spark.notebook_run import DISPLAYED

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("[a-z]*.py"))
# only in ``make soak``: a JVM of their own, and tests/spark has what they show
SELDOM = {"on_kafka", "typed_messages", "upserts", "without_duplicates"}
OF_THE_RUNTIME = {"pyspark", "matplotlib", "pandas"}  # Databricks has them
OF_THE_WHEEL = {"txmq", "pyarrow"}
WIDGETS = NOTEBOOKS[0].read_text().split("# COMMAND ----------")[1].strip()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_in_databricks_source_format(notebook: Path) -> None:
    lines = notebook.read_text().splitlines()
    assert lines[0] == "# Databricks notebook source"
    assert lines.count("# COMMAND ----------") >= 5
    assert any(line.startswith("# MAGIC %md") for line in lines)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_installs_what_it_imports_and_begins_anew_with_the_set_up(notebook: Path) -> None:
    text = notebook.read_text()
    cells = [cell.strip() for cell in text.split("# COMMAND ----------")]
    assert "**Compute:**" in cells[0]
    assert cells[1].replace(' + "[kafka]"', "") == WIDGETS, "all notebooks have the same widgets"
    (packages,) = re.findall(r"^# MAGIC %pip install \$wheel(.*)$", cells[2], re.MULTILINE)
    assert cells[3:5] == ["dbutils.library.restartPython()", "# MAGIC %run ./_setup"]
    assert cells[-1].splitlines()[-1].startswith("clean_up(")
    found = list(ast.walk(ast.parse(text)))
    names = {alias.name for each in found if isinstance(each, ast.Import) for alias in each.names}
    names |= {str(each.module) for each in found if isinstance(each, ast.ImportFrom)}
    imported = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    extras = set(re.findall(r"\[(\w+)\]", cells[1]))
    assert imported - OF_THE_RUNTIME - OF_THE_WHEEL - set(packages.split()) - extras == set()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_redefines_no_name_of_the_set_up(notebook: Path) -> None:
    """A function of the set-up would find the notebook's."""
    assert _names(notebook) & _names(notebook.parent / "_setup.py") == set()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_deletes_no_files_to_act_a_crash(notebook: Path) -> None:
    calls = {
        node.attr for node in ast.walk(ast.parse(notebook.read_text())) if isinstance(node, ast.Attribute)
    }
    assert calls & {"rm", "rmtree", "unlink", "remove", "rmdir"} == set()


def test_a_path_in_a_volume_names_catalog_schema_and_volume() -> None:
    found = set[str]()
    for folder in ("docs", "examples"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".md", ".py", ".yml"):
                found |= set(re.findall(r"/Volumes/\w[\w./-]*\w", path.read_text()))
    assert len(found) >= 5
    volumes = {path: path.split("/")[2:5] for path in found}
    assert [path for path, names in volumes.items() if len(names) < 3 or "." in names[2]] == []


def _names(notebook: Path) -> set[str]:
    found: set[str] = set()
    for each in ast.parse(notebook.read_text()).body:  # of the notebook itself, not within a function
        if isinstance(each, ast.FunctionDef):
            found.add(each.name)
        elif isinstance(each, ast.Assign):
            found |= {
                name.id
                for name in ast.walk(each)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
    return found - {"each", "_"}


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("# MAGIC %pip install txmq", "install the wheel from a volume"),
        ('kept = 1\n# COMMAND ----------\ndbutils.library.restartPython()\n# COMMAND ----------\nkept', "'kept' is not defined"),
        ('dbutils.fs.rm("/tmp/checkpoint", True)', "cannot reach it"),
        ('dbutils.widgets.get("folder")', "no widget has the name 'folder'"),
        ("# MAGIC %sh ls", "no magic command"),
        ("# MAGIC %run ./other\nprint(1)", "needs a cell of its own"),
        ("# MAGIC %run ./other", "declare it in the notebook that is opened"),
        ("spark.sparkContext", "without a JVM and RDDs"),
        ("def each(batch, tx):\n    batch.rdd.count()", "without a JVM and RDDs"),
        ("spark._jvm", "without a JVM and RDDs"),
        ("frame.cache()", "no caches"),
        ("transactional(each, persist=True)", "no caches"),
        ('spark.conf.set("spark.sql.shuffle.partitions", 2)', "neither settings nor an environment"),
        ('import os\nos.environ["KAFKA"]', "neither settings nor an environment"),
    ],
)  # fmt: skip
def test_what_a_cluster_could_not_do_is_refused(cell: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(f"# Databricks notebook source\n{cell}\n")
    (tmp_path / "other.py").write_text('dbutils.widgets.text("catalog", "main")\n')
    with pytest.raises((Refused, NameError), match=why):
        Notebook(None, tmp_path / "volume", {}).run(tmp_path / "notebook.py")


def test_a_path_outside_of_the_volume_and_a_broker_in_it_are_refused(tmp_path: Path) -> None:
    notebook = Notebook(None, tmp_path, {})
    notebook.require_reachable("main.shop.orders")
    notebook.require_reachable(f"{tmp_path}/checkpoint")
    notebook.require_a_disk(tmp_path.parent / "broker")
    with pytest.raises(Refused):
        notebook.require_reachable("/tmp/lake/orders")
    with pytest.raises(Refused):
        notebook.require_a_disk(tmp_path / "data")


# what a cell asks of a session or of txmq, and why it is refused
REFUSED = [
    ('spark.readStream.format("txmq")', "dataSource.register"),
    ('rows.write.format("txmq")', "dataSource.register"),
    ('spark.read.load("/tmp/lake")', "cannot reach it"),
    ('spark.read.parquet("/tmp/lake")', "cannot reach it"),
    ('rows.write.format("delta").save("/tmp/lake")', "cannot reach it"),
    ('BatchTransaction.append(None, rows, "/tmp/lake")', "cannot reach it"),
    ('BatchTransaction.merge(None, rows, "/tmp/lake", "t.id = s.id")', "cannot reach it"),
    ('txmq.transactional(print, url="kafka://host:9092", app_id="a", ledger="/tmp/ledger")', "cannot reach it"),
    ('spark.sql("CREATE TABLE t (id INT) USING delta LOCATION \'/tmp/lake\'")', "no table on files"),
    ('spark.sql("CREATE TABLE delta.`/tmp/lake` (id INT) USING delta")', "no table on files"),
    ('stream.writeStream.option("checkpointLocation", "/tmp/checkpoint")', "cannot reach it"),
    ('stream.writeStream.options(checkpointLocation="/tmp/checkpoint")', "cannot reach it"),
    ('noop.option("checkpointLocation", f"{volume}/c").start()', "availableNow=True"),
    ('noop.option("checkpointLocation", f"{volume}/c").trigger(processingTime="1 second").start()', "availableNow=True"),
    ('stream.writeStream.format("noop").trigger(availableNow=True).start()', "needs the option checkpointLocation"),
    ('spark.readStream.options(data=f"{volume}/data")', "no disk for a broker"),
    ('txmq.Broker.open(f"{volume}/data")', "no disk for a broker"),
    ('txmq.connect(data=f"{volume}/data")', "no disk for a broker"),
    ('txmq.transactional(print, data=f"{volume}/data", app_id="a")', "no disk for a broker"),
]  # fmt: skip
BEFORE = """# Databricks notebook source
import txmq
from connector.batch.batch_transaction import BatchTransaction
from examples.run_notebook import Refused

dbutils.widgets.text("volume", "")
volume = dbutils.widgets.get("volume")
rows, stream = spark.range(1), spark.readStream.format("rate").load()
noop = stream.writeStream.format("noop")
"""
CELL = """
# COMMAND ----------

try:
    {}
except Refused as error:
    print("refused:", error)
else:
    print("done")
"""


@pytest.mark.spark
@pytest.mark.slow
def test_what_a_cluster_could_not_do_with_a_session_is_refused(
    jvm: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "notebook.py").write_text(BEFORE + "".join(CELL.format(call) for call, _ in REFUSED))
    done = _run(tmp_path / "notebook.py", tmp_path, [], {**os.environ, **jvm})
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    answers = [line for line in done.stdout.splitlines() if line.startswith(("refused: ", "done"))]
    for (call, why), answer in zip(REFUSED, answers, strict=True):
        assert answer.startswith("refused: ") and why in answer, call


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", with_settings(QUICK))
        yield


@pytest.fixture(scope="module")
def jvm(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """One for several notebooks, one after the other, as a cluster of Databricks has: where it listens."""
    with spark_forks():
        gateway = launch_gateway(popen_kwargs={"cwd": tmp_path_factory.mktemp("jvm")})
    yield {
        "PYSPARK_GATEWAY_PORT": str(gateway.java_parameters.port),
        "PYSPARK_GATEWAY_SECRET": gateway.java_parameters.auth_token,
    }
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(GUARD_S)


@dataclass(frozen=True)
class Ran:
    """A notebook that has run. ``folder``: what is its own."""

    done: subprocess.CompletedProcess[str]
    folder: Path

    def displayed(self) -> list[list[dict[str, Any]]]:
        """The rows of each frame that it has displayed."""
        lines = [line for line in self.done.stdout.splitlines() if line.startswith(DISPLAYED)]
        return [json.loads(line.removeprefix(DISPLAYED)) for line in lines]

    def plotted(self, picture: str) -> dict[str, Any]:
        """What each axes of a figure shows, by its label."""
        (told,) = self.folder.glob(f"run/volume/{picture}.json")
        assert told.with_suffix("").read_bytes().startswith(b"\x89PNG")
        return {axes["label"]: axes for axes in json.loads(told.read_text())}


@pytest.fixture(scope="module")
def ran(
    quick: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Ran]:
    """Runs a notebook, once."""

    @functools.cache
    def run(name: str) -> Ran:
        folder = tmp_path_factory.mktemp(name)
        own = {"TMPDIR": str(folder), "MPLBACKEND": "module://tests.figures", "MPLCONFIGDIR": str(folder)}
        environment = {**os.environ, **own}
        if name == "exactly_once":  # as a user runs it, by the path of a Python that is not activated
            venv.create(folder / "bare", symlinks=True)
            environment["PATH"] = f"{folder / 'bare' / 'bin'}{os.pathsep}{os.environ['PATH']}"
            for named in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
                environment.pop(named, None)
        else:
            environment |= request.getfixturevalue("jvm")
        widgets = [f"broker_url={request.getfixturevalue('kafka_url')}"] if name == "on_kafka" else []
        (notebook,) = [path for path in NOTEBOOKS if path.stem == name]
        return Ran(_run(notebook, folder, widgets, environment), folder)

    return run


def _run(
    notebook: Path, folder: Path, widgets: list[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.spark.notebook_run", str(notebook), str(folder / "run"), *widgets]
    return run_to_end(command, folder, cwd=folder, env={**environment, "PYTHONPATH": str(ROOT)})


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook",
    seldom(NOTEBOOKS, lambda path: path.stem in SELDOM),
    ids=lambda path: path.stem,
)
def test_notebook_runs_cell_by_cell(notebook: Path, ran: Callable[[str], Ran]) -> None:
    done = ran(notebook.stem).done
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", ["exactly_once", "without_duplicates"])
def test_a_notebook_runs_with_a_broker_of_yours_and_leaves_nothing_there(
    name: str, jvm: Mapping[str, str], tmp_path: Path
) -> None:
    (notebook,) = [path for path in NOTEBOOKS if path.stem == name]
    environment = {**os.environ, **jvm, "TXMQ_PASSWORD": "secret", "MPLBACKEND": "agg"}
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as broker:
        broker.accounts.add_user("ann", passwords.hashed("secret", passwords.Cost(4)), ("operator",))
        broker.accounts.set_permissions("ann", ".*", ".*", ".*")
        with BrokerClient(broker.url, credentials=Credentials("ann", "secret")) as client:
            exchanges = client.exchanges()
            widgets = [f"broker_url={broker.url}", f"amqp_url={broker.amqp_urls[0]}/%2F"]
            done = _run(notebook, tmp_path, [*widgets, "user=ann", "secret=txmq/ann"], environment)
            assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
            assert client.queues() == [] and client.exchanges() == exchanges


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.slow
def test_the_example_of_a_crash_runs_as_a_script(quick: None, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "crash.py")]
    done = run_to_end(command, tmp_path, cwd=tmp_path, env=environment)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


def test_the_notebooks_that_plot_are_those_that_are_looked_at() -> None:
    assert {path.stem for path in NOTEBOOKS if "pyplot" in path.read_text()} == {"exactly_once", "on_kafka"}


@pytest.mark.spark
@pytest.mark.slow
def test_a_notebook_plots_the_lag_and_the_time_of_each_batch(ran: Callable[[str], Ran]) -> None:
    pytest.importorskip("matplotlib")
    plotted = ran("exactly_once").plotted("figure-1.png")
    assert set(plotted) == {"lag in messages", "seconds"}
    (lag,), (seconds,) = plotted["lag in messages"]["bars"], plotted["seconds"]["bars"]
    # Spark 4.1 says where a batch ended in place of where the queue ended
    assert lag == ([600, 200, 0] if has_admission_control() else [0, 0, 0])
    assert len(seconds) == 3 and min(seconds) > 0


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.slow
def test_a_notebook_displays_its_batches_where_there_is_a_display_and_plots_what_is_left(
    ran: Callable[[str], Ran],
) -> None:
    pytest.importorskip("matplotlib")
    on_kafka = ran("on_kafka")
    rows = on_kafka.displayed()[0]
    assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 3
    left = list(itertools.accumulate((-row["messages"] for row in rows), initial=1_000))[1:]
    assert left[-1] == 0
    (line,) = on_kafka.plotted("figure-1.png")["lag in messages"]["lines"]
    assert line == [[row["sequence"], lag] for row, lag in zip(rows, left, strict=True)]
