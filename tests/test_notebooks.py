"""The notebooks are real: each is in Databricks' source format and runs from its first to its last cell as a
plain script.
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

from connector.stream.spark_version import has_admission_control
from tests.forked import spark_forks
from tests.jvm import with_settings
from tests.progress import GUARD_S, run_to_end
from tests.spark.displaying_notebook import DISPLAYED
from tests.spark.jobs import QUICK

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_in_databricks_source_format(notebook: Path) -> None:
    lines = notebook.read_text().splitlines()
    assert lines[0] == "# Databricks notebook source"
    assert lines.count("# COMMAND ----------") >= 5
    assert any(line.startswith("# MAGIC %md") for line in lines)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_says_which_packages_it_needs(notebook: Path) -> None:
    text = notebook.read_text()
    (said,) = re.findall(r"^# MAGIC .*Packages: (.*(?:\n# MAGIC \S.*)*)", text, re.MULTILINE)
    found = list(ast.walk(ast.parse(text)))
    names = {alias.name for each in found if isinstance(each, ast.Import) for alias in each.names}
    names |= {str(each.module) for each in found if isinstance(each, ast.ImportFrom)}
    imported = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    brought = {"txmq", "pyarrow"} | ({"pyspark", "delta"} if "'.[spark" in said else set())
    assert {name for name in imported - brought if name not in said} == set()


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
        (told,) = self.folder.glob(f"txmq-notebook-*/{picture}.json")
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
        command = [sys.executable]
        if name == "exactly_once":  # as a user runs it, by the path of a Python that is not activated
            venv.create(folder / "bare", symlinks=True)
            environment["PATH"] = f"{folder / 'bare' / 'bin'}{os.pathsep}{os.environ['PATH']}"
            for named in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
                environment.pop(named, None)
        elif name != "crash":  # which starts drivers, and kills them
            environment |= request.getfixturevalue("jvm")
        if name == "on_kafka":
            url: str = request.getfixturevalue("kafka_url")
            environment["KAFKA"] = url.removeprefix("kafka://")
            command += ["-m", "tests.spark.displaying_notebook"]
        (notebook,) = [path for path in NOTEBOOKS if path.stem == name]
        return Ran(run_to_end([*command, str(notebook)], folder, cwd=folder, env=environment), folder)

    return run


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_as_a_plain_script(notebook: Path, ran: Callable[[str], Ran]) -> None:
    done = ran(notebook.stem).done
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


def test_the_notebooks_that_plot_and_display_are_those_that_are_looked_at() -> None:
    for name in ("pyplot", "display(", "find_spec"):
        assert {path.stem for path in NOTEBOOKS if name in path.read_text()} == {"exactly_once", "on_kafka"}


@pytest.mark.spark
@pytest.mark.slow
def test_a_notebook_plots_the_lag_and_the_time_of_each_batch(ran: Callable[[str], Ran]) -> None:
    pytest.importorskip("matplotlib")
    plotted = ran("exactly_once").plotted("batches.png")
    assert set(plotted) == {"lag in messages", "seconds"}
    (lag,), (seconds,) = plotted["lag in messages"]["bars"], plotted["seconds"]["bars"]
    # Spark 4.1 says where a batch ended in place of where the queue ended
    assert lag == ([600, 200, 0] if has_admission_control() else [0, 0, 0])
    assert len(seconds) == 3 and min(seconds) > 0


@pytest.mark.spark
@pytest.mark.slow
def test_a_notebook_displays_its_batches_where_there_is_a_display_and_plots_what_is_left(
    ran: Callable[[str], Ran],
) -> None:
    pytest.importorskip("matplotlib")
    on_kafka = ran("on_kafka")
    (rows,) = on_kafka.displayed()
    assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 3
    left = list(itertools.accumulate((-row["messages"] for row in rows), initial=1_000))[1:]
    assert left[-1] == 0
    (line,) = on_kafka.plotted("lag.png")["lag in messages"]["lines"]
    assert line == [[row["sequence"], lag] for row, lag in zip(rows, left, strict=True)]
