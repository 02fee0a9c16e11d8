"""The data directory as a whole: its files, its owner, and whether a path may be one.

    DIR/lock          flock of the owner; its pid and host, for the message
    DIR/catalog.db    SQLite, with catalog.db-wal while it is open
    DIR/segments/     NNNNNNNN.arrow; made after the catalog, so if there is no catalog, it was lost
    DIR/sums/         NNNNNNNN, for each segment of messages: checksums of a few rows each, for salvage
    DIR/broker.log, DIR/endpoint.json   of the launcher, not used here

Invariant: nothing in the directory is changed before the lock is held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path

from broker_core.core.endpoint import UNFINISHED, why_foreign
from broker_core.core.errors import DataDirectoryInvalid, DataDirectoryLocked

logger = logging.getLogger("txmq.store")

OURS_ALONE = 0o700
_OURS = ("lock", "catalog.db", "segments", "sums", "broker.", "endpoint.", UNFINISHED)


def segment_path(directory: Path, number: int) -> Path:
    return directory / "segments" / f"{number:08d}.arrow"


def prepare(path: Path) -> None:
    """Creates ``path`` if it is missing. Raises DataDirectoryInvalid, as :func:`check` does, and for one of
    another user.
    """
    if why := why_foreign(path):
        raise DataDirectoryInvalid(why)
    try:
        if not path.exists():
            path.mkdir(mode=OURS_ALONE, parents=True, exist_ok=True)
    except OSError as error:
        raise DataDirectoryInvalid(f"{path} cannot be used as a data directory: {error.strerror}") from error
    check(path)


def close_to_others(path: Path) -> None:
    """Takes the rights of other users from a directory, which a volume or a copy gives them.

    It only warns if the directory belongs to another user.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(mode & ~0o077)
    except OSError as error:
        logger.warning("other users of this machine may read the directory %s: %s", path, error.strerror)


def check(path: Path, *, foreign: bool = True) -> None:
    """Raises DataDirectoryInvalid for a file, for an unusable directory, and if ``foreign``, for a directory
    with other files than a data directory has.
    """
    try:
        if not path.is_dir():
            raise DataDirectoryInvalid(f"{path} is a file, not a data directory; name another path")
        names = sorted(entry.name for entry in path.iterdir())
        usable = os.access(path, os.R_OK | os.W_OK | os.X_OK)
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError as error:
        raise DataDirectoryInvalid(f"{path} cannot be used as a data directory: {error.strerror}") from error
    if not usable:
        why = os.strerror(errno.EROFS) if read_only else "no permission to write"
        raise DataDirectoryInvalid(f"{path} cannot be used as a data directory: {why}")
    others = [name for name in names if not name.startswith(_OURS)]
    if foreign and others and not {"catalog.db", "segments"} & set(names):
        raise DataDirectoryInvalid(
            f"{path} is not empty and not a data directory: it has {', '.join(others[:3])}; name an empty or "
            "a new directory"
        )


class DirectoryLock:
    """Held until ``release``; the operating system releases it when the process ends."""

    def __init__(self, path: Path, *, write: bool = True) -> None:
        """``write`` False: the lock file is not changed. Raises DataDirectoryLocked, DataDirectoryInvalid,
        also for a copy that was not finished.
        """
        if (path / UNFINISHED).exists():
            raise DataDirectoryInvalid(
                f"{path} is a backup that was not finished, and lacks data: delete it, and make it again"
            )
        name = path / "lock"
        try:
            self._descriptor = os.open(
                name, os.O_NOFOLLOW | (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY), 0o600
            )
        except OSError as error:
            raise DataDirectoryInvalid(
                f"{path} cannot be used as a data directory: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._descriptor, 256, 0).decode(errors="replace").split()
            os.close(self._descriptor)
            pid, host = (*owner, "unknown", "unknown")[:2]
            raise DataDirectoryLocked(
                f"the data directory {path} is in use by process {pid} on host {host}; "
                + ("connect to that broker, or end it first" if write else "end it first")
            ) from error
        if write:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            close_to_others(path)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
