"""Signals that come at any moment of the main thread: each is taken, and none makes it wait for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.progress import run_to_end

# another process sends the next signal as soon as it sees that the one before was taken
SENDER = """
import os, signal, sys
while True:
    line = sys.stdin.readline()
    if not line:
        break
    os.kill(int(sys.argv[1]), signal.SIGTERM)
"""
TAKER = f"""
import os, signal, subprocess, sys
from broker_core.server.threads import Signals
signals = Signals(signal.SIGTERM, signal.SIGHUP)
sender = subprocess.Popen([sys.executable, "-c", {SENDER!r}, str(os.getpid())], stdin=subprocess.PIPE, text=True)
for number in range(3_000):
    print(file=sender.stdin, flush=True)
    while (arrived := signals.wait(0.000001)) is None:
        pass
    assert arrived == signal.SIGTERM
sender.stdin.close()
sender.wait()
os.kill(os.getpid(), signal.SIGHUP)
assert signals.wait(600) == signal.SIGHUP and signals.wait(0) is None
print("taken")
"""


@pytest.mark.slow
def test_signals_at_any_moment_of_a_wait_are_taken_one_by_one(tmp_path: Path) -> None:
    done = run_to_end([sys.executable, "-c", TAKER], tmp_path)
    assert (done.returncode, done.stdout) == (0, "taken\n"), done.stderr
