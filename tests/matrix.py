"""``python -m tests.matrix [--only 4.1.1] [--job sink] [--write]``: the same tests on every Spark, Delta, Python and
Java that go together, in environments of their own under ``.venv/matrix``. ``--write`` puts the table into
docs/spark.md.

Every pair of a Spark and a Python is run, and every Spark on the oldest and the newest Java that it starts on. What
the machine does not have is named.

Not here: the tests (``JOBS``), which are those of the suite.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "spark.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = "avro,connect,fast,json-schema,kafka,protobuf"
TEST_PACKAGES = ("hatchling", "hypothesis", "pandas", "pika", "psycopg", "pytest", "pytest-xdist", "trustme")
JOBS: dict[str, tuple[str, ...]] = {
    "source": ("tests/spark/test_source.py", "tests/spark/test_unadmitted.py"),
    "sink": ("tests/spark/test_sink.py",),
    "foreachBatch with tables": ("tests/spark/test_foreach_batch.py", "tests/spark/test_merge.py"),
    "crash table": ("tests/crash/test_spark_crash.py",),
    "notebook": ("tests/test_notebooks.py", "-k", "upserts"),
}
LIMIT_S = 3600.0
STARTS = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
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


@dataclass(frozen=True)
class Outcome:
    passed: int
    skipped: int
    failed: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.passed} passed"]
        parts += [f"{self.skipped} skipped"] if self.skipped else []
        return ", ".join([*parts, *([f"**{len(self.failed)} failed**"] if self.failed else [])])


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
        yield Cell(spark, python, homes[column % len(homes)])


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
    return causes[-1] if causes else f"exit code {done.returncode}"


def ran(cell: Cell, python: Path, tests: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
        done = subprocess.run(
            command, cwd=ROOT, env=surroundings(cell, python), capture_output=True, text=True, timeout=LIMIT_S
        )
        if not report.exists():
            return Outcome(0, 0, (done.stderr[-500:] or done.stdout[-500:],))
        outcome = counted(report)
    if outcome.failed:
        print(done.stdout[-4000:], file=sys.stderr)
    return outcome


def counted(report: Path) -> Outcome:
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = tuple(str(case.get("name")) for case in bad)
    return Outcome(len(cases) - len(failed) - skipped, skipped, failed)


def row(cell: Cell, jobs: Collection[str] = tuple(JOBS)) -> tuple[str, bool]:
    """A row of the table, and whether all is well. What is not of ``jobs`` is not run."""
    named = [cell.spark.spark, cell.spark.delta, cell.python.version, cell.java.version]
    python = environment(cell)
    outcomes: list[Outcome | None] = []
    for name, tests in JOBS.items():
        if name not in jobs:
            outcomes.append(None)
            continue
        begun = time.monotonic()
        outcomes.append(ran(cell, python, tests))
        print(
            f"{' '.join(named)}: {name}: {outcomes[-1]} ({time.monotonic() - begun:.0f} s)", file=sys.stderr
        )
    told = ["-" if each is None else str(each) for each in outcomes]
    return f"| {' | '.join([*named, *told])} |", not any(each and each.failed for each in outcomes)


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


def table(rows: Iterable[str], missing: Sequence[str], notes: Sequence[str], day: datetime.date) -> str:
    head = ["pyspark", "delta-spark", "Python", "JDK", *JOBS]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]
    absent = [f"Not on that machine, and not run: {', '.join(missing)}."] if missing else []
    first = " ".join([f"Run on {day.isoformat()} by `make matrix`.", *absent, *notes])
    return "\n".join([first, "", *lines, ""])


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.matrix")
    asked.add_argument("--only", action="append", help="a version of pyspark, or of Python (may be repeated)")
    asked.add_argument("--job", action="append", choices=list(JOBS), help="these tests (may be repeated)")
    asked.add_argument("--write", action="store_true", help="put the table into docs/spark.md")
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
    rows = [row(cell, given.job or JOBS) for cell in found]
    text = table([line for line, _ in rows], missing, notes, datetime.date.today())
    print(text)
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{text}\n{END}{rest.partition(END)[2]}")
    return 0 if all(well for _, well in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
