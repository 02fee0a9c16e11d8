"""The table at the end of a long run."""

from __future__ import annotations

from typing import Literal

import pytest

from tests import durations


def report(
    place: str, seconds: float, *markers: str, when: Literal["setup", "call", "teardown"] = "call"
) -> pytest.TestReport:
    return pytest.TestReport(
        f"{place}::test_it", (place, 0, ""), dict.fromkeys(markers, 1), "passed", None, when, duration=seconds
    )


def test_a_long_run_tells_the_seconds_of_each_kind_and_the_files_that_are_too_long() -> None:
    reports = [
        report("tests/spark/test_a.py", 70, "spark", "crash"),
        report("tests/spark/test_a.py", 70, "spark", when="setup"),
        report("tests/kafka/test_b.py", 30),
        report("tests/crash/test_c.py", 10, "crash"),
        report("tests/interop/test_d.py", 15),
        report("tests/broker/test_e.py", 5),
    ]
    *table, long = durations.lines(reports)
    assert [line.split() for line in table] == [
        ["Spark", "1", "tests", "140", "s", "70%"],
        ["Kafka", "1", "tests", "30", "s", "15%"],
        ["crash", "1", "tests", "10", "s", "5%"],
        ["interop", "1", "tests", "15", "s", "8%"],
        ["rest", "1", "tests", "5", "s", "2%"],
    ]
    assert long.startswith("140 s in tests/spark/test_a.py: ")
    assert list(durations.lines(reports[2:])) == [], "a run of seconds has no table"
