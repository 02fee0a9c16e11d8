"""The files of a table's directory, beside Delta: durable, copied, missing, deleted.

Not here: which files and when (``hidden.py``).
Invariant: every path is relative to the directory of the table. Each operation may be repeated. A copy has
its name only when it is whole: another driver may have committed that name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

DISK = "file:"


class TableFiles:
    """The files in the directory of a table on a disk that this process sees."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def at(cls, location: str) -> TableFiles:
        """``location``: of a table, ``file:/...``."""
        return cls(Path(location.removeprefix(DISK)))

    def path(self, path: str) -> Path:
        """Returns the place of a file in the file system."""
        return self._root / path

    def sync(self, paths: Iterable[str]) -> None:
        """Makes files and the directories that name them durable. Raises OSError."""
        folders: dict[Path, None] = {}
        for path in paths:
            _fsync(self._root / path)
            folder = (self._root / path).parent
            while folder != self._root.parent and folder not in folders:
                folders[folder] = None
                folder = folder.parent
        for folder in folders:
            _fsync(folder)

    def copy(self, pairs: Mapping[str, str]) -> None:
        """Gives files (from -> to) a second name, or copies them where the disk has no hard links. Raises
        FileNotFoundError, OSError.
        """
        for source, target in pairs.items():
            have, want = self._root / source, self._root / target
            want.parent.mkdir(parents=True, exist_ok=True)
            _link(have, want)
            # what Hadoop verifies when it reads a local file
            with contextlib.suppress(FileNotFoundError):
                _link(_checksum(have), _checksum(want))

    def missing(self, paths: Iterable[str]) -> list[str]:
        """Returns the files that do not exist, in order."""
        return [path for path in paths if not (self._root / path).exists()]

    def children(self, path: str) -> list[str]:
        """Returns the names in a directory; none if there is no directory."""
        try:
            return sorted(os.listdir(self._root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write(self, path: str, text: str) -> None:
        """Writes a small file, with its directories; it has its name only when it is whole."""
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = _part(target)
        part.write_text(text)
        part.replace(target)

    def delete(self, path: str) -> None:
        """Deletes a directory with all that it holds, if it exists."""
        # two drivers may delete one directory at the same time
        shutil.rmtree(self._root / path, ignore_errors=True)


def _checksum(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        part = _part(source)
        shutil.copyfile(source, part)
        _fsync(part)
        part.replace(target)


def _part(path: Path) -> Path:
    """Where a file is while it is written. No reader of a table takes a name that begins with a dot."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
