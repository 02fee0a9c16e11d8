"""The files of a table's directory, beside Delta: durable, copied, missing, deleted.

``<table>/_txmq/<app>/<sequence>.<token>/<number>/`` holds the files of one append that Delta has written for
an attempt and not committed, in the layout of the table. Its name begins with ``_``, so neither VACUUM nor a
reader of the table looks into it.

Not here: what the files hold (``staged_files.py``), when they reach the table (``after/add_files.py``).
Invariants: what may still be decided or added is never deleted. An attempt whose sequence is decided can only
be decided if it is the one that was: each (query, batch) is decided once, and gets the next sequence. Every
path is relative to the directory of the table. Each operation may be repeated. A copy has
its name only when it is whole: another driver may have committed that name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from broker_core.core.files import readable, sync
from broker_core.engine import LedgerEntry
from connector.tables.table_format import Attempt

DISK = "file:"
HIDDEN = "_txmq"
_SYNCS = 8  # at the same time
_KEPT = 1000
Stamp = tuple[int, ...]  # what os.stat says: device, inode, and more of a file
_lock = threading.Lock()
_durable: dict[Path, Stamp] = {}  # directories whose entry is durable, up to the root


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

    def make(self, path: str) -> None:
        """Makes a directory, and those above it. Raises OSError."""
        folder = self._root
        for name in path.split("/"):
            folder /= name
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                with _lock:  # it may have the place and the number of one that was deleted
                    _durable.pop(folder, None)

    def sync(self, paths: Iterable[str]) -> None:
        """Makes files and the directories that name them durable, in any order. Raises OSError.

        A directory whose name this process has made durable is not synced again.
        """
        files = [self._root / path for path in paths]
        found: dict[Path, Stamp] = {}
        for file in files:
            folder = file.parent
            while folder not in found:
                found[folder] = _stamp(folder.stat())[:2]
                if folder == self._root or _durable.get(folder) == found[folder]:
                    break
                folder = folder.parent
        places = [*files, *found]
        if not places:
            return
        with ThreadPoolExecutor(min(len(places), _SYNCS)) as pool:  # one flush of the disk serves several
            for _ in pool.map(sync, places):
                pass
        with _lock:
            for folder, names in found.items():
                _durable.pop(folder, None)  # the one used last is the last one
                _durable[folder] = names
            while len(_durable) > _KEPT:
                del _durable[next(iter(_durable))]

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

    def copy_missing(self, pairs: Mapping[str, str]) -> list[str]:
        """Copies the files (from -> to) that lack the second name; returns that of those which lack both."""
        sources = {to: source for source, to in pairs.items()}
        lost = {to: sources[to] for to in self.missing(sources)}
        gone = set(self.missing(lost.values())) if lost else set()
        self.copy({source: to for to, source in lost.items() if source not in gone})
        return [to for to, source in lost.items() if source in gone]

    def missing(self, paths: Iterable[str]) -> list[str]:
        """Returns the files that do not exist, in order."""
        return [path for path in paths if not (self._root / path).exists()]

    def read(self, path: str) -> tuple[str, Stamp]:
        """Returns the text of a file, and its stamp. Raises FileNotFoundError, OSError."""
        with open(self._root / path, encoding="utf-8") as file:
            return file.read(), _stamp(os.fstat(file.fileno()))

    def stamp(self, path: str) -> Stamp | None:
        """Returns the identity of a file, which another file of its name does not have; None if it is
        missing.
        """
        try:
            return _stamp((self._root / path).stat())
        except (FileNotFoundError, NotADirectoryError):
            return None

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


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _checksum(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if not target.exists():  # a RESTORE has left it in the table
            raise
    except OSError:  # a file system without links
        part = _part(source)
        shutil.copyfile(source, part)
        sync(part)
        part.replace(target)


def _part(path: Path) -> Path:
    """Where a file is while it is written. No reader of a table takes a name that begins with a dot."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


# -- the hidden directory ------------------------------------------------------------------------------------


def hidden_directory(attempt: Attempt) -> str:
    """Returns the directory of an attempt. ``txn_app_id`` contains the id of the engine's data and the table:
    other data count their batches anew.
    """
    return f"{_app_directory(attempt)}/{attempt.sequence}.{attempt.token}"


def sweep(location: str, attempt: Attempt, unapplied: Callable[[], list[LedgerEntry]]) -> None:
    """Deletes the attempts of the same app that can be neither decided nor added any more.

    ``attempt`` is decided. ``unapplied`` is asked after that, so that no decision is missed.
    """
    files, ours = TableFiles.at(location), _app_directory(attempt)
    numbers = {name: name.partition(".")[0] for name in files.children(ours)}
    old = [name for name, of in numbers.items() if of.isdigit() and 0 < int(of) <= attempt.sequence]
    live = {f"{entry.sequence}.{entry.token}" for entry in unapplied()} if old else set()
    for name in old:
        if name not in live:
            files.delete(f"{ours}/{name}")


def _app_directory(attempt: Attempt) -> str:
    name = hashlib.sha256(attempt.txn_app_id.encode()).hexdigest()[:16]
    return f"{HIDDEN}/{readable(attempt.app_id)[:60]}-{name}"
