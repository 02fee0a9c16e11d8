"""The Python that Spark runs for data sources and tasks, and whether it can load txmq.

Spark takes it from the environment of the process that starts the JVM. Data sources are looked up with
PYSPARK_DRIVER_PYTHON, else PYSPARK_PYTHON, else the ``python3`` of the PATH; tasks run PYSPARK_PYTHON, else
``python3``. Settings of a session do not change that: ``spark.pyspark.python`` is for spark-submit.

Not here: what else an installation needs (``txmq/doctor``).
Invariant: importing this module imports nothing of Spark.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

PYTHON = "PYSPARK_PYTHON"
DRIVER_PYTHON = "PYSPARK_DRIVER_PYTHON"
DEFAULT = "python3"

# pyspark itself is not among them: Spark puts its own on their path
_NEEDED = ("pyspark_txmq", "txmq", "connector", "broker_core", "pyarrow", "numpy", "pandas", "xxhash")
_LOOK = f"""\
import importlib.util, json, sys
missing = [name for name in {_NEEDED} if importlib.util.find_spec(name) is None]
print(json.dumps([sys.version_info[:3], missing]))
"""
_LOOK_S = 30.0
_OURS = (sys.version_info[0], sys.version_info[1])


@dataclass(frozen=True, slots=True)
class Worker:
    """A Python that Spark runs. ``variable`` names it, "" if it is Spark's default."""

    command: str
    variable: str
    path: str  # "" if the command is not found
    version: tuple[int, ...] = ()
    problem: str = ""  # what is wrong with it, as the end of a sentence about it

    def __str__(self) -> str:
        text = self.command if self.path in ("", self.command) else f"{self.command} ({self.path})"
        return f"{self.variable}={text}" if self.variable else text

    def advice(self) -> str:
        """What to do about the problem."""
        ours = sys.executable or "the path of the Python that has txmq"
        if self.variable == DRIVER_PYTHON:
            return f"unset {DRIVER_PYTHON} and set {PYTHON}={ours}"
        return f"set {PYTHON}={ours}" + (f", or install txmq for {self.path}" if self.variable else "")


def workers(environment: Mapping[str, str] | None = None) -> list[Worker]:
    """Every Python that Spark would run if it was started in ``environment``: one, or two that differ."""
    env = os.environ if environment is None else environment
    of_tasks = (env[PYTHON], PYTHON) if env.get(PYTHON) else (DEFAULT, "")
    of_lookups = (env[DRIVER_PYTHON], DRIVER_PYTHON) if env.get(DRIVER_PYTHON) else of_tasks
    chosen = dict((of_tasks, of_lookups))  # the same command is looked at once
    return [_look(command, variable, env) for command, variable in chosen.items()]


def notice() -> str:
    """What is wrong with the Python that Spark would run, and what to do. "" if nothing is, or if this
    process does not start Spark.
    """
    if not _starts_spark():
        return ""
    wrong = next((worker for worker in workers() if worker.problem), None)
    if wrong is None:
        return ""
    return (
        f"Spark's Python processes run {wrong}, which {wrong.problem}: Spark will not find format('txmq') "
        f"(DATA_SOURCE_NOT_FOUND), or its tasks will fail. Before the Spark session starts, {wrong.advice()}"
        + ("" if wrong.variable else ", or call txmq.recommended_conf(), which does that")
    )


def choose() -> None:
    """Sets PYSPARK_PYTHON to this Python if Spark's default would run, and cannot load txmq.

    Nothing is set if a JVM runs already, because it has read the environment.
    """
    if os.environ.get(PYTHON) or not sys.executable or not _starts_spark() or _jvm_runs():
        return
    if any(worker.problem for worker in workers() if not worker.variable):
        os.environ[PYTHON] = sys.executable


def _starts_spark() -> bool:
    """False in processes that Spark started itself, and where a server or a platform chooses the Python."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    chosen = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "DATABRICKS_RUNTIME_VERSION")
    if any(os.environ.get(name) for name in chosen) or find_spec("py4j") is None:  # a client of Spark Connect
        return False
    return spec is None or not spec.name.startswith("pyspark.")


def _jvm_runs() -> bool:
    core = sys.modules.get("pyspark.core.context")
    started = core is not None and core.SparkContext._gateway is not None
    return started or "PYSPARK_GATEWAY_PORT" in os.environ


def _look(command: str, variable: str, environment: Mapping[str, str]) -> Worker:
    path = shutil.which(command, path=environment.get("PATH")) or ""
    if not path:
        return Worker(command, variable, "", problem="is not found")
    if _is_this(path):
        return Worker(command, variable, path, tuple(sys.version_info[:3]))
    try:
        done = subprocess.run(
            [path, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
        )
        version, missing = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return Worker(command, variable, path, problem="is no Python that runs")
    problem = ""
    if missing:
        problem = f"has no {'txmq' if missing[0] == _NEEDED[0] else missing[0]}"
    elif tuple(version[:2]) != _OURS:
        problem = f"is Python {version[0]}.{version[1]}, while the driver runs {_OURS[0]}.{_OURS[1]}"
    return Worker(command, variable, path, tuple(version), problem)


def _is_this(path: str) -> bool:
    """Whether ``path`` is the Python of this process, by any of its names in one folder."""
    ours = sys.executable
    return (
        bool(ours)
        and os.path.dirname(os.path.abspath(path)) == os.path.dirname(os.path.abspath(ours))
        and os.path.samefile(path, ours)
    )
