"""What SQLite asks of the operating system is refused: each call once with each error, and all for two seconds.

Not here: the calls of the broker's own code (``tests/server/test_files_run_out.py``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import native_calls

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux",
    reason="no C compiler, or not Linux: the system calls of SQLite are not refused",
)
def test_nothing_that_was_committed_is_lost_when_system_calls_of_sqlite_fail(tmp_path: Path) -> None:
    assert COMPILER is not None
    library, control = tmp_path / "refused.so", tmp_path / "control"
    source = ROOT / "tests" / "native_calls.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    control.write_bytes(bytes(native_calls.SIZE))
    command = [sys.executable, "-m", "tests.native_calls", str(tmp_path / "data"), str(control)]
    loaded = {**os.environ, "LD_PRELOAD": str(library), "TXMQ_REFUSED": str(control)}
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=loaded, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    answer = json.loads(found.stdout)
    refused = answer["refused"]
    numbers = set(map(native_calls.name_of, native_calls.ERRORS))
    for call in ("open open", "write small", "write large", "sync small", "sync large", "all"):
        assert set(refused[call]) == numbers, (call, refused)
    assert "EIO" in refused["read loading"], refused
    assert any(call.startswith("read") for call in refused), refused
    for reason in answer["reasons"]:
        assert reason.startswith("[TXMQ_") and "\n" not in reason, reason
        assert "CORRUPT" not in reason or "start the broker once more first" in reason, reason
        assert str(tmp_path) in reason or "the broker" in reason, reason
