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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import SparkSession

AT_ONCE = 8  # requests to a remote file system


class TableFiles(Protocol):
    def sync(self, paths: Iterable[str]) -> None:
        """Makes files and the directories that name them durable. Raises OSError."""

    def copy(self, pairs: Mapping[str, str]) -> None:
        """Gives files (from -> to) a second name, or copies them. Raises FileNotFoundError, OSError."""

    def missing(self, paths: Iterable[str]) -> list[str]:
        """Returns the files that do not exist, in order."""

    def children(self, path: str) -> list[str]:
        """Returns the names in a directory; none if there is no directory."""

    def write(self, path: str, text: str) -> None:
        """Writes a small file, with its directories."""

    def delete(self, path: str) -> None:
        """Deletes a directory with all that it holds, if it exists."""


def table_files(spark: SparkSession, location: str) -> TableFiles:
    """Returns the files of the table at ``location``; not on Connect."""
    if location.startswith("file:"):
        return Local(Path(location.removeprefix("file:")))
    return Remote(spark, location)


class Local:
    """A table on a disk of this machine. A copy is a hard link where the disk has them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def sync(self, paths: Iterable[str]) -> None:
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
        for source, target in pairs.items():
            have, want = self._root / source, self._root / target
            want.parent.mkdir(parents=True, exist_ok=True)
            _link(have, want)
            # what Hadoop verifies when it reads a local file
            with contextlib.suppress(FileNotFoundError):
                _link(_checksum(have), _checksum(want))

    def missing(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if not (self._root / path).exists()]

    def children(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write(self, path: str, text: str) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def delete(self, path: str) -> None:
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
        part = source.with_name(f"{source.name}.{uuid.uuid4().hex}")
        shutil.copyfile(source, part)
        _fsync(part)
        part.replace(target)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Remote:
    """A table on another file system of Hadoop, which makes a file durable when it closes it."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        jvm: Any = spark._jvm
        self._hadoop = jvm.org.apache.hadoop.fs
        self._configuration = spark._jsparkSession.sessionState().newHadoopConf()
        self._root = self._hadoop.Path(location)
        self._system = self._root.getFileSystem(self._configuration)

    def sync(self, paths: Iterable[str]) -> None:
        pass

    def copy(self, pairs: Mapping[str, str]) -> None:
        def one(pair: tuple[str, str]) -> None:
            have, want = map(self._path, pair)
            if self._system.exists(want):
                return
            if not self._system.exists(have):
                raise FileNotFoundError(pair[0])
            part = have.suffix(f".{uuid.uuid4().hex}")
            self._hadoop.FileUtil.copy(
                self._system, have, self._system, part, False, True, self._configuration
            )
            self._system.mkdirs(want.getParent())
            if not self._system.rename(part, want) and not self._system.exists(want):
                raise OSError(f"{pair[0]} was copied, and could not be named {pair[1]}")

        _each(one, pairs.items())

    def missing(self, paths: Iterable[str]) -> list[str]:
        wanted = list(paths)
        found = _each(lambda path: bool(self._system.exists(self._path(path))), wanted)
        return [path for path, there in zip(wanted, found, strict=True) if not there]

    def children(self, path: str) -> list[str]:
        if not self._system.exists(self._path(path)):
            return []
        return sorted(str(status.getPath().getName()) for status in self._system.listStatus(self._path(path)))

    def write(self, path: str, text: str) -> None:
        stream = self._system.create(self._path(path), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def delete(self, path: str) -> None:
        self._system.delete(self._path(path), True)

    def _path(self, path: str) -> Any:
        return self._hadoop.Path(self._root, path)


def _each(work: Callable[[Any], Any], items: Iterable[Any]) -> Sequence[Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(work, items))
