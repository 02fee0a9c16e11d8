"""The matrix of versions: what it runs, and where.

The row of the pinned Spark and Delta is in ``make test``; ``make soak`` ends with all rows, because an environment is a
Spark of 450 MB. What Spark 4.1 asks of a source is there without one: ``tests/connector/test_unadmitted.py`` and the
model.
"""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import matrix
from tests.matrix import Cell, Java, Outcome, Python, Row, Spark

SPARKS = [Spark("1", "a"), Spark("2", "b")]
VERSIONS = [Python(name, Path(name)) for name in ("3.10", "3.11", "3.12")]
HOMES = [Java(name, Path(name)) for name in ("17", "25")]


def test_every_spark_meets_every_python_and_every_java() -> None:
    found = list(matrix.cells(SPARKS, VERSIONS, HOMES))
    assert {(cell.spark, cell.python) for cell in found} == {(s, p) for s in SPARKS for p in VERSIONS}
    assert {(cell.spark, cell.java) for cell in found} == {(s, j) for s in SPARKS for j in HOMES}
    assert len(found) == len(SPARKS) * len(VERSIONS)


def test_the_constraints_are_the_locked_versions_without_spark() -> None:
    lines = matrix.locked(matrix.ROOT / "requirements.lock")
    assert any(line.startswith("pyarrow==") for line in lines)
    assert not any(
        word in line for line in lines for word in ("--hash", "\\", "pyspark", "delta-spark", "py4j")
    )


def test_each_locked_version_meets_the_bounds_of_the_project() -> None:
    """And those that run untrusted bytes, or whose format is stored, have an upper one."""
    lock = (matrix.ROOT / "requirements.lock").read_text()
    written = re.findall(r'"([\w.-]+(?:\[\w+\])?[<>=][^"]*)"', (matrix.ROOT / "pyproject.toml").read_text())
    wanted = {each.name: each.specifier for each in map(Requirement, written)}
    locked = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    assert [pair for pair in locked if pair[0] in wanted and pair[1] not in wanted[pair[0]]] == []
    for name in ("pyarrow", "starlette", "uvicorn", "kafka-python", "pyspark", "delta-spark"):
        assert "<" in str(wanted[name]), name


def test_the_environment_of_the_demo_has_versions_of_that_of_the_tests() -> None:
    tests, demo = (
        set(matrix.locked(matrix.ROOT / name)) for name in ("requirements.lock", "requirements-demo.lock")
    )
    assert demo and demo <= tests


def test_an_outcome_counts_tests_and_names_those_that_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    why = '<skipped type="pytest.skip" message="no disk">t.py:1: no disk</skipped>'
    cases = ["", why, "<failure/>", "<error/>", why]
    text = "".join(f'<testcase name="t{number}">{inside}</testcase>' for number, inside in enumerate(cases))
    report.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    outcome = matrix.counted(report)
    assert outcome == Outcome(1, {"no disk": 2}, ("t2", "t3"))
    assert str(outcome) == "1 passed, 2 skipped, **2 failed**"


def test_a_row_says_what_was_run_and_fails_with_its_tests() -> None:
    cell = Cell(SPARKS[0], VERSIONS[0], HOMES[0])
    good = Row(cell, {"sink": Outcome(3, {}, ())})
    assert str(good) == "| 1 | a | 3.10 | 17 | - | 3 passed | - | - | - | - |"
    assert good.well and Row(cell, {}).well
    assert not Row(cell, {"sink": Outcome(3, {}, ()), "source": Outcome(0, {}, ("t",))}).well


def test_the_table_says_what_was_not_there_and_what_does_not_start() -> None:
    cell = Cell(SPARKS[0], VERSIONS[0], HOMES[0])
    notes, day = ["Spark 1 does not start on JDK 25 (x)."], datetime.date(2026, 1, 2)
    begin = (
        "Run on 2026-01-02 by `make matrix`. The crash table is whole with the first Python of a Spark, and one test of "
        "each row with the others. "
    )
    end = (
        "Not on that machine, and not run: Python 3.9. Spark 1 does not start on JDK 25 (x).\n\n"
        "| pyspark | delta-spark | Python | JDK | source |"
    )
    whole = Row(cell, {job: Outcome(1, {}, ()) for job in matrix.JOBS})
    assert matrix.table([whole], ["Python 3.9"], notes, day).startswith(begin + end)
    part = matrix.table([whole, Row(cell, {})], ["Python 3.9"], notes, day)
    assert part.startswith(f"{begin}-: not run. {end}")
    assert part.endswith(f"|\n{whole}\n{Row(cell, {})}\n"), "and nothing was skipped"


def test_under_the_table_stands_why_tests_were_skipped() -> None:
    old, new = (Cell(spark, VERSIONS[0], HOMES[0]) for spark in SPARKS)
    found = [
        Row(
            old, {"source": Outcome(9, {"needs Spark 2": 3}, ()), "crash table": Outcome(9, {"soak": 19}, ())}
        ),
        Row(
            new,
            {"source": Outcome(9, {"only on Spark 1": 4}, ()), "crash table": Outcome(9, {"soak": 1}, ())},
        ),
        Row(new, {"crash table": Outcome(9, {"soak": 19}, ())}),
    ]
    assert matrix.table(found, [], [], datetime.date(2026, 1, 2)).splitlines()[-1] == (
        "Skipped: under source 3 (needs Spark 2), 4 (only on Spark 1); under crash table 1 or 19 (soak)."
    )


# -- where it is run -----------------------------------------------------------------------------------------


def _commands(target: str) -> list[str]:
    """What ``make`` would run for a target whose environment is there."""
    asked = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/ready", target]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(asked, cwd=matrix.ROOT, env=own, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _collected(*words: str, before: str = "pass") -> set[str]:
    """Of a run of its own, which counts no process of this one as left behind. ``before``: statements before pytest."""
    program = f"import sys, pytest; {before}; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "-q", "--collect-only", *words]
    own = {name: value for name, value in os.environ.items() if name != "TXMQ_TEST_RUN"}
    told = subprocess.run(command, cwd=matrix.ROOT, env=own, capture_output=True, text=True)
    assert told.returncode == 0, (told.stdout + told.stderr)[-2000:]
    return {line for line in told.stdout.splitlines() if "::" in line}


def test_make_test_is_the_row_of_the_pinned_spark_and_delta() -> None:
    lock = (matrix.ROOT / "requirements.lock").read_text()
    pinned = dict(re.findall(r"^(pyspark|delta-spark)==(\S+)", lock, re.MULTILINE))
    assert Spark(pinned["pyspark"], pinned["delta-spark"]) in matrix.SPARKS


def test_make_test_leaves_none_of_the_files_of_the_matrix_out() -> None:
    (command,) = [line for line in _commands("test") if "-m pytest -q -n" in line]
    words = shlex.split(command)
    named = words[words.index("pytest") + 1 :]
    assert not {word.partition("=")[0] for word in named} & {
        *("-m", "-k", "--ignore", "--ignore-glob", "--deselect", "--lf", "--sw"),
    }, command
    assert not [word for word in named if word.startswith("tests")], command


@pytest.mark.slow
def test_each_name_of_the_matrix_has_tests_that_make_test_runs() -> None:
    """``make test`` leaves nothing out but what is only in ``make soak``."""
    named = [name for names in matrix.JOBS.values() for name in names]
    run = _collected("-m", "not soak", *named)
    assert [name for name in named if not any(test.startswith(name) for test in run)] == []


@pytest.mark.slow
def test_each_file_of_the_matrix_is_imported_where_spark_has_no_read_limits() -> None:
    """As on Spark 4.1, which has no ``pyspark.sql.streaming.datasource``: what a conftest imports counts too."""
    files = sorted({name for names in matrix.JOBS.values() for name in names})
    without = "import pyspark.sql.datasource; sys.modules['pyspark.sql.streaming.datasource'] = None"
    assert _collected(*files, before=without)


def test_make_soak_ends_with_the_matrix() -> None:
    assert _commands("soak")[-1] == ".venv/bin/python -m tests.matrix"


def test_a_cell_is_run_with_its_java_and_its_python(tmp_path: Path) -> None:
    cell = Cell(SPARKS[0], VERSIONS[0], Java("17", tmp_path))
    told = matrix.surroundings(cell, tmp_path / "bin" / "python")
    assert told["JAVA_HOME"] == str(tmp_path)
    assert told["PYSPARK_PYTHON"] == told["PYSPARK_DRIVER_PYTHON"] == str(tmp_path / "bin" / "python")
    assert told["PATH"].startswith(str(tmp_path / "bin"))


def test_outcomes_without_a_failure_are_kept_with_their_commit(tmp_path: Path) -> None:
    cell, file = Cell(SPARKS[0], VERSIONS[0], HOMES[0]), tmp_path / "outcomes.json"
    runs: list[str] = []

    def run(outcome: Outcome) -> Outcome:
        runs.append("run")
        return outcome

    good, bad = Outcome(3, {"no disk": 1}, ()), Outcome(3, {}, ("t",))
    assert matrix.Kept(file, "a").outcome(cell, "source", lambda: run(good)) == good
    assert matrix.Kept(file, "a").outcome(cell, "sink", lambda: run(bad)) == bad
    assert len(runs) == 2
    assert matrix.Kept(file, "a").outcome(cell, "source", lambda: run(bad)) == good
    assert len(runs) == 2, "an outcome that is kept was run again"
    assert matrix.Kept(file, "a").outcome(cell, "sink", lambda: run(good)) == good
    assert matrix.Kept(file, "b").outcome(cell, "source", lambda: run(bad)) == bad
    assert matrix.Kept(file, "").outcome(cell, "source", lambda: run(bad)) == bad
    assert len(runs) == 5


def test_the_other_pythons_run_one_test_of_each_row_of_the_crash_table() -> None:
    names = ["test_row_1_a", "test_row_1_b", "test_rows_11_and_12_c[x]", "test_row_12_d", "test_on_kafka_e"]
    lines = [*(f"tests/t.py::{name}" for name in names), "", "5 tests collected"]
    kept = matrix.one_of_each_row(lines)
    assert [line.partition("::")[2] for line in kept] == [names[0], names[2], names[3], names[4]]
    assert [cell.whole for cell in matrix.cells(SPARKS, VERSIONS, HOMES)] == [True, False, False] * 2


@pytest.mark.slow
def test_the_test_of_a_row_of_the_crash_table_is_one_that_runs() -> None:
    """Not one of ``make soak``, which is skipped: the row would have no test on this Python."""
    home = Java("", Path(os.environ.get("JAVA_HOME", "/")))
    cell = Cell(SPARKS[0], Python("", Path(sys.executable)), home, whole=False)
    chosen = matrix.tests_of(cell, matrix.CRASH_TABLE, Path(sys.executable))
    assert len(chosen) > 10
    assert {*chosen} <= _collected("-m", "not soak", *matrix.JOBS[matrix.CRASH_TABLE])
