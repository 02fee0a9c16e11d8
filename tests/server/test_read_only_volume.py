"""A volume that comes back read-only: nothing opens, every error says why, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.progress import run_to_end

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def _may_mount() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _may_mount(), reason="this user may not make a mount namespace")
def test_a_data_directory_on_a_volume_that_comes_back_read_only_is_refused_and_is_whole_afterwards(
    tmp_path: Path,
) -> None:
    (tmp_path / "volume").mkdir()
    command = [*NAMESPACE, sys.executable, "-m", "tests.server.read_only_volume", str(tmp_path / "volume")]
    done = run_to_end(command, tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["errors"]) == 3
    for error in told["errors"]:
        assert error.startswith("[TXMQ_DATA_DIRECTORY_INVALID]") and "Read-only file system" in error, error
    assert told["untouched"] and told["body"] == "kept"
