"""A copy of a data directory, while its broker goes on: receives the files of one moment.

1. The first piece: a backup that is refused makes nothing. 2. The directory, with the file UNFINISHED in it,
which no broker opens. 3. Each file, synced. 4. All names. 5. UNFINISHED is removed: from now on the copy is
one. A kill before that leaves UNFINISHED.

Not here: which files (``server/flight/backup.py``).
Invariant: only what a data directory has is written, only below a directory that was absent or empty, and
only for its owner.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import pyarrow.flight as arrow_flight
import xxhash

from broker_core.arrow.part_file import FULL
from broker_core.client.connection import FAILED, FlightConnection
from broker_core.core import failpoint
from broker_core.core.address import Address
from broker_core.core.endpoint import ID, UNFINISHED
from broker_core.core.errors import (
    ConnectionFailed,
    DataDirectoryInvalid,
    DiskFull,
    RemoteProtocolError,
    StoreError,
    StoreFailed,
)
from broker_core.core.files import sync
from broker_core.flight import contract

_NAME = re.compile(rf"catalog\.db|{ID}|segments/\d{{8}}\.arrow|sums/\d{{8}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Backup:
    directory: str
    files: int
    size_bytes: int


def backup(address: Address, to: str | os.PathLike[str], connect_s: float = 0.0) -> Backup:
    """Raises DataDirectoryInvalid (``to`` is not absent or empty), AccessRefused, ResourceLocked (a backup is
    in progress), ConnectionFailed (the broker ended), DiskFull, StoreFailed.
    """
    path = Path(to).absolute()
    if address.directory and Path(address.directory).resolve() in (path.resolve(), *path.resolve().parents):
        raise DataDirectoryInvalid(f"{path} is in the data directory {address.directory}; name another place")
    connection = FlightConnection(address, connect_s=connect_s)
    try:
        connection.live(connection.patience())
        try:
            return _received(connection, path)
        except OSError as error:
            raise _unwritten(path, error) from error
    finally:
        connection.close()


def _unwritten(path: Path, error: OSError) -> StoreError:
    why, kind = error.strerror or str(error), type(error).__name__
    if error.errno in FULL:
        return DiskFull(
            f"{path} cannot be written: {why}; the copy is not finished: delete it, and make it again where "
            "there is room"
        )
    if not os.path.lexists(path / UNFINISHED):
        return DataDirectoryInvalid(
            f"{path} cannot be made: {why}; name a new directory where this user may write"
        )
    return StoreFailed(
        f"{path} cannot be written: {why} ({kind}); the copy is not finished: delete it, and make it again "
        "on a disk that takes it"
    )


def _received(connection: FlightConnection, path: Path) -> Backup:
    # 1.
    _check_place(path)
    pieces = _pieces(connection, path)
    first = list(islice(pieces, 1))
    # 2.
    _begin(path)
    failpoint.here("backup.begun")
    # 3.
    files: dict[str, tuple[int, str]] = {}
    manifest: contract.Manifest | None = None
    name, descriptor, checksum = "", -1, xxhash.xxh3_64()
    for label, piece in chain(first, pieces):
        if label != name and descriptor >= 0:
            files[name] = _ended(descriptor, checksum)
            descriptor = -1
            failpoint.here("backup.file")
        if not label:
            manifest = contract.decode_checked(contract.Manifest, piece, "backup")
            break
        if descriptor < 0:
            if not _NAME.fullmatch(label) or label in files:
                raise RemoteProtocolError(
                    f"the broker sent a file {label[:80]!r}, which a backup does not have"
                )
            name, checksum = label, xxhash.xxh3_64()
            descriptor = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        checksum.update(piece)
        _write(descriptor, piece)
    if manifest is None or manifest.files != files or not {"catalog.db", ID} <= files.keys():
        raise RemoteProtocolError(f"{path} is not what the broker has sent: delete it, and make it again")
    # 4.
    for directory in (path / "segments", path / "sums", path):
        sync(directory)
    failpoint.here("backup.synced")
    # 5.
    (path / UNFINISHED).unlink()
    sync(path)
    failpoint.here("backup.done")
    return Backup(str(path), len(files), sum(size for size, _ in files.values()))


def _check_place(path: Path) -> None:
    """Raises DataDirectoryInvalid, OSError."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir() or path.is_symlink():
        raise DataDirectoryInvalid(f"{path} is no directory; name a new or an empty one")
    if names := sorted(each.name for each in path.iterdir()):
        if UNFINISHED in names:
            unfinished = f"{path} is a backup that was not finished"
            raise DataDirectoryInvalid(f"{unfinished}; delete it, or name another place")
        raise DataDirectoryInvalid(f"{path} is not empty: it has {names[0]}; name a new or an empty one")


def _begin(path: Path) -> None:
    """Raises DataDirectoryInvalid, OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_place(path)
    path.chmod(0o700)
    for name in (UNFINISHED, "lock"):
        os.close(os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    sync(path)
    for name in ("segments", "sums"):
        (path / name).mkdir(mode=0o700)
    sync(path.parent)


def _pieces(connection: FlightConnection, path: Path) -> Iterator[tuple[str, bytes]]:
    """Once: a backup of another moment cannot go on where this one broke off. Raises ConnectionFailed."""
    ticket = arrow_flight.Ticket(contract.encode(contract.Ticket(backup=True)))
    try:
        for chunk in connection.live().client.do_get(ticket):
            for row in chunk.data.to_pylist():
                yield row["file"], row["piece"]
    except FAILED as error:
        crossed = contract.error_from(error)
        if crossed is None:
            crossed = ConnectionFailed(
                f"the broker at {connection.address} has ended, and the backup {path} is not finished",
                "delete it, and make it again" if path.exists() else "make it again",
            )
        raise crossed from error


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _ended(descriptor: int, checksum: xxhash.xxh3_64) -> tuple[int, str]:
    size = os.fstat(descriptor).st_size
    os.fsync(descriptor)
    os.close(descriptor)
    return size, checksum.hexdigest()
