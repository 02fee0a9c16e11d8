"""The matrix of versions: what it runs, and, in ``make soak``, each of its rows.

No row is in ``make test``: an environment is a Spark of 450 MB, which takes minutes to install. What Spark 4.1 asks of
a source is there without one: ``tests/connector/test_unadmitted.py`` and the model.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import Cell, Java, Outcome, Python, Spark

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


def test_an_outcome_counts_tests_and_names_those_that_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = ["", "<skipped/>", "<failure/>", "<error/>"]
    text = "".join(f'<testcase name="t{number}">{inside}</testcase>' for number, inside in enumerate(cases))
    report.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    outcome = matrix.counted(report)
    assert outcome == Outcome(1, 1, ("t2", "t3"))
    assert str(outcome) == "1 passed, 1 skipped, **2 failed**"


def test_the_table_says_what_was_not_there_and_what_does_not_start() -> None:
    text = matrix.table(
        ["| a |"], ["Python 3.9"], ["Spark 1 does not start on JDK 25 (x)."], datetime.date(2026, 1, 2)
    )
    assert text.startswith(
        "Run on 2026-01-02 by `make matrix`. Not on that machine, and not run: Python 3.9. "
        "Spark 1 does not start on JDK 25 (x).\n\n| pyspark | delta-spark | Python | JDK | source |"
    )


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("spark", matrix.SPARKS, ids=lambda spark: spark.spark)
def test_everything_holds_on_each_spark_with_each_python_and_java(spark: Spark) -> None:
    homes = matrix.javas()
    found, _ = matrix.planned([spark], matrix.pythons(), [homes[0], *homes[1:][-1:]])
    assert found
    assert [line for line, well in map(matrix.row, found) if not well] == []


def test_a_cell_is_run_with_its_java_and_its_python(tmp_path: Path) -> None:
    cell = Cell(SPARKS[0], VERSIONS[0], Java("17", tmp_path))
    told = matrix.surroundings(cell, tmp_path / "bin" / "python")
    assert told["JAVA_HOME"] == str(tmp_path)
    assert told["PYSPARK_PYTHON"] == told["PYSPARK_DRIVER_PYTHON"] == str(tmp_path / "bin" / "python")
    assert told["PATH"].startswith(str(tmp_path / "bin"))
