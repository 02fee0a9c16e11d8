"""Exceptions of SQLite and the operating system, as errors of the store with advice.

Invariant: nothing here retries or hides; the caller attaches the cause when it raises.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from broker_core.arrow.part_file import FULL, ROOM
from broker_core.core.errors import (
    CorruptCatalog,
    DataDirectoryLocked,
    DiskFull,
    ResourceShortage,
    StoreError,
    StoreFailed,
    one_line,
)

# they pass: the same call succeeds when others have closed files or freed memory, or an operator allows it
PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EINTR}


def corrupt_catalog(path: Path, what: object) -> CorruptCatalog:
    """Returns the error; ``path`` is the catalog file."""
    return CorruptCatalog(
        f"the catalog {path} is damaged: {what}. Restore the whole data directory from a backup; without one,"
        f" `txmq broker salvage {path.parent} --to NEWDIR` makes a data directory of what can be read, "
        "and names what is lost"
    )


def _mount_point(path: Path) -> Path:
    path = path.absolute()
    while not os.path.ismount(path) and path != path.parent:
        path = path.parent
    return path


def disk_full(path: Path, what: object, remedy: str = ROOM) -> DiskFull:
    try:
        state = os.statvfs(path)
        free = f"{state.f_bavail * state.f_frsize} bytes free"
    except OSError:
        free = "free space unknown"
    return DiskFull(
        f"no space to write to {path}, file system {_mount_point(path)}, {free}: {remedy}, then start the "
        "broker again. Nothing of this commit was acknowledged, and all that was acknowledged before is safe "
        f"({what})"
    )


def _is_full(directory: Path) -> bool:
    """Returns whether the disk is full, because SQLite reports some such writes as a plain I/O error."""
    try:
        state = os.statvfs(directory)
    except OSError:
        return False
    return state.f_bavail * state.f_frsize < 1 << 16


def _read_only(directory: Path) -> StoreFailed:
    return StoreFailed(
        f"the volume of the data directory {directory} is read-only: make the file system "
        f"{_mount_point(directory)} writable (after an error it has to be unmounted and checked), then start "
        "the broker again. Nothing of this commit was acknowledged, and all acknowledged before is safe"
    )


def _is_read_only(directory: Path) -> bool:
    """Returns whether the volume refuses every write, which SQLite reports as a plain I/O error. The flags of
    a file system that an error has made read-only may not say so.
    """
    try:
        os.close(os.open(directory / "lock", os.O_WRONLY))
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def _of_sqlite(error: sqlite3.Error, catalog: Path) -> StoreError:
    text = str(error)
    if "is full" in text:
        return disk_full(catalog, text)
    if "I/O error" in text or "unable to open" in text or "readonly" in text:
        if _is_read_only(catalog.parent):
            return _read_only(catalog.parent)
        if _is_full(catalog.parent):
            return disk_full(catalog, text)
        return StoreFailed(
            f"the catalog {catalog} cannot be written or read: {text}; check the disk, then "
            "start the broker again"
        )
    if "locked" in text:
        return DataDirectoryLocked(
            f"another program holds the catalog {catalog} open; close it, then start the broker again"
        )
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(
        error, (sqlite3.InterfaceError, sqlite3.ProgrammingError)
    ):
        failed = unreadable(catalog)
        if failed is not None:
            return StoreFailed(
                f"the catalog {catalog} cannot be read: {failed.strerror}; check the disk, then start "
                "the broker again"
            )
        once = "SQLite says so too if the disk has failed to give it once: start the broker once more first"
        return corrupt_catalog(catalog, f"{text} ({once})")
    return StoreFailed(f"the catalog {catalog} refused a write: {text}; start the broker again")


def unreadable(catalog: Path) -> OSError | None:
    """Returns why the files of the catalog cannot be read, which SQLite calls malformed."""
    for path in (catalog, catalog.with_name(catalog.name + "-wal")):
        try:
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass
        except FileNotFoundError:
            continue
        except OSError as error:
            return error
    return None


@contextlib.contextmanager
def passing(path: Path) -> Iterator[None]:
    """Raises ResourceShortage for an error that passes, out of a step that leaves nothing behind."""
    try:
        yield
    except MemoryError as error:
        raise _shortage(path, "no memory") from error
    except OSError as error:
        if error.errno in PASSING:
            raise _shortage(path, str(error.strerror)) from error
        raise


def _shortage(path: Path, why: str) -> ResourceShortage:
    return ResourceShortage(
        f"{path} cannot be used now ({why}), and nothing was done",
        "try again; the broker continues when there are files and memory again",
    )


@contextlib.contextmanager
def full_disk_named(directory: str) -> Iterator[None]:
    """Raises DiskFull for an error of the operating system that means so; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise store_error(error, Path(directory)) from error
        raise


def unread_catalog(error: Exception, directory: Path) -> StoreError:
    """Converts ``error``, raised by reading the records of a catalog."""
    is_of_sqlite = isinstance(error, sqlite3.Error)
    return store_error(error, directory) if is_of_sqlite else corrupt_catalog(directory / "catalog.db", error)


def store_error(error: BaseException, directory: Path) -> StoreError:
    """Converts ``error``, raised by reading or writing the data directory, to a StoreError."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, sqlite3.Error):
        return _of_sqlite(error, directory / "catalog.db")
    if isinstance(error, OSError) and error.errno in FULL:
        path = Path(error.filename) if isinstance(error.filename, str) else directory
        return disk_full(path, error.strerror, FULL[error.errno])
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return _read_only(directory)
    text = one_line(error) or type(error).__name__
    return StoreFailed(
        f"a write to the data directory {directory} failed: {text}; the broker takes no more "
        "work until it is started again"
    )
