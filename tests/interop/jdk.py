"""Java programs of the tests: their jars and their classes.

Skips where there is no JDK 17 or later, and where the jars are neither cached nor to be had.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from bench.jars import resolve

RELEASE = "17"


def class_path(coordinates: Sequence[str], excludes: str = "") -> str:
    """The jars of ``coordinates`` and of what these need, but ``excludes``."""
    if not shutil.which("java") or not shutil.which("javac"):
        pytest.skip(f"there is no JDK on this machine (java and javac): install version {RELEASE} or later")
    try:
        return os.pathsep.join(resolve(coordinates, excludes))
    except SystemExit as error:
        if not str(error).startswith("cannot resolve"):
            raise  # a jar that is not the one that is pinned
        pytest.skip(f"the jars are neither cached nor to be had from Maven Central: {error}")


def compiled(sources: Iterable[Path], jars: str, folder: Path) -> str:
    """The class path of programs that are compiled into ``folder``, which exists."""
    command = ["javac", "--release", RELEASE, "-d", str(folder), "-cp", jars, *sorted(map(str, sources))]
    done = subprocess.run(command, capture_output=True, text=True)
    if f"release version {RELEASE} not supported" in done.stderr:
        pytest.skip(f"the JDK of this machine is older than {RELEASE}")
    assert done.returncode == 0, done.stderr
    return f"{jars}{os.pathsep}{folder}"
