"""The first stream of the README is examples/first_stream.py, and prints what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import txmq
from tests.amqp_server import serving
from tests.forked import spark_forks
from tests.interop.test_clients_page import here, run_block
from tests.jvm import with_settings
from tests.page_blocks import code
from tests.spark.jobs import QUICK

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "first_stream.py"
# Spark ends a worker that had nothing to do for a minute by closing its socket, and the worker answers to it.
IDLE_WORKER = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"  File \S*/pyspark/daemon\.py\", line \d+, in manager\n(?: {4}.*\n)*"
    r"  File \S*/pyspark/daemon\.py\", line \d+, in worker\n(?: {4}.*\n)*"
    r"BrokenPipeError: .*\n"
)


@pytest.mark.spark
@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_first_stream_prints_what_the_readme_says_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", with_settings(QUICK))
    shown = re.search(
        r"```python\n(def book.*?)```\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert shown is not None and shown[1] in EXAMPLE.read_text()
    assert _run(tmp_path).endswith(shown[2])
    if goes_on:
        assert _run(tmp_path).endswith(
            "table:  [5, 40, 700, 5, 40, 700]\n"
            """large:  ['{"amount": 700}', '{"amount": 700}']\n"""
            "broken: ['not a payment', 'not a payment']\n"
        )
    log = IDLE_WORKER.sub("", (tmp_path / "first-stream" / "spark.log").read_text())
    assert "deprecated" not in log and "Traceback" not in log
    with txmq.Broker.open(tmp_path / "first-stream" / "data"):  # ends the one that the script has started
        pass
    with serving(tmp_path / "data") as broker:  # the next block, in the same directory
        assert run_block(here(code("README.md", "import pika"), broker), tmp_path) == "1 in answers\n"


def _run(folder: Path) -> str:
    """What the script prints; it writes nothing to standard error."""
    shell = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    with spark_forks():
        done = subprocess.run(
            [sys.executable, EXAMPLE], cwd=folder, env=shell, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return done.stdout
