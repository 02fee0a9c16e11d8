"""The first stream of the README, as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import txmq
from tests.forked import spark_forks
from tests.jvm import with_settings
from tests.spark.jobs import QUICK

ROOT = Path(__file__).parents[2]


def script() -> str:
    section = (ROOT / "README.md").read_text().partition("## A first stream")[2].partition("\n## ")[0]
    return section.partition("```python\n")[2].partition("```")[0]


@pytest.mark.spark
def test_the_first_stream_runs_as_it_stands_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", with_settings(QUICK))
    (tmp_path / "first.py").write_text(script())
    for run in (1, 2):
        with spark_forks():
            done = subprocess.run(
                [sys.executable, "first.py"], cwd=tmp_path, env=_environment(), capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "deprecated" not in done.stderr, "Spark warns a newcomer of what txmq does"
        assert [done.stdout.count(f'{{"amount": {amount}}}') for amount in (40, 700)] == [0, run]
        assert done.stdout.count("not an order") == run
        rows = [line for line in done.stdout.splitlines() if line.endswith((" 5|", " 40|", "700|"))]
        assert len(rows) == 3 * run, done.stdout
    with txmq.Broker.open(tmp_path / "data"):  # ends the one that the script has started
        pass


def _environment() -> dict[str, str]:
    """Of a shell: what the test session has set for Spark is not in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
