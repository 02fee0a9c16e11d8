"""A file system of its own that an error turns read-only under open files, as ext4 does with ``errors=remount-ro``, and
that is checked and mounted again.

Not here: a remount, which the kernel refuses while a file is open for writing (``tests/server/read_only_volume.py``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.progress import wait_until

_TOOLS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_SIZE_BYTES = 256 << 20  # of a file with holes; more than the alarm for a disk asks for


class FailingVolume:
    """Mounted at ``path`` and empty."""

    def __init__(self, folder: Path) -> None:
        self._image, self.path = folder / "volume.image", folder / "volume"
        self.path.mkdir()
        make = shutil.which("mkfs.ext4", path=_TOOLS)
        if make is None or os.geteuid() != 0:
            pytest.skip("only root may mount a volume that fails, and it needs mkfs.ext4")
        with self._image.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        subprocess.run([make, "-q", "-F", self._image], check=True)
        if self._mount():
            pytest.skip("no loop device can be mounted here, so no volume can fail")

    def _mount(self) -> int:
        command = ["mount", "-o", "loop,errors=remount-ro", self._image, self.path]
        return subprocess.run(command, capture_output=True).returncode

    def turn_read_only(self) -> None:
        """As after an error: each write fails, also to files that are open."""
        subprocess.run(["mount", "-o", "remount,abort", self.path], check=True)

    def repair(self) -> None:
        """As an operator does, once no file is open."""
        unmount = ["umount", self.path]
        wait_until(lambda: subprocess.run(unmount, capture_output=True).returncode == 0, "no file is open")
        check = shutil.which("e2fsck", path=_TOOLS)
        assert check is not None
        assert subprocess.run([check, "-p", self._image], capture_output=True).returncode in (0, 1)
        assert self._mount() == 0

    def end(self) -> None:
        subprocess.run(["umount", "--lazy", self.path], check=False)
        self._image.unlink()


@contextlib.contextmanager
def failing_volume(folder: Path) -> Iterator[FailingVolume]:
    volume = FailingVolume(folder)
    try:
        yield volume
    finally:
        volume.end()
