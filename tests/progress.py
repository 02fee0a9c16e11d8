"""Waiting by progress: a test gives up when nothing moves any more, not when a clock says so.

What moves is the CPU time of this process and all that it has started. On a machine that is busy with
something else that takes longer, and is no reason to fail. Nor is a machine that was suspended: between two looks
at most ``_MOST_S`` count. ``GUARD_S`` is for waits within one process that end at once or never.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

GUARD_S = 600.0
STILL_S = 90.0  # so long without a move is the end
LIVELOCK_S = 900.0  # moving, but getting nowhere
_LOOK_S = 5.0
_MOST_S = 2 * _LOOK_S
_MOVE = 0.02  # of one core, over a look: an idle JVM takes less


class Meter:
    """``check`` fails the test once nothing has moved for ``STILL_S``."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._cpu_s = _cpu_s()
        self._waited_s = self._still_s = 0.0

    def check(self, what: str) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        cpu_s, passed_s = _cpu_s(), min(now - self._looked, _MOST_S)
        moved = cpu_s - self._cpu_s > _MOVE * passed_s or cpu_s < self._cpu_s  # or something ended
        self._still_s = 0.0 if moved else self._still_s + passed_s
        self._waited_s += passed_s
        self._looked, self._cpu_s = now, cpu_s
        assert self._still_s < STILL_S, f"nothing has moved for {STILL_S} s, and not yet: {what}"
        assert self._waited_s < LIVELOCK_S, f"not within {LIVELOCK_S} s: {what}"


def wait_until(
    condition: Callable[[], Any], what: str = "the condition came true", *, poll_s: float = 0.02
) -> Any:
    """What the condition gives, once that is true."""
    meter = Meter()
    while not (found := condition()):
        meter.check(what)
        time.sleep(poll_s)
    return found


def wait_for_end(process: subprocess.Popen[Any], what: str) -> int:
    """The exit code of a child."""
    wait_until(lambda: process.poll() is not None, what)
    return int(process.returncode)


def run_to_end(command: Sequence[str], folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with its output captured; what it prints goes to files beside ``folder``, so that
    no pipe fills.
    """
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, text=True, **more)
        try:
            code = wait_for_end(process, f"{command[:4]} ends")
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def _cpu_s() -> float:
    """Seconds that this process, its descendants and those that have ended have computed."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
        if process is own:
            total += times.children_user + times.children_system
    return total
