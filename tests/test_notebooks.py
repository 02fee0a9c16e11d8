"""The notebooks are real: each is in Databricks' source format and runs from its first to its last cell as a
plain script.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pyspark.java_gateway import launch_gateway

from tests.forked import spark_forks
from tests.jvm import with_settings
from tests.progress import GUARD_S, run_to_end
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
    brought = {"txmq", "pyarrow"} | ({"pyspark", "delta"} if "txmq[spark" in said else set())
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


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_as_a_plain_script(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if notebook.stem == "exactly_once":  # as a user runs it, by the path of a Python that is not activated
        venv.create(tmp_path / "bare", symlinks=True)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bare' / 'bin'}{os.pathsep}{os.environ['PATH']}")
        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            monkeypatch.delenv(name, raising=False)
    elif notebook.stem != "crash":  # which starts drivers, and kills them
        listens: Mapping[str, str] = request.getfixturevalue("jvm")
        for name, value in listens.items():
            monkeypatch.setenv(name, value)
    if notebook.stem == "on_kafka":
        url: str = request.getfixturevalue("kafka_url")
        monkeypatch.setenv("KAFKA", url.removeprefix("kafka://"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run_to_end([sys.executable, str(notebook)], tmp_path, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
