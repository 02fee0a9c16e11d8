"""The output of ``python -m bench``. Not here: the figures, which ``make bench`` measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("notes_too", [False, True])
def test_it_ends_without_an_error_with_the_reader_of_its_output(notes_too: bool) -> None:
    command = [sys.executable, "-m", "bench", "--only", "import_ms"]
    errors = subprocess.STDOUT if notes_too else subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as bench:
        assert bench.stdout is not None
        bench.stdout.close()  # as `head` does
        told = bench.stderr.read() if bench.stderr is not None else ""
    assert bench.returncode == 0, told
    assert "Error" not in told, told
