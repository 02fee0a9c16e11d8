"""Which Python Spark would run, and what ``import txmq`` and ``recommended_conf`` do about one without txmq."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from connector import workers
from connector.conf import recommended_conf

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ``python3`` without packages: first on the PATH where no environment is activated."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin"


@pytest.fixture
def not_activated(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (workers.PYTHON, workers.DRIVER_PYTHON, "PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{bare}{os.pathsep}/usr/bin")
    monkeypatch.setattr(workers, "_jvm_runs", lambda: False)  # other tests of this process have a session
    return bare


def test_without_an_activated_environment_spark_runs_another_python_and_the_notice_says_what_to_set(
    not_activated: Path,
) -> None:
    (worker,) = workers.workers()
    assert worker.path == str(not_activated / "python3") and worker.problem.startswith("has no ")
    text = workers.notice()
    assert f"Spark's Python processes run python3 ({not_activated / 'python3'})" in text
    assert "DATA_SOURCE_NOT_FOUND" in text
    assert f"set PYSPARK_PYTHON={sys.executable}, or call txmq.recommended_conf()" in text


def test_the_python_of_this_process_needs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    found = workers.workers({"PATH": os.path.dirname(sys.executable)})
    assert [(each.command, each.problem) for each in found] == [("python3", "")]
    assert workers.workers({"PYSPARK_PYTHON": sys.executable, "PATH": ""})[0].problem == ""


@pytest.mark.parametrize(
    ("variables", "wrong", "expected", "advice"),
    [
        ({"PYSPARK_PYTHON": "/nowhere/python"}, "PYSPARK_PYTHON", "is not found", "set PYSPARK_PYTHON="),
        # as `pyspark` is told to start a notebook: Spark then runs it as a Python
        ({"PYSPARK_DRIVER_PYTHON": "true"}, "PYSPARK_DRIVER_PYTHON", "is no Python that runs", "unset PYSPARK_DRIVER_PYTHON"),
    ],
)  # fmt: skip
def test_a_variable_that_names_no_python_is_named_with_what_to_do(
    variables: dict[str, str], wrong: str, expected: str, advice: str
) -> None:
    folder = os.path.dirname(sys.executable)
    found = workers.workers({**variables, "PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"})
    (bad,) = [each for each in found if each.problem]
    assert (bad.variable, bad.problem) == (wrong, expected)
    assert bad.advice().startswith(advice) and sys.executable in bad.advice()


def test_a_python_of_another_version_is_a_problem(tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho '[[3, 1, 4], []]'\n")
    other.chmod(0o755)
    (found,) = workers.workers({"PYSPARK_PYTHON": str(other), "PATH": "/usr/bin"})
    assert (
        found.problem == f"is Python 3.1, while the driver runs {sys.version_info[0]}.{sys.version_info[1]}"
    )


def test_recommended_conf_sets_the_python_of_spark_where_unset_and_needed(not_activated: Path) -> None:
    recommended_conf()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert workers.notice() == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"PYSPARK_PYTHON": "/mine/python"},
        {"PYSPARK_GATEWAY_PORT": "1"},  # spark-submit has started the JVM
        {"SPARK_REMOTE": "sc://somewhere"},  # the server runs the Python
        {"DATABRICKS_RUNTIME_VERSION": "18.0"},  # so does the platform
        {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}/usr/bin"},  # activated
    ],
    ids=str,
)
def test_recommended_conf_leaves_a_choice_of_the_user_and_a_python_that_works(
    not_activated: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.undo()
    for name in (workers.PYTHON, workers.DRIVER_PYTHON):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PATH": f"{not_activated}{os.pathsep}/usr/bin", **variables}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    recommended_conf()
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "warned"),
    [
        ("import pyspark, txmq", True),
        ("import txmq, pyspark; txmq.transactional", True),
        ("import txmq", False),  # a program without Spark
        ("import txmq; txmq.recommended_conf()", False),
    ],
)
def test_importing_txmq_in_a_program_with_spark_says_what_to_set_once(
    not_activated: Path, program: str, warned: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=not_activated,
    )
    assert done.returncode == 0
    assert done.stderr.count("RuntimeWarning: Spark's Python processes run python3") == int(warned), (
        done.stderr
    )
