"""``python -m tests.matrix [--only 4.1.1] [--job sink] [--write]``: the same tests on every Spark, Delta, Python and
Java that go together, in environments of their own under ``.venv/matrix``. ``--write`` puts the table into
docs/test_matrix.md.

Every pair of a Spark and a Python is run, and every Spark on the oldest and the newest Java that it starts on. What
the machine does not have is named, and so is why a test was skipped. The first Python of a Spark runs every test of
the crash table; the others run one test of each of its rows. An environment is built while another one is tested. An
outcome without a failure is kept with its commit: what was interrupted goes on where it was.

Not here: the tests (``JOBS``), which are those of the suite.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "test_matrix.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = "avro,connect,fast,json-schema,kafka,protobuf"
TEST_PACKAGES = (
    "hatchling",
    "hypothesis",
    "matplotlib",
    "pandas",
    "pika",
    "psycopg",
    "pytest",
    "pytest-xdist",
    "trustme",
)
JOBS: dict[str, tuple[str, ...]] = {
    "source": (
        "tests/spark/test_source.py",
        "tests/spark/test_unadmitted.py",
        "tests/connector/typed",  # PySpark's own conversions differ
        "tests/connector/delta/test_exported_files.py",
    ),
    "sink": ("tests/spark/test_sink.py",),
    "foreachBatch with tables": ("tests/spark/test_foreach_batch.py", "tests/spark/test_merge.py"),
    "crash table": ("tests/crash/test_spark_crash.py",),
    "Spark Connect": ("tests/spark/test_connect.py",),
    "notebook": ("tests/test_notebooks.py::test_notebook_runs_cell_by_cell[exactly_once]",),
}
CRASH_TABLE = "crash table"
LIMIT_S = 3600.0
# with packages: Hadoop's client, which loads them, does not run on every Java that Spark starts on
STARTS = """
from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = configure_spark_with_delta_pip(builder).getOrCreate()
print("counted", spark.range(5).count())
"""


@dataclass(frozen=True)
class Spark:
    spark: str
    delta: str


SPARKS = (Spark("4.1.1", "4.3.1"), Spark("4.2.0", "4.4.0"))


@dataclass(frozen=True)
class Java:
    version: str
    home: Path


@dataclass(frozen=True)
class Python:
    version: str
    path: Path


@dataclass(frozen=True)
class Cell:
    spark: Spark
    python: Python
    java: Java
    whole: bool = True  # every test of the crash table; else one of each row

    @property
    def names(self) -> list[str]:
        return [self.spark.spark, self.spark.delta, self.python.version, self.java.version]


@dataclass(frozen=True)
class Outcome:
    passed: int
    skipped: dict[str, int]  # why -> how many
    failed: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.passed} passed"]
        parts += [f"{sum(self.skipped.values())} skipped"] if self.skipped else []
        return ", ".join([*parts, *([f"**{len(self.failed)} failed**"] if self.failed else [])])


@dataclass(frozen=True)
class Row:
    cell: Cell
    outcomes: dict[str, Outcome]  # of the jobs that were run

    def __str__(self) -> str:
        told = [str(self.outcomes.get(job, "-")) for job in JOBS]
        return f"| {' | '.join([*self.cell.names, *told])} |"

    @property
    def well(self) -> bool:
        return not any(outcome.failed for outcome in self.outcomes.values())


# -- what the machine has ------------------------------------------------------------------------------------


def javas() -> list[Java]:
    """One of each version from 17 on, by their ``release`` files."""
    homes = [*Path("/usr/lib/jvm").glob("*"), *(Path(each) for each in [os.environ.get("JAVA_HOME")] if each)]
    found: dict[int, Java] = {}
    for home in sorted(homes):
        release = home / "release"
        text = release.read_text() if release.exists() and (home / "bin" / "java").exists() else ""
        named = re.search(r'JAVA_VERSION="(\d+)[^"]*"', text)
        if named and int(named[1]) >= 17:
            found.setdefault(int(named[1]), Java(named[1], home))
    return [found[version] for version in sorted(found)]


def pythons() -> list[Python]:
    """One of each version of ``PYTHONS``: this one, of pyenv, of the path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = []
    for version in PYTHONS:
        places = [Path(sys.base_prefix) / "bin" / f"python{version}"]
        places += sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
        places += [Path(each) for each in [shutil.which(f"python{version}")] if each]
        found += [Python(version, place) for place in places[:] if place.exists()][:1]
    return found


def cells(sparks: Sequence[Spark], versions: Sequence[Python], homes: Sequence[Java]) -> Iterator[Cell]:
    """Every Spark with every Python, on the Javas in turn."""
    for spark, (column, python) in itertools.product(sparks, enumerate(versions)):
        yield Cell(spark, python, homes[column % len(homes)], whole=column == 0)


# -- environments --------------------------------------------------------------------------------------------


def locked(lock: Path) -> list[str]:
    """The versions of ``requirements.lock`` as constraints: without hashes, without Spark and Delta."""
    lines = [line.removesuffix(" \\").strip() for line in lock.read_text().splitlines() if "==" in line]
    return [line for line in lines if not re.match(r"(pyspark|delta-spark|py4j)==", line)]


def environment(cell: Cell) -> Path:
    """The Python of an environment for this Spark and this Python, made once. Raises CalledProcessError."""
    place = ROOT / ".venv" / "matrix" / f"spark-{cell.spark.spark}-python-{cell.python.version}"
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        subprocess.run([cell.python.path, "-m", "venv", "--clear", place], check=True)
        constraints = place / "constraints.txt"
        constraints.write_text("\n".join(locked(ROOT / "requirements.lock")))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        wanted = [f"pyspark=={cell.spark.spark}", f"delta-spark=={cell.spark.delta}", *TEST_PACKAGES]
        subprocess.run([*pip, "--constraint", constraints, *wanted], check=True)
        this = ["--no-build-isolation", "--constraint", constraints, "--editable", f"{ROOT}[{EXTRAS}]"]
        subprocess.run([*pip, *this], check=True)
        ready.touch()
    return python


def surroundings(cell: Cell, python: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYSPARK_", "SPARK_", "TXMQ_", "JDK_JAVA_OPTIONS"))
    }
    path = os.pathsep.join([str(cell.java.home / "bin"), str(python.parent), os.environ["PATH"]])
    named = {name: str(python) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")}
    return {**kept, **named, "JAVA_HOME": str(cell.java.home), "PATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}


# -- running -------------------------------------------------------------------------------------------------


def why_not(cell: Cell, python: Path) -> str:
    """Why this Spark does not start on this Java; "" if it does."""
    done = subprocess.run(
        [python, "-c", STARTS],
        env=surroundings(cell, python),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if "counted 5" in done.stdout:
        return ""
    causes = re.findall(r"(?:Exception|Error): (.*)", done.stderr)
    return causes[0] if causes else f"exit code {done.returncode}"


def ran(cell: Cell, python: Path, tests: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
        done = subprocess.run(
            command, cwd=ROOT, env=surroundings(cell, python), capture_output=True, text=True, timeout=LIMIT_S
        )
        if not report.exists():
            return Outcome(0, {}, (done.stderr[-500:] or done.stdout[-500:],))
        outcome = counted(report)
    if outcome.failed:
        print(done.stdout[-4000:], file=sys.stderr)
    return outcome


def counted(report: Path) -> Outcome:
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = Counter(each.get("message", "") for case in cases for each in case.findall("skipped"))
    failed = tuple(str(case.get("name")) for case in bad)
    return Outcome(len(cases) - len(failed) - skipped.total(), dict(skipped), failed)


class Kept:
    """The outcomes without a failure of a commit, in a file. ``commit`` is "" where the tree differs from its
    commit: nothing is kept then.
    """

    def __init__(self, file: Path, commit: str) -> None:
        self._file, self._commit = file, commit
        self._found: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            written = json.loads(file.read_text())
            self._found = written["outcomes"] if written["commit"] == commit else {}

    def outcome(self, cell: Cell, job: str, run: Callable[[], Outcome]) -> Outcome:
        name = " ".join([*cell.names, job])
        if self._commit and name in self._found:
            found = self._found[name]
            return Outcome(found["passed"], found["skipped"], ())
        outcome = run()
        if self._commit and not outcome.failed:
            self._found[name] = asdict(outcome)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps({"commit": self._commit, "outcomes": self._found}))
            new.replace(self._file)
        return outcome


def commit() -> str:
    """The commit of the tree; "" where a file that the tests see differs from it."""
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", ".", ":!docs"], capture_output=True, text=True
    )
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    return "" if changed.stdout or changed.returncode else head.stdout.strip()


def one_of_each_row(tests: Iterable[str]) -> list[str]:
    """The first test of each row of the crash table, and the first one on Kafka, of the tests that pytest collects."""
    first: dict[str, str] = {}
    for test in tests:
        numbered = re.search(r"::test_(rows?_\d+|on_kafka)_", test)
        if numbered:
            first.setdefault(numbered[1], test)
    return list(first.values())


def tests_of(cell: Cell, job: str, python: Path) -> Sequence[str]:
    if cell.whole or job != CRASH_TABLE:
        return JOBS[job]
    command = [python, "-m", "pytest", "-q", "--collect-only", "-m", "not soak", *JOBS[job]]
    told = subprocess.run(
        command, cwd=ROOT, env=surroundings(cell, python), capture_output=True, text=True, timeout=LIMIT_S
    )
    return one_of_each_row(told.stdout.splitlines()) or JOBS[job]


def row(cell: Cell, python: Path, kept: Kept, jobs: Collection[str] = tuple(JOBS)) -> Row:
    """What is not of ``jobs`` is not run."""
    outcomes: dict[str, Outcome] = {}
    for name in (job for job in JOBS if job in jobs):
        begun = time.monotonic()
        outcome = kept.outcome(cell, name, lambda job=name: ran(cell, python, tests_of(cell, job, python)))
        seconds = time.monotonic() - begun
        print(f"{' '.join(cell.names)}: {name}: {outcome} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        outcomes[name] = outcome
    return Row(cell, outcomes)


def rows(cells: Sequence[Cell], jobs: Collection[str] = tuple(JOBS)) -> Iterator[Row]:
    """The rows in turn; the environments are built ahead of them."""
    kept = Kept(ROOT / ".venv" / "matrix" / "outcomes.json", commit())
    with ThreadPoolExecutor(1) as builder:
        for cell, python in [(cell, builder.submit(environment, cell)) for cell in cells]:
            yield row(cell, python.result(), kept, jobs)


def planned(
    sparks: Sequence[Spark], versions: Sequence[Python], homes: Sequence[Java]
) -> tuple[list[Cell], list[str]]:
    """The cells to run, and a sentence for each Spark that does not start on a Java."""
    found, notes = [], []
    for spark in sparks:
        tried = {home: Cell(spark, versions[0], home) for home in homes}
        reasons = {home: why_not(cell, environment(cell)) for home, cell in tried.items()}
        for home, reason in reasons.items():
            if reason:
                notes.append(f"Spark {spark.spark} does not start on JDK {home.version} ({reason}).")
        found += cells([spark], versions, [home for home in homes if not reasons[home]])
    return found, notes


def why_skipped(found: Sequence[Row]) -> str:
    """The reasons that the tests gave; "" if none was skipped."""
    parts = []
    for job in JOBS:
        counts: dict[str, set[int]] = {}
        for outcome in (each.outcomes[job] for each in found if job in each.outcomes):
            for why, count in outcome.skipped.items():
                counts.setdefault(why, set()).add(count)
        told = [f"{' or '.join(map(str, sorted(counts[why])))} ({why})" for why in sorted(counts)]
        parts += [f"under {job} {', '.join(told)}"] if told else []
    return f"Skipped: {'; '.join(parts)}." if parts else ""


def table(found: Sequence[Row], missing: Sequence[str], notes: Sequence[str], day: datetime.date) -> str:
    head = ["pyspark", "delta-spark", "Python", "JDK", *JOBS]
    shown = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *map(str, found)]
    parts = [
        f"Run on {day.isoformat()} by `make matrix`.",
        "The crash table is whole with the first Python of a Spark, and one test of each row with the others.",
    ]
    parts += ["-: not run."] if any(job not in each.outcomes for each in found for job in JOBS) else []
    parts += [f"Not on that machine, and not run: {', '.join(missing)}."] if missing else []
    why = why_skipped(found)
    return "\n".join([" ".join([*parts, *notes]), "", *shown, "", *([why, ""] if why else [])])


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.matrix")
    asked.add_argument("--only", action="append", help="a version of pyspark, or of Python (may be repeated)")
    asked.add_argument("--job", action="append", choices=list(JOBS), help="these tests (may be repeated)")
    asked.add_argument("--write", action="store_true", help="put the table into docs/test_matrix.md")
    given = asked.parse_args()
    versions, homes = pythons(), javas()
    if not homes:
        print("no JDK 17 or later in /usr/lib/jvm or at JAVA_HOME", file=sys.stderr)
        return 1
    missing = [
        f"Python {version}" for version in PYTHONS if version not in {each.version for each in versions}
    ]
    chosen = [homes[0], *homes[1:][-1:]]  # the oldest and the newest
    only = {*given.only} if given.only else set()
    sparks = [spark for spark in SPARKS if spark.spark in only] or SPARKS
    versions = [python for python in versions if python.version in only] or versions
    found, notes = planned(sparks, versions, chosen)
    done: list[Row] = []
    text = ""
    for each in rows(found, given.job or JOBS):
        done.append(each)
        absent = [Row(cell, {}) for cell in found[len(done) :]]
        text = table([*done, *absent], missing, notes, datetime.date.today())
        if given.write:
            before, _, rest = PAGE.read_text().partition(BEGIN)
            PAGE.write_text(f"{before}{BEGIN}{text}\n{END}{rest.partition(END)[2]}")
    print(text)
    return 0 if all(each.well for each in done) else 1


if __name__ == "__main__":
    sys.exit(main())
